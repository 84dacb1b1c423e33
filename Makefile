# Everything runs in .venv, which is made on the first use and again when pyproject.toml changes.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

# The layouts that `make test` samples rotate with the date; give SHARDWISE_SEED to repeat another day's.
SHARDWISE_SEED ?= $(shell date +%Y%m%d)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all mutation lint figures clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.train  ## the tour: predict, train on four processes, compare, one page
	@$(BIN)/python -m shardwise demo

test test-all mutation: export OMP_NUM_THREADS := 1

test: $(VENV)/.test  ## all tests, with a sample of layouts that rotates with the date
	@echo "layouts are sampled with the seed SHARDWISE_SEED=$(SHARDWISE_SEED)"
	@SHARDWISE_SEED=$(SHARDWISE_SEED) $(BIN)/python -m pytest -q

test-all: $(VENV)/.test  ## all tests, with every generated layout
	@SHARDWISE_ALL=1 $(BIN)/python -m pytest -q

mutation: $(VENV)/.test  ## put known mistakes back, and see that a test fails for each
	@$(BIN)/python tests/mutation/run.py

lint: $(VENV)/.test  ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

figures: $(VENV)/.test  ## draw the README's picture again, and print the table that it quotes
	@$(BIN)/python docs/figures.py
	@$(BIN)/python docs/figures.py --numbers

clean:  ## remove what was built or cached, .venv included; runs/ stays
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -prune -exec rm -rf {} + -o -name '*.egg-info' -prune -exec rm -rf {} +

$(BIN)/python:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "shardwise needs Python 3.11 or newer: make PYTHON=/path/to/python3.11")'
	@"$(PYTHON)" -m venv $(VENV)

# The interpreter's own time changes with every install: only its existence counts.
$(VENV)/.train $(VENV)/.test: $(VENV)/.%: pyproject.toml | $(BIN)/python
	@echo "installing shardwise[$*] into $(VENV)"
	@$(PIP) install --editable '.[$*]'
	@touch $@

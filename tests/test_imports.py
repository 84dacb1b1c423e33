"""The direction of imports between rooms, what a command may load, and the decoder's silence about parallelism."""

import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwise
from harness.cases import table

PACKAGE = Path(shardwise.__file__).parent

FLOORS = {
    "errors": 0,
    "calls": 0.75,
    "small_files": 0,
    "lazy": 0,
    "arrays": 0,
    "records": 0,
    "options": 0.5,
    "codec": 0.5,
    "model": 1,
    "cluster": 1,
    "report": 1,
    "data": 1,
    "schedule": 2,
    "decoder": 2,
    "ops": 3,
    "layout": 4,
    "predict": 5,
    "checkpoint": 5,
    "interop": 5,
    "planner": 6,
    "runtime": 6,
    "serving": 7,
    "validation": 7,
    "emulate": 8,
    "audit": 8,
    "certify": 8,
    "lab": 8,
    "studio": 8,
    "api": 9,
    "__init__": 10,
    "demo": 11,
    "cli": 12,
    "__main__": 13,
}
"""Room -> floor. A room imports itself and lower floors, but for `NEVER`. `__init__` is `from shardwise import ...`."""

NEVER = {("runtime", "predict"), ("studio", "decoder"), ("layout", "decoder")}
NEVER |= {(room, other) for room in ("decoder", "ops") for other in ("cluster", "report", "data", "schedule")}
NEVER |= {("studio", other) for other in ("runtime", "serving", "emulate", "lab")}
NEVER |= {(core, other) for core in ("api", "__init__", "demo") for other in ("validation", "emulate", "lab")}
"""Lower floors that a room must not import all the same. The runtime does not know the predictions it is held against;
layouts and the page need no torch; a decoder is its model in plain PyTorch; the core never imports validation/,
emulate/ or lab/."""

TORCH_ROOMS = {"decoder", "ops", "runtime", "serving", "emulate", "certify"}
HEAVY = {"numpy", "torch", "rich", "tokenizers", "pyarrow", "datasets"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import in a file, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: write imports in full"
            yield node.lineno, node.module or ""
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def rooms_imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, room) of every import of ours; a name that is no room is one of the package itself."""
    for line, name in imported(path):
        head, _, rest = name.partition(".")
        if head == "shardwise" and rest:
            room = rest.split(".")[0]
            yield line, room if (PACKAGE / room).is_dir() or (PACKAGE / f"{room}.py").is_file() else "__init__"


EXPORTED = {("__init__", "cli")}
"""`from shardwise import emit` is a command as a function, which is loaded when it is first used."""


def refused(room: str, other: str) -> bool:
    return room != other and (room, other) not in EXPORTED and (FLOORS[other] >= FLOORS[room] or (room, other) in NEVER)


def test_every_room_has_a_floor():
    assert {room_of(path) for path in modules()} <= FLOORS.keys()


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_lower_rooms_never_import_higher_ones(path):
    room = room_of(path)
    wrong = [f"line {line}: {room} imports {other}" for line, other in rooms_imported(path) if refused(room, other)]
    assert not wrong


def test_the_rule_can_fail():
    assert refused("layout", "runtime") and refused("model", "report") and refused("runtime", "predict")
    assert refused("report", "layout") and refused("runtime", "cli") and refused("decoder", "report")
    assert refused("predict", "planner") and refused("api", "validation") and refused("serving", "emulate")
    assert not refused("cli", "model") and not refused("predict", "layout") and not refused("runtime", "decoder")


DESCRIPTIONS = {"cache_shape", "expert_share", "fusion", "limits"}
"""Files of ops/ without torch, beside the forms that they describe: what rooms without torch may import of it."""


def test_rooms_without_torch_import_descriptions_of_forms_alone():
    for path in modules():
        if room_of(path) not in TORCH_ROOMS:
            inside = {name.removeprefix("shardwise.ops.") for _, name in imported(path) if "shardwise.ops" in name}
            assert {name for name in inside if not name.startswith(tuple(DESCRIPTIONS))} == set(), path
    for name in DESCRIPTIONS:
        path = PACKAGE / "ops" / f"{name.replace('.', '/')}.py"
        assert not any(name.startswith(("torch", "shardwise.decoder")) for _, name in imported(path))


LAZY_TORCH = {PACKAGE / "checkpoint" / "foreign" / "pickles.py", PACKAGE / "model" / "shapes" / "recording.py"}
"""Other trainers' files are torch's, and so are the classes of transformers: it is imported in functions there, whose
callers name what brings it."""


def test_only_the_torch_rooms_import_torch():
    for path in LAZY_TORCH:
        top = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import)]
        assert "torch" not in {alias.name for node in top for alias in node.names}
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in modules()
        if room_of(path) not in TORCH_ROOMS and path not in LAZY_TORCH
        for line, name in imported(path)
        if name.partition(".")[0] == "torch"
    ]
    assert not wrong


PARALLELISM = re.compile(
    r"\b(ranks?|world(_size)?|all_?(reduce|gather|to_all)|reduce_?scatter|process_?groups?|shard(s|ed|ing)?|mesh|"
    r"(data|tensor|sequence|context|pipeline|expert)[ _-]?parallel(ism)?|distributed|collectives?|zero[123]|"
    r"fsdp|ddp|dtensor|nccl|gloo)\b",
    re.IGNORECASE,
)


def test_the_decoder_has_no_word_about_parallelism():
    found = [
        f"{path.name}:{number}: {match[0]}"
        for path in sorted((PACKAGE / "decoder").glob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        # "shardwise.model" is a name, not a word.
        for match in PARALLELISM.finditer(line.replace("shardwise", ""))
    ]
    assert not found
    for word in ("rank", "Tensor-parallel", "all_gather", "torch.distributed", "sharded"):
        assert PARALLELISM.search(word)


def modules_of(code: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after `code`."""
    source = f"import sys\n{code}\nimport json\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(PACKAGE.parent), "PATH": ""},
        timeout=120,
    )
    return set(json.loads(done.stderr.splitlines()[-1]))


def loaded_by(code: str) -> set[str]:
    return {name.partition(".")[0] for name in modules_of(code)} & HEAVY


COMMAND = "from shardwise.cli.main import main\nassert main({argv!r}) == 0"
ESTIMATE = ["estimate", "llama-3-70b", "--layout", "tp=8,dp=8,zero=1", "--cluster", "8x8xH100"]
ESTIMATE += ["--seq", "8192", "--batch", "512", "--json"]
UNTIMED = ["64xcpu" if word == "8x8xH100" else word for word in ESTIMATE]
"""On a device of which nobody knows how fast it is."""


@pytest.mark.parametrize(
    "code",
    [
        "import shardwise",
        "from shardwise import ModelConfig, Cluster, Layout, Workload, StepReport, compare, UserError, estimate, train",
        "from shardwise import api, cluster, data, layout, model, predict, report",
        "import shardwise.runtime.job.launch, shardwise.runtime.job.config, shardwise.runtime.job.worker",
        COMMAND.format(argv=UNTIMED),
        COMMAND.format(argv=["estimate", "--params", "7e9", "--zero-table", "1,2,4,8,16", "--json"]),
        COMMAND.format(argv=["explain", "pretrain_gpt.py --tensor-model-parallel-size 2", "--ranks", "8", "--json"]),
        COMMAND.format(argv=["--help"]),
        "from shardwise.cli.main import main\nassert main(['train', 'gpt2', '--help']) == 0",
    ],
    ids=["package", "names", "rooms", "launcher", "estimate", "zero-table", "explain", "help", "train-help"],
)
def test_nothing_heavy_is_loaded(code):
    assert loaded_by(code) == set()


TYPOS = table(__file__, "TYPOS")


def test_a_typo_is_answered_before_anything_heavy_is_loaded():
    """A misspelt command, flag, choice, model, device or key is answered about as fast as `import numpy`."""
    assert loaded_by(TYPOS) == set()


def test_a_time_needs_arrays_and_no_more():
    assert loaded_by(COMMAND.format(argv=ESTIMATE)) == {"numpy"}


PLAN = ["plan", "llama-3-8b", "--cluster", "2xH100", "--seq", "1024", "--batch", "8", "--top", "1"]
UNUSED = (
    "interop.reading", "interop.writing", "serving", "emulate", "validation", "studio", "checkpoint", "data",
    "runtime.job.config", "report.compare", "report.run_directory", "model.trace", "predict.time.serving",
    "predict.time.stragglers", "cli.calibrate_device", "cli.plan_file", "cli.plan_models",
)  # fmt: skip
"""What neither an estimate nor a plan uses."""


@pytest.mark.parametrize(("argv", "most"), [(ESTIMATE[:-1], 190), (PLAN, 215)], ids=["estimate", "plan"])
def test_a_command_loads_what_it_uses(argv, most):
    """Each module of ours takes about a millisecond: as long as a hundredth of `import numpy`."""
    loaded = modules_of(COMMAND.format(argv=argv))
    ours = {name.removeprefix("shardwise.") for name in loaded if name.startswith("shardwise.")}
    assert not {name for name in ours for unused in UNUSED if f"{name}.".startswith(f"{unused}.")}
    assert not {"numpy.ma", "numpy.typing", "difflib", "tempfile", "hashlib"} & loaded
    assert len(ours) <= most and ("planner.plan" in ours) == (argv is PLAN)


def test_a_lazy_package_has_its_names():
    """A name that a module has as well stays the name, whichever is imported first."""
    import shardwise.report
    import shardwise.report.compare as module

    assert shardwise.report.compare is module  # `import a.b as c` takes the attribute of a
    from shardwise.report import compare

    assert callable(compare) and "StepReport" in dir(shardwise.report)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = shardwise.report.nothing


WITHOUT_POSIX = table(__file__, "WITHOUT_POSIX")
"""What Python on Windows lacks, as far as it can be taken away here; there is no home either."""
COMMANDS_WITHOUT_POSIX = [
    PLAN,
    ["plan", "llama-3-8b", "--cluster", "8xH100", "--serve", "--prompt", "512", "--output", "64", "--concurrency", "8"],
    ESTIMATE,
    ["explain", "vllm serve meta-llama/Llama-3.1-8B --tensor-parallel-size 2"],
    ["emit", "llama-3-70b", "--layout", "tp=8", "--for", "vllm"],
    ["list", "models"],
]


@pytest.mark.parametrize("argv", COMMANDS_WITHOUT_POSIX, ids=lambda argv: argv[0])
def test_a_command_without_ranks_needs_no_posix(argv):
    modules_of(WITHOUT_POSIX + COMMAND.format(argv=argv))


@pytest.mark.parametrize(
    "argv", [["train", "gpt2"], ["lab", "--help"], ["pipeline", "run", "1f1b"]], ids=lambda argv: argv[0]
)
def test_a_command_that_needs_posix_says_so(argv):
    source = f"{WITHOUT_POSIX}\nfrom shardwise.cli.main import main\nsys.exit(main({argv!r}))"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and f"{argv[0]} needs Linux: no " in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_loaded_packages_are_seen():
    assert "numpy" in loaded_by("import numpy")


LAZY = [path.parent for path in PACKAGE.rglob("__init__.py") if "lazily(" in path.read_text()]


@pytest.mark.parametrize("package", LAZY, ids=lambda package: package.name)
def test_every_public_name_exists(package):
    module = importlib.import_module(".".join(package.relative_to(PACKAGE.parent).parts))
    for name in module.__all__:
        assert getattr(module, name) is not None
    assert set(module.__all__) <= set(dir(module))


def test_no_other_name_exists():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = shardwise.nothing


def test_the_version_is_the_distribution_s():
    import tomllib

    project = PACKAGE.parents[1] / "pyproject.toml"
    assert tomllib.loads(project.read_text())["project"]["version"] == shardwise.__version__

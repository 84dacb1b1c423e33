from pathlib import Path

import pytest

from harness import changed
from harness.cases import from_table

FILES = {
    "src/shardwise/__init__.py": "",
    "src/shardwise/part/__init__.py": "from shardwise.part.low import low\n",
    "src/shardwise/part/low.py": 'TABLE = "table.toml"\n\ndef low(): ...\n',
    "src/shardwise/part/table.toml": "",
    "src/shardwise/high.py": "def high():\n    from shardwise.part import low\n",
    "src/shardwise/cli/__init__.py": "",
    "src/shardwise/cli/plan.py": "import shardwise.high\n",
    "tests/conftest.py": "import shardwise.part.low\n",
    "tests/harness/jobs.py": "import shardwise.part.low\n",
    "tests/harness/test_job.py": 'run("harness.jobs:train")\n',
    "tests/test_low.py": "from shardwise.part import low\n",
    "tests/test_high.py": "from shardwise.high import high\n",
    "tests/test_command.py": 'main(["plan", "x"])\n',
    "tests/test_other.py": "import json\n",
}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(changed, "ROOT", tmp_path)
    monkeypatch.setattr(changed, "TESTS", tmp_path / "tests")
    monkeypatch.setattr(changed, "ROOTS", [tmp_path / name for name in ("src", "tests", "docs", "benchmarks")])
    return tmp_path


@from_table
def test_distances_are_the_fewest_imports(tree: Path, file: str, expected: dict[str, int]) -> None:
    """Through functions' imports, names of packages, jobs and commands by string, and data that a module names."""
    found = changed.distances({tree / file})
    assert {path.stem.removeprefix("test_"): far for path, far in found.items()} == expected


def test_what_all_tests_share_concerns_all_when_it_changes(tree: Path) -> None:
    found = changed.distances({tree / "tests/conftest.py"})
    assert {path.name for path in found} == {Path(name).name for name in FILES if "test_" in name}

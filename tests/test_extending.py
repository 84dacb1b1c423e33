"""The examples of docs/extending.md run as they are."""

import re
from pathlib import Path

import pytest

from harness.cases import from_table
from shardwise.cluster import Cluster
from shardwise.schedule import build as build_collective
from shardwise.schedule.algorithms import registry as algorithms
from shardwise.schedule.pipeline import build, registry
from shardwise.schedule.pipeline.verify import verify
from shardwise.schedule.verify import verify as verify_collective

GUIDE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The algorithm and the schedule of the guide, known as long as one test runs."""
    monkeypatch.setattr(algorithms, "_KNOWN", {name: dict(known) for name, known in algorithms._KNOWN.items()})
    monkeypatch.setattr(registry, "_KNOWN", dict(registry._known()))
    for example in blocks("python"):
        exec(example, {})


@pytest.mark.usefixtures("examples")
def test_the_algorithm_is_right() -> None:
    assert all(verify_collective(build_collective("all-reduce", "chain", p)) == [] for p in (1, 2, 5, 8))


@pytest.mark.usefixtures("examples")
def test_the_schedule_is_right() -> None:
    for p, m in ((1, 3), (2, 4), (4, 2), (4, 8), (8, 32)):
        assert verify(build("eager-1f1b", p, m)) == []


def test_the_cluster_file_is_one(tmp_path: Path) -> None:
    text, *_ = blocks("toml")
    (tmp_path / "mine.toml").write_text(text)
    cluster = Cluster.parse(str(tmp_path / "mine.toml"))
    assert (cluster.nodes, cluster.devices, cluster.device.name) == (4, 32, "MyGPU")
    assert cluster.intra.bandwidth == 400e9 and cluster.inter.kind == "network"


@from_table
def test_the_changes_quoted_are_in_the_source(block: int, file: str) -> None:
    source = (Path(__file__).parents[1] / "src" / "shardwise" / file).read_text(encoding="utf-8")
    added = [line[1:] for line in blocks("diff")[block].splitlines() if line.startswith("+") and "..." not in line]
    missing = [line for line in added if line not in source and not line.startswith("peak_flops")]
    assert len(added) > 4 and not missing


def test_the_key_quoted_is_in_the_source() -> None:
    root, quoted = Path(__file__).parents[1], "\n".join(blocks("diff"))
    files = re.findall(r"^\+\+\+ (\S+)\n((?:\+(?!\+\+).*\n)+)", quoted, re.MULTILINE)
    for path, lines in files:
        assert lines.replace("\n+", "\n").removeprefix("+") in (root / path).read_text(encoding="utf-8"), path
    assert 3 < len(files) <= 6

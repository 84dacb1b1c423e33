"""Loss sequences that do not depend on ep, straight and resumed from a checkpoint of any layout with experts.

All pairs of seven layouts with SHARDWISE_ALL=1, else a sample.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from harness.expert_jobs import plain_routing
from harness.pool import run_ranks
from harness.reference import Case
from harness.resume_jobs import Trained
from harness.space import EXPERT_MODELS
from harness.today import RESUMED, of_some, some_of
from shardwise.checkpoint import Checkpoint, diff
from shardwise.layout import Layout, Workload
from shardwise.model import ModelConfig

MODEL = EXPERT_MODELS["deepseek"]
LAYOUTS = (
    "dp=1", "dp=4,ep=4", "dp=4,ep=2,zero=3", "dp=2,tp=2,ep=2,etp=2,zero=1", "tp=4,ep=4,sp",
    "dp=2,cp=2,ep=2,zero=2,shard=2", "dp=2,pp=2,ep=2,zero=1,schedule=zb-h1",
)  # fmt: skip
SAVED, LAST = 3, 6
PAIRS = 2
LONG_SAVED, LONG_LAST = 10, 20
LIMIT = 240.0


def layout(text: str) -> Layout:
    return Layout.parse(f"{text},precision=fp64")


def model(capacity: float) -> ModelConfig:
    """Sequences are balanced, biases follow the loads, and with a capacity some tokens are dropped."""
    assert MODEL.experts is not None
    return MODEL.replace(experts=replace(MODEL.experts, capacity=capacity, balance_loss=0.05))


CASE = Case(model(0.7), Workload(seq=12, batch=8))


def straight(case: Case, text: str, folder: Path, saved: int, last: int) -> list[Trained]:
    payload = (case, layout(text), str(folder), saved, last)
    return run_ranks("harness.resume_jobs:straight", layout(text).ranks, payload, limit=LIMIT)


def resumed(case: Case, text: str, source: Path, folder: Path | None, last: int) -> list[Trained]:
    targets = [(str(source), None if folder is None else str(folder))]
    payload = (case, layout(text), targets, last)
    return [rank[0] for rank in run_ranks("harness.resume_jobs:go_on", layout(text).ranks, payload, limit=LIMIT)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[float]]]:
    """Layout -> (its checkpoint, its losses), made when first asked for."""
    folder = tmp_path_factory.mktemp("saved")

    class Runs(dict[str, tuple[Path, list[float]]]):
        def __missing__(self, text: str) -> tuple[Path, list[float]]:
            own = folder / str(LAYOUTS.index(text))
            ranks = straight(CASE, text, own, SAVED, LAST)
            self[text] = own / f"step-{SAVED}", ranks[0].losses
            return self[text]

    return Runs()


@of_some("experts", RESUMED, 2)
@pytest.mark.parametrize(("source", "to"), some_of(product(LAYOUTS, LAYOUTS), PAIRS, "resumed experts"))
def test_a_run_continues_under_any_layout(source: str, to: str, saved: dict, tmp_path: Path) -> None:
    path, losses = saved[source]
    ranks = resumed(CASE, to, path, tmp_path / "again", LAST)
    for rank in ranks:
        assert rank.losses == pytest.approx(losses[SAVED:], rel=1e-9, abs=0)
    assert diff(Checkpoint.open(path), Checkpoint.open(tmp_path / "again" / f"step-{SAVED}")) == []


@of_some("experts' losses", RESUMED, 2)
@pytest.mark.parametrize("capacity", some_of([0.0, 0.7], 1, "capacities"))
def test_twenty_steps_have_the_losses_of_any_ep_also_when_resumed(capacity: float, tmp_path: Path) -> None:
    """Two micro-batches a step on four data ranks; resumed by every ep from one ep's checkpoint."""
    case = Case(model(capacity), Workload(seq=12, batch=8))
    assert case.workload.micro_batches(layout("dp=4")) == 2
    dropped = sum(int((~routing.takes).sum()) for routing in plain_routing(case).values())
    assert bool(dropped) == bool(capacity)
    texts = ("dp=4", "dp=4,ep=2", "dp=4,ep=4")
    expected: list[float] = []
    for text in texts:
        for rank in straight(case, text, tmp_path / text, LONG_SAVED, LONG_LAST):
            expected = expected or rank.losses
            assert rank.losses == pytest.approx(expected, rel=1e-9, abs=0), text
    assert len(set(expected)) == LONG_LAST
    for source, to in zip(texts, (*texts[1:], texts[0]), strict=True):
        for rank in resumed(case, to, tmp_path / source / f"step-{LONG_SAVED}", None, LONG_LAST):
            assert rank.losses == pytest.approx(expected[LONG_SAVED:], rel=1e-9, abs=0), (source, to)

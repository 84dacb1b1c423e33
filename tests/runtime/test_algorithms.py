"""Training by the schedule that a layout names, `algorithm=`: parity, ledger, memory and traffic, in real processes."""

import json
import os
from functools import partial
from pathlib import Path

import pytest

from harness import forked
from harness.cases import table
from harness.checks import assert_ledger, assert_memory, assert_parity, assert_replicas_equal, train
from harness.jobs import RankOutcome
from harness.reference import Case
from harness.space import MODELS
from harness.today import by_turns
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.predict.traffic.schedules import predict_transport
from shardwise.report import StepReport

LAYOUTS = table(__file__, "LAYOUTS")


def case_of(layout: Layout) -> Case:
    model = MODELS["llama"]
    return Case(model, Workload(seq=16, batch=2 * layout.dp * layout.pp), layout.precision, layout.attention)


def assert_transport(case: Case, layout: Layout, ranks: list[RankOutcome]) -> int:
    """The rows of every rank are the schedule's; returns how many a schedule carried."""
    carried = 0
    for rank, outcome in enumerate(ranks):
        plan = unit_plan(case.model, layout, case.workload, rank=rank, backend=outcome.backend)
        for row, expected in zip(outcome.role.transport, predict_transport(plan, rank), strict=True):
            assert (row.row, row.bytes_sent, row.steps) == (expected.row, expected.bytes_sent, expected.steps), rank
            assert row.algorithm == expected.algorithm or expected.algorithm == "auto"
            carried += bool(row.bytes_sent)
    return carried


@pytest.mark.layouts(lambda text, transport: Layout.parse(text))
@pytest.mark.parametrize(("text", "transport"), by_turns(LAYOUTS, 4, "layouts with algorithms"))
def test_training(text: str, transport: str) -> None:
    layout = Layout.parse(text)
    case = case_of(layout)
    trained = partial(train, layout=layout, transport=transport)
    ranks = trained(case)
    assert_parity(case, layout, ranks, again=trained)
    assert_replicas_equal(ranks)
    assert_ledger(case, layout, ranks)
    assert_memory(case, layout, ranks)
    assert assert_transport(case, layout, ranks) > 0


def own(*words: str) -> str:
    """Standard output of `shardwise` where a module outside the package defines an algorithm."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"SHARDWISE_ALGORITHMS": "harness.own_algorithm", "OMP_NUM_THREADS": "1"}
    done = forked.shardwise(*words, environment=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("transport", ["gloo", "shared"])
def test_one_decorated_function_is_verified_priced_drawn_and_trained_with(tmp_path: Path, transport: str) -> None:
    if transport == "gloo":
        assert "chain" in own("collective", "verify", "all-reduce", "chain", "--ranks", "1-9")
        assert "chain" in own(
            "collective", "cost", "all-reduce", "--cluster", "2x8xH100", "--ranks", "16", "--bytes", "1MB"
        )
        assert "up" in own("collective", "show", "all-reduce", "chain", "--ranks", "3")
    (tmp_path / "text.txt").write_text(" ".join(map(str, range(4000))))

    def train_with(layout: str, name: str) -> list[float]:
        own(
            *("train", "tiny-llama", "--vocab", "300", "--layout", f"{layout},precision=fp64"),
            *("--data", str(tmp_path / "text.txt"), "--seq", "32", "--batch", "3", "--steps", "3", "--no-tensorboard"),
            *("--set", "layers=2,hidden=64,ffn=96", "--validate-batches", "1", "--out", str(tmp_path / name)),
            *("--report", "--transport", transport),
        )
        events = map(json.loads, (tmp_path / name / "events.jsonl").read_text().splitlines())
        return [event["loss"] for event in events if "loss" in event]

    alone, chained = train_with("dp=1", "alone"), train_with("dp=3,algorithm=chain", "chained")
    assert len(alone) == 3 and chained == pytest.approx(alone, rel=1e-9)
    predicted, measured = (
        StepReport.read(tmp_path / f"chained/reports/{source}.json") for source in ("predicted", "measured")
    )
    carried = [
        [(row.algorithm, row.bytes_sent, row.steps) for row in report.roles[0].transport]
        for report in (predicted, measured)
    ]
    assert carried[0] == carried[1] and {row[0] for row in carried[0]} == {"chain"}

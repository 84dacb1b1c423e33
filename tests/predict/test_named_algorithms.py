import random

import pytest

from harness.cases import from_table
from harness.today import seed
from shardwise.cluster import Cluster
from shardwise.errors import LayoutError, UserError
from shardwise.layout import Layout, Workload
from shardwise.layout.serving import check_generation
from shardwise.predict.estimate import estimate
from shardwise.predict.time.pricing import Pricing
from shardwise.schedule import algorithms, build
from shardwise.schedule.choose import pricer
from shardwise.schedule.sending import compile_steps, lower, room
from shardwise.schedule.traffic import moved

WORKLOAD = Workload(seq=16, batch=16)


@pytest.mark.parametrize("collective", ["all-reduce", "all-gather", "reduce-scatter"])
def test_traffic_and_room_are_the_lowered_program_s(collective: str) -> None:
    generator = random.Random(f"{seed()} {collective}")
    for algorithm in algorithms(collective):
        p, n = generator.choice((2, 3, 4, 6)), generator.choice((1, 7, 24, 1001))
        schedule = build(collective, algorithm.name, p)
        for rank in range(p):
            program = lower(schedule, n, rank)
            actions = [action for action in program.actions[rank] if action.kind in ("send", "recv")]
            sent = sum(stop - start for a in actions if a.kind == "send" for start, stop in a.spans)
            assert moved(schedule, n, 4, rank) == (4 * sent, len({action.label for action in actions}))
            base = int(schedule.bounds(n)[-1])
            most = compile_steps(program.actions[rank], base, program.elements)[1]
            assert most - base <= room(schedule, n), (schedule.name, p, n)


def test_what_a_schedule_does_not_suit_runs_as_under_auto_and_the_report_says_so() -> None:
    report = estimate("tiny-llama", "dp=4,zero=1,algorithm=tree", WORKLOAD)
    (note,) = [note for note in report.notes if "algorithm=tree" in note]
    assert "all_gather_into over dp, reduce_scatter over dp" in note
    rows = {report.roles[0].ledger[row.row].op: row.algorithm for row in report.roles[0].transport}
    assert rows == {"all_gather_into": "auto", "reduce_scatter": "auto", "all_reduce": "tree"}
    # Data-parallel groups have two ranks on each node of four; tensor-parallel pairs are inside one.
    report = estimate("tiny-llama", "dp=4,tp=2,algorithm=hierarchical,node=4", WORKLOAD)
    rows = {report.roles[0].ledger[row.row].axes: row.algorithm for row in report.roles[0].transport}
    assert rows["tp"] == "auto" and rows["dp"] == "hierarchical"
    assert estimate("tiny-llama", "dp=4", WORKLOAD).roles[0].transport == ()


@pytest.mark.parametrize("name", ["ring", "tree", "recursive-doubling"])
def test_the_time_of_a_named_algorithm_is_its_schedule_s_price(name: str) -> None:
    cluster = Cluster.parse("2x8xH100")
    seconds = Pricing(cluster, layout=Layout(dp=16, algorithm=name)).collectives.seconds
    usual = Pricing(cluster).collectives
    expected = pricer("all_reduce", 16, usual._cluster).pick(2.0**26, name)[1].seconds
    assert seconds("all_reduce", 2.0**26, 16) == pytest.approx(expected)
    assert seconds("all_to_all", 2.0**26, 16) == usual.seconds("all_to_all", 2.0**26, 16)


@from_table
def test_layouts_that_are_rejected(text: str, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        Layout.parse(text)


def test_generation_runs_no_schedule() -> None:
    from shardwise.model import catalog

    with pytest.raises(UserError, match="for training"):
        check_generation(Layout.parse("tp=2,algorithm=ring"), catalog.get("tiny-llama"))


def test_canonical_text() -> None:
    text = "dp=4,algorithm=hierarchical,node=2,micro=2"
    assert str(Layout.parse("micro=2,node=2,dp=4,algorithm=hierarchical")) == text

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cases import table
from harness.report_strategies import held, ledger_rows, reports
from shardwise.errors import UserError
from shardwise.report import Bytes, LedgerRow, Role, StepReport
from shardwise.report.step_report import merge_roles


@given(reports())
def test_json_round_trip(report):
    text = json.dumps(report.to_json(), allow_nan=False)
    assert StepReport.from_json(json.loads(text)) == report


@given(reports())
def test_file_round_trip(tmp_path_factory, report):
    path = tmp_path_factory.mktemp("report") / "r.json"
    report.write(path)
    assert StepReport.read(path) == report
    assert [p.name for p in path.parent.iterdir()] == ["r.json"]


@given(held)
def test_peak_is_what_of_the_classes_is_there_at_once(held):
    role = Role("all", (0,), held, ())
    assert role.peak_bytes == sum(held.to_json().values())
    assert replace(role, bytes=replace(held, absent=held.total)).peak_bytes == 0


@given(st.integers(0, 10**12), st.integers(0, 10**12), st.integers(0, 10**12))
def test_classes_of_a_peak_add_up_to_it(peak, gradients, saved):
    held = Bytes.of(peak, gradients=gradients, saved=saved)
    assert (held.total, held.gradients, held.saved) == (peak, gradients, saved)
    assert min(held.other, held.absent) == 0


def test_peak_is_written_out():
    role = Role("all", (0, 1), Bytes(1, 2, 3, 4, 5, 6), ())
    report = StepReport("predicted", {}, "dp=2", {}, "2xH100", (role,))
    assert report.to_json()["roles"][0]["peak_bytes"] == 21


def test_payload_is_the_full_tensor_times_the_count():
    assert LedgerRow("forward", "all_reduce", "tp", "blocks.0", "bfloat16", 1000, 3).payload_bytes == 6000


GOOD = StepReport("predicted", {}, "", {}, "", (Role("all", (0,), Bytes(), ()),)).to_json()
ROW = table(__file__, "ROW")
CARRIED = {"row": 0, "algorithm": "ring", "bytes_sent": 1, "steps": 1, "time_s": 0.5, "wait_s": 0.0}


def role(**damage):
    return GOOD | {"roles": [GOOD["roles"][0] | damage]}


@pytest.mark.parametrize(
    "damage",
    [
        [],
        GOOD | {"layout": None},
        GOOD | {"source": ["measured"]},
        GOOD | {"model": "gpt2"},
        GOOD | {"time": float("inf")},
        GOOD | {"time": -1.0},
        GOOD | {"notes": "one"},
        role(ranks=[]),
        role(ranks=[-1]),
        role(ranks=[True]),
        role(role=3),
        role(bytes={"parameters": 10**400}),
        role(bytes={"parameters": -1}),
        role(bytes={"absent": 1}),
        role(ledger=[ROW | {"axes": ["dp"]}]),
        role(ledger=[ROW | {"unit": None}]),
        role(ledger=[ROW | {"dtype": []}]),
        role(ledger=[ROW | {"phase": "sideways"}]),
        role(ledger=[ROW | {"count": -1}]),
        role(ledger=[ROW | {"elements": 10**400}]),
        role(ledger=[ROW], transport=[CARRIED | {"row": 1}]),
        role(ledger=[ROW], transport=[CARRIED | {"time_s": float("nan")}]),
        role(timeline=["event"]),
        GOOD | {"schema_version": 2},
        GOOD | {"roles": 5},
        GOOD | {"surprise": 1},
        {k: v for k, v in GOOD.items() if k != "layout"},
        GOOD | {"roles": [{"role": "all"}]},
        GOOD | {"roles": [GOOD["roles"][0] | {"bytes": {"parameters": 1, "wings": 2}}]},
        GOOD | {"roles": [GOOD["roles"][0] | {"bytes": {"parameters": "many"}}]},
        GOOD | {"roles": [GOOD["roles"][0] | {"ledger": [ROW | {"dtype": "float7"}]}]},
        GOOD | {"roles": [GOOD["roles"][0] | {"ledger": [ROW | {"elements": "many"}]}]},
    ],
)
def test_damage_is_a_user_error_of_one_line(tmp_path, damage):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(damage))
    with pytest.raises(UserError, match=r"r\.json") as caught:
        StepReport.read(path)
    assert "\n" not in str(caught.value)


def test_what_is_not_damaged_is_read_from_a_text_of_a_path_too(tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(role(ledger=[ROW], transport=[CARRIED])))
    assert StepReport.read(str(path)).roles[0].transport[0].time_s == 0.5


@pytest.mark.parametrize("text", ["", "{", "\x00\x01"])
def test_what_is_not_json_is_a_user_error(tmp_path, text):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"r\.json is not valid JSON"):
        StepReport.read(path)


def test_missing_places_are_user_errors(tmp_path):
    report = StepReport.from_json(GOOD)
    with pytest.raises(UserError, match="cannot read"):
        StepReport.read(tmp_path / "none.json")
    with pytest.raises(UserError, match="cannot write"):
        report.write(tmp_path / "none" / "r.json")


@given(st.dictionaries(st.integers(0, 30), st.tuples(st.sampled_from([1, 2, 3]), st.lists(ledger_rows, max_size=1))))
def test_merged_roles_hold_every_rank_once_with_its_own_bytes(per_rank):
    mine = {rank: Role("", (rank,), Bytes(parameters=size), tuple(rows)) for rank, (size, rows) in per_rank.items()}
    merged = merge_roles(mine)
    assert sorted(rank for role in merged for rank in role.ranks) == sorted(per_rank)
    assert all((role.bytes, role.ledger) == (mine[r].bytes, mine[r].ledger) for role in merged for r in role.ranks)
    assert len({(role.bytes, role.ledger) for role in merged}) == len(merged)
    assert [role.ranks[0] for role in merged] == sorted(role.ranks[0] for role in merged)


def test_merged_roles_are_named_by_their_ranks():
    sizes = {0: 1, 1: 2, 2: 1, 3: 1, 4: 3}
    merged = merge_roles({r: Role("", (r,), Bytes(size), ()) for r, size in sizes.items()})
    assert [role.role for role in merged] == ["ranks 0,2-3", "rank 1", "rank 4"]
    assert [role.role for role in merge_roles({0: Role("", (0,), Bytes(), ()), 1: Role("", (1,), Bytes(), ())})] == [
        "all"
    ]

"""`compare`: equal where the reports are, unequal wherever they are not, on whichever ranks."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from harness.report_strategies import reports
from shardwise.errors import UserError
from shardwise.report import Bytes, LedgerRow, Role, StepReport, compare
from shardwise.report.compare import EXACT_CLASSES

ROW = LedgerRow("forward", "all_gather_into", "shard", "blocks.0", "bfloat16", 1000, 2)
HELD = Bytes(100, 200, 300, 400, 500, 600)


def report(*roles, source="predicted", **fields):
    settings = {"model": {"name": "m"}, "layout": "dp=2", "workload": {"batch": 8}, "cluster": "2xCPU"} | fields
    return StepReport(source=source, roles=tuple(roles), **settings)


def role(*ranks, held=HELD, ledger=(ROW,)):
    return Role(f"r{ranks[0]}", ranks, held, tuple(ledger))


@given(reports())
def test_a_report_equals_itself(r):
    found = compare(r, r)
    assert found.equal_ledger and found.exact_classes_equal and found.peak_error == 0 and not found.differences


@given(reports(), st.randoms())
def test_how_ranks_are_split_into_roles_does_not_matter(r, random):
    split = [replace(role, role=str(rank), ranks=(rank,)) for role in r.roles for rank in role.ranks]
    random.shuffle(split)
    found = compare(r, replace(r, roles=tuple(split)))
    assert found.equal_ledger and found.exact_classes_equal
    assert sorted(rank for pair in found.pairs for rank in pair.ranks) == sorted(x.ranks[0] for x in split)
    assert len({pair.role for pair in found.pairs}) == len(found.pairs)


def test_what_compiled_blocks_save_is_the_compilers_choice():
    other = replace(HELD, saved=1, other=0)
    for a, b, free in (("predicted", "measured", True), ("predicted", "dry-run", False)):
        found = compare(
            *(report(role(0, held=h), source=s, layout="compile=block") for h, s in ((HELD, a), (other, b)))
        )
        assert found.exact_classes_equal == free
        rules = {row.byte_class: row.accepted for row in found.bytes}
        assert rules["parameters"] is True and rules["saved"] is (None if free else False)
        assert rules["peak"] is (None if free else False)


@given(reports(), reports(world=4))
def test_verdict_agrees_with_a_comparison_rank_by_rank(a, b):
    def per_rank(r):
        out = {}
        for role in r.roles:
            counts = {}
            for row in role.ledger:
                key = replace(row, count=0)
                counts[key] = counts.get(key, 0) + row.count
            for rank in role.ranks:
                out[rank] = {key: n for key, n in counts.items() if n}
        return out

    assert compare(a, b).equal_ledger == (per_rank(a) == per_rank(b))


@given(reports(), st.data())
def test_one_changed_count_is_found(r, data):
    assume(any(role.ledger for role in r.roles))
    changed = data.draw(st.sampled_from([i for i, role in enumerate(r.roles) if role.ledger]))
    ledger = list(r.roles[changed].ledger)
    at = data.draw(st.integers(0, len(ledger) - 1))
    ledger[at] = replace(ledger[at], count=ledger[at].count + 1)
    roles = tuple(replace(x, ledger=tuple(ledger)) if i == changed else x for i, x in enumerate(r.roles))
    found = compare(r, replace(r, roles=roles))
    assert not found.equal_ledger
    assert [row.key.unit for row in found.rows if not row.equal] == [ledger[at].unit]


def test_a_row_that_one_side_lacks_counts_zero_there():
    other = replace(ROW, unit="blocks.1")
    found = compare(report(role(0)), report(role(0, ledger=[ROW, other])))
    assert [(row.key.unit, row.count_a, row.count_b, row.equal) for row in found.rows] == [
        ("blocks.0", 2, 2, True),
        ("blocks.1", 0, 2, False),
    ]


def test_counts_of_the_same_kind_add_up_whatever_their_order():
    twice = [replace(ROW, count=1), replace(ROW, unit="head"), replace(ROW, count=1)]
    assert compare(report(role(0, ledger=[replace(ROW, unit="head"), ROW])), report(role(0, ledger=twice))).equal_ledger


@pytest.mark.parametrize("field", ["phase", "op", "axes", "unit", "dtype", "elements"])
def test_every_field_of_a_row_matters(field):
    other = {
        "phase": "backward",
        "op": "all_reduce",
        "axes": "dp",
        "unit": "head",
        "dtype": "float32",
        "elements": 1001,
    }
    found = compare(report(role(0)), report(role(0, ledger=[replace(ROW, **{field: other[field]})])))
    assert not found.equal_ledger and len(found.rows) == 2


@pytest.mark.parametrize("field", list(Bytes.__dataclass_fields__))
def test_every_exact_class_matters(field):
    found = compare(report(role(0)), report(role(0, held=replace(HELD, **{field: getattr(HELD, field) + 1}))))
    assert found.exact_classes_equal == (field not in EXACT_CLASSES)
    assert [row.byte_class for row in found.bytes if not row.equal] == [field, "peak"]


def test_peak_error_is_relative_to_b_and_the_worst_of_all_ranks():
    a = report(role(0, held=Bytes(other=90)), role(1, held=Bytes(other=103)))
    b = report(role(0, held=Bytes(other=100)), role(1, held=Bytes(other=100)))
    found = compare(a, b)
    assert found.peak_error == pytest.approx(0.10)
    assert [row.accepted for row in found.bytes if row.byte_class == "peak"] == [False, True]
    assert [row.accepted for row in found.bytes if row.byte_class == "other"] == [None, None]


def test_ranks_that_one_side_lacks_are_named_and_spoil_equality():
    found = compare(report(role(0, 1, 2)), report(role(1, 2, 3, 4)))
    assert (found.ranks_only_a, found.ranks_only_b) == ((0,), (3, 4))
    assert not found.equal_ledger and not found.exact_classes_equal
    assert [pair.ranks for pair in found.pairs] == [(1, 2)]


def test_reports_without_a_common_rank_are_not_equal():
    found = compare(report(), report())
    assert not found.equal_ledger and not found.exact_classes_equal and found.peak_error == math.inf


def test_a_rank_in_two_roles_is_refused():
    with pytest.raises(UserError, match="more than one role"):
        compare(report(role(0, 1), role(1)), report(role(0, 1)))


def test_equal_ranks_are_compared_once_however_many():
    found = compare(report(role(*range(16384))), report(role(*range(8000)), role(*range(8000, 16384))))
    assert found.equal_ledger and len(found.pairs) == len(found.rows) == 2


def test_settings_that_differ_are_named():
    found = compare(report(role(0)), report(role(0), layout="tp=2", workload={"batch": 16}, cluster=""))
    assert found.differences == ("layout: dp=2 / tp=2", "workload: batch 8 / 16", "cluster: 2xCPU / none")
    assert not compare(report(workload={"shape": (1, 2)}), report(workload={"shape": [1, 2]})).differences


@given(reports(), reports())
def test_json_is_strict_and_holds_the_verdict(a, b):
    found = compare(a, b)
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert data["equal_ledger"] == found.equal_ledger
    assert [row["count_b"] for row in data["rows"]] == [row.count_b for row in found.rows]
    assert {row["class"] for row in data["bytes"]} <= {*Bytes.__dataclass_fields__, "peak"}

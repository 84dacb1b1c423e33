"""Identical blocks become one line, and only identical ones."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from harness.report_strategies import ledger_rows, reports
from shardwise.report import LedgerRow, compare
from shardwise.report.grouping import compared_ledgers, group_compared, group_ledger

ROW = LedgerRow("forward", "all_gather_into", "shard", "blocks.0", "bfloat16", 1000, 2)


def labels(rows):
    return [group.label for group in group_ledger(rows)]


def test_eighty_blocks_are_one_line():
    assert labels([replace(ROW, unit=f"blocks.{i}") for i in range(80)]) == ["blocks.0-79 \u00d780"]


def test_a_block_that_differs_stands_alone():
    rows = [replace(ROW, unit=f"blocks.{i}", count=9 if i == 3 else 2) for i in range(6)]
    assert labels(rows) == ["blocks.0-2,4-5 \u00d75", "blocks.3"]


def test_descending_blocks_and_inner_numbers():
    assert labels([replace(ROW, unit=f"blocks.{i}.mlp") for i in (2, 1, 0)]) == ["blocks.0-2.mlp \u00d73"]
    assert labels([replace(ROW, unit=u) for u in ("w1", "w2")]) == ["w1", "w2"]


@given(st.lists(ledger_rows))
def test_groups_hold_every_row_once_and_are_alike(rows):
    groups = group_ledger(rows)
    assert sorted(row for group in groups for row in group.rows) == sorted(rows)
    for group in groups:
        assert len({replace(row, unit="") for row in group.rows}) == 1
        assert group.units == len({row.unit for row in group.rows})


@given(reports(), reports())
def test_compared_groups_hold_every_row_of_every_rank(a, b):
    comparison = compare(a, b)
    views = list(compared_ledgers(comparison))
    ranks = [rank for ranks, _ in views for rank in ranks]
    assert sorted(ranks) == sorted(rank for pair in comparison.pairs for rank in pair.ranks)
    rows_of = {pair.role: [r for r in comparison.rows if r.role == pair.role] for pair in comparison.pairs}
    for ranks, rows in views:
        for pair in comparison.pairs:
            if set(pair.ranks) & set(ranks):
                assert [(r.key, r.equal) for r in rows_of[pair.role]] == [(r.key, r.equal) for r in rows]
        assert sum(len(group.rows) for group in group_compared(rows)) == len(rows)

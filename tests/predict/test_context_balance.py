"""Attention's work per context-parallel rank, counted pair by pair."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from shardwise.cli.main import main
from shardwise.layout import Layout, Workload
from shardwise.layout.context import SequenceCut
from shardwise.model.flops import attention_flops_per_token
from shardwise.model.operations import AttentionCore
from shardwise.predict.arguments import as_model
from shardwise.predict.context_balance import context_balance

DEGREES = (2, 3, 4, 8)


def counted(cut: SequenceCut, rank: int, window: int) -> int:
    """Pairs of a rank's queries with the keys that a mask leaves them."""
    return sum(min(place + 1, window or place + 1) for run in cut.places(rank) for place in run)


def from_blocks(cut: SequenceCut, rank: int) -> int:
    """Pairs of the blocks that the ring computes, key rank by key rank."""
    pairs = 0
    for other in range(cut.cp):
        rows, columns, causal = cut.visible(rank, other)
        queries, keys = (len(range(cut.local)[part]) for part in (rows, columns))
        pairs += queries * (queries + 1) // 2 if causal else queries * keys
    return pairs


def layouts() -> Iterator[tuple[Layout, int]]:
    for cp in DEGREES:
        for kind in ("ring", "allgather"):
            for seq in (2 * cp, 8 * cp + 1, 1000 + cp, 8192):
                yield Layout(cp=cp, cpkind=kind), seq


@pytest.mark.parametrize(("layout", "seq"), list(layouts()), ids=str)
def test_zigzag_is_balanced_and_counts_the_blocks_that_run(layout: Layout, seq: int) -> None:
    model, cut = as_model("tiny-llama"), SequenceCut.of(layout, seq)
    balance = context_balance(model, layout, Workload(seq=seq, batch=1))
    core = AttentionCore(model.heads, model.kv_heads, model.head_dim, model.head_dim)
    pairs = [from_blocks(cut, rank) for rank in range(layout.cp)]
    assert list(balance.flops) == [model.layers * core.flops(one) for one in pairs]
    assert pairs == [counted(cut, rank, 0) for rank in range(layout.cp)]
    assert 1 <= balance.largest < 1.02
    assert sum(balance.flops) == cut.padded * attention_flops_per_token(model, cut.padded)


@pytest.mark.parametrize(("cp", "plain"), [(2, 1.5), (4, 1.75), (8, 1.875)])
@pytest.mark.parametrize("kind", ["ring", "ulysses", "allgather"])
def test_plain_cut_gives_the_last_rank_almost_twice_the_mean(cp: int, plain: float, kind: str) -> None:
    balance = context_balance(as_model("llama-3-8b"), Layout(cp=cp, cpkind=kind), Workload(seq=131_072, batch=1))
    assert balance.plain_largest == pytest.approx(plain, abs=1e-4)
    assert balance.plain_flops[-1] == max(balance.plain_flops)
    assert balance.largest == 1.0


def test_windows_are_counted() -> None:
    model = as_model("tiny-gemma2")
    seq = 4 * max(part.window for part in cores(model))
    layout = Layout(cp=4)
    balance = context_balance(model, layout, Workload(seq=seq, batch=1))
    cut = SequenceCut.of(layout, seq)
    for flops, one in ((balance.flops, cut), (balance.plain_flops, replace(cut, zigzag=False))):
        for rank in range(4):
            assert flops[rank] == sum(core.flops(counted(one, rank, core.window)) for core in cores(model))
    assert balance.largest < balance.plain_largest


def cores(model) -> list[AttentionCore]:
    from shardwise.model.parameters import blueprint

    parts = blueprint(model).parts
    return [op for part in parts for op in part.operations if op.kind == "attention" for _ in range(part.count)]


def test_estimate_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["estimate", "llama-3-8b", "--cluster", "8xH100", "--seq", "8192", "--batch", "8", "--layout"]
    assert main([*command, "cp=8", "--json"]) == 0
    balance = json.loads(capsys.readouterr().out)["balance"]
    assert len(balance["flops"]) == 8 and balance["largest_over_mean"] == 1.0
    assert main([*command, "cp=8"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "busiest rank" in line]
    assert lines == ["attention, busiest rank over the mean: 1.000 (zigzag), 1.875 in a plain cut"]
    assert main([*command, "dp=8", "--json"]) == 0
    assert "balance" not in json.loads(capsys.readouterr().out)

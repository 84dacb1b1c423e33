"""A sequence over context-parallel ranks: the tokens of each, and its attention in zigzag order and in a plain cut."""

from __future__ import annotations

from dataclasses import replace

from shardwise.layout import Layout, Workload
from shardwise.layout.context import SequenceCut
from shardwise.model import ModelConfig
from shardwise.predict.context_balance import context_balance
from shardwise.studio.columns import How, Table


def sequence(model: ModelConfig, layout: Layout, workload: Workload) -> tuple[Table, int]:
    """One row per context-parallel rank of a layout with cp > 1, and the tokens of a sequence with its padding."""
    cut, balance = SequenceCut.of(layout, workload.seq), context_balance(model, layout, workload)
    plain = replace(cut, zigzag=False)
    rows = []
    for rank in range(cut.cp):
        first, second = cut.places(rank)
        before, after = plain.places(rank)
        work = balance.flops[rank], balance.plain_flops[rank]
        rows.append((rank, first.start, first.stop, second.start, second.stop, before.start, after.stop, *work))
    units = dict.fromkeys(
        ("rank", "first chunk from", "to", "second chunk from", "to ", "plain cut from", " to"), ""
    ) | {"attention": "count", "attention, plain cut": "count"}
    order = "zigzag order" if cut.zigzag else "plain order"
    return Table.of_rows(f"Tokens of each context-parallel rank, in {order}, and FLOPs", units, rows), cut.padded


def how_sequence(layout: Layout, workload: Workload, command: str) -> How:
    """The cut in words."""
    cut = SequenceCut.of(layout, workload.seq)
    chunk = cut.local // 2
    steps = [
        f"{cut.seq:,} tokens, with padding {cut.padded:,}, are 2 x {cut.cp} chunks of {chunk:,}",
        f"zigzag: rank r has chunks r and {2 * cut.cp - 1} - r"
        if cut.zigzag
        else "ulysses: rank r has chunks 2 r and 2 r + 1, and attends with its share of the heads over all tokens",
        "attention: pairs of a token and the tokens that it sees, times the FLOPs of a pair, forward, all layers; in a "
        "plain cut the last rank's tokens see most",
    ]
    return How(steps, command, "Megatron-LM, ring-flash-attention, Llama 3 (docs/context.md)")

"""The schedules of generation: prompts in chunks that fill and drain the pipeline, tokens that go round in it."""

from __future__ import annotations

from shardwise.schedule.pipeline.registry import Order, generator, one_chunk
from shardwise.schedule.pipeline.training import F


def _decode(p: int, m: int, v: int) -> str:
    return one_chunk(p, m, v) or ("" if m >= p else f"with fewer than p in flight ranks stand still: m of at least {p}")


@generator("prefill", source="Agrawal et al. 2023", train=False)
def prefill(p: int, m: int, v: int, rank: int) -> Order:
    """Chunks of prompts, one after the other: fill and drain."""
    return [F(rank, k) for k in range(m)]


@generator("decode", source="Pope et al. 2022", rule=_decode, train=False)
def decode(p: int, m: int, v: int, rank: int, tokens: int = 8) -> Order:
    """M micro-batches in flight, one token of each in turn; the last stage's token goes back to the first.

    tokens: of each of the m micro-batches; the k-th action is token k // m of micro-batch k % m.
    """
    return [F(rank, k) for k in range(m * tokens)]

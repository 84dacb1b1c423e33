"""Attention over pages, wherever they lie, is attention over the whole sequence."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.ops import paged
from shardwise.ops.blockwise import ScoreRule
from shardwise.ops.cache_shape import CacheShape
from shardwise.ops.paged import PagedCache
from shardwise.serving.messages import Request, Sampling
from shardwise.serving.rows import rows_of
from shardwise.serving.scheduler import Chunk, EngineStep, Sequence

SIZE, PAGES, WIDTH = 3, 40, 8
CPU = torch.device("cpu")

lengths = st.lists(st.tuples(st.integers(1, 14), st.integers(0, 13)), min_size=1, max_size=4)


RULES = [ScoreRule(WIDTH**-0.5, 0.0, 0), ScoreRule(0.3, 0.0, 4), ScoreRule(0.5, 1.5, 0), ScoreRule(0.5, 1.5, 5)]


def _exact(q: Tensor, k: Tensor, v: Tensor, start: int, rule: ScoreRule) -> Tensor:
    """q: [n, H, D]; k, v: [L, K, D], of which row i of q sees the first start + i + 1, or a window of these."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.double(), k) * rule.scale
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(start + 1)
    if rule.window:
        hidden |= torch.ones_like(hidden).tril(start - rule.window)
    return torch.einsum("hnl,lhd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@settings(deadline=None, max_examples=60)
@given(lengths, st.sampled_from([(4, 2), (4, 4), (3, 1)]), st.booleans(), st.integers(0, 10**6), st.sampled_from(RULES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_sees_its_own_sequence(dtype, sequences, heads, scattered, seed, rule) -> None:  # type: ignore[no-untyped-def]
    """sequences: (tokens, of which so many are in the cache already)."""
    generator = torch.Generator().manual_seed(seed)
    cache = PagedCache(CacheShape(2, heads[1], WIDTH, WIDTH), PAGES, SIZE, dtype, CPU)
    cache.tensor.fill_(torch.nan)  # what was never written must not count
    pages = torch.randperm(PAGES, generator=generator).tolist() if scattered else list(range(PAGES))
    chunks, content = [], []
    for number, (length, cached) in enumerate(sequences, 1):
        cached = min(cached, length - 1)
        count = -(-length // SIZE)
        own, pages = pages[:count], pages[count:]
        sequence = Sequence(Request(number, (1,), Sampling()), number, [1] * length, own)
        q, k, v = (torch.randn(length, n, WIDTH, generator=generator).to(dtype) for n in (heads[0], heads[1], heads[1]))
        if cached:
            rows = rows_of(EngineStep((Chunk(sequence, 0, cached, False),)), SIZE, CPU)
            cache.attend(torch.cat((q, k, v), 1)[:cached], rows, rule)
        chunks.append(Chunk(sequence, cached, length, True))
        content.append((q, k, v))
    order = sorted(range(len(chunks)), key=lambda i: chunks[i].stop - chunks[i].start > 1)
    turn = EngineStep(tuple(chunks[i] for i in order))
    parts = [[x[chunks[i].start :] for x in content[i]] for i in order]
    heads_of_all = torch.cat([torch.cat(each) for each in zip(*parts, strict=True)], 1)
    before, paged.SCORES = paged.SCORES, 20
    try:
        found = cache.attend(heads_of_all, rows_of(turn, SIZE, CPU), rule).unflatten(1, (-1, WIDTH))
    finally:
        paged.SCORES = before
    expected = torch.cat(
        [_exact(content[i][0][chunks[i].start :], *content[i][1:], chunks[i].start, rule) for i in order]
    )
    assert found.shape == expected.shape
    assert float((found.double() - expected).abs().max()) < (1e-5 if dtype == torch.float32 else 0.06)

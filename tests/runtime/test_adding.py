"""Sums of the ranks' pieces straight into their place: every precision, in chunks or not, beside a plain sum."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.ops.limits import sum_chunk
from shardwise.runtime.transport.adding import Target, add_up, wide_room

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 5),
    st.sampled_from([0, 1, 7, 1000, (1 << 17) + 3]),
    st.sampled_from([(BF16, BF16), (BF16, FP32), (FP32, FP32), (FP64, FP64)]),
    st.booleans(),
    st.integers(0, 1 << 20),
)
def test_a_sum_is_rounded_once(
    ranks: int, elements: int, dtypes: tuple[torch.dtype, torch.dtype], adds: bool, seed: int
) -> None:
    """In fp32 for bf16, in the order of the pieces."""
    generator = torch.Generator().manual_seed(seed)
    pieces = [torch.randn(elements, generator=generator).to(dtypes[0]) for _ in range(ranks)]
    before = torch.randn(elements, generator=generator).to(dtypes[1])
    wide = FP64 if FP64 in dtypes else FP32
    first, *rest = [*([before] if adds else []), *pieces]
    expected = first.to(wide)
    for piece in rest:
        expected = expected + piece.to(wide)
    kept = [piece.clone() for piece in pieces]
    target = Target(before.clone(), adds)
    add_up(pieces, target, wide_room(target, ranks))
    assert torch.equal(target.tensor, expected.to(dtypes[1]))
    assert all(torch.equal(piece, was) for piece, was in zip(pieces, kept, strict=True))


@pytest.mark.parametrize(
    ("ranks", "adds", "needs"), [(1, True, False), (2, False, False), (2, True, True), (3, False, True)]
)
def test_room_is_made_for_more_than_one_addition_in_bf16(ranks: int, adds: bool, needs: bool) -> None:
    elements = 1 << 18
    room = wide_room(Target(torch.empty(elements, dtype=BF16), adds), ranks)
    assert (len(room) if room is not None else 0) == needs * sum_chunk(elements)
    assert wide_room(Target(torch.empty(elements), adds), ranks) is None


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_what_is_overwritten_may_be_the_first_piece(ranks: int, dtype: torch.dtype) -> None:
    """As this rank's own piece of a whole gradient is, at stage 1."""
    pieces = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(ranks)]
    expected = sum((piece.float() for piece in pieces), torch.zeros(1000)).to(dtype)
    target = Target(pieces[0])
    add_up(pieces, target, wide_room(target, ranks))
    assert torch.equal(pieces[0], expected)

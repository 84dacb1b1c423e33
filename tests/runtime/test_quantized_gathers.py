"""Gathers of weights in 8 bits (qwz): the same bits as weights that are rounded first, with exact ledgers and bytes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.checks import assert_ledger, assert_memory, assert_replicas_equal, judge
from harness.jobs import RankOutcome, Training
from harness.pool import run_ranks
from harness.space import SPACES, Point, cases
from harness.today import QUANTIZED, by_turns, of_some
from shardwise.layout.wire import BLOCK, packed_bytes
from shardwise.runtime.transport.adding import Target
from shardwise.runtime.zero.quantized import LARGEST, add_up_packed, pack, unpack

POINTS = [
    point
    for name in SPACES
    for point in [p for p in cases(name) if p.layout.stage == 3 and p.layout.precision != "fp64"][::6]
]


def roundtrip(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    packed = torch.zeros(packed_bytes(len(numbers), bits), dtype=torch.uint8)
    pack(numbers, bits, packed)
    again = torch.empty(len(numbers))
    unpack(packed, bits, again)
    return again


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3 * BLOCK + 5), st.sampled_from([4, 8]), st.integers(0, 1 << 30), st.floats(-30, 30))
def test_no_element_is_off_by_more_than_half_a_scale(elements: int, bits: int, seed: int, magnitude: float) -> None:
    numbers = torch.from_numpy(np.random.default_rng(seed).standard_normal(elements).astype(np.float32) * 2**magnitude)
    numbers[seed % elements] = 0.0
    again = roundtrip(numbers, bits)
    for a in range(0, elements, BLOCK):
        given, found = numbers[a : a + BLOCK].double(), again[a : a + BLOCK].double()
        scale = float(given.abs().max().float() / LARGEST[bits])
        ulp = float(given.abs().max()) * 2.0**-23
        assert float((given - found).abs().max()) <= scale / 2 + ulp


@pytest.mark.parametrize("bits", [4, 8])
def test_large_tensors_go_in_chunks_and_zeros_and_nans_stay(bits: int) -> None:
    numbers = torch.randn(300 * BLOCK + 7, generator=torch.Generator().manual_seed(1))
    numbers[: 2 * BLOCK] = 0.0
    pieces = [roundtrip(piece, bits) for piece in numbers.split(BLOCK)]
    assert torch.equal(roundtrip(numbers, bits), torch.cat(pieces))
    assert not roundtrip(numbers, bits)[: 2 * BLOCK].any()
    numbers[5] = torch.nan
    assert roundtrip(numbers, bits)[:BLOCK].isnan().all()
    added = torch.ones(len(numbers))
    packed = torch.zeros(packed_bytes(len(numbers), bits), dtype=torch.uint8)
    pack(numbers, bits, packed)
    add_up_packed([packed], bits, Target(added, True))
    assert torch.equal(added[BLOCK:], 1 + roundtrip(numbers, bits)[BLOCK:])


@pytest.mark.parametrize(
    ("elements", "bits", "nbytes"), [(1, 8, 8), (256, 8, 260), (257, 8, 268), (256, 4, 132), (9, 4, 12)]
)
def test_bytes_of_a_piece(elements: int, bits: int, nbytes: int) -> None:
    assert packed_bytes(elements, bits) == nbytes


def train(point: Point, job: str, quantized: bool) -> list[RankOutcome]:
    layout = replace(point.layout, qwz=True) if quantized else replace(point.layout, hpz=0)
    asked = Training(point.case, layout, judge(point.case), transport=dict(point.choices).get("transport", "shared"))
    return run_ranks(job, layout.ranks, asked)


@of_some("gathers", QUANTIZED, 2)
@pytest.mark.layouts(lambda point: replace(point.layout, qwz=True))
@pytest.mark.parametrize("point", by_turns(POINTS, 2, "quantized gathers"), ids=lambda p: p.id)
def test_trap_26_gathers_have_the_bits_of_rounded_weights(point: Point) -> None:
    ranks = train(point, "harness.jobs:train", True)
    for one, other in zip(ranks, train(point, "harness.quantized_jobs:rounded", False), strict=True):
        assert (one.losses, one.norms, one.pieces) == (other.losses, other.norms, other.pieces)
    assert_replicas_equal(ranks)
    assert_ledger(point.case, replace(point.layout, qwz=True), ranks)
    assert_memory(point.case, replace(point.layout, qwz=True), ranks)

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cases import table
from harness.checks import assert_exact, judge
from harness.jobs import RankOutcome, Training
from harness.pool import run_ranks
from harness.quantized import GRADIENT_POINTS, rounded
from harness.quantized_jobs import Account, FedBack, Summed, numbers
from harness.reference import Case
from harness.space import MODELS, SPACES, Point, cases, point
from harness.today import QUANTIZED, by_turns, of_some, some_of
from shardwise.checkpoint import Checkpoint, diff
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.layout.axes import HPZ, SHARD
from shardwise.layout.gathers import gather_counts
from shardwise.layout.unit import GRADIENT_BITS
from shardwise.layout.wire import BLOCK, packed_bytes
from shardwise.model import ModelConfig
from shardwise.model.catalog import get
from shardwise.predict.traffic.ledger import predict_ledger
from shardwise.runtime.checkpointing import RESIDUAL
from shardwise.runtime.transport.buffers import Target
from shardwise.runtime.zero.quantized import LARGEST, add_up_packed, pack, unpack

# -- Gathers of weights in 8 bits


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
    assert_exact(point.case, replace(point.layout, qwz=True), ranks)


# -- Sums of gradients in 4 bits (qgz): each rank's part is rounded once a hop and added up in fp32, and no more


LAYOUTS = table(__file__, "LAYOUTS")


def summed(parts: list[np.ndarray], runs: tuple[tuple[int, int], ...] = ()) -> np.ndarray:
    """The sum of what is sent of each part, whose blocks begin anew with each run; all of a part is one by default."""
    runs = runs or ((0, len(parts[0])),)
    sent = [np.concatenate([rounded(part[start:stop]) for start, stop in runs]) for part in parts]
    total = sent[0]
    for one in sent[1:]:
        total = total + one
    return total


@pytest.mark.parametrize("text", LAYOUTS)
def test_trap_27_the_sum_has_the_bits_of_its_hops(text: str) -> None:
    layout = Layout.parse(f"{text},qgz,precision=fp32")
    asked = Summed(MODELS["llama"].replace(hidden=50), layout, "blocks.0", seed=len(text), adds="hpz" in text)
    unit = unit_plan(asked.model, layout, Workload(8, layout.dp)).by_name["blocks.0"]
    given = [
        numbers(asked.seed * 100 + rank, unit.padded).numpy().reshape(layout.dp, -1) for rank in range(layout.ranks)
    ]
    near = layout.hpz or layout.dp
    for rank, (found, ledger) in enumerate(run_ranks("harness.quantized_jobs:packed_sum", layout.ranks, asked)):
        place, tp_rank = divmod(rank, layout.tp)
        of_rank = [given[other * layout.tp + tp_rank][place] for other in range(layout.dp)]
        groups = [of_rank[f * near : (f + 1) * near] for f in range(layout.dp // near)]
        sums = [summed(group, unit.block_cuts[place]) for group in groups]
        expected = sums[0] if len(sums) == 1 else summed(sums, unit.block_cuts[place])
        assert np.array_equal(found.numpy(), expected + np.float32(7) if asked.adds else expected)
        packed = unit.packed_bytes(GRADIENT_BITS)
        axes = ["dp"] if len(sums) == 1 else ["hpz", "hpz-across"]
        sent = [layout.dp * packed, layout.dp // near * packed][: len(axes)]
        rows = [(row.op, row.axes, row.dtype, row.elements) for row in ledger]
        assert rows == [("all_to_all", *row) for row in zip(axes, ("uint8",) * len(axes), sent, strict=True)]


def feeds(point: Point) -> bool:
    return GRADIENT_POINTS.index(point) % 2 == 1


def train_gradients(point: Point, layout: Layout) -> list[RankOutcome]:
    asked = Training(point.case, layout, judge(point.case), transport=dict(point.choices).get("transport", "shared"))
    return run_ranks("harness.jobs:train", layout.ranks, asked)


@of_some("gradients", QUANTIZED, 2)
@pytest.mark.layouts(lambda point: replace(point.layout, qgz=True, feedback=feeds(point)))
@pytest.mark.parametrize("point", by_turns(GRADIENT_POINTS, 3, "quantized gradients"), ids=lambda p: p.id)
def test_ledger_and_bytes_are_exact(point: Point) -> None:
    layout = replace(point.layout, qgz=True, feedback=feeds(point))
    ranks = train_gradients(point, layout)
    assert_exact(point.case, layout, ranks)


def test_errors_of_hops_grow_as_they_are_said_to() -> None:
    """Relative errors of normal numbers over 8 ranks: one hop, two hops, and a ring that rounds at every hop."""
    draw = np.random.default_rng(5)
    parts = [draw.standard_normal(64 * BLOCK).astype(np.float32) for _ in range(8)]
    true = np.sum(np.array(parts, dtype=np.float64), 0)

    def error(found: np.ndarray) -> float:
        return float(np.linalg.norm(found - true) / np.linalg.norm(true))

    ring = parts[0]
    for part in parts[1:]:
        ring = rounded(ring) + part
    one, two = error(summed(parts)), error(summed([summed(parts[:4]), summed(parts[4:])]))
    assert one < two < error(rounded(ring))
    assert (one, two) == pytest.approx((0.126, 0.178), rel=0.1)


def test_a_model_learns_as_without() -> None:
    case = point(model="llama", dp=4, zero=3, precision="fp32").case
    case = replace(case, steps=5)
    plain = Layout(dp=4, zero=3, precision="fp32")
    outcomes = [
        run_ranks("harness.jobs:train", 4, Training(case, layout, judge(case), memory=False))[0].losses
        for layout in (plain, replace(plain, qgz=True, qwz=True, hpz=2))
    ]
    assert outcomes[1] != outcomes[0] and outcomes[1] == pytest.approx(outcomes[0], rel=0.02)


def test_all_of_it_sends_a_quarter_between_nodes() -> None:
    """Bytes into a node of 8, by the ledger: what is gathered over all comes there once, and each of its ranks has its
    part of what goes across."""
    model, workload = get("llama-3-8b"), Workload(4096, 64)
    plain = Layout(dp=64, zero=3)

    def between(layout: Layout) -> int:
        times, names = {"dp": 1, "hpz-across": 8}, {unit.name for unit in unit_plan(model, layout, workload).units}
        rows = predict_ledger(unit_plan(model, layout, workload, backend="nccl"))
        return sum(row.payload_bytes * times.get(row.axes, 0) for row in rows if row.unit in names)

    packed = replace(plain, hpz=8, qwz=True, qgz=True)
    units = unit_plan(model, packed, workload).units
    gathers = sum(64 * packed_bytes(unit.shard_numel, 8) for unit in units)
    sums = sum(8 * 8 * packed_bytes(unit.shard_numel, 4) for unit in units)
    assert between(packed) == gathers + sums
    assert between(packed) / between(plain) == pytest.approx(0.27, abs=0.005)  # embedding and head: one gather
    assert between(replace(plain, hpz=8)) / between(plain) == pytest.approx(0.7, abs=0.01)


# -- Error feedback beside qgz


STEPS = 4
LAYOUTS_FED = ["dp=2,zero=1", "dp=3,zero=2", "dp=6,zero=3,hpz=2", "dp=6,zero=3,hpz=3"]


class NumpyResiduals:
    """Sums with error feedback in NumPy. given: step -> the gradient of every rank, a row for each rank's interval."""

    def __init__(self, ranks: int, near: int, elements: int) -> None:
        self.near, self.groups = near, ranks // near
        self.first = np.zeros((ranks, ranks, elements), np.float32)
        self.second = np.zeros((ranks, self.groups if self.groups > 1 else 0, elements), np.float32)

    def step(self, given: list[np.ndarray]) -> np.ndarray:
        ranks, near = range(len(given)), self.near
        sent = [[_fed(self.first[rank, to], given[rank][to]) for to in ranks] for rank in ranks]
        found = []
        for to in ranks:
            sums = [_added([sent[f * near + k][to] for k in range(near)]) for f in range(self.groups)]
            if self.groups > 1:  # the near rank at this place packs it again
                sums = [_fed(self.second[f * near + to % near, to // near], total) for f, total in enumerate(sums)]
            found.append(_added(sums))
        return np.array(found)

    def folded(self) -> np.ndarray:
        total = self.first.sum(0, dtype=np.float64)
        for rank, pieces in enumerate(self.second):
            for group, piece in enumerate(pieces):
                total[group * self.near + rank % self.near] += piece
        return total


def _fed(residual: np.ndarray, values: np.ndarray) -> np.ndarray:
    due = residual + values
    sent = rounded(due)
    residual[:] = due - sent
    return sent


def _added(parts: list[np.ndarray]) -> np.ndarray:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@pytest.mark.parametrize("text", LAYOUTS_FED)
def test_trap_27_true_sums_are_what_was_sent_and_what_is_left(text: str) -> None:
    layout = Layout.parse(f"{text},qgz,feedback,precision=fp32")
    asked = Summed(MODELS["llama"].replace(hidden=50), layout, "blocks.0", seed=len(text), adds=False, steps=STEPS)
    unit = unit_plan(asked.model, layout, Workload(8, layout.dp)).by_name["blocks.0"]
    account = NumpyResiduals(layout.dp, layout.hpz or layout.dp, unit.shard_numel)
    ranks: list[FedBack] = run_ranks("harness.quantized_jobs:fed_back", layout.dp, asked)
    true, sent = np.zeros((2, layout.dp, unit.shard_numel))
    for step in range(STEPS):
        given = [
            numbers((asked.seed + step) * 100 + rank, unit.padded).numpy().reshape(layout.dp, -1)
            for rank in range(layout.dp)
        ]
        sums = np.array([rank.sums[step].numpy() for rank in ranks])
        assert np.array_equal(sums, account.step(given)), step
        true += np.array(given, np.float64).sum(0)
        sent += sums
    for rank, found in enumerate(ranks):
        assert np.array_equal(found.first.numpy().reshape(layout.dp, -1), account.first[rank])
        assert np.array_equal(found.second.numpy().reshape(-1, unit.shard_numel), account.second[rank])
    folded = np.array([rank.folded.numpy() for rank in ranks])
    assert np.allclose(folded, account.folded(), rtol=1e-5, atol=1e-6 * np.abs(folded).max())
    # Every rank rounds sums of its gradients and residuals to fp32.
    assert np.abs(true - sent - folded).max() <= 1e-6 * STEPS * layout.dp * np.abs(true).max()
    assert np.abs(true - sent).max() > 1e-3 * np.abs(true).max()


@of_some("errors", QUANTIZED, 2)
@pytest.mark.parametrize("point", some_of(GRADIENT_POINTS, 3, "error feedback"), ids=lambda p: p.id)
def test_trap_27_every_gradient_of_a_training_is_accounted_for(point) -> None:
    layout = replace(point.layout, qgz=True, feedback=True)
    asked = Training(point.case, layout, None, transport=dict(point.choices).get("transport", "shared"))  # type: ignore[arg-type]
    ranks: list[list[Account]] = run_ranks("harness.quantized_jobs:accounted", layout.ranks, asked)
    accounts = [account for rank in ranks for account in rank]
    for account in accounts:
        assert account.apart <= 1e-5 * max(account.true, account.residual), account
    # Not much of it: micro-batches without a gradient, where all labels are ignored, send what was left.
    assert any(account.residual > 1e-5 * account.true for account in accounts)


def test_errors_of_two_hundred_steps_do_not_add_up() -> None:
    """Relative errors of the sum of 200 steps: as large as a single step's without feedback, a fourteenth with it."""
    generator = torch.Generator().manual_seed(3)
    steps = [torch.randn(16 * BLOCK, generator=generator) for _ in range(200)]
    true = torch.stack(steps).double().sum(0)
    errors = []
    for residual in (None, torch.zeros(16 * BLOCK)):
        packed = torch.zeros(packed_bytes(16 * BLOCK, 4), dtype=torch.uint8)
        sent, again = torch.zeros(16 * BLOCK, dtype=torch.float64), torch.empty(16 * BLOCK)
        for step in steps:
            pack(step, 4, packed, residual)
            unpack(packed, 4, again)
            sent += again
        errors.append(float((sent - true).norm() / true.norm()))
    assert errors[0] == pytest.approx(0.126, rel=0.1) and errors[1] == pytest.approx(0.126 / 200**0.5, rel=0.1)


MODEL = ModelConfig(
    "fed", vocab=59, hidden=29, layers=4, heads=3, kv_heads=3, head_dim=6, ffn=41, max_positions=16, tied=True
)
CASE = Case(MODEL, Workload(seq=12, batch=12), precision="fp32")
STORED = ("dp=2,zero=1,micro=3", "dp=4,zero=3,hpz=2", "dp=4,zero=2,shard=2", "dp=2,pp=2,zero=3")


def saved(text: str, folder: Path, words: str = "qgz,feedback") -> Checkpoint:
    layout = Layout.parse(f"{text},{words},precision=fp32")
    run_ranks("harness.resume_jobs:straight", layout.ranks, (CASE, layout, str(folder), 2, 2))
    return Checkpoint.open(folder / "step-2")


def resaved(source: Checkpoint, text: str, folder: Path, words: str = "qgz,feedback", steps: int = 2) -> Checkpoint:
    """It as another layout saves it again, before it goes on."""
    layout = Layout.parse(f"{text},{words},precision=fp32")
    payload = (CASE, layout, [(str(source.folder), str(folder))], steps)
    run_ranks("harness.resume_jobs:go_on", layout.ranks, payload)
    return Checkpoint.open(folder / "step-2")


def residuals(checkpoint: Checkpoint) -> list[str]:
    return [name for name in checkpoint.tensors if name.startswith(f"{RESIDUAL}/")]


@of_some("residuals", QUANTIZED, 2)
@pytest.mark.parametrize("text", some_of(STORED, 2, "stored residuals"))
def test_trap_27_residuals_go_from_layout_to_layout(text: str, tmp_path: Path) -> None:
    source = saved(text, tmp_path / "a")
    assert len(residuals(source)) == len(source.tensors) // 4
    assert all(np.abs(source.read(name)).max() > 0 for name in residuals(source))
    for index, to in enumerate((text, STORED[STORED.index(text) - 1])):
        assert diff(source, resaved(source, to, tmp_path / f"b{index}", steps=3)) == [], to


def test_a_layout_without_feedback_drops_residuals_and_one_with_it_starts_at_zero(tmp_path: Path) -> None:
    source = saved(STORED[1], tmp_path / "a")
    without = resaved(source, "dp=3,zero=2", tmp_path / "b", "qgz")
    assert {difference.tensor for difference in diff(source, without)} == set(residuals(source))
    again = resaved(without, STORED[3], tmp_path / "c")
    assert residuals(again) == residuals(source)
    assert not any(again.read(name).any() for name in residuals(again))


# -- Second copies of gathered parameters (hpz): they change no bit, and every step makes them anew


CASE_COPIED = point(model="qwen3", dp=4, zero=3, accumulate=3).case
PLAIN = Layout(dp=4, zero=3)


def train_copied(layout: Layout) -> list[RankOutcome]:
    case = replace(CASE_COPIED, precision=layout.precision)
    asked = Training(case, layout, judge(case), memory=False)
    return run_ranks("harness.jobs:train", layout.ranks, asked)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_trap_26_a_second_copy_changes_no_bit(precision: str) -> None:
    plain = replace(PLAIN, precision=precision)
    for one, other in zip(train_copied(plain), train_copied(replace(plain, hpz=2)), strict=True):
        assert (one.losses, one.norms, one.pieces) == (other.losses, other.norms, other.pieces)


@pytest.mark.parametrize("pp", [1, 2])
def test_trap_26_an_evaluation_has_the_weights_of_today(pp: int) -> None:
    """After every step, on packed weights as on second copies; a pipeline gathers for it as it does for a step."""
    model = MODELS["llama"].replace(layers=2)
    case = Case(model, Workload(12, 8), "fp32")
    plain = Layout(dp=4, pp=pp, zero=3, precision="fp32")
    ways = [plain, replace(plain, hpz=2), replace(plain, qwz=True), replace(plain, hpz=2, qwz=True)]
    found = [
        run_ranks("harness.quantized_jobs:evaluated", layout.ranks, Training(case, layout, judge(case)))[-1]
        for layout in ways
    ]
    assert found[1] == found[0] and found[3] == found[2] == pytest.approx(found[0], rel=0.02)
    assert len(set(found[0])) == case.steps


NEAR = {"embedding": 3, "blocks.0": 4, "blocks.1": 7, "blocks.2": 7, "blocks.3": 3, "head": 3}
"""Gathers of a step from copies: forward and backward of four micro-batches but the first, less what is still there."""


@pytest.mark.parametrize(("pp", "near"), [(1, NEAR), (2, {})])  # a pipeline gathers each of its stages once
def test_only_the_first_gather_of_a_step_is_over_all_shards(pp: int, near: dict[str, int]) -> None:
    plan = unit_plan(get("tiny-llama"), Layout(dp=8, pp=pp, zero=3, hpz=4), Workload(64, 32))
    assert plan.micro_batches == 4
    counts = gather_counts(plan)
    for unit in plan.units:
        over = {axes: sum(n for (_, g), n in counts.items() if g[:2] == (unit.name, axes)) for axes in (SHARD, HPZ)}
        assert over == {SHARD: 1, HPZ: near.get(unit.name, 0)}, unit.name


def test_every_copy_is_a_part_of_the_unit() -> None:
    plan = unit_plan(get("tiny-llama"), Layout(dp=8, zero=3, hpz=4), Workload(64, 32))
    assert plan.mesh.group(HPZ, 6) == (4, 5, 6, 7)
    assert all(unit.copy_numel * 4 == unit.padded for unit in plan.units)

"""`sync=local`: replicas that train apart from each other against as many models on one device, in float64; the
communication ledger and the memory of a step with an outer step; what an outer step sends in few bits."""

import pytest
import torch

from harness.apart import PACKED, Apart, selected_apart
from harness.apart_checks import assert_as_alone, assert_predicted, blank, trained
from harness.apart_jobs import Exchanged
from harness.checks import assert_replicas_equal, train
from harness.pool import run_ranks
from harness.quantized_jobs import Account, numbers
from harness.reference import Case, reference
from harness.space import MODELS
from harness.today import by_turns
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.layout.outer import outer_pieces
from shardwise.layout.wire import BLOCK
from shardwise.predict.memory.step import optimizer_bytes
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.zero.quantized import LARGEST


@pytest.mark.layouts(lambda apart: apart.layout)
@pytest.mark.parametrize("apart", selected_apart(), ids=lambda a: a.id)
def test_replicas_train_as_they_would_alone(apart: Apart) -> None:
    ranks = trained(apart)
    assert_as_alone(apart, ranks)
    assert_predicted(apart, ranks)


@pytest.mark.layouts(lambda apart: apart.layout)
@pytest.mark.parametrize("apart", by_turns(PACKED, 2, "packed outer gradients"), ids=lambda a: a.id)
def test_packed_outer_gradients_are_predicted_and_accounted_for(apart: Apart) -> None:
    """Over all outer steps, the true sums are what was sent and what is left; replicas have the same bits."""
    against = blank(apart.case.model)
    ranks = train(apart.case, apart.layout, against, transport=apart.transport)
    assert_predicted(apart, ranks)
    assert_replicas_equal(ranks)
    accounts: list[list[Account]] = run_ranks("harness.apart_jobs:accounted", apart.layout.ranks, apart)
    for account in (account for rank in accounts for account in rank):
        assert account.apart <= 1e-5 * max(account.true, account.residual), account
        assert account.residual > 1e-5 * account.true


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("replicas", [2, 3])
def test_a_packed_sum_is_off_by_half_a_scale_per_packing(bits: int, replicas: int) -> None:
    layout = Layout.parse(f"dp={2 * replicas},zero=1,sync=local,every=1,outer_bits={bits},replicas={replicas}")
    asked = Exchanged(MODELS["llama"].replace(hidden=50), layout, "blocks.0")
    plan = unit_plan(asked.model, layout, Workload(8, layout.dp))
    unit, pieces = plan.by_name[asked.unit], outer_pieces(plan, plan.by_name[asked.unit])
    assert pieces and pieces.elements * replicas >= unit.shard_numel
    found: list[tuple] = run_ranks("harness.apart_jobs:exchanged", layout.ranks, asked)
    for rank in (0, 1):  # of the shard group; the others are its peers in the other replicas
        given = torch.stack([numbers(peer, unit.shard_numel) for peer in range(rank, layout.ranks, 2)]).double()
        total = given.sum(0)
        bound = sum(_half_scales(one, pieces, bits) for one in given)
        summed, first, error = found[rank]
        assert bool((first.double().abs() <= _half_scales(given[0], pieces, bits) * 1.001).all())
        bound = bound + _half_scales(total, pieces, bits, bound)
        assert bool(((summed.double() - total).abs() <= bound * 1.001).all())
        assert torch.allclose(error.double() * replicas, total - summed.double(), rtol=0, atol=1e-5 * total.abs().max())
        assert all(torch.equal(summed, found[peer][0]) for peer in range(rank, layout.ranks, 2))


def _half_scales(values: torch.Tensor, pieces, bits: int, more: torch.Tensor | float = 0.0) -> torch.Tensor:
    """Half the scale of each element's block. more: by how much values may be larger."""
    bound = torch.zeros_like(values)
    largest = values.abs() + more
    for piece in range(pieces.count):
        for run in pieces.runs(piece):
            start, stop = (piece * pieces.elements + at for at in (run.elements.start, run.elements.stop))
            for first in range(start, stop, BLOCK):
                block = slice(first, min(first + BLOCK, stop))
                bound[block] = largest[block].max() / LARGEST[bits] / 2
    return bound


@pytest.mark.parametrize("text", ["dp=2", "dp=3,micro=2", "dp=4,replicas=2,zero=3", "dp=2,tp=2,sp"])
def test_an_average_after_every_step_of_sgd_is_data_parallel(text: str) -> None:
    """A mean of weights that SGD has moved by equally many tokens each, unclipped, is a step by the mean gradient."""
    layout = Layout.parse(f"{text},sync=local,every=1,precision=fp64")
    workload = Workload(8, 2 * layout.dp * layout.micro, optimizer="sgd")
    case = Case(MODELS["llama"], workload, optimizer=OptimizerConfig(lr=0.1, warmup=2, clip=0.0), ignore="none")
    expected = reference(case)
    scale = sum(float(tensor.square().sum()) for tensor in expected.final.values()) ** 0.5
    for rank in train(case, layout, expected):
        assert sum(rank.final_errors.values()) ** 0.5 <= 1e-12 * scale


def test_without_base_or_momentum_nothing_more_is_kept() -> None:
    """Local SGD in full precision: the mean of weights needs no state."""
    plain, local = (
        unit_plan(MODELS["llama"], Layout.parse(text), Workload(8, 2)) for text in ("dp=2", "dp=2,sync=local,every=2")
    )
    assert optimizer_bytes(plain) == optimizer_bytes(local)

"""`split` where parameters have no gradient in some steps: they are left alone, as torch's AdamW does."""

import math

import pytest
import torch
from torch import Tensor, nn

from harness.idle_jobs import STEPS, IdleTraining, NowAndThen, reference
from harness.pool import run_ranks
from shardwise import Layout, UserError, split
from shardwise.errors import DivergedError


@pytest.mark.parametrize(
    "layout", ["dp=2", "dp=2,zero=1", "dp=2,zero=3,recompute=full", "dp=2,tp=2,zero=2", "pp=2,dp=2,schedule=gpipe"]
)
def test_parameters_without_a_gradient_on_any_rank_are_left_alone(layout, tmp_path):
    """Frozen for a step, used by one rank in every second one, and never used; through a checkpoint."""
    expected = reference()
    ranks = Layout.parse(layout).ranks
    results = run_ranks("harness.idle_jobs:train_idle", ranks, (IdleTraining(layout, str(tmp_path)), expected))
    for name, whole in expected.items():
        error = math.sqrt(sum(errors.get(name, 0.0) for errors, _ in results))
        assert error <= 1e-9 * float(whole.norm()), name
    assert {missed for _, missed in results} == {STEPS}


def squares(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return model(x, False).square().sum(), x.numel()


@pytest.mark.usefixtures("alone")
def test_what_was_frozen_at_the_split_does_not_start_to_train_silently():
    plain = NowAndThen()
    plain.often.weight.requires_grad_(False)
    module = split(plain, "precision=fp32")
    x = torch.ones(2, 4)
    module.train_step(squares, x)
    module.module.often.weight.requires_grad_(True)
    with pytest.raises(UserError, match=r"often\.weight was frozen when the module was split") as caught:
        module.train_step(squares, x)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("alone")
def test_numbers_of_tokens_are_any_that_a_sum_can_be_divided_by():
    torch.manual_seed(0)
    module = split(nn.Sequential(nn.Linear(4, 4)), "precision=fp64", accumulate=2)
    x = torch.ones(2, 4)

    def step(*counts: float | Tensor) -> float:
        outcome = module.train_step(
            lambda model, count: (model(x).square().sum(), count), list(counts), lr=0.0
        )  # fmt: skip
        assert outcome.grad_norm * outcome.tokens == pytest.approx(norm)
        return outcome.loss * outcome.tokens

    plain = module.train_step(lambda model, count: (model(x).square().sum(), count), [3, 3], lr=0.0)
    norm, whole = plain.grad_norm * 6, plain.loss * 6
    for counts in ((0.5, 0), (0, 0.25), (torch.tensor(2.9), 1)):
        assert step(*counts) == pytest.approx(whole)
    for counts in ((-3, 9), (9, -3), (math.nan, 1), (1, math.inf)):
        with pytest.raises(UserError, match="a number of tokens that is negative or not finite"):
            step(*counts)
    assert step(3, 3) == pytest.approx(whole)  # nothing is left of the steps that failed


@pytest.mark.usefixtures("alone")
def test_a_batch_of_nan_changes_nothing():
    module = split(NowAndThen(), "precision=fp32")
    x = torch.ones(2, 4)
    module.train_step(squares, x)
    before = [p.detach().clone() for p in module.module.parameters()]
    with pytest.raises(DivergedError, match="step 2: the loss is nan"):
        module.train_step(squares, x * math.nan)
    assert all(torch.equal(a, b) for a, b in zip(before, module.module.parameters(), strict=True))
    assert module.program.optimizer.missed["never.weight"] == 1

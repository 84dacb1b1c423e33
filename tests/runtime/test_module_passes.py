"""Losses that call a user's module twice, with and without gradients, and forward passes that leave blocks out: final
parameters are those of plain PyTorch."""

from __future__ import annotations

from itertools import product

import pytest

from harness.pass_jobs import LOSSES, reference
from harness.pool import run_ranks
from harness.today import some_of

LAYOUTS = [
    f"dp=2,zero={zero}{more}" for zero in range(4) for more in ("", ",recompute=full", ",offload_activations=cpu")
] + ["dp=2,zero=3,offload=cpu", "dp=2,zero=3,hpz=2", "dp=2,zero=2,offload=cpu"]


def trained(name: str, layout: str, accumulate: int = 1) -> None:
    expected = reference(name, accumulate)
    ranks = run_ranks("harness.pass_jobs:train_passes", 2, (name, layout, accumulate, expected))
    for parameter, values in expected.items():
        errors = [rank[parameter] for rank in ranks if parameter in rank]
        error = sum(errors) ** 0.5
        assert errors, parameter
        assert error < 1e-10 * float(values.norm()), parameter


@pytest.mark.parametrize(("name", "layout"), some_of(product(LOSSES, LAYOUTS), 8, "passes"))
def test_training_is_that_of_plain_pytorch(name: str, layout: str) -> None:
    trained(name, layout)


@pytest.mark.parametrize("name", some_of(LOSSES, 2, "passes of micro-batches"))
@pytest.mark.parametrize("layout", ["dp=2,zero=1", "dp=2,zero=3"])
def test_micro_batches_are_one_batch(name: str, layout: str) -> None:
    trained(name, layout, accumulate=2)

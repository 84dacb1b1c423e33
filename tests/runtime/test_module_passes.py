"""Losses that call a user's module twice, with and without gradients, and forward passes that leave blocks out: final
parameters are those of plain PyTorch."""

import re
from itertools import product

import pytest

from harness.cases import from_table
from harness.pass_jobs import LOSSES, reference
from harness.pool import run_ranks
from harness.today import some_of

LAYOUTS = [
    f"dp=2,zero={zero}{more}" for zero in range(4) for more in ("", ",recompute=full", ",offload_activations=cpu")
] + ["dp=2,zero=3,offload=nvme,offload_params=nvme", "dp=2,zero=3,hpz=2", "dp=2,zero=2,offload=cpu"]


def trained(name: str, layout: str, accumulate: int = 1) -> None:
    expected = reference(name, accumulate)
    ranks = run_ranks("harness.pass_jobs:train_passes", 2, (name, layout, accumulate, expected))
    for parameter, values in expected.items():
        errors = [rank[parameter] for rank in ranks if parameter in rank]
        error = sum(errors) ** 0.5
        assert errors, parameter
        assert error < 1e-10 * float(values.norm()), parameter


@pytest.mark.parametrize(("name", "layout"), some_of(product(LOSSES, LAYOUTS), 6, "passes"))
def test_training_is_that_of_plain_pytorch(name: str, layout: str) -> None:
    trained(name, layout)


@pytest.mark.parametrize("name", some_of(LOSSES, 1, "passes of micro-batches"))
@pytest.mark.parametrize("layout", ["dp=2,zero=1", "dp=2,zero=3"])
def test_micro_batches_are_one_batch(name: str, layout: str) -> None:
    trained(name, layout, accumulate=2)


@from_table
def test_what_does_not_run_is_one_line(name: str, layout: str, message: str) -> None:
    for line in run_ranks("harness.pass_jobs:rejected", 2, (name, layout)):
        assert re.search(message, line) and "\n" not in line

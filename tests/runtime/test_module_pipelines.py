"""Pipelines of a user's module: `verify` and training under the schedules of the catalog's models."""

from __future__ import annotations

import pytest

from harness.own_modules import GPT2_PARTS, GPT2_PLAN, PIPED, token_example
from harness.pool import run_ranks
from shardwise import Layout
from shardwise.runtime.module.comparison import first_difference
from shardwise.runtime.module.verify import TOLERANCE, Verification, VerifyRequest

pytestmark = pytest.mark.usefixtures("leftovers")


def verdict(model, layout: str, plan=None, parts=None, tolerance=TOLERANCE) -> Verification:
    """`verify` in the tests' own ranks."""
    exact = Layout.parse(f"{layout},precision=fp64")
    request = VerifyRequest(model, exact, token_example(), plan, None, tolerance, parts)
    return first_difference(run_ranks("harness.module_jobs:compare", exact.ranks, request))


LAYOUTS = [
    "pp=2",
    "pp=2,schedule=gpipe",
    "pp=2,virtual=2,schedule=interleaved",
    "pp=2,dp=2,zero=1",
    "pp=2,dp=2,zero=2",
    "pp=2,dp=2,zero=3,recompute=full",
    "pp=2,tp=2",
    "pp=2,dp=2,tp=2,zero=1",
    "pp=2,recompute=full",
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", PIPED)
def test_transformers_classes_are_split_right(family, layout):
    tolerance = 1e-6 if family in ("mixtral", "deepseek") else TOLERANCE
    plan, parts = (GPT2_PLAN, GPT2_PARTS) if family.startswith("gpt2") else (None, None)
    result = verdict(PIPED[family], layout, plan, parts, tolerance)
    assert result, str(result)
    assert result.parameters >= 15

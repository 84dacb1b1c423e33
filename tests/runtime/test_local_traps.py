"""Mistakes of replicas that train apart from each other, each with a case that would show it (tests/mutation)."""

import pytest

from harness.apart import Apart, listed
from harness.apart_checks import assert_as_alone, assert_predicted, blank, trained
from harness.apart_jobs import Account
from harness.checks import train
from harness.pool import run_ranks
from harness.space import EXPERT_MODELS, MODELS

CASES = [
    listed(MODELS["llama"], "dp=4,zero=1,sync=local,every=2,outer=nesterov,replicas=2,precision=fp64"),
    listed(MODELS["qwen3"], "dp=2,tp=2,zero=3,sp,sync=local,every=2,precision=fp64"),
    listed(MODELS["mqa"], "dp=2,tp=2,zero=1,sync=local,every=2,moments=average,precision=fp64"),
    listed(EXPERT_MODELS["mixtral"], "dp=4,ep=2,zero=2,sync=local,every=2,outer=nesterov,replicas=2,precision=fp64"),
]


@pytest.mark.parametrize("apart", CASES, ids=lambda a: a.id)
def test_trap_30_replicas_train_as_they_would_alone(apart: Apart) -> None:
    ranks = trained(apart)
    assert_as_alone(apart, ranks)
    assert_predicted(apart, ranks)


def test_trap_30_what_packing_loses_is_sent_later() -> None:
    apart = listed(MODELS["gpt2"], "dp=2,zero=1,sync=local,every=1,outer=nesterov,outer_bits=4,precision=fp32")
    train(apart.case, apart.layout, blank(apart.case.model))
    accounts: list[list[Account]] = run_ranks("harness.apart_jobs:accounted", apart.layout.ranks, apart)
    for account in (account for rank in accounts for account in rank):
        assert account.apart <= 1e-5 * max(account.true, account.residual), account

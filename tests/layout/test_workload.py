"""What is asked of the model: numbers that a step can have."""

import pytest

from shardwise.errors import UserError
from shardwise.layout.workload import MOST, Workload

PARTNERS = {"seq": {"batch": 1}, "batch": {"seq": 1}}


@pytest.mark.parametrize("key", ["seq", "batch", "prompt", "output", "concurrency"])
def test_numbers_beyond_any_cluster_are_refused(key):
    assert getattr(Workload(**{key: MOST} | PARTNERS.get(key, {})), key) == MOST
    with pytest.raises(UserError, match=f"{key} must be at most 1,000,000,000, not 1,000,000,001"):
        Workload(**{key: MOST + 1} | PARTNERS.get(key, {}))


def test_true_is_no_number():
    with pytest.raises(UserError, match="seq must be a positive integer, not True"):
        Workload(seq=True, batch=1)

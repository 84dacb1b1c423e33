"""Devices for a training run, and what makes no sense."""

import pytest

from shardwise.errors import UserError
from shardwise.planner.campaign import devices_needed


def test_one_device_does_its_peak():
    assert devices_needed(86400e12, 1e12, 1.0, 1) == 1
    assert devices_needed(86400e12, 1e12, 0.5, 2) == 1


@pytest.mark.parametrize("wrong", [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 1.5, 1), (1, 1, 0.5, -1)])
def test_nonsense_is_refused(wrong):
    with pytest.raises(UserError, match="must be positive"):
        devices_needed(*wrong)

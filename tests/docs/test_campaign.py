"""Devices for a training run, and what makes no sense."""

import pytest

from quoted.campaign import devices_needed, rule_of_thumb
from shardwise.errors import UserError


def test_one_device_does_its_peak():
    assert devices_needed(86400e12, 1e12, 1.0, 1) == 1
    assert devices_needed(86400e12, 1e12, 0.5, 2) == 1


@pytest.mark.parametrize("wrong", [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 1.5, 1), (1, 1, 0.5, -1)])
def test_nonsense_is_refused(wrong):
    with pytest.raises(UserError, match="must be positive"):
        devices_needed(*wrong)


def test_rule_of_thumb():
    """GPT-3: 3.14e23 FLOP for 174.6B parameters and 300B tokens (Brown et al. 2020, table D.1)."""
    assert rule_of_thumb(174.6e9, 300e9) == pytest.approx(3.14e23, rel=1e-2)
    assert rule_of_thumb(0, 5) == 0


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf")])
def test_rule_of_thumb_refuses_figures_that_are_none(bad):
    with pytest.raises(UserError, match="parameters"):
        rule_of_thumb(bad, 1)
    with pytest.raises(UserError, match="tokens"):
        rule_of_thumb(1, bad)

"""Bytes of training states against the table of stages, and the questions that turn them round."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import UserError
from shardwise.predict import zero_table
from shardwise.predict.memory.states import largest_model, least_devices, training_states

PARAMS = st.floats(1.0, 1e15)


@given(PARAMS, st.integers(1, 4096), st.sampled_from([2, 4]))
def test_each_stage_shards_one_part_more(params, ranks, gradient_bytes):
    weights, gradients, optimizer = 2 * params, gradient_bytes * params, 12 * params
    expected = [
        (weights, gradients, optimizer),
        (weights, gradients, optimizer / ranks),
        (weights, gradients / ranks, optimizer / ranks),
        (weights / ranks, gradients / ranks, optimizer / ranks),
    ]
    table = zero_table(params, [ranks], gradient_bytes)
    for stage, parts in enumerate(expected):
        held = training_states(params, stage, ranks, gradient_bytes)
        assert (held.weights, held.gradients, held.optimizer) == parts
        assert table[stage][ranks] == pytest.approx(sum(parts), rel=1e-12)


@given(PARAMS, st.integers(0, 3), st.integers(1, 4096))
def test_the_largest_model_fills_the_device(device, stage, ranks):
    assert training_states(largest_model(device, stage, ranks), stage, ranks).total == pytest.approx(device)


@given(st.floats(1e6, 1e13), st.floats(1e9, 1e12))
def test_as_many_devices_as_are_needed_and_no_more(params, device):
    found = least_devices(params, device)
    assert training_states(params).total <= found * device * (1 + 1e-12)
    assert found == 1 or training_states(params).total > (found - 1) * device


@pytest.mark.parametrize(
    "call",
    [
        lambda: training_states(0),
        lambda: training_states(float("nan")),
        lambda: training_states(7e9, 4),
        lambda: training_states(7e9, 1, 0),
        lambda: least_devices(7e9, 0),
    ],
)
def test_nonsense_is_one_line(call):
    with pytest.raises(UserError) as raised:
        call()
    assert "\n" not in str(raised.value)

"""Means of a closed loop's requests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.predict.time.requests import closed_loop

seconds = st.floats(1e-4, 1.0)


@given(seconds, seconds, seconds, st.integers(1, 300), st.integers(0, 300), st.integers(2, 2000), st.floats(0.1, 100))
def test_first_and_following_tokens_add_up_to_an_answer(token, read, busy, running, more, output, together):
    found = closed_loop(token, read, busy, float(running), float(running + more), output, together)
    assert found.first + (output - 1) * found.each == pytest.approx(found.answer)
    assert found.first >= read * (1 - 1e-9) and found.each >= token * (1 - 1e-9)


@given(seconds, seconds, seconds, st.integers(1, 100), st.integers(1, 50), st.integers(1, 500))
def test_waiting_follows_littles_law(token, read, busy, running, times, output):
    served = closed_loop(token, read, busy, float(running), float(running), output).answer
    waited = closed_loop(token, read, busy, float(running), float(times * running), output).answer
    assert waited == pytest.approx(times * served)


def test_the_first_token_is_the_mean_clients_and_not_the_last_ones():
    one, many = (closed_loop(0.01, 0.4, 0.4, n, n, 500) for n in (1.0, 50.0))
    assert one.first == 0.4
    assert 0.4 < many.first < 50 * 0.4 / 4

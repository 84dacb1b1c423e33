"""A rank's error in a step of a split module: every rank ends with its message, and none waits for a timeout."""

import pytest

from harness.cases import table
from harness.failing_jobs import fail
from harness.pool import run_ranks
from harness.today import some_of
from shardwise import Layout

assert fail
CASES = table(__file__, "CASES")


@pytest.mark.parametrize(("layout", "transport", "failing", "how"), some_of(CASES, 3, "failing ranks"))
def test_every_rank_ends_with_the_message_of_the_one_that_failed(layout, transport, failing, how):
    ranks = run_ranks("harness.failing_jobs:fail", Layout.parse(layout).ranks, (layout, transport, failing, how))
    words = "loss_fn must return (summed loss" if how == "returns" else "a bad row"
    for rank, (kind, message, seconds, again) in enumerate(ranks):
        assert seconds < 60, "others must not wait for the timeout of 600 s"
        assert words in message and "\n" not in message, (rank, message)
        if rank != failing:
            assert kind == "UserError" and message.startswith(f"rank {failing}: "), (rank, message)
        else:
            assert kind == ("ValueError" if how == "raises" else "UserError")
        assert again.startswith("this split has ended: ") and words in again

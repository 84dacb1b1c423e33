"""Every generated layout with context parallelism against one device, the predicted ledger and the predicted memory."""

from functools import partial

import pytest

from harness.checks import assert_ledger, assert_memory, assert_parity, assert_replicas_equal, train
from harness.contexts import selected_contexts
from harness.space import Point


@pytest.mark.layouts(lambda point: point.layout)
@pytest.mark.parametrize("point", selected_contexts(), ids=lambda p: p.id)
def test_layout(point: Point) -> None:
    trained = partial(train, layout=point.layout, transport=point["transport"])
    ranks = trained(point.case)
    assert_parity(point.case, point.layout, ranks, again=trained)
    assert_replicas_equal(ranks)
    assert_ledger(point.case, point.layout, ranks)
    assert_memory(point.case, point.layout, ranks)

"""Buffers whose memory comes and goes: what views see, and what is counted."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.runtime.transport.buffers import Buffer, ByteCounter

CPU = torch.device("cpu")


def test_views_outlive_the_memory() -> None:
    buffer = Buffer("comm", 6, torch.float32, CPU, ByteCounter())
    view = buffer.take()[2:5].view(3, 1)
    buffer.free()
    assert buffer.tensor.untyped_storage().nbytes() == 0
    buffer.take().zero_()
    view.add_(7.0)
    assert buffer.tensor.tolist() == [0, 0, 7, 7, 7, 0]


def test_only_what_is_taken_has_memory() -> None:
    buffer = Buffer("comm", 1000, torch.bfloat16, CPU, ByteCounter())
    assert len(buffer.take(10)) == 10
    assert buffer.tensor.untyped_storage().nbytes() == 20


def test_nobody_takes_what_is_in_use() -> None:
    buffer = Buffer("comm", 4, torch.float32, CPU, ByteCounter())
    buffer.free()
    buffer.take()
    with pytest.raises(AssertionError, match="in use"):
        buffer.take()


def test_users_hold_lasting_memory_one_after_the_other() -> None:
    whole, reused, tally = torch.zeros(4), [], ByteCounter()
    two, four = (Buffer("comm", n, torch.float32, CPU, tally, whole[:n], reused.append) for n in (2, 4))
    view = two.take()[1:]
    with pytest.raises(AssertionError, match="in use"):
        two.take()
    two.free()
    four.take().fill_(3.0)
    assert (two.held, four.held, view.tolist()) == (False, True, [3.0])
    assert [len(tensor) for tensor in reused] == [2, 4]
    assert tally.total == 0, "who allocated the memory counts it"


@given(st.lists(st.tuples(st.sampled_from(["gradients", "comm"]), st.integers(0, 3)), max_size=30), st.integers(0, 30))
def test_the_tally_knows_the_most_of_each_class(moves: list[tuple[str, int]], restart: int) -> None:
    tally, told = ByteCounter(), []
    buffers = {
        (kind, i): Buffer(kind, i + 1, torch.float64, CPU, tally) for kind in ("gradients", "comm") for i in range(4)
    }
    tally.changed = told.append
    most: dict[str, int] = {}
    for number, key in enumerate(moves):
        if number == restart:
            tally.restart()
            most = {}
            most |= {kind: _held(buffers, kind) for kind in ("gradients", "comm")}
        buffer = buffers[key]
        buffer.free() if buffer.held else buffer.take()
        most |= {kind: max(most.get(kind, 0), _held(buffers, kind)) for kind in ("gradients", "comm")}
        assert tally.total == sum(told) == _held(buffers, "gradients") + _held(buffers, "comm")
    assert all(tally.most[kind] == size for kind, size in most.items())


def _held(buffers: dict[tuple[str, int], Buffer], kind: str) -> int:
    return sum(b.tensor.untyped_storage().nbytes() for (k, _), b in buffers.items() if k == kind)

"""How long a rank looks before it leaves its core to others."""

import os
import time
from collections.abc import Iterator

import pytest

from shardwise.runtime.transport import memory
from shardwise.runtime.transport.memory import Peer, SpinWait


class _Hours:
    """Time that passes with naps and yields alone; the flag goes up at its end."""

    def __init__(self, patch: pytest.MonkeyPatch, seconds: float) -> None:
        self.flags, self.now, self.seconds = memoryview(bytearray(8)).cast("q"), 0.0, seconds
        self.naps: list[float] = []
        self.yields = 0
        patch.setattr(memory.time, "monotonic", lambda: self.now)
        patch.setattr(memory.time, "sleep", self._nap)
        patch.setattr(memory.os, "sched_yield", self._yield)

    def _nap(self, seconds: float) -> None:
        self.naps.append(seconds)
        self._pass(seconds)

    def _yield(self) -> None:
        self.yields += 1
        self._pass(1e-5)

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.seconds:
            self.flags[0] = 1


@pytest.fixture
def peer() -> Iterator[Peer]:
    """Rank 1, which lives as long as this test."""
    found = Peer(1, os.getpid())
    yield found
    found.forget()


def test_naps_get_longer(monkeypatch: pytest.MonkeyPatch, peer: Peer) -> None:
    hours, patience = _Hours(monkeypatch, 1.0), SpinWait(2, 2, 10.0)
    patience.wait(hours.flags, 0, 1, peer)
    assert hours.yields > 100 and hours.naps == sorted(hours.naps)
    assert hours.naps[0] == SpinWait.NAP_S and hours.naps[-1] == SpinWait.LONGEST_NAP_S


def test_who_rests_wakes_up_seldom(monkeypatch: pytest.MonkeyPatch, peer: Peer) -> None:
    hours, patience = _Hours(monkeypatch, 1.0), SpinWait(2, 2, 10.0)
    patience.rests = True
    patience.wait(hours.flags, 0, 1, peer)
    assert not hours.yields and len(hours.naps) == pytest.approx(1.0 / SpinWait.LONGEST_NAP_S, abs=1)


@pytest.mark.parametrize("rests", [False, True])
def test_patience_ends(monkeypatch: pytest.MonkeyPatch, peer: Peer, rests: bool) -> None:
    hours, patience = _Hours(monkeypatch, time.monotonic() + 1e9), SpinWait(2, 2, 10.0)
    patience.rests = rests
    with pytest.raises(RuntimeError, match="rank 1 did not come within 10 s"):
        patience.wait(hours.flags, 0, 1, peer)

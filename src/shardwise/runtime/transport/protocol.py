"""The `Transport` protocol, which carries collectives between ranks. `Comms` adds ledger, timing and heartbeat."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shardwise.layout.algorithms import Carried
from shardwise.runtime.transport.buffers import ByteCounter, Target, Workspace
from shardwise.schedule.traffic import Moved


class Work(Protocol):
    """A collective under way on one rank; works of torch.distributed are such."""

    def wait(self) -> Any:
        """Return when its result may be read."""

    def is_completed(self) -> bool:
        """Whether it is complete, or this rank could complete it now without waiting for others."""


class Works:
    """Several works as one."""

    def __init__(self, works: Sequence[Work] = ()) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


DONE = Works()
"""Nothing left to wait for."""


class Realization(NamedTuple):
    """Realization of one collective by a transport."""

    algorithm: str
    """As reports name it."""
    lazy: bool
    """Whether it runs inside `wait`: no time counts before."""


class Transport(Protocol):
    """The collectives among the ranks of one group, on flat contiguous tensors. All ranks start the same ones in the
    same order; ranks are named by their place in the group."""

    def how(self, op: str, full: Tensor) -> Realization:
        """The realization of a ledger's operation on a full tensor."""

    def allocate(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A zeroed tensor for the transport's lifetime, in the memory that suits its collectives best. All ranks call
        this together. Peers may read it after a collective's `wait`, until `wait_readers`."""
        return torch.zeros(elements, dtype=dtype, device=device)

    def wait_readers(self, memory: Tensor) -> None:
        """Wait until no peer reads a tensor that `allocate` gave, which may then be written."""
        return

    def reserve(self, elements: int, dtype: torch.dtype, device: torch.device, tally: ByteCounter) -> list[Tensor]:
        """Prepare reduce-scatters of up to so many elements, one at a time; returns the memory that they need beside
        their tensors. tally: counts its bytes as they come and go."""
        return []

    def watch(self, look: Callable[[], object]) -> None:
        """Call `look` now and then while waiting for peers; it raises where one of them has failed."""
        return

    def abort(self) -> None:
        """Let no peer wait for this rank any more, which uses the transport no more."""
        return

    def shortcut(self, op: str, nbytes: int) -> bool:
        """Whether a small sum, gather or exchange of equal parts is quicker with `at_once`, which completes it."""
        return False

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False, at_once: bool = False) -> Work:
        """Sum (or maximum) over the group, in place."""

    def all_gather(self, out: Tensor, piece: Tensor, *, at_once: bool = False) -> Work:
        """Every rank's `piece`, in the dtype of `out`, end to end in `out`. It may be its place there."""

    def reduce_scatter(self, full: Tensor, into: Callable[[], Target]) -> Work:
        """Put this rank's piece of the sum of `full` where `into` says, called when the sum is made."""

    def all_to_all(
        self, out: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int], *, at_once: bool = False
    ) -> Work:
        """Exchange rows: `sent` and `received` count them by rank. at_once: equal parts."""

    def send(self, tensor: Tensor, peer: int) -> Work:
        """Hand over a tensor, which may be reused after `wait`."""

    def receive(self, out: Tensor, peer: int) -> Work:
        """Fill a tensor with the peer's next message."""

    def run_schedule(
        self, carried: Carried, flat: Tensor, start: int, width: int, workspace: Workspace, maximum: bool
    ) -> Moved:
        """Run a schedule on elements [start, start + width) of each of a tensor's pieces, in place, and wait for it."""

    def rest(self, resting: bool) -> None:
        """Whether what this rank waits for is unlikely to come soon."""
        return

    def close(self) -> None:
        return

"""Memory that is allocated only while something is in it, and its bytes by class.

A `Buffer` is a flat tensor whose storage is emptied and filled again, so views of it (parameters' gradients) stay valid
all through a run.
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.ops.limits import sum_chunk


class ByteCounter:
    """Bytes by class: `now`, and `most` at one time since `restart`. `changed`: told every difference, when set."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.changed: Callable[[int], object] | None = None

    @property
    def total(self) -> int:
        return sum(self.now.values())

    def add(self, kind: str, difference: int) -> None:
        self.now[kind] += difference
        self.most[kind] = max(self.most[kind], self.now[kind])
        if self.changed is not None:
            self.changed(difference)

    def restart(self) -> None:
        self.most = Counter(self.now)


class Buffer:
    """A flat tensor at a fixed address, with defined content from `take` until `free`. `kind`: the class of its bytes.

    Its storage is allocated by `take` and freed by `free`, so that views can only be made in between. memory: instead
    a lasting tensor of as many elements, which other buffers may use before and after; its bytes are not counted here.
    reusable: called with it before `take`, to wait for its readers.
    """

    def __init__(
        self,
        kind: str,
        elements: int,
        dtype: torch.dtype,
        device: torch.device,
        tally: ByteCounter,
        memory: Tensor | None = None,
        reusable: Callable[[Tensor], object] | None = None,
    ) -> None:
        self._kind, self._tally, self._reusable, self.held = kind, tally, reusable, False
        self.lasting = memory is not None
        self.tensor = torch.empty(elements, dtype=dtype, device=device) if memory is None else memory
        if memory is None:
            self._storage().resize_(0)

    def _storage(self) -> torch.UntypedStorage:
        return self.tensor.untyped_storage()

    def take(self, elements: int | None = None) -> Tensor:
        """The tensor's first `elements` (all), with memory of undefined content for them alone."""
        assert not self.held, "the buffer is in use"
        count = self.tensor.numel() if elements is None else elements
        self.held = True
        if not self.lasting:
            self._bytes = count * self.tensor.element_size()
            self._storage().resize_(self._bytes)
            self._tally.add(self._kind, self._bytes)
        elif self._reusable is not None:
            self._reusable(self.tensor)
        return self.tensor[:count]

    def free(self) -> None:
        """Drop the content; a buffer without any stays so."""
        if self.held and not self.lasting:
            self._storage().resize_(0)
            self._tally.add(self._kind, -self._bytes)
        self.held = False


class Workspace:
    """Buffers of one rank for all schedules, which run one at a time: room for staged and packed messages, and an fp32
    copy of what is summed there. Each is as large as its largest use so far; `tally` counts them."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self.tally = ByteCounter()

    def take(self, name: str, nbytes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """`nbytes` bytes of undefined content, as `dtype`."""
        before = self._buffers[name].numel() if name in self._buffers else 0
        if name not in self._buffers or before < nbytes:
            self._buffers.pop(name, None)
            self._buffers[name] = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self.tally.add("comm", nbytes - before)
        return self._buffers[name][:nbytes].view(dtype)


class Target(NamedTuple):
    """Destination of a sum: a flat tensor, which it overwrites, or to which it is added (`adds`)."""

    tensor: Tensor
    adds: bool = False


def wide_room(target: Target, pieces: int) -> Tensor | None:
    """A chunk in fp32, where adding up so many pieces takes more than one addition in bf16."""
    into = target.tensor
    if into.dtype != torch.bfloat16 or pieces + target.adds <= 2:
        return None
    return torch.empty(sum_chunk(len(into)), dtype=torch.float32, device=into.device)


def add_up(pieces: list[Tensor], target: Target, wide: Tensor | None) -> None:
    """Put the sum of flat `pieces`, of the target's size and one dtype, into the target, rounded once where that is
    bf16. wide: what `wide_room` gave. A target that is overwritten may be the first piece itself, and no other.

    Where dtypes differ it goes chunk by chunk: the cache holds what torch converts.
    """
    into, adds = target
    if pieces[0].device != into.device:  # an accumulator in the host's memory, of sums on a device
        pieces = [piece.to(into.device) for piece in pieces]
    if len(pieces) == 2 and not adds and pieces[0].dtype == into.dtype:
        torch.add(pieces[0], pieces[1], out=into)
        return
    apart = wide is not None or (pieces[0].dtype != into.dtype and not into.is_cuda)
    step = max(1, sum_chunk(len(into)) if apart else len(into))
    for part, *rows in zip(*(each.split(step) for each in (into, *pieces)), strict=True):
        total = part if wide is None else wide[: len(part)]
        if not adds:
            total.copy_(rows.pop(0))
        elif wide is not None:
            total.copy_(part)
        for row in rows:
            total.add_(row)
        if wide is not None:
            part.copy_(wide[: len(part)])

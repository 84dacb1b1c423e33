"""Memory of the engine that is there only while something lies in it.

A `Buffer` is a flat tensor whose storage is emptied and filled again, so views of it (parameters' gradients) stay valid
all through a run. A `ByteCounter` knows how many bytes of each class are there, and how many at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor


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
        """Forget what was held before."""
        self.most = Counter(self.now)


class Buffer:
    """A flat tensor without memory until `take`, and after `free`. `kind`: the class its bytes count in.

    Views of it can only be made while it has memory. memory: a tensor of as many elements, of somebody else's, that it
    has for good.
    """

    def __init__(
        self,
        kind: str,
        elements: int,
        dtype: torch.dtype,
        device: torch.device,
        tally: ByteCounter,
        memory: Tensor | None = None,
    ) -> None:
        self._kind, self._tally, self._bytes = kind, tally, 0
        self._own = memory is None
        if memory is None:
            self.tensor = torch.empty(elements, dtype=dtype, device=device)
            self._storage().resize_(0)
        else:
            self.tensor = memory

    def _storage(self) -> torch.UntypedStorage:
        return self.tensor.untyped_storage()

    @property
    def held(self) -> bool:
        return self._bytes > 0

    def take(self, elements: int | None = None) -> Tensor:
        """The tensor's first `elements` (all), with memory of undefined content for them alone."""
        assert not self.held, "the buffer is in use"
        count = self.tensor.numel() if elements is None else elements
        self._bytes = count * self.tensor.element_size()
        if self._own:
            self._storage().resize_(self._bytes)
        self._tally.add(self._kind, self._bytes)
        return self.tensor[:count]

    def free(self) -> None:
        """Nobody needs what lies here any more; a buffer without memory stays so."""
        if self.held:
            assert self._own, "it is not ours to free"
            self._storage().resize_(0)
            self._tally.add(self._kind, -self._bytes)
            self._bytes = 0


class SharedBuffer:
    """The first elements of a buffer that is there for good, which several users hold one after the other: what a
    `Buffer` of its own would be to each of them. reclaim: called before one of them takes it."""

    def __init__(self, whole: Buffer, elements: int, reclaim: Callable[[Tensor], object]) -> None:
        self.tensor, self.held = whole.tensor[:elements], False
        self._reclaim = reclaim

    def take(self) -> Tensor:
        """The tensor, of undefined content."""
        assert not self.held, "the buffer is in use"
        self._reclaim(self.tensor)
        self.held = True
        return self.tensor

    def free(self) -> None:
        """Its user needs it no more."""
        self.held = False

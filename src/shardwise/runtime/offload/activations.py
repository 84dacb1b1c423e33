"""Saved activations in the host's memory: each block's go there in its forward pass and come back for its backward.

The tensors of the block before come back, too, while a block goes backward. On CUDA copies have a stream of their own
and pinned memory.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.layout.homes import TO_DEVICE, TO_HOST
from shardwise.runtime.transport.buffers import ByteCounter
from shardwise.runtime.transport.comms import Comms


class OffloadedActivations:
    """The saved tensors of all blocks. comms: has the ledger of their copies. host: counts their bytes. lasting:
    storages of tensors that stay on the device anyway, such as weights."""

    def __init__(self, device: torch.device, comms: Comms, host: ByteCounter, lasting: set[int]) -> None:
        self.comms, self.host, self.lasting = comms, host, lasting
        self.on_host: set[int] = set()
        """Storages in the host's memory, where that is the device's, too."""
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def allocate(self, nbytes: int) -> Tensor:
        """Memory of the host, as uint8 [nbytes]."""
        if self.stream is not None:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        empty = torch.empty(0, dtype=torch.uint8)
        storage = torch.UntypedStorage(nbytes, device=empty.untyped_storage().device)  # a dry run's is on meta
        self.on_host.add(storage._cdata)  # before an operation sees it
        return empty.set_(storage)

    def free(self, host: Tensor) -> None:
        self.host.add("saved", -host.nbytes)
        self.on_host.discard(host.untyped_storage()._cdata)

    def block(self, part: str, shared: Callable[[], set[int]], before: SavedTensors | None) -> SavedTensors:
        """What a block is about to save. shared: storages that stay on the device, since other blocks read them, too.
        before: what the block before it has saved for the same micro-batch."""
        return SavedTensors(self, part, shared, before)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Copies between device and host, beside what computes."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield


class _Place:
    __slots__ = ("device", "dtype", "key", "offset", "shape", "stride")

    def __init__(self, key: int, tensor: Tensor) -> None:
        self.key, self.dtype, self.device = key, tensor.dtype, tensor.device
        self.shape, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()


class SavedTensors:
    """Storages that one block has saved for one micro-batch; `saving` is around its forward pass."""

    def __init__(
        self, of: OffloadedActivations, part: str, shared: Callable[[], set[int]], before: SavedTensors | None
    ) -> None:
        self._of, self._part, self._shared, self._before = of, part, shared, before
        self._away: dict[int, Tensor] = {}
        self._spans: list[tuple[int, int]] = []
        """Nanoseconds from and to which tensors were copied."""
        self._here: dict[int, Tensor] = {}
        self._left: Counter[int] = Counter()
        """Storage -> saved tensors in it that backward has not read."""
        self._keys: dict[int, tuple[int, Tensor]] = {}
        """Address of a live storage -> (its key, a tensor that keeps it alive)."""

    def saving(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._keys:
            if storage._cdata in self._of.lasting | self._shared() or not storage.nbytes():
                return tensor
            key = len(self._away)
            self._away[key] = self._to_host(tensor)
            self._keys[storage._cdata] = key, tensor.detach()
            self._of.host.add("saved", storage.nbytes())
        key = self._keys[storage._cdata][0]
        self._left[key] += 1
        return _Place(key, tensor)

    def saved(self) -> None:
        """The forward pass is over: what it has saved may go from the device."""
        self._keys.clear()
        self._of.comms.copied(TO_HOST, self._part, torch.uint8, self._nbytes, self._spans)
        self._spans = []

    def _to_host(self, tensor: Tensor) -> Tensor:
        flat, started = _bytes_of(tensor), time.perf_counter_ns()
        host = self._of.allocate(len(flat))
        with self._of.copying():
            host.copy_(flat, non_blocking=True)
            if self._of.stream is not None:
                flat.record_stream(self._of.stream)
        self._spans.append((started, time.perf_counter_ns()))
        return host

    def restore(self, device: torch.device) -> None:
        """The block is about to go backward: have its tensors on the device, and start to bring those of the block
        before."""
        self._start(device)
        self._of.comms.copied(TO_DEVICE, self._part, torch.uint8, self._nbytes, self._spans)
        if self._before is not None:
            self._before._start(device)
        if self._of.stream is not None:
            torch.cuda.current_stream().wait_stream(self._of.stream)

    def _start(self, device: torch.device) -> None:
        started = time.perf_counter_ns()
        missing = [key for key in self._left if key not in self._here]
        with self._of.copying():
            for key in missing:
                self._here[key] = self._to_device(key, device)
        if missing:
            self._spans.append((started, time.perf_counter_ns()))

    def _to_device(self, key: int, device: torch.device) -> Tensor:
        away = self._away[key]
        return torch.empty_like(away, device=device).copy_(away, non_blocking=True)

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        flat = self._here.get(saved.key)
        if flat is None:  # read again after its last reader
            flat = self._to_device(saved.key, saved.device)
        self._left[saved.key] -= 1
        if self._left[saved.key] <= 0:
            # From here on it lives as long as backward reads it.
            del self._left[saved.key]
            self._here.pop(saved.key, None)
        return torch.as_strided(flat.view(saved.dtype), saved.shape, saved.stride, saved.offset)

    @property
    def _nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._away.values())

    def drop(self) -> None:
        for tensor in self._away.values():
            self._of.free(tensor)
        self._away.clear()
        self._here.clear()
        self._left.clear()


def _bytes_of(tensor: Tensor) -> Tensor:
    storage, width = tensor.untyped_storage(), tensor.dtype.itemsize
    if storage.nbytes() % width:
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    # A fake tensor keeps a storage that it was set to for ever.
    return tensor.detach().as_strided((storage.nbytes() // width,), (1,), 0).view(torch.uint8)


def storages(values: Any) -> set[int]:
    """Storages of all tensors in nested values, such as a batch's."""
    if isinstance(values, Tensor):
        return {values.untyped_storage()._cdata}
    if is_dataclass(values):
        values = [getattr(values, field.name) for field in fields(values)]
    if isinstance(values, dict):
        values = values.values()
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        return set()
    return set().union(*map(storages, values))

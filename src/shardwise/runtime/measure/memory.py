"""Measuring one step: which storages are alive, by class, and the most that ever were.

Parameters and optimizer state are there all the time. The engine's buffers come and go: their classes are the most that
they take at one time, and the peak, the most of everything at one time, may be less than the sum of the classes.

On CPU every storage is followed from the operation that made it to its end, by a dispatch mode and weak references, and
what autograd saves is seen through saved-tensor hooks: a storage counts from the end of the forward pass that saved it
until autograd has let go of its last saved tensor. What a pipeline keeps for the gradients of weights counts, too.
Memory that an operator takes and returns inside itself is not seen. On CUDA the allocator tells the peak. The lasting
workspaces of cuBLAS are left out (each thread that computes has one): predictions reserve memory for them, as for the
driver's context and its kernels.
"""

import time
import weakref
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.ops.gradients import WeightGradient
from shardwise.report.step_memory import (
    ALLOC,
    ENGINE,
    FREE,
    PART,
    SAVED,
    UNSAVED,
    StepMemory,
    StorageEvent,
    step_memory,
)
from shardwise.report.step_report import Bytes, Role
from shardwise.runtime.measure.parts import PartWatcher
from shardwise.runtime.pipeline.program import StepProgram, no_callback
from shardwise.runtime.torch_versions import patience_with_recompilations

SETTLE = 1e-3
"""Seconds that a measured step on CPU stands still after each collective, so that its buffers are gone."""


class LiveStorages(TorchDispatchMode):
    """Follows storages that appear while the mode is on. known, elsewhere: storages to leave out, which may
    change."""

    supports_higher_order_operators = True  # as compiled graphs contain

    def __init__(self, known: set[int], elsewhere: Collection[int] = ()) -> None:
        super().__init__()
        self._elsewhere = elsewhere
        self._seen: dict[int, Any] = {}
        self._known = known
        self.live = 0
        self.peak = 0
        self.events: list[StorageEvent] = []
        self._began = time.perf_counter_ns()

    @property
    def now(self) -> int:
        """Nanoseconds since the mode was made."""
        return time.perf_counter_ns() - self._began

    def note(self, what: str, key: int, size: int = 0, words: str = "") -> None:
        self.events.append(StorageEvent(self.now, what, key, size, words))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled blocks stay compiled under this mode; what they make and free inside themselves is not seen."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._add_all(args)
        self._add_all(kwargs.values())
        out = func(*args, **kwargs)
        self._add_all(out if isinstance(out, (tuple, list)) else (out,), str(func))
        return out

    def _add_all(self, values: Iterable[Any], made_by: str = "") -> None:
        """Arguments and results of operators are tensors, or lists of them, beside other values."""
        for value in values:
            if isinstance(value, Tensor):
                self._add(value, made_by)
            elif isinstance(value, (tuple, list)):
                self._add_all(value, made_by)
            elif isinstance(value, dict):
                self._add_all(value.values(), made_by)

    def _add(self, value: Tensor, made_by: str) -> None:
        storage = value.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        # Last, since a fake tensor's device takes as long as an operation.
        if key in self._seen or key in self._known or key in self._elsewhere or not size or value.device.type == "meta":
            return

        def gone(_: Any, key: int = key, size: int = size) -> None:
            if self._seen.pop(key, None) is not None:
                self.change(-size)
                self.note(FREE, key)

        self._seen[key] = weakref.ref(storage, gone)
        self.change(size)
        self.note(ALLOC, key, size, f"{made_by} {str(value.dtype).removeprefix('torch.')} {list(value.shape)}".strip())

    def follows(self, value: Tensor) -> bool:
        return value.untyped_storage()._cdata in self._seen

    def reference(self, key: int) -> weakref.ref[Any] | None:
        """The storage with this address, where it has appeared and is alive."""
        return self._seen.get(key)

    def change(self, difference: int) -> None:
        """So many bytes more are alive."""
        self.live += difference
        self.peak = max(self.peak, self.live)


class _Packed:
    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class StepMeasurement:
    """Context manager around one `program.step`: afterwards `role` gives ledger, bytes by class and transport times."""

    def __init__(self, program: StepProgram) -> None:
        self.program = program
        held = program.engine.storages()
        outer = program.outer
        optimizer = [*program.optimizer.owned(), *(outer.owned() if outer else [])]
        self._lasting = {"parameters": held["parameters"], "optimizer": optimizer}
        every = [*held.values(), *self._lasting.values(), program.optimizer.on_host()]
        every += [program.optimizer.buffers_on_host(), outer.on_host() if outer else []]
        self._known = {t.untyped_storage()._cdata for tensors in every for t in tensors}
        self._saved: dict[int, list[int]] = {}
        """Storage -> [bytes, saved tensors on it]."""
        self.saved = 0
        self._storages = LiveStorages(self._known, program.offloaded.on_host if program.offloaded else set())
        self._engine: Counter[str] = Counter()
        """Bytes of its buffers by class, as they were noted last."""
        self._parts = PartWatcher(program, lambda part: self._storages.note(PART, 0, 0, part))
        self._end = 0
        self._workspaces = 0
        self._patience: AbstractContextManager[object] = (
            patience_with_recompilations() if program.plan.layout.compile == "block" else nullcontext()
        )
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor)

    def __enter__(self) -> Self:
        program = self.program
        program.comms.start_recording()
        program.after_compute = self._count
        if program.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            program.comms.pause = SETTLE
        tally = program.engine.tally
        tally.restart()
        program.engine.host.restart()
        tally.changed = self._engine_changed
        self._engine_changed(tally.total)
        self._parts.start()
        self._patience.__enter__()
        self._storages.__enter__()
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        self._storages.__exit__(*error)
        self._patience.__exit__(*error)
        program = self.program
        if program.device.type == "cuda":
            # bytes of cuBLAS's workspaces, which are released for that: the next products make new ones
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated()
            torch._C._cuda_clearCublasWorkspaces()
            self._workspaces = held - torch.cuda.memory_allocated()
        self._parts.stop()
        self._end = self._storages.now
        program.after_compute = no_callback
        program.engine.tally.changed = None
        program.comms.stop_recording()
        program.comms.pause = 0.0

    def _engine_changed(self, difference: int) -> None:
        self._storages.change(difference)
        for name, size in self.program.engine.tally.now.items():
            if size != self._engine[name]:
                self._storages.note(ENGINE, 0, size - self._engine[name], name)
                self._engine[name] = size

    @property
    def events(self) -> list[StorageEvent]:
        """What happened to storages, in order."""
        return self._storages.events

    def trace(self, rank: int, step: int) -> StepMemory:
        """Memory over the step. step: its number."""
        lasting = {name: _unique_bytes(tensors) for name, tensors in self._lasting.items()}
        return step_memory(rank, step, self.events, lasting, self._end)

    def _pack(self, tensor: Tensor) -> _Packed:
        packed, storage = _Packed(tensor), tensor.untyped_storage()
        if storage._cdata not in self._known:
            if storage._cdata not in self._saved:
                self._storages.note(SAVED, storage._cdata)
            self._saved.setdefault(storage._cdata, [storage.nbytes(), 0])[1] += 1
            weakref.finalize(packed, self._unpacked, storage._cdata)
        return packed

    def _unpacked(self, key: int) -> None:
        self._saved[key][1] -= 1
        if not self._saved[key][1]:
            del self._saved[key]
            self._storages.note(UNSAVED, key)

    def _count(self, kept: list[WeightGradient]) -> None:
        results = {key: nbytes for key, (nbytes, _) in self._saved.items()}
        for storage in (tensor.untyped_storage() for product in kept for tensor in product.reads):
            if storage._cdata not in self._known:
                results[storage._cdata] = storage.nbytes()
        self.saved = max(self.saved, sum(results.values()))

    def followed(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of the storages behind `tensors` that an operation of the step has touched."""
        return _unique_bytes(tensor for tensor in tensors if self._storages.follows(tensor))

    def role(self, rank: int) -> Role:
        lasting = {name: _unique_bytes(tensors) for name, tensors in self._lasting.items()}
        if self.program.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated() - self._workspaces
        else:
            peak = sum(lasting.values()) + self._storages.peak
        most = self.program.engine.tally.most
        bytes_ = Bytes.of(peak, **lasting, gradients=most["gradients"], comm=most["comm"], saved=self.saved)
        comms = self.program.comms
        routed = self.program.routed
        record = routed.to_json() if routed else None
        host, disk = Bytes(**self.program.engine.host.most), self.program.bytes_on_disk
        return Role(
            f"rank {rank}", (rank,), bytes_, comms.ledger(), comms.transport(), routed=record, host=host, disk=disk
        )


def _unique_bytes(tensors: Iterable[Tensor]) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())

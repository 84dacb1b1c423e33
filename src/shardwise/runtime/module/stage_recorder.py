"""Recording a module's parts as one stage of a pipeline, on fake tensors: what each keeps, and needs at the most."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from shardwise.model.traced_stages import When
from shardwise.ops.gradients import WeightGradient
from shardwise.report.step_report import LedgerRow
from shardwise.runtime.measure.memory import StepMeasurement
from shardwise.runtime.module.chain import ENTRY, EXIT
from shardwise.runtime.module.inputs import tensors_in
from shardwise.runtime.module.pipelined import ModuleWorker
from shardwise.runtime.module.program import LossFunction, ModuleProgram

MICRO_BATCHES = 3
"""The first one; one that adds its gradients to what is there; one whose gradients of weights come apart."""
Keepers = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], str]
"""The savers, holders, keepers and kind of `TracedTensors`."""


@dataclass
class RawStages:
    """Numbers of one size of micro-batch."""

    tensors: dict[Keepers, int] = field(default_factory=dict)
    peaks: dict[tuple[When, str], int] = field(default_factory=dict)
    messages: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Part -> (dtype, elements) of what it hands on."""
    kept: set[str] = field(default_factory=set)
    """Parts whose output the next one keeps."""
    buffers: int = 0
    calls: tuple[LedgerRow, ...] = ()
    """The ledger, in the order of its first calls."""


@dataclass
class _Kept:
    """Memory that is there after a forward pass, or for gradients of weights."""

    there: weakref.ref[Any] | None
    nbytes: int
    savers: set[str] = field(default_factory=set)
    holders: set[str] = field(default_factory=set)
    keepers: set[str] = field(default_factory=set)


class StageRecorder(StepMeasurement):
    """Context manager around `record`. program: of a module that is described as a chain, without a pipeline."""

    def __init__(self, program: ModuleProgram) -> None:
        super().__init__(program)
        self.module, self.raw, self.parts = program.module, RawStages(), program.plan.parts
        self._recomputes = program.plan.layout.recompute == "full"
        self._part = ENTRY
        """The part that computes."""
        self._when: When = "forward"
        self._opened: tuple[When, str] | None = None
        self._peaks: dict[tuple[When, str], int] = {}
        self._savers: dict[int, set[str]] = {}
        self._holders: dict[int, set[str]] = {}
        self._kept: dict[int, _Kept] = {}
        self._gone: list[tuple[int, _Kept]] = []
        self._handed: dict[str, tuple[int, weakref.ref[Any] | None]] = {}
        """Part -> the address of the storage that it hands on, and the storage."""

    def __enter__(self) -> StageRecorder:
        super().__enter__()
        engine = self.program.engine
        engine.tally.changed = None  # the engine's buffers are predicted
        self._storages.change(-engine.tally.total)
        self._use = engine.use_unit
        engine.use_unit = self._used  # type: ignore[method-assign]
        self._handles: list[Any] = []
        for path in self.parts[1:-1]:
            block = self.module.get_submodule(path)
            self._handles += [
                block.register_forward_pre_hook(self._before(path), with_kwargs=True),
                block.register_forward_hook(self._after(path)),
            ]
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self.program.engine.use_unit = self._use  # type: ignore[method-assign]
        super().__exit__(*error)
        self.raw.calls = tuple(self.program.comms.calls())

    def record(self, loss: LossFunction, batches: Sequence[Any]) -> RawStages:
        """Forward and backward passes of `MICRO_BATCHES` micro-batches."""
        program = self.program
        assert isinstance(program, ModuleProgram)
        worker = ModuleWorker(program, program.messages, program.loss_of(loss), batches)
        program.engine.begin_step()
        for micro, when in enumerate(("backward", "adding", "inputs")):
            self._micro_batch(worker, micro, when)  # type: ignore[arg-type]
        inputs = {x.untyped_storage()._cdata for batch in batches for x in tensors_in(batch)}
        self._group(inputs)
        self.raw.buffers = self.followed(self.module.buffers())
        return self.raw

    def _micro_batch(self, worker: ModuleWorker, micro: int, backward: When) -> None:
        comms, self._peaks, self._when, self._part = self.program.comms, {}, "forward", ENTRY
        self._savers, self._holders, self._kept, self._gone = {}, {}, {}, []
        comms.phase = "forward"
        self._open(ENTRY)
        worker.forward(0, micro, None)
        self._close()
        comms.phase, self._when = "backward", backward
        self._open(EXIT)
        worker.backward(0, micro, None, weights=backward != "inputs")
        self._close()
        before, self._when = self._storages.live, "weights"
        if backward == "inputs":
            worker.backward_of_weights(0, micro)
            self._close()
        after = self._storages.live
        for (when, part), nbytes in self._peaks.items():
            self.raw.peaks[when, part] = nbytes - (before if when == "weights" else after)

    # -- where the passes are

    def _open(self, part: str) -> None:
        self._storages.peak, self._opened, self._part = self._storages.live, (self._when, part), part

    def _close(self) -> None:
        if self._opened:
            self._peaks[self._opened] = self._storages.peak
            if self._when == "forward":
                self._peaks["made", self._opened[1]] = self._storages.live
        self._opened = None

    def _used(self, kind: str, part: str) -> None:
        if kind == "weights":
            self._close()
            self._open(part)
        self._use(kind, part)

    def _before(self, path: str) -> Any:
        def enter(block: nn.Module, args: Any, kwargs: Any) -> None:
            self._close()
            if path == self.parts[1]:
                self._hand_on(ENTRY, next(iter((*args, *kwargs.values()))))
            if self._recomputes:
                for x in tensors_in(args, kwargs):
                    self._holders.setdefault(x.untyped_storage()._cdata, set()).add(path)
            self._open(path)

        return enter

    def _after(self, path: str) -> Any:
        following = self.parts[self.parts.index(path) + 1]

        def leave(block: nn.Module, args: Any, out: Tensor) -> None:
            self._close()
            self._hand_on(path, out)
            self._open(following)

        return leave

    def _hand_on(self, part: str, x: Any) -> None:
        if not isinstance(x, Tensor):
            return  # `split` says it
        self.raw.messages[part] = str(x.dtype).removeprefix("torch."), x.numel()
        key = x.untyped_storage()._cdata
        self._handed[part] = key, self._storages.reference(key)
        if x.requires_grad:
            x.register_hook(lambda grad: self._arrived(part))

    def _arrived(self, part: str) -> None:
        """The gradient of a part's output is there: its backward pass begins."""
        self._close()
        self._open(part)

    # -- what is kept

    def _pack(self, tensor: Tensor) -> Any:
        key = tensor.untyped_storage()._cdata
        if key not in self._saved:
            self._savers[key] = set()
        self._savers[key].add(self._part)
        return super()._pack(tensor)

    def _count(self, kept: list[WeightGradient]) -> None:
        if self._when == "forward":
            self.raw.kept = {part for part in self._handed if self._keeps(part)}
            for key, (nbytes, _) in self._saved.items():
                self._note(key, nbytes).savers |= self._savers[key]
            for key, parts in self._holders.items():
                there = self._storages.reference(key)
                if there is not None and key not in self._known:
                    self._note(key, there().nbytes()).holders |= parts  # type: ignore[union-attr]  # it is alive
        for product in kept:
            for storage in (tensor.untyped_storage() for tensor in product.reads):
                if storage._cdata not in self._known:
                    self._note(storage._cdata, storage.nbytes()).keepers.add(product.part)

    def _keeps(self, part: str) -> bool:
        """Whether the part after this one keeps what it takes."""
        (key, there), following = self._handed[part], self.parts[self.parts.index(part) + 1]
        if self._storages.reference(key) is not there:
            return False  # another storage has got the address since
        return any(following in who.get(key, ()) for who in (self._savers if key in self._saved else {}, self._holders))

    def _note(self, key: int, nbytes: int) -> _Kept:
        """The entry of a storage. Another one may have had its address before."""
        there = self._storages.reference(key)
        if key not in self._kept or self._kept[key].there is not there:
            if key in self._kept:
                self._gone.append((key, self._kept[key]))
            self._kept[key] = _Kept(there, nbytes)
        return self._kept[key]

    def _group(self, inputs: set[int]) -> None:
        """Bytes by who keeps them, of the last micro-batch."""
        buffers = {buffer.untyped_storage()._cdata for buffer in self.module.buffers()}
        for key, kept in [*self._gone, *self._kept.items()]:
            kind = "input" if key in inputs else "lasting" if key in buffers else "activation"
            savers, holders, keepers = (
                tuple(part for part in self.parts if part in who) for who in (kept.savers, kept.holders, kept.keepers)
            )
            place = savers, holders, keepers, kind
            self.raw.tensors[place] = self.raw.tensors.get(place, 0) + kept.nbytes

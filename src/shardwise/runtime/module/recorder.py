"""Recording one step of a user's module on fake tensors: operations, what is alive when, and what autograd saves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from shardwise.ops.gradients import WeightGradient
from shardwise.report.step_report import LedgerRow
from shardwise.runtime.measure.memory import StepMeasurement
from shardwise.runtime.module.inputs import tensors_in
from shardwise.runtime.module.program import ModuleProgram

ATTENTION = ("scaled_dot_product", "_flash_attention", "_efficient_attention")
"""Words in the names of fused attention's operators."""
GROUPED = "_grouped_mm"
"""Name of the operator of products by groups, such as those of experts."""


@dataclass(frozen=True)
class RawOp:
    """One operation with the numbers of one size of micro-batch; fields as of `TracedOp`."""

    part: str
    kind: Literal["product", "attention", "pass"]
    name: str
    module: str
    phase: Literal["forward", "backward"]
    sizes: tuple[int, ...]
    flops: int
    nbytes: int
    end: Literal["", "entry", "exit"] = ""


@dataclass
class RawStep:
    """One recorded step."""

    inputs: int = 0
    """Bytes of a micro-batch's inputs."""
    saved: dict[str, int] = field(default_factory=dict)
    moments: list[tuple[str, str, int]] = field(default_factory=list)
    """(when, part, bytes) of all micro-batches, as of `TracedMoment`."""
    calls: tuple[LedgerRow, ...] = ()
    """The ledger, in the order of its first calls."""
    operations: list[RawOp] = field(default_factory=list)
    """Of the first micro-batch."""


class FakeStepRecorder(StepMeasurement):
    """Context manager around the forward and backward passes of a program on fake tensors."""

    def __init__(self, program: ModuleProgram) -> None:
        super().__init__(program)
        self.module, self.raw = program.module, RawStep()
        self._part = self._when = ""
        (self._root,), self._blocks = program.plan.of_kind("root"), frozenset(program.plan.of_kind("block"))
        self._saver: dict[int, str] = {}
        self._operations = _Operations(self)
        self.path: list[str] = []
        """Submodules in whose forward passes we are."""
        self.phase: Literal["forward", "backward"] = "forward"
        self._in_blocks = False
        """Whether a block of this pass has begun."""
        self.recording = True
        """Whether operations count: those of the first micro-batch."""

    @property
    def part(self) -> str:
        """The part that computes: in a forward pass that of the innermost block."""
        if self.phase == "backward":
            return self._part
        return next((name for name in reversed(self.path) if name in self._blocks), self._root)

    @property
    def end(self) -> Literal["", "entry", "exit"]:
        """Whether what the root computes comes before the blocks, or behind them."""
        if self.part != self._root:
            return ""
        return "entry" if self._in_blocks == (self.phase == "backward") else "exit"

    def __enter__(self) -> FakeStepRecorder:
        super().__enter__()
        engine = self.program.engine
        engine.tally.changed = None  # the engine's buffers are predicted
        self._storages.change(-engine.tally.total)
        self._use, self._finish = engine.use_unit, engine.finish_backward
        engine.use_unit, engine.finish_backward = self._used, self._finished  # type: ignore[method-assign]
        self._handles = list(self._hooks_of(self.module))
        self._operations.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._operations.__exit__(*error)
        for handle in self._handles:
            handle.remove()
        engine = self.program.engine
        engine.use_unit, engine.finish_backward = self._use, self._finish  # type: ignore[method-assign]
        super().__exit__(*error)
        self.raw.calls = tuple(self.program.comms.calls())

    def _hooks_of(self, module: nn.Module) -> Iterator[Any]:
        for name, child in module.named_modules():
            yield child.register_forward_pre_hook(lambda *_, name=name: self.path.append(name))
            yield child.register_forward_hook(self._leave, always_call=True)

    def _leave(self, *_: Any) -> None:
        self.path.pop()

    def _used(self, kind: str, part: str) -> None:
        if kind == "forward":
            if not self._when:
                self._open("loss", "")
        else:
            self._close()
            self._note("begin", part, self._storages.live)
            self._open("backward", part)
            if self.phase == "forward":
                self.phase, self._in_blocks = "backward", False
        self._in_blocks = self._in_blocks or part in self._blocks
        self._part = part
        self._use(kind, part)

    def _finished(self, part: str) -> None:
        """The backward pass of a part is over."""
        self._close()
        self._note("reduction", part, self._storages.live)
        self._open("between", part)
        self._finish(part)
        self._part = self._root
        if part == self._root:  # the micro-batch is over
            self._when, self.phase, self.recording, self._in_blocks = "", "forward", False, False

    def _open(self, when: str, part: str) -> None:
        self._storages.peak = self._storages.live
        self._when, self._about = when, part

    def _close(self) -> None:
        if self._when:
            self._note(self._when, self._about, self._storages.peak)

    def _note(self, when: str, part: str, nbytes: int) -> None:
        self.raw.moments.append((when, part, nbytes))

    def _pack(self, tensor: Tensor) -> Any:
        key = tensor.untyped_storage()._cdata
        if key not in self._saved:  # an earlier storage may have had its address
            self._saver[key] = self.part
        return super()._pack(tensor)

    def _count(self, kept: list[WeightGradient]) -> None:
        if self.raw.saved:
            return  # all micro-batches save as much
        for key, (nbytes, _) in self._saved.items():
            part = self._saver[key]
            self.raw.saved[part] = self.raw.saved.get(part, 0) + nbytes


class _Operations(TorchDispatchMode):
    """Notes every operation that moves data; views, and what communication does, are left out."""

    def __init__(self, recorder: FakeStepRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        recorder = self._recorder
        offloaded = recorder.program.offloaded
        if recorder.program.comms.communicating or (
            offloaded and any(x.untyped_storage()._cdata in offloaded.on_host for x in tensors_in(args))
        ):
            return out
        if recorder.recording and func.namespace == "aten" and not func.is_view and not _makes_nothing(func):
            recorder.raw.operations.append(self._operation(func, args, kwargs or {}, out))
        return out

    def _operation(self, func: Any, args: Any, kwargs: Any, out: Any) -> RawOp:
        tensors = tensors_in(args, kwargs, out)
        distinct = {x.untyped_storage()._cdata: x for x in reversed(tensors)}
        nbytes = sum(x.numel() * x.element_size() for x in distinct.values())
        name, flops = func._overloadpacket.__name__, 0
        kind, sizes = _sizes(name, [x for x in args if isinstance(x, Tensor)])
        if kind == "attention":
            sizes = *sizes, int(any(x is True for x in (*args, kwargs.get("is_causal"))))
            flops = _attention_flops(sizes, "backward" in name)
        elif name == GROUPED:
            ends = args[2] if len(args) > 2 else kwargs.get("offs")
            kind, (sizes, flops) = "product", _grouped(args[0], args[1], ends)
        elif counted := flop_registry.get(func._overloadpacket):
            flops = int(counted(*args, **kwargs, out_val=out))
        recorder = self._recorder
        path = recorder.path[-1] if recorder.path and recorder.phase == "forward" else ""
        return RawOp(recorder.part, kind, name, path, recorder.phase, sizes, flops, nbytes, recorder.end)


def _makes_nothing(func: Any) -> bool:
    """Whether an operator only looks at a tensor, or makes one without values."""
    return func._overloadpacket.__name__ in (
        "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "is_same_size",
        "set_", "resize_", "_local_scalar_dense", "lift_fresh",
    )  # fmt: skip


def _sizes(name: str, tensors: list[Tensor]) -> tuple[Literal["product", "attention", "pass"], tuple[int, ...]]:
    """(kind, sizes as of `TracedOp`) of an operator with these arguments."""
    if any(word in name for word in ATTENTION):
        q, k = tensors[:2] if "backward" not in name else tensors[1:3]
        return "attention", (q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1], q.shape[3])
    if name in ("mm", "addmm", "bmm", "baddbmm"):
        a, b = tensors[-2:]
        batch = a.shape[0] if a.dim() == 3 else 1
        return "product", (batch, a.shape[-2], b.shape[-1], a.shape[-1])
    return "pass", ()


def _grouped(a: Tensor, b: Tensor, ends: Tensor) -> tuple[tuple[int, ...], int]:
    """(sizes as of `TracedOp` of equal groups, FLOPs) of a product whose groups are matrices of a or b, or share their
    rows, columns or what is summed over, up to `ends`."""
    groups = max(len(x) for x in (a, b) if x.dim() == 3) if a.dim() == 3 or b.dim() == 3 else len(ends)
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    flops = 2 * m * k * n * (groups if a.dim() == b.dim() == 3 else 1)
    if a.dim() == b.dim() == 2:
        k //= groups
    elif a.dim() == 2:
        m //= groups
    elif b.dim() == 2:
        n //= groups
    return (groups, max(1, m), max(1, n), max(1, k)), flops


def _attention_flops(sizes: tuple[int, ...], backward: bool) -> int:
    """Two products forward, five backward (Dao 2023), over the whole square of queries and keys or, where attention is
    causal, over the pairs of a token and those up to it."""
    batch, queries, keys, heads, _, width, causal = sizes
    pairs = queries * (keys + 1) // 2 if causal else queries * keys
    return (10 if backward else 4) * batch * heads * pairs * width

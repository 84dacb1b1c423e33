"""The core of attention over sequences that are cut over context-parallel ranks, as a layout names it.

Attention over a sequence in zigzag order: keys and values of the other ranks pass by, or are gathered.

Ring (Liu et al. 2023): in each of cp - 1 steps a rank sends the keys and values that it has to the next rank, receives
those of the previous one, and attends to what it has meanwhile. In backward they go around again, and their gradients
with them, one step more, home. All-gather (Llama 3): all keys and values are gathered, in backward again, and the
gradients are reduce-scattered. Both attend block by block and merge by log-sum-exp. Saved are q, k, v, the output and
its log-sum-exp. Gradients of keys and values add up in fp32 for bf16.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.decoder.attention import CoreAttention
from shardwise.layout.axes import CP
from shardwise.layout.context import SequenceCut, gathers_keys
from shardwise.layout.units import UnitPlan
from shardwise.ops.blockwise import Explicit, FlashOnCPU, FlashOnCUDA, Kernel, Merged, Scores
from shardwise.ops.context import Core
from shardwise.runtime.context import ulysses
from shardwise.runtime.context.view import block_scores
from shardwise.runtime.transport.buffers import Target
from shardwise.runtime.transport.comms import Comms


@dataclass(frozen=True)
class ContextCore:
    """The attention core of one part on one rank."""

    comms: Comms
    cut: SequenceCut
    kernel: Kernel
    part: str
    """The part that it belongs to, by which the ledger names its messages."""
    scores: Callable[[Any, int], Scores]
    """(batch, rank) -> the pairs of queries here and keys of that rank that see each other."""

    @property
    def rank(self) -> int:
        return self.comms.index(CP)

    def exchange(self, tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Pass a tensor on to the next rank: (that of the previous rank, what to wait by before it is read)."""
        coming, ranks = torch.empty_like(tensor), self.cut.cp
        pending = [
            self.comms.send(tensor, CP, (self.rank + 1) % ranks, self.part),
            self.comms.receive(coming, CP, (self.rank - 1) % ranks, self.part),
        ]

        def wait() -> None:
            for message in reversed(pending):
                message.wait()

        return coming, wait


class RingSource:
    """Keys and values pass by."""

    def __init__(self, core: ContextCore) -> None:
        self._core = core

    def around(self, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(rank, its keys and values), this rank's first. The next ones travel while the caller uses these."""
        core, ranks = self._core, self._core.cut.cp
        for step in range(ranks):
            coming, wait = core.exchange(kv) if step + 1 < ranks else (kv, _no_wait)
            yield (core.rank - step) % ranks, kv
            wait()
            kv = coming

    def gradients(self, parts: Iterator[Tensor]) -> Tensor:
        """The sum over ranks of the gradients of this rank's keys and values.

        parts: gradients of the keys and values that pass by, in the order of `around`; overwritten.
        """
        total, wait = next(parts), _no_wait
        total, wait = self._core.exchange(total)
        for part in parts:
            wait()
            total, wait = self._core.exchange(part.add_(total))
            del part  # before the next one is computed
        wait()
        return total


class GatherSource:
    """Keys and values of all ranks are gathered."""

    def __init__(self, core: ContextCore) -> None:
        self._core = core

    def _order(self) -> list[int]:
        return [(self._core.rank - step) % self._core.cut.cp for step in range(self._core.cut.cp)]

    def around(self, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(rank, its keys and values), this rank's first."""
        whole = kv.new_empty(self._core.cut.cp, *kv.shape)
        self._core.comms.all_gather(whole, kv, CP, self._core.part)
        return ((other, whole[other]) for other in self._order())

    def gradients(self, parts: Iterator[Tensor]) -> Tensor:
        by_rank = dict(zip(self._order(), parts, strict=True))
        whole = torch.stack([by_rank.pop(rank) for rank in sorted(by_rank)])
        mine = torch.empty_like(whole[0])
        self._core.comms.reduce_scatter(whole.view(-1), CP, self._core.part, lambda: Target(mine.view(-1)))
        return mine


Source = RingSource | GatherSource


def _no_wait() -> None:
    """No-op: nothing is under way."""


class _Attention(torch.autograd.Function):
    """softmax(q kᵀ) v over the whole sequence. q: [B, S / cp, H, D]; k: [B, S / cp, K, D]; v: [B, S / cp, K, V];
    returns [B, S / cp, H, V]."""

    @staticmethod
    def forward(ctx: Any, core: ContextCore, source: Source, batch: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        merged = None
        for other, packed in source.around(_packed(k, v)):
            rows, columns, _ = core.cut.visible(core.rank, other)
            keys, values = (x[:, columns] for x in _unpacked(packed, k.shape, v.shape))
            out, lse = core.kernel.forward(q[:, rows], keys, values, core.scores(batch, other))
            if merged is None:
                merged = Merged(out, lse)
            else:
                merged.add(rows, out, lse)
            del packed, keys, values, out, lse  # before the next ones come
        assert merged is not None
        result = merged.out(q.dtype)
        ctx.core, ctx.source, ctx.batch = core, source, batch
        ctx.save_for_backward(q, k, v, result, merged.lse)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        core: ContextCore = ctx.core
        dq = torch.zeros_like(q, dtype=lse.dtype)

        def gradients() -> Iterator[Tensor]:
            for other, packed in ctx.source.around(_packed(k, v)):
                rows, columns, _ = core.cut.visible(core.rank, other)
                scores = core.scores(ctx.batch, other)
                keys, values = (x[:, columns] for x in _unpacked(packed, k.shape, v.shape))
                dq_part, *parts = core.kernel.backward(
                    grads[0][:, rows], q[:, rows], keys, values, out[:, rows], lse[:, :, rows].contiguous(), scores
                )
                dq[:, rows] += dq_part
                del packed, keys, values, dq_part
                yield _placed(parts, columns, k.shape, v.shape, lse.dtype)

        packed = ctx.source.gradients(gradients()).to(k.dtype)
        return None, None, None, dq.to(q.dtype), *_unpacked(packed, k.shape, v.shape)


def _packed(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values, which may be narrower, as one message."""
    return torch.cat((k.reshape(-1), v.reshape(-1)))


def _unpacked(packed: Tensor, keys: torch.Size, values: torch.Size) -> tuple[Tensor, Tensor]:
    k, v = packed.split([keys.numel(), values.numel()])
    return k.view(keys), v.view(values)


def _placed(parts: list[Tensor], columns: slice, keys: torch.Size, values: torch.Size, dtype: torch.dtype) -> Tensor:
    """Gradients of the keys and values `columns` among those of all, packed; `parts` is emptied."""
    whole = torch.zeros(keys.numel() + values.numel(), dtype=dtype, device=parts[0].device)
    for into in _unpacked(whole, keys, values):
        into[:, columns] = parts.pop(0)
    return whole


def attend(core: ContextCore, gathers: bool, q: Tensor, k: Tensor, v: Tensor, batch: Any = None) -> Tensor:
    """Causal attention of this rank's queries to the whole sequence. gathers: keys and values, instead of a ring.
    batch: what `core.scores` takes."""
    source = GatherSource(core) if gathers else RingSource(core)
    out: Tensor = _Attention.apply(core, source, batch, q, k, v)  # type: ignore[no-untyped-call]
    return out


def context_core(part: str, plan: UnitPlan, comms: Comms, device: torch.device, core: CoreAttention) -> Core:
    """The core of a part, whose `kind` is set, over all context-parallel ranks, from the form that it has on one."""
    if plan.layout.ulysses:
        plain = core.forward
        core.first_head += plan.cp_rank * (plan.model.heads // plan.layout.tp // plan.layout.cp)

        def across(q: Tensor, k: Tensor, v: Tensor, batch: Any) -> Tensor:
            whole = partial(plain, batch=batch.whole)
            return ulysses.attend(comms, part, whole, plan.workload.seq, q, k, v)

        return across

    def scores(batch: Any, other: int) -> Scores:
        return block_scores(batch, core, plan.sequence, plan.cp_rank, other)

    context = ContextCore(comms, plan.sequence, _kernel(plan, core, device), part, scores)
    return partial(attend, context, gathers_keys(plan.layout))


def _kernel(plan: UnitPlan, core: CoreAttention, device: torch.device) -> Kernel:
    """The kernel for a core's blocks of attention."""
    if not core.fused:
        return Explicit(core.scale, core.softcap or 0.0)
    masked = plan.workload.isolate_documents or core.window > 0
    return fused_kernel(plan.layout.dtype, core.scale, device, masked)


def fused_kernel(dtype: str, scale: float, device: torch.device, masked: bool = False) -> Kernel:
    """A device's kernel that computes blocks of attention in one piece, where it has one: FlashAttention takes bf16 and
    no masks."""
    if device.type == "cpu":
        return FlashOnCPU(scale)
    return FlashOnCUDA(scale) if dtype == "bfloat16" and not masked else Explicit(scale)

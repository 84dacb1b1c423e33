"""The core of attention over sequences that are cut over context-parallel ranks, as a layout names it."""

from __future__ import annotations

import torch

from shardwise.decoder.attention import CoreAttention
from shardwise.layout.units import UnitPlan
from shardwise.ops.blockwise import Explicit, FlashOnCPU, FlashOnCUDA, Kernel
from shardwise.ops.context import Core
from shardwise.runtime.context import ring, ulysses
from shardwise.runtime.transport.comms import Comms


def context_core(part: str, plan: UnitPlan, comms: Comms, device: torch.device, core: CoreAttention) -> Core:
    """The core of a part, whose `kind` is set, over all context-parallel ranks, from the form that it has on one."""
    if plan.layout.ulysses:
        plain = core.forward
        core.first_head += plan.cp_rank * (plan.model.heads // plan.layout.tp // plan.layout.cp)
        return lambda q, k, v, batch: ulysses.attend(comms, part, plain, q, k, v, batch)
    context = ring.ContextCore(comms, plan.sequence, kernel_for(plan, core, device), part, core)
    source = ring.RingSource(context) if plan.layout.cpkind == "ring" else ring.GatherSource(context)
    return lambda q, k, v, batch: ring.attend(context, source, q, k, v, batch)


def kernel_for(plan: UnitPlan, core: CoreAttention, device: torch.device) -> Kernel:
    """The kernel for a core's blocks of attention. FlashAttention takes bf16 and no masks."""
    explicit = Explicit(core.scale, core.softcap or 0.0)
    if not core.fused:
        return explicit
    if device.type == "cpu":
        return FlashOnCPU(core.scale)
    masked = plan.workload.isolate_documents or core.window
    return FlashOnCUDA(core.scale) if plan.layout.dtype == "bfloat16" and not masked else explicit

"""Tensors that autograd saves in the forward pass of each part of a decoder, on fake tensors."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from shardwise.layout.units import UnitPlan
from shardwise.runtime.dryrun import fake_comms
from shardwise.runtime.job.setup import blank_batch
from shardwise.runtime.pipeline.stages import StageRunner


class SavedStorage(NamedTuple):
    """The memory behind one or more saved tensors."""

    nbytes: int
    dtype: str
    """torch's name."""


SHARED, MLP = "shared", "mlp"
"""Tensors that several blocks save, such as masks; a block's feed-forward part."""


def saved_storages(plan: UnitPlan, fake: Any) -> dict[tuple[str, str], list[SavedStorage]]:
    """Storages that each part of the plan's rank, which is the first, saves in the forward pass of a micro-batch, the
    head's loss included; fake: the mode of fake tensors. A key is a part and `MLP` where the block calls it, `SHARED`
    for the first block where several save a tensor, or nothing."""
    savers: dict[int, dict[tuple[str, str], None]] = {}
    tensors: dict[int, torch.Tensor] = {}
    first, from_input = next(iter(plan.first_blocks), ""), plan.layout.recompute == "input"
    saved: dict[tuple[str, str], list[SavedStorage]] = {(part, ""): [] for part in plan.parts}
    with fake_comms(plan, 0) as comms, fake:
        runner = StageRunner(plan, comms, torch.device("cpu"))
        lasting = {t.untyped_storage()._cdata for tensors in runner.engine.storages().values() for t in tensors}
        use_unit, current = runner.engine.use_unit, [plan.parts[0], ""]

        def used(kind: str, part: str) -> None:
            current[0] = first if from_input and plan.kind(part) == "block" else part
            use_unit(kind, part)

        def half(name: str) -> Callable[..., None]:
            return lambda *_: current.__setitem__(1, name)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            key = tensor.untyped_storage()._cdata
            if key not in lasting:
                tensors[key] = tensor  # so that no other storage gets its address
                savers.setdefault(key, {})[current[0], current[1]] = None
            return tensor

        for part in plan.of_kind("block"):
            mlp = runner.parts[part].get_submodule(MLP)
            mlp.register_forward_pre_hook(half(MLP))
            mlp.register_forward_hook(half(""))
        runner.engine.use_unit = used  # type: ignore[method-assign]
        batch, targets = blank_batch(plan)
        runner.engine.begin_step()
        runner.engine.begin_micro_batch()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = runner.loss(runner.forward(0, None, batch.fresh()), targets)
        del loss
        for storage, tensor in tensors.items():
            keys = list(savers[storage])
            key = (first, SHARED) if len({part for part, _ in keys}) > 1 else keys[0]
            row = SavedStorage(tensor.untyped_storage().nbytes(), str(tensor.dtype).removeprefix("torch."))
            saved.setdefault(key, []).append(row)
        return saved

"""Layouts that split a user's module so far, without torch."""

from __future__ import annotations

from shardwise.errors import LayoutError
from shardwise.layout import Layout, Workload, check_runnable, pipeline
from shardwise.layout.keys import changed
from shardwise.layout.legality import check_adapters, check_modes, check_narrow_base
from shardwise.layout.optimizers import check_own
from shardwise.model import ModelConfig
from shardwise.model.blueprint import Blueprint


def check_module_layout(layout: Layout, ranks: int | None = None) -> None:
    """Raise `LayoutError` for a layout that cannot split a user's module, or not on so many `ranks`."""
    for key, value in changed(layout).items():
        if key.module:
            raise LayoutError(f"{key.text(value)} {key.module}; it is not there yet for a user's module: leave it out")
    if layout.served:
        raise LayoutError(
            f"sync={layout.sync} has parameter servers, which hand out a run's text; a user's module gets its batches "
            "from its own loop: choose sync=local, or leave it out"
        )
    if layout.recompute == "input":
        raise LayoutError(
            "recompute=input computes blocks again from the first one's input, and a user's module may take other "
            "tensors between them: choose recompute=full"
        )
    if layout.recompute == "selective" and layout.compile == "block":
        raise LayoutError(
            "recompute=selective finds attention as it runs, which compile=block does not show: choose recompute=full, "
            "or leave compile out"
        )
    check_modes(layout)
    if layout.offloads_activations and layout.pp > 1:
        raise LayoutError(
            f"offload_activations={layout.offload_activations} does not go with pp={layout.pp} for a user's module, "
            "whose stages go backward as a whole: leave it out, or choose recompute=full"
        )
    if layout.inner_ranks < layout.tp:
        raise LayoutError("tpkind=gathered is the plan's matter for a user's module: use colwise_gather_output")
    if ranks is not None and layout.ranks != ranks:
        raise LayoutError(
            f"layout {layout} needs {layout.ranks} ranks, but there are {ranks}: start it with torchrun "
            f"--nproc-per-node {layout.ranks}"
        )


def check_run(layout: Layout, model: ModelConfig, workload: Workload, ranks: int | None = None) -> None:
    """Raise `LayoutError` if a run cannot have this layout: of a model by its class of transformers, for a reason that
    needs no torch; `class_run.planned` has the others."""
    if model.counted is None:
        check_runnable(layout, model, workload, ranks)
        return
    check_module_layout(layout, ranks)
    check_own(workload.optimizer)
    workload.micro_batches(layout)
    name = model.name
    if stored := model.counted.stored:
        raise LayoutError(f"{name}: its weights are quantized ({stored}), which must be dequantized to 16 bits first")
    if not model.counted.source:
        raise LayoutError(f"{name}: {model.counted.reason}, and its config.json is not at hand")
    if model.lora:
        check_adapters(layout, model, workload)
    if layout.sp and workload.seq % layout.tp:
        raise LayoutError(f"sequences of {workload.seq} tokens cannot be cut into tp = {layout.tp} equal pieces")


def check_described(blueprint: Blueprint, layout: Layout, micro_batches: int) -> None:
    """Raise `LayoutError` for a layout that does not suit these parameters, or a pipeline that has no schedule for
    these blocks and micro-batches."""
    if any(p.dtype for p in blueprint.parameters()):
        check_narrow_base(layout)
    if layout.pp == 1:
        return
    pipeline.stages(blueprint, layout)
    pipeline.check_schedule(layout, micro_batches, "; accumulate= gives their number")


def fewest_micro_batches(layout: Layout) -> int:
    """The smallest number of micro-batches that the layout's schedule supports."""
    if layout.pp == 1:
        return 1
    counts = range(1, 4 * layout.pp * layout.virtual + 1)
    return next((count for count in counts if not pipeline.objection(layout, count)), layout.pp)

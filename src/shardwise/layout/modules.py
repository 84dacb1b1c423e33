"""Layouts that split a user's module, and a model by its class of transformers, without torch."""

from __future__ import annotations

from shardwise.errors import LayoutError
from shardwise.layout import Layout, Workload, check_runnable, pipeline
from shardwise.layout.axes import EP, PP
from shardwise.layout.context import SequenceCut, cuts_sequences
from shardwise.layout.legality import check_adapters, check_modes, check_narrow_base
from shardwise.layout.optimizers import check_own
from shardwise.model import ModelConfig
from shardwise.model.blueprint import Blueprint
from shardwise.model.parameters import Model

_HEADLESS = ("Model", "ForMaskedLM", "ForPreTraining", "Classification", "ForQuestionAnswering", "ForRegression")
"""Endings of names of classes that do not tell the next token."""


def check_module_layout(layout: Layout, ranks: int | None = None) -> None:
    """Raise `LayoutError` for a layout that cannot split a user's module, or not on so many `ranks`."""
    if layout.served:
        raise LayoutError(
            f"sync={layout.sync} has parameter servers, which hand out a run's text; a user's module gets its batches "
            "from its own loop: choose sync=local, or leave it out"
        )
    if layout.sp and (key := next((axis for axis in PP + EP if getattr(layout, axis) > 1), "")):
        raise LayoutError(f"sp does not go with {key}={getattr(layout, key)} for a user's module yet: leave sp out")
    if layout.recompute == "input":
        raise LayoutError(
            "recompute=input computes blocks again from the first one's input, and a user's module may take other "
            "tensors between them: choose recompute=full"
        )
    selective = layout.recompute == "selective"
    if layout.compile == "block" and (selective or cuts_sequences(layout)):
        raise LayoutError(
            "recompute=selective and cp find attention as it runs, which compile=block does not show: choose "
            "recompute=full, or leave compile out"
        )
    if selective and cuts_sequences(layout):
        raise LayoutError("recompute=selective under cp would send keys and values once more: choose recompute=full")
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


def why_no_class(model: Model) -> str:
    """Reason why a model that no decoder here computes does not run by its class of transformers either, as far as its
    configuration shows; empty where it runs."""
    if model.counted is None:
        return model.why_not_runnable() or ""
    if stored := model.counted.stored:
        return f"its weights are quantized ({stored}), which must be dequantized to 16 bits first"
    source = model.counted.source
    if source.get("is_encoder_decoder"):
        return "its class is an encoder with a decoder"
    named = [str(name) for name in source.get("architectures") or () if not str(name).endswith("LMHeadModel")]
    if named and all(name.endswith(_HEADLESS) for name in named):
        return f"its class {named[0]} has no logits of the next token"
    return "" if source else f"{model.counted.reason}, and its config.json is not at hand"


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
    if reason := why_no_class(model):
        raise LayoutError(f"{name}: {reason}")
    if model.lora:
        check_adapters(layout, model, workload)
    if layout.sp and workload.seq % layout.tp:
        raise LayoutError(f"sequences of {workload.seq} tokens cannot be cut into tp = {layout.tp} equal pieces")
    if cuts_sequences(layout) and workload.isolate_documents:
        raise LayoutError(f"{name}: cp cuts attention without masks, and documents are kept apart by one: leave cp out")
    if cuts_sequences(layout) and any(c.kind == "linear" or 0 < c.window < workload.seq for c in model.counted.caches):
        raise LayoutError(f"{name}: cp cuts causal attention, and layers have windows or states: leave cp out")
    if (padded := SequenceCut.of(layout, workload.seq).padded) != workload.seq:
        raise LayoutError(
            f"{name}: cp cuts sequences of {workload.seq} tokens into unequal pieces: choose --seq {padded}"
        )


def check_described(blueprint: Blueprint, layout: Layout, micro_batches: int) -> None:
    """Raise `LayoutError` for a layout that does not suit these parameters, or a pipeline that has no schedule for
    these blocks and micro-batches."""
    check_narrow_base(layout, blueprint)
    if layout.pp > 1 or layout.stages:
        pipeline.stages(blueprint, layout)
    if layout.pp > 1:
        pipeline.check_schedule(layout, micro_batches, "; accumulate= gives their number")


def fewest_micro_batches(layout: Layout) -> int:
    """The smallest number of micro-batches that the layout's schedule supports."""
    if layout.pp == 1:
        return 1
    counts = range(1, 4 * layout.pp * layout.virtual + 1)
    return next((count for count in counts if not pipeline.objection(layout, count)), layout.pp)

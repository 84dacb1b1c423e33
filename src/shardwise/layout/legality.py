"""Whether a layout suits a model and a workload (`check`), and whether it can run here and now (`check_runnable`).

Two questions: what no machine could do, and what this runtime does not do yet. Each refusal is one line with the reason
and the nearest legal values.
"""

from collections.abc import Callable
from dataclasses import replace
from math import gcd
from typing import Any

from shardwise.errors import LayoutError, UserError
from shardwise.layout import pipeline
from shardwise.layout.keys import KEYS, changed, defaults, divisors, goes_with
from shardwise.layout.layout import Layout
from shardwise.layout.optimizers import check_own
from shardwise.layout.tensor import split_dim
from shardwise.layout.workload import Workload
from shardwise.model import ModelConfig
from shardwise.model.adapters import is_narrow
from shardwise.model.blueprint import Blueprint
from shardwise.model.lora import NF4, block_inputs
from shardwise.model.parameters import Model, blueprint


def valid_tp(model: ModelConfig, limit: int = 1024) -> list[int]:
    """Tensor-parallel degrees that divide the query heads and divide, or are divided by, the key/value heads."""
    return [tp for tp in _of_heads(model.heads, model.kv_heads) if tp <= limit]


def valid_ulysses(model: ModelConfig, tp: int) -> list[int]:
    """Context-parallel degrees under Ulysses: they divide a tp rank's query heads and divide, or are divided by, its
    key/value heads."""
    return _of_heads(model.heads // tp, max(1, model.kv_heads // tp))


def _of_heads(heads: int, kv: int) -> list[int]:
    return [n for n in divisors(heads) if kv % n == 0 or n % kv == 0]


def valid_ep(model: Model, ranks: int) -> list[int]:
    """Expert-parallel degrees: those that divide the model's experts and the `ranks` of a stage (dp x cp x tp)."""
    return list(divisors(gcd(model.experts.count, ranks) if model.experts else 1))


def check(layout: Layout, model: ModelConfig, workload: Workload | None = None, ranks: int | None = None) -> None:
    """Raise `LayoutError` when `layout` cannot split `model`, `workload` or a cluster of `ranks` devices."""
    if layout.inner_ranks not in valid_tp(model):
        raise LayoutError(
            f"tp={layout.tp} does not suit {model.name}: it must divide its {model.heads} heads and divide, or be a "
            f"multiple of, its {model.kv_heads} key/value heads; valid tp: {', '.join(map(str, valid_tp(model)))}"
        )
    if layout.cp > 1 and layout.gathers_outputs:
        raise LayoutError(
            f"cp={layout.cp} cuts attention between tensor-parallel heads, which tpkind=gathered has not: choose "
            "tpkind=megatron or cp=1"
        )
    if layout.cp > 1 and layout.ulysses and layout.cp not in valid_ulysses(model, layout.tp):
        degrees = ", ".join(map(str, valid_ulysses(model, layout.tp)))
        raise LayoutError(
            f"cp={layout.cp} with cpkind=ulysses does not suit {model.name}: each rank takes whole heads of the "
            f"{model.heads // layout.tp} that a tp rank has; valid cp: {degrees}, or choose cpkind=ring"
        )
    if layout.stages and sum(layout.stages) != model.layers:
        raise LayoutError(f"stages={'/'.join(map(str, layout.stages))} adds up to {sum(layout.stages)} layers, "
                          f"but {model.name} has {model.layers}")  # fmt: skip
    if layout.pp > 1:
        pipeline.stages(model, layout)
        # Without a workload: as many micro-batches as any schedule asks for.
        count = workload.micro_batches(layout) if workload is not None and workload.batch else 2 * layout.stage_count
        pipeline.check_schedule(layout, count)
    if layout.ep > 1 and (model.experts is None or model.experts.count % layout.ep):
        if not model.experts:
            raise LayoutError(f"ep={layout.ep} splits experts: {model.name} is a model without experts; leave it out")
        valid = ", ".join(map(str, valid_ep(model, layout.data_ranks * layout.tp // layout.expert_tp)))
        raise LayoutError(f"ep={layout.ep} does not divide its {model.experts.count} experts; valid ep: {valid}")
    if layout.etp and not model.experts:
        raise LayoutError(f"etp={layout.etp} splits experts: {model.name} is a model without experts; leave it out")
    if model.experts and layout.gathers_outputs:
        raise LayoutError(f"tpkind=gathered has no form for the experts of {model.name}: choose tpkind=megatron")
    if model.lora:
        check_adapters(layout, model, workload)
    if model.attention_dropout and layout.attention == "sdpa":
        raise LayoutError(
            f"{model.name} drops attention probabilities, which needs attention=math (the fused kernel's mask cannot "
            "be keyed by global index); add attention=math or set attention_dropout to 0"
        )
    if ranks is not None:
        check_ranks(layout, ranks)
    if workload is not None and workload.batch:
        workload.micro_batches(layout)
        _check_sequence(layout, model, workload)


def suited(layout: Layout, model: Model) -> tuple[Layout, tuple[str, ...]]:
    """The layout with the attention that the model needs, and a sentence where that is another one than it has."""
    if model.counted or not model.attention_dropout or layout.attention != "sdpa":
        return layout, ()
    why = f"attention=math: {model.name} drops attention probabilities, which fused kernels do not"
    return replace(layout, attention="math"), (why,)


def check_served(layout: Layout, model: ModelConfig) -> None:
    """As `check`, for the server of another engine: it spreads experts unevenly where ep does not divide them. Raises
    `LayoutError`."""
    uneven = model.experts is not None and 1 < layout.ep < model.experts.count
    check(replace(layout, ep=1, etp=0) if uneven else layout, model)


def check_ranks(layout: Layout, ranks: int) -> None:
    """Raise `LayoutError` when a layout has more or fewer ranks."""
    if layout.ranks != ranks:
        raise LayoutError(
            f"layout {layout} needs dp x tp x pp x cp{' + servers' if layout.parameter_servers.own else ''} = "
            f"{layout.ranks} ranks, but there are {ranks}; "
            f"{_nearest(layout, ranks)}"
        )


def check_adapters(layout: Layout, model: ModelConfig, workload: Workload | None) -> None:
    """Raise `LayoutError` for what frozen weights cannot have yet. Without a workload, any layout may store them."""
    for key, value in changed(layout).items() if workload is not None else ():
        if "unadapted" in key.marks:
            raise LayoutError(f"{key.text(value)} does not go with the adapters of {model.name} yet: leave it out")
    if model.lora and model.lora.base:
        check_narrow_base(layout, blueprint(model))
    if layout.pp > 1 and pipeline.splits_backward(layout.schedule):
        raise LayoutError(
            f"schedule={layout.schedule} computes gradients of weights apart, of which adapters have few: choose 1f1b"
        )


def check_narrow_base(layout: Layout, whole: Blueprint) -> None:
    """Raise `LayoutError` for what frozen weights in fewer bits cannot have."""
    for parameter in (p for part in whole.parts for p in part.parameters if is_narrow(p)):
        base, inputs = parameter.dtype, parameter.shape[1]
        if layout.params_on_disk:
            raise LayoutError(
                f"offload_params=nvme keeps parameters of one width on disk, and base={base} has two: choose "
                "offload_params=cpu"
            )
        block, cut = block_inputs(base), layout.tp if split_dim(parameter, layout) == 1 else 1
        if base == NF4 and inputs % (block * cut):
            way = f"tp={cut} does not cut into blocks of {block}" if cut > 1 else f"blocks of {block} do not divide"
            raise LayoutError(
                f"lora: base={base}: {parameter.name} has {inputs} inputs, which {way}: choose "
                + ("a smaller tp, or base=fp8" if cut > 1 else "base=fp8")
            )


def _nearest(layout: Layout, ranks: int) -> str:
    rest = layout.tp * layout.pp * layout.cp
    ranks -= layout.ranks - layout.training_ranks
    if ranks % rest == 0:
        return f"dp={ranks // rest} would use them all"
    return f"tp x pp x cp = {rest} would have to divide {ranks}"


def check_positions(model: Model, seq: int) -> None:
    """Raise `LayoutError` for sequences of more tokens than a model has learned positions."""
    if seq > model.max_positions and model.positions == "learned":
        raise LayoutError(
            f"sequences of {seq} tokens exceed the {model.max_positions} learned positions of {model.name}; "
            f"use at most {model.max_positions}"
        )


def _check_sequence(layout: Layout, model: ModelConfig, workload: Workload) -> None:
    check_positions(model, workload.seq)
    if layout.cp > 1:
        if workload.seq < 2 * layout.cp:
            raise LayoutError(
                f"cp={layout.cp} cuts sequences into {2 * layout.cp} chunks, but they have {workload.seq} tokens; "
                f"at most cp={workload.seq // 2} has a token for each"
            )
    elif layout.sp and workload.seq % layout.tp:
        below, above = ((workload.seq // layout.tp + more) * layout.tp for more in (0, 1))
        nearest = f"{below} or {above}" if below else str(above)
        raise LayoutError(
            f"sequence length {workload.seq} cannot be cut into tp = {layout.tp} equal pieces; nearest that can: "
            f"{nearest}"
        )


def beyond_positions(model: Model, seq: int) -> tuple[str, ...]:
    """A sentence on sequences longer than a model's positions, which rotary ones do not forbid; nothing for others."""
    if seq <= model.max_positions:
        return ()
    return (
        f"sequences of {seq:,} tokens are longer than the {model.max_positions:,} positions of {model.name}: counted "
        "and priced all the same",
    )


def fewer_ranks(
    layout: Layout, model: ModelConfig, workload: Workload, ranks: int,
    checked: Callable[[Layout, ModelConfig, Workload], None] | None = None,
) -> Layout | None:  # fmt: skip
    """The layout with the largest smaller dp that runs on at most `ranks`, all else as it was; None when there is none.
    checked: raises for what cannot run; None is `check_runnable`.

    A shard group that the smaller dp cannot be cut into shrinks with it, and so do the ranks of a second copy.
    """
    groups = [(name, group) for name in goes_with("zero") if (group := KEYS[name].group)]
    for dp in range(min(layout.dp - 1, ranks // (layout.ranks // layout.dp)), 0, -1):
        try:
            smaller = replace(layout, dp=dp, **defaults(*(name for name, _ in groups)))
            for name, group in groups:
                sizes = [n for n in group.sizes(getattr(smaller, group.whole)) if n <= getattr(layout, name)]
                changes: dict[str, Any] = {name: max(sizes, default=0)}
                smaller = replace(smaller, **changes)
            (checked or check_runnable)(smaller, model, workload)
        except UserError:
            continue
        return smaller
    return None


def check_modes(layout: Layout) -> None:
    """Raise `LayoutError` for two keys that the runtime cannot have together yet, whatever the model."""
    if layout.local_sgd and layout.offload_home == "nvme":
        raise LayoutError(
            f"sync=local does not go with offload={layout.offload} yet: an outer step changes weights that are on disk "
            "already; choose offload=cpu"
        )
    if layout.pp > 1 and layout.compile == "block" and pipeline.splits_backward(layout.schedule):
        raise LayoutError(
            f"schedule={layout.schedule} computes the weights' gradients apart, which compile=block cannot: choose "
            "another schedule or compile=off"
        )
    if layout.offloads_activations and layout.compile == "block":
        raise LayoutError(
            "compile=block saves tensors where offload_activations=cpu does not see them: choose compile=off, or leave "
            "offload_activations out"
        )


def check_runnable(layout: Layout, model: ModelConfig, workload: Workload, ranks: int | None = None) -> None:
    """Raise `LayoutError` if the runtime cannot run `layout` yet, or if `check` rejects it."""
    check(layout, model, workload, ranks)
    check_own(workload.optimizer)
    check_modes(layout)
    if reason := model.why_not_runnable():
        raise LayoutError(f"{model.name}: {reason}")

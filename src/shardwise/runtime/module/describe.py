"""From a user's module to its `Blueprint`: a root and blocks, and the cut of every parameter by the plan's styles."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from shardwise.errors import LayoutError, UserError, did_you_mean
from shardwise.layout import Layout
from shardwise.layout.styles import GATHERED, LOOKUP, WHOLE, MapStyle, matched, named
from shardwise.model.adapters import SCALE, A, B
from shardwise.model.blueprint import Blueprint, Cut, Parameter, Part, PartKind
from shardwise.model.lora import INT8
from shardwise.runtime.module.adapters import AdaptedMap, columns_out
from shardwise.runtime.module.chain import ENTRY, EXIT, Chain
from shardwise.runtime.module.expert_plan import ExpertPlan, divisors, expert_plan, published_plan, stacked
from shardwise.runtime.module.initial import is_meta
from shardwise.runtime.module.inputs import suited
from shardwise.runtime.module.sequence import SequencePlan, sequence_plan

ROOT = "root"
"""Name of the part of everything that is in no block."""


@dataclass(frozen=True)
class DescribedModule:
    """A module's parts, and how its maps are cut."""

    blueprint: Blueprint
    styles: Mapping[str, MapStyle]
    """Module whose weights are cut, or see partial gradients -> its style."""
    experts: ExpertPlan = field(default_factory=ExpertPlan)
    """Its modules of experts that the plan splits."""
    chain: Chain | None = None
    """Order of its parts, under a pipeline."""
    sequence: SequencePlan = field(default_factory=SequencePlan)
    """Where its stream is cut along the sequence."""


def describe(
    module: nn.Module, layout: Layout, plan: Mapping[str, str] | None, blocks: Sequence[str], chain: Chain | None = None
) -> DescribedModule:
    """Describe a module. plan: {pattern: style}; None for the module's own. blocks: paths, in order of their forward
    passes. chain: the order of all parts, under a pipeline.

    A parameter that several parts share belongs to the root. Raises `UserError` for parameters that cannot be split,
    and `LayoutError` for a degree that does not divide.
    """
    names = _names(module)
    styles: dict[str, MapStyle] = {}
    experts = ExpertPlan()
    if layout.tp > 1 or layout.ep > 1:
        published = plan is None
        plan = published_plan(module, layout) if plan is None else plan
        experts = expert_plan(module, layout, plan, published)
        styles = _styles(module, layout, experts.others, published) if layout.tp > 1 else {}
    sequence = SequencePlan()
    if layout.sp:
        styles_named = named(experts.others, [name for name, _ in module.named_modules()])
        sequence, styles = sequence_plan(module, layout, styles, styles_named, blocks)
    parts: dict[str, list[Parameter]] = {name: [] for name in _part_names(blocks, chain)}
    reads: list[str] = []
    for parameter, aliases in names.items():
        part = _root_or_block(aliases, blocks) if chain is None else _in_chain(aliases, chain, reads)
        full, prefix = aliases[0], "" if part in _KINDS else f"{part}."
        name = full.removeprefix(prefix)
        if any(alias.rpartition(".")[0] in experts.modules for alias in aliases):
            _check_apart(aliases, experts)
            width = experts.widths.get(full, 0)
            stack = stacked(name, tuple(parameter.shape), width, not parameter.requires_grad)
            parts[part].append(replace(stack, transposed=_is_transposed(module, full, parameter)))
        else:
            described = _parameter(module, name, aliases, parameter, styles, layout)
            parts[part].append(replace(described, sees_shards=sequence.sees_shards(aliases)))
    made = [
        Part(
            name, _KINDS.get(name, "block"), _class_of(module, name), tuple(held), (), 0, 0,
            reads=tuple(reads) if name == EXIT else (),
        )
        for name, held in parts.items()
    ]  # fmt: skip
    return DescribedModule(Blueprint(type(module).__name__, 0, tuple(made)), styles, experts, chain, sequence)


_KINDS: dict[str, PartKind] = {ROOT: "root", ENTRY: "entry", EXIT: "exit"}


def _part_names(blocks: Sequence[str], chain: Chain | None) -> list[str]:
    return [ROOT, *blocks] if chain is None else [ENTRY, *chain.blocks, EXIT]


def _root_or_block(aliases: Sequence[str], blocks: Sequence[str]) -> str:
    homes = {_home(alias, blocks) for alias in aliases}
    return homes.pop() if len(homes) == 1 else ROOT


def _in_chain(aliases: Sequence[str], chain: Chain, reads: list[str]) -> str:
    """The part of a parameter under a pipeline. reads: takes the one that entry and exit share, a tied table."""
    homes = {chain.home(alias) for alias in aliases}
    if "" in homes:
        raise UserError(f"parts: {aliases[0]} is in none of them; name every module with parameters, in order")
    if homes == {ENTRY, EXIT}:
        reads.append(aliases[0])
        if len(reads) > 1:
            raise UserError(f"parts: {' and '.join(reads)} are shared by the first and the last stage; one can be")
        return ENTRY
    if len(homes) > 1:
        raise UserError(
            f"parts: {' and '.join(aliases)} are one parameter of several parts: one stage cannot have them"
        )
    return homes.pop()


def find_blocks(module: nn.Module, wanted: Sequence[str] | None) -> list[str]:
    """Paths of the modules that are gathered and recomputed alone, in the order in which they are registered.

    wanted: names of classes, or paths where `*` is one step. None: the classes of a `transformers` model's
    `_no_split_modules`, else the elements of every `nn.ModuleList` whose elements are of one class. Blocks are never
    inside others. Raises `UserError` for a name that fits nothing.
    """
    named = {name: child for name, child in module.named_modules() if name and any(True for _ in child.parameters())}
    classes = {type(child).__name__ for child in named.values()}
    if wanted is None and (published := getattr(module, "_no_split_modules", None)):
        wanted = [name for name in published if name in classes]
    if wanted is None:
        paths = [f"{name}.{leaf}" for name, child in module.named_modules() for leaf in _alike(child)]
    else:
        paths = []
        for word in wanted:
            hits = [name for name, child in named.items() if type(child).__name__ == word]
            hits = hits or list(matched({word: WHOLE}, named, published=True))
            if not hits:
                raise UserError(f"blocks: nothing is named {word!r}; {did_you_mean(word, classes, 'classes:')}")
            if held := next((name for name in hits if _only_holds(named[name])), ""):
                raise UserError(
                    f"blocks: {held} is a {type(named[held]).__name__}, which is never called: name {held}.*"
                )
            paths += hits
    chosen = {path.removeprefix(".") for path in paths}
    paths = [path for path in named if path in chosen]
    return [path for path in paths if not any(path.startswith(f"{other}.") for other in paths)]


def _alike(child: nn.Module) -> list[str]:
    """Names of the elements of a list of modules of one class, which are called."""
    if not isinstance(child, nn.ModuleList) or len({type(element) for element in child}) != 1 or len(child) < 2:
        return []
    return [name for name, element in child.named_children() if not _only_holds(element)]


def _only_holds(child: nn.Module) -> bool:
    """Whether it has no forward pass: a list of lists of blocks, or of parameters."""
    return type(child).forward is nn.Module.forward


def _class_of(module: nn.Module, name: str) -> str:
    return type(module if name in _KINDS else module.get_submodule(name)).__name__


def _home(name: str, blocks: Collection[str]) -> str:
    return next((block for block in blocks if name.startswith(f"{block}.")), ROOT)


def _names(module: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Parameter -> all names that it has in the module, the first one that of its state dict's."""
    names: dict[nn.Parameter, list[str]] = {}
    storages: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter not in names:
            _check(name, parameter)
            storage = parameter.untyped_storage()
            if parameter.device.type != "meta" and (other := storages.setdefault(storage.data_ptr(), name)) != name:
                raise UserError(
                    f"{other} and {name} are different parameters in one memory; share one parameter instead"
                )
        names.setdefault(parameter, []).append(name)
    if not names:
        raise UserError(f"{type(module).__name__} has no parameters, so there is nothing to split")
    if not any(parameter.requires_grad for parameter in names):
        raise UserError(f"{type(module).__name__} has no parameter with requires_grad, so there is nothing to train")
    return names


def _check(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise UserError(f"{name} has no shape yet: run the module once, then split it")
    if not parameter.is_floating_point():
        raise UserError(f"{name} is {str(parameter.dtype).removeprefix('torch.')}; split trains real numbers alone")
    if not parameter.numel():
        raise UserError(f"{name} has no elements; remove it")


# -- tensor parallelism


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is a linear map with its weight as [inputs, outputs] (`transformers`' Conv1D)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _is_transposed(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Whether a weight, or the weight beside a factor of an adapter, has its outputs as columns."""
    owner, _, leaf = name.rpartition(".")
    child = module.get_submodule(owner)
    return (is_conv1d(child) and leaf == "weight") or (parameter.dim() == 3 and columns_out(child))


def is_plain_map(module: nn.Module) -> bool:
    """Whether it is a linear map with the usual forward, and a weight that is a parameter: none that `weight_norm` or
    another parametrization computes."""
    usual = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    plain = usual and "weight" in module._parameters
    return is_conv1d(module) or plain or isinstance(module, AdaptedMap)


def _check_apart(aliases: Sequence[str], experts: ExpertPlan) -> None:
    if len({alias.rpartition(".")[0] for alias in aliases}) > 1:
        raise UserError(f"plan: {' and '.join(aliases)} are one parameter; experts share none with other modules")


def _styles(module: nn.Module, layout: Layout, plan: Mapping[str, str], published: bool) -> dict[str, MapStyle]:
    if published:
        _check_heads(module, layout)
    every = list(module.named_modules(remove_duplicate=False))
    chosen = matched(plan, [name for name, child in every if child._parameters], published)
    first = {child: chosen[name] for name, child in reversed(every) if name in chosen}
    styles = {name: chosen.get(name, first[child]) for name, child in every if child in first}  # of all its names
    for name, style in styles.items():
        styles[name] = _suited(name, module.get_submodule(name), style)
    return styles | _of_shared(module, styles)


def _suited(name: str, child: nn.Module, style: MapStyle) -> MapStyle:
    """The style for this kind of module: a vocabulary is looked up, or, in a head, made into logits."""
    if style.cut == "replicated":
        return style
    if isinstance(child, nn.Embedding):
        if style.cut != "vocab":
            raise UserError(f"plan: {name} is a table: choose vocab, or replicate")
        if child.max_norm is not None or child.scale_grad_by_freq:
            raise UserError(
                f"plan: {name} has max_norm or scale_grad_by_freq, which need the whole table: replicate it"
            )
        return style
    if not is_plain_map(child):
        own = ""
        if isinstance(child, nn.Linear):
            computes = "weight" not in child._parameters
            own = " whose weight is computed from others" if computes else " with a forward of its own"
        kind = f"{type(child).__name__}{own}"
        raise UserError(f"plan: {name} is a {kind}; nn.Linear, Conv1D and nn.Embedding are cut, so replicate it")
    return GATHERED if style.cut == "vocab" else style


def _of_shared(module: nn.Module, styles: Mapping[str, MapStyle]) -> dict[str, MapStyle]:
    """The styles of maps that the plan does not name but whose weight it cuts in another one: a tied table, or head."""
    cut = {id(module.get_submodule(name).weight) for name, style in styles.items() if style.cut != "replicated"}
    others = {}
    for name, child in module.named_modules(remove_duplicate=False):
        if id(getattr(child, "weight", None)) in cut and styles.get(name, MapStyle()).cut == "replicated":
            if not (is_plain_map(child) or isinstance(child, nn.Embedding)):
                raise UserError(
                    f"plan: {name}, a {type(child).__name__}, reads all of a weight that another map shares and "
                    "the plan cuts: replicate that map"
                )
            others[name] = LOOKUP if isinstance(child, nn.Embedding) else GATHERED
    return others


def _check_heads(module: nn.Module, layout: Layout) -> None:
    config = getattr(module, "config", None)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % layout.tp:
            raise LayoutError(
                f"tp={layout.tp} does not divide the {heads} of {name} of {type(module).__name__}; "
                f"valid tp: {divisors(heads)}"
            )


def _parameter(
    module: nn.Module,
    name: str,
    aliases: Sequence[str],
    parameter: nn.Parameter,
    styles: Mapping[str, MapStyle],
    layout: Layout,
) -> Parameter:
    """name: inside its part; aliases: all global ones."""
    cuts: dict[Cut, str] = {}
    partial, transposed, dtype = False, False, _narrow(module, aliases)
    for alias in aliases:
        owner, _, leaf = alias.rpartition(".")
        style = styles.get(owner, MapStyle())
        cut = "replicated" if leaf == SCALE and dtype else _cut(style, leaf)
        transposed = _is_transposed(module, alias, parameter)
        partial = partial or style.partial
        partial = partial or _sees_part(style, leaf)
        cuts.setdefault("column" if cut == "vocab" else cut, alias)
        if cut in ("column", "row") and "none" in style.edges:  # what gathers or splits itself may pad
            dim = (cut == "row") != transposed if parameter.dim() > 1 else 0
            _check_divides(alias, cut, parameter.shape[dim], layout)
    if len(cuts) > 1:
        both = ", ".join(f"{alias} by {cut}" for cut, alias in cuts.items())
        raise UserError(f"plan: one parameter is cut in two ways: {both}; give its modules styles that agree")
    full = tuple(parameter.shape)
    shape = full if len(full) < 3 else (prod(full[:-1]), full[-1])
    return Parameter(
        name, shape, decay=len(full) > 1, cut=next(iter(cuts)), partial=partial, transposed=transposed,
        frozen=not parameter.requires_grad, module_shape=() if shape == full else full, dtype=dtype,
    )  # fmt: skip


def _narrow(module: nn.Module, aliases: Sequence[str]) -> str:
    """Format of a weight beside which there are scales, and of scales that are bytes; else empty."""
    owner, _, leaf = aliases[0].rpartition(".")
    base = getattr(module.get_submodule(owner), "frozen_base", None)
    return base.name if base and (leaf == "weight" or (leaf == SCALE and base.name != INT8)) else ""


def _cut(style: MapStyle, leaf: str) -> Cut:
    """A bias is cut with column-parallel outputs that stay apart, and added whole to outputs that come together. Of an
    adapter, the factor at the side that is cut is cut with it."""
    if leaf == "weight":
        return style.cut
    if leaf in _SIDES:
        return style.cut if style.cut == _SIDES[leaf] else "replicated"
    if leaf == SCALE:
        return "column" if style.cut == "column" else "replicated"
    return "column" if style.cut == "column" and style.edges.leave == "none" else "replicated"


_SIDES: dict[str, Cut] = {A: "row", B: "column"}
"""Factor of an adapter -> the cut of a map that it is cut by."""


def _sees_part(style: MapStyle, leaf: str) -> bool:
    """Whether a rank has a part of the gradient of an adapter's factor: the one that is whole beside a cut weight."""
    return leaf in _SIDES and style.cut in _SIDES.values() and style.cut != _SIDES[leaf]


def _check_divides(name: str, cut: Cut, size: int, layout: Layout) -> None:
    if size % layout.tp:
        what = "outputs" if cut == "column" else "inputs"
        raise LayoutError(f"tp={layout.tp} does not divide the {size} {what} of {name}; valid tp: {divisors(size)}")


def call(module: Callable[..., Any], example: Any) -> Any:
    """The result for an example: a dictionary of keyword arguments, a tuple of arguments, or one argument."""
    example = suited(module, example)
    if isinstance(example, Mapping):
        return module(**example)
    return module(*example) if isinstance(example, tuple) else module(example)


def run_order(
    module: nn.Module, blocks: Sequence[str], example: Any, loss: Callable[[Any, Any], Any] | None = None
) -> list[str]:
    """The blocks in the order of their forward passes, by running the module once. One that runs several times, or
    never, is left out: it then belongs to the root. example: as for `call`, or for a loss, whose last pass counts."""
    runs: list[str] = []
    hooks = [module.register_forward_pre_hook(lambda *_: runs.clear())]
    hooks += [
        module.get_submodule(block).register_forward_pre_hook(lambda child, args, block=block: runs.append(block))
        for block in blocks
    ]
    if is_meta(module):
        example = _pytree.tree_map(lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, example)
    try:
        with torch.set_grad_enabled(loss is not None):
            call(module, example) if loss is None else loss(module, suited(module, example))
    finally:
        for hook in hooks:
            hook.remove()
    return [block for block in runs if runs.count(block) == 1]

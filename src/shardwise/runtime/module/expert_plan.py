"""Experts in a user's module: the modules that a plan names, and how their stacked weights are split.

A module of experts has parameters of its own alone, each with the experts along its first dim, and a forward of
(tokens [T, hidden], chosen experts [T, k], their weights [T, k]) -> [T, hidden]: `transformers`' form since version 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from shardwise.errors import LayoutError, UserError
from shardwise.layout import Layout
from shardwise.layout.styles import EXPERTS, STYLES, WIDTHS, path_of
from shardwise.model.adapters import A, factor_of
from shardwise.model.blueprint import Parameter

EXAMPLE = "plan={'blocks.*.experts': 'experts'}"


@dataclass(frozen=True)
class ExpertPlan:
    """Entries of a plan that are about experts."""

    modules: Mapping[str, int] = field(default_factory=dict)
    """Module of experts -> how many it has."""
    widths: Mapping[str, int | None] = field(default_factory=dict)
    """Parameter -> maps whose outputs tensor parallelism splits in it, or 0 for inputs, as in `WIDTHS`; None for an
    adapter's factor at the other side, which every rank has whole, and a part of its gradient."""
    others: Mapping[str, str] = field(default_factory=dict)
    """The rest of the plan."""


def divisors(number: int) -> str:
    """In words."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def published_plan(module: nn.Module, layout: Layout) -> Mapping[str, str]:
    """The plan that a `transformers` model has for a layout. Raises `UserError` where it has none."""
    name = type(module).__name__
    experts, maps = (getattr(module, plan, None) or {} for plan in ("_ep_plan", "_tp_plan"))
    if layout.ep > 1 and not experts:
        raise UserError(f"ep={layout.ep} splits experts, and {name} publishes no plan for any: give {EXAMPLE}")
    if layout.tp > 1 and not maps:
        raise UserError(
            f"tp={layout.tp} needs a plan, and {name} publishes none: give "
            "plan={'blocks.*.up': 'column', 'blocks.*.down': 'row'}"
        )
    return {**(experts if layout.ep > 1 else {}), **(maps if layout.tp > 1 else {})}


def expert_plan(module: nn.Module, layout: Layout, plan: Mapping[str, str], published: bool) -> ExpertPlan:
    """Divide a plan. published: whether it may name modules that this model does not have.

    Raises `UserError` for experts that cannot be split, and `LayoutError` for a degree that does not divide.
    """
    named = dict(module.named_modules())
    patterns = [pattern for pattern, style in plan.items() if STYLES.get(style) == EXPERTS]
    found = {
        name: _experts_of(name, child)
        for name, child in named.items()
        if any(path_of(pattern).fullmatch(name) for pattern in patterns)
    }
    for pattern in () if published else patterns:
        if not any(path_of(pattern).fullmatch(name) for name in found):
            raise UserError(f"plan: no module is named {pattern!r}, which the plan takes for experts")
    if layout.ep > 1 and not found:
        raise UserError(f"ep={layout.ep} splits experts, and the plan names none: give {EXAMPLE}")
    for name, count in found.items():
        if count % layout.ep:
            raise LayoutError(
                f"ep={layout.ep} does not divide the {count} experts of {name}; valid ep: {divisors(count)}"
            )
    weights = [f"{name}.{leaf}" for name in found for leaf, _ in named[name].named_parameters()]
    styles, others = _of_weights(plan, patterns, weights)
    return ExpertPlan(found, _widths(named, weights, styles, layout), others)


def _experts_of(name: str, child: nn.Module) -> int:
    own = dict(child.named_parameters(recurse=False))
    if len(own) < len(dict(child.named_parameters())):
        raise UserError(f"plan: {name} has parameters in submodules; experts are stacked in parameters of its own")
    counts = {len(p) if p.dim() in (2, 3) else 0 for p in own.values()}
    if len(counts) != 1 or 0 in counts:
        raise UserError(
            f"plan: {name} does not stack experts: each of its parameters needs two or three dims, the first one over "
            "the experts"
        )
    return counts.pop()


def _of_weights(
    plan: Mapping[str, str], patterns: Sequence[str], weights: Sequence[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """({weight of experts: style}, the plan for all else)."""
    styles: dict[str, str] = {}
    others = {}
    for pattern, style in plan.items():
        hits = [weight for weight in weights if path_of(pattern).fullmatch(weight)]
        if hits and style not in WIDTHS:
            raise UserError(
                f"plan: {pattern!r} has style {style!r}, which split does not have for weights of experts; it has "
                f"{', '.join(WIDTHS)}"
            )
        for weight in hits:
            styles.setdefault(weight, style)
        if not hits and pattern not in patterns:
            others[pattern] = style
    return styles, others


def _widths(
    named: Mapping[str, nn.Module], weights: Sequence[str], styles: Mapping[str, str], layout: Layout
) -> dict[str, int | None]:
    widths: dict[str, int | None] = {}
    for weight in weights if layout.expert_tp > 1 else ():
        adapted, factor = factor_of(weight)
        packed = WIDTHS[styles[adapted or weight]] if (adapted or weight) in styles else None
        if factor and packed is not None and bool(packed) == (factor == A):
            if layout.ep > 1:
                raise LayoutError(
                    f"etp={layout.expert_tp} splits the width of experts with adapters, which needs ep=1: choose etp=1"
                )
            widths[weight] = None
            continue
        if packed is None:
            raise UserError(
                f"plan: tp={layout.tp} splits each expert, and {weight} has no style for that: give it packed_column, "
                "column or row, or choose etp=1"
            )
        owner, _, leaf = weight.rpartition(".")
        shape = named[owner].get_parameter(leaf).shape
        size = shape[-2] if packed else shape[-1]
        if len(shape) != 3 or size % (max(packed, 1) * layout.expert_tp):
            maps = f" of {packed} maps" if packed > 1 else ""
            raise LayoutError(f"tp={layout.tp} does not divide the width {size}{maps} of {weight}; or choose etp=1")
        widths[weight] = packed
    return widths


def stacked(name: str, shape: tuple[int, ...], width: int | None, frozen: bool = False) -> Parameter:
    """Stacked weights of experts, as rows by expert. name: inside its part; width: as in `ExpertPlan.widths`."""
    rows = shape[0] * shape[1] if len(shape) == 3 else shape[0]
    whole = width is None
    return Parameter(
        name, (rows, shape[-1]), decay=True, cut="replicated" if whole else "expert", heads=0 if whole else shape[0],
        partial=whole, frozen=frozen, packed=width or 0, module_shape=shape if len(shape) == 3 else (),
    )  # fmt: skip

"""Saved tensors of a decoder's parts from recordings of the runtime (`recordings.json`), which `make recordings` makes.

A recording is one forward pass of the real runtime on fake tensors whose sizes are products of distinct primes, so that
the bytes of each saved tensor factor into a formula: `element*tokens*inner` is one element per token and feed-forward
width. A name's formulas depend on few traits of the model and the layout, which the data states with it, so that
formulas of every tensor serve all models, whatever others these save.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.layout.placement import width_held
from shardwise.layout.units import UnitPlan
from shardwise.predict.memory.sizes import (
    MapInputs,
    Sizes,
    core_sizes,
    cuts_attention,
    shared_width,
    uses_batched_attention,
    uses_blocked_attention,
)

Formula = tuple[int, list[str]]
"""Coefficient and names of sizes, whose product are bytes."""


def traits_of(plan: UnitPlan, part: str, routes: bool) -> dict[str, bool | str]:
    """What of the model and the layout decides which tensors a part saves. routes: whether it has experts."""
    layout, model, kind = plan.layout, plan.model, plan.blueprint.kind(part)
    if kind == "block" and layout.recompute in ("full", "input"):
        return {"kind": "recomputed" if layout.recompute == "full" or part in plan.local.first_blocks else "later"}
    before = kind == "head" or model.norm_placement != "post"
    traits: dict[str, bool | str] = {"kind": kind, "norm": model.norm if before else "none", "before": before}
    if kind != "block":
        trains = plan.blueprint.trains_in(part)
        traits |= {"trains": trains, "learned": model.positions == "learned", "split": layout.tp > 1}
    else:
        experts, latent = model.experts if routes else None, model.latent_attention
        every = not experts or plan.routing.places * experts.active == plan.routing.pairs
        core = _core(plan)
        traits |= {
            **MapInputs.of(plan, part)._asdict(),
            "after": model.norm_placement != "pre",
            "sum": "none" if model.parallel_residual else "normed" if before else "read",
            "query_norm": model.qk_norm_scope if model.qk_norm else "none",
            "latent": ("queries too" if latent.q_rank else "yes") if latent else "no",
            "core": core,
            "some_heads": layout.cp > 1 and layout.ulysses and core != "recomputed",
            "capped": core == "math" and bool(model.score_softcap),
            "dropped": core == "math" and bool(model.attention_dropout),
            "gated": model.gated,
            "routes": experts is not None,
            "spread": experts is not None and layout.ep > 1,
            "places": "capacity" if experts and experts.capacity else "all" if every else "some",
        }
    return traits


def _core(plan: UnitPlan) -> str:
    """How attention's core is computed, as far as what it saves is concerned."""
    if plan.layout.recompute == "selective":
        return "recomputed"
    if cuts_attention(plan):
        return "cut"
    if uses_blocked_attention(plan):
        return "blocked"
    return "short" if plan.layout.attention == "sdpa" and uses_batched_attention(plan) else plan.layout.attention


def sizes_of(plan: UnitPlan, s: Sizes, part: str, routes: bool) -> dict[str, Any]:
    """Names of sizes in formulas -> the plan's, integers or arrays of them. routes: whether the part has experts."""
    sizes: dict[str, Any] = {**vars(s), "statistic": s.statistic, "inner": s.ffn}
    if routes and (experts := plan.model.experts):
        pairs, received = plan.routing.rows(part)
        sizes |= {"received": received, "pairs": pairs, "places": plan.routing.places, "active": experts.active}
        sizes |= {"expert width": width_held(experts.ffn, plan.layout.expert_tp), "inner": shared_width(plan)}
    if latent := plan.model.latent_attention:
        sizes |= {
            "low ranks": latent.kv_rank + latent.rope_head_dim,
            "q_rank": latent.q_rank,
            "kv_rank": latent.kv_rank,
        }
    core = core_sizes(plan, s)
    if core is not s:
        sizes |= {f"core {name}": value for name, value in vars(core).items()}
    return sizes


@cache
def recordings() -> dict[str, dict[str, tuple[list[str], dict[str, list[str]]]]]:
    """Kind of a part -> name of a tensor -> traits, and formulas by the values of these."""
    data: dict[str, Any] = json.loads(Path(__file__).with_name("recordings.json").read_text("utf-8"))
    return data


def key_of(traits: Mapping[str, bool | str], names: list[str]) -> str:
    """The values of some traits in one word."""
    values = (traits[name] for name in names)
    return "; ".join(value if isinstance(value, str) else "yes" if value else "no" for value in values)


@cache
def _formulas(traits: tuple[tuple[str, bool | str], ...]) -> tuple[dict[str, list[int]], list[Formula]]:
    """Of parts of some traits: name of each tensor that they save -> places of its formulas; and the formulas."""
    values = dict(traits)
    places: dict[str, int] = {}
    of_name: dict[str, list[int]] = {}
    for name, (names, table) in recordings()[str(values["kind"])].items():
        if formulas := table[key_of(values, names)]:
            of_name[name] = [places.setdefault(formula, len(places)) for formula in formulas]
    words = [formula.split("*") for formula in places]
    return of_name, [(int(w[0]), w[1:]) if w[0].isdecimal() else (1, w) for w in words]


def recorded_items(plan: UnitPlan, s: Sizes, part: str) -> dict[str, Any]:
    """Bytes of the tensors that a part's forward pass saves, inputs of the step included, by name."""
    routes = plan.blueprint.routes_in(part)
    of_name, formulas = _formulas(tuple(traits_of(plan, part, routes).items()))
    sizes = sizes_of(plan, s, part, routes)
    nbytes = []
    for product, names in formulas:
        for name in names:
            product = product * sizes[name]
        nbytes.append(product)
    return {name: nbytes[at[0]] if len(at) == 1 else sum(nbytes[place] for place in at) for name, at in of_name.items()}

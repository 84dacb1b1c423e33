"""Saved tensors of a decoder's parts from recordings of the runtime (`recordings.json`), which `make recordings` makes.

A recording is one forward pass of the real runtime on fake tensors whose sizes are products of distinct primes, so that
the bytes of each saved tensor factor into a formula: `2*e*B*S*f` is two elements per token and feed-forward width.
Recordings are looked up by the form of a part (the model's mechanisms, without sizes) and by its mode (what of the
layout and the workload changes the tensors); without a recording they are None.
"""

import json
from collections.abc import Mapping
from functools import cache, cached_property
from importlib.resources import files
from math import prod
from typing import Any

from shardwise.layout.experts import gathers_sequences
from shardwise.layout.placement import kv_heads_held, width_held
from shardwise.layout.units import UnitPlan
from shardwise.model import ModelConfig
from shardwise.ops.limits import LONGEST_SHORT, SHORTEST
from shardwise.report.step_report import DTYPE_BYTES

AXES = ("recompute", "core", "documents", "context", "tensor", "route")
"""Axes of a mode, in the order of the tree of recordings."""

SHARED = "shared"
"""Word before the form of tensors that several blocks save, such as masks."""

Tree = int | dict[str, Any]
"""The number of a list of formulas; or, by values of the next axis with `|` between them, a tree."""

Key = tuple[str, tuple[str, ...]]
"""Form and mode."""


def keys_of(plan: UnitPlan, part: str) -> tuple[Key, ...]:
    """Forms and modes of the recordings that add up to a part: of a block that is not fused those of its attention and
    of its feed-forward part."""
    layout, model, kind = plan.layout, plan.model, plan.kind(part)
    tensor = "gathered" if layout.gathers_outputs and layout.tp > 1 else "split"
    tensor = "whole" if layout.tp == 1 and kind != "block" else tensor + "-sp" * layout.sp
    frozen = "frozen" * (not plan.trains_in(part))
    if kind == "embedding":
        learned, dropout = model.positions == "learned", bool(model.dropout)
        words = [kind, "learned" * learned, "norm" * model.embedding_norm, "dropout" * dropout, frozen]
        return ((_joined(words), ("", "", "", "", tensor, "")),)
    if kind == "head":
        words = [kind, model.norm, "capped" * bool(model.logit_softcap), frozen]
        return ((_joined(words), ("", "", "", "", tensor, "")),)
    if layout.recompute in ("full", "input"):
        recompute = layout.recompute if layout.recompute == "full" or part in plan.first_blocks else "later"
        return ((kind, (recompute, "", "", "", tensor, "")),)
    outer = [model.norm, model.norm_placement, "parallel" * model.parallel_residual, "dropout" * bool(model.dropout)]
    outer += ["compiled" * (layout.compile == "block")]
    attention = *_core_of(plan), tensor, ""
    if plan.fuses_blocks:
        return ((_joined(["fused", *outer, *_attention_words(model)]), (layout.recompute, *attention)),)
    inner, route = ["gated" * model.gated], ""
    if model.experts and plan.routes_in(part):
        inner = ["experts", "shared" * bool(model.experts.shared)]
        route = ("spread" if layout.ep > 1 else "here") + "-split" * gathers_sequences(layout)
        padded = plan.routed_places * model.experts.active != plan.routed_pairs
        route += "-capacity" if model.experts.capacity else "-padded" * padded
    outer += ["adapters" * plan.blueprint.freezes]
    inner += _frozen(plan, part, "mlp.gate_up" if model.gated else "mlp.up", "mlp.down")
    words = [*_attention_words(model), *_frozen(plan, part, "attention.qkv", "attention.out")]
    return (
        (_joined(["attention", *outer, *words]), (layout.recompute, *attention)),
        (_joined(["feed-forward", *outer, *inner]), ("", "", "", "", tensor, route)),
    )


def _joined(words: list[str]) -> str:
    return " ".join(word for word in words if word)


def _attention_words(model: ModelConfig) -> list[str]:
    latent = model.latent_attention
    return [
        f"qk-{model.qk_norm_scope.split()[0]}" * model.qk_norm, "rope" * (model.positions == "rope"),
        "masked" * (not model.plain_attention), "capped" * bool(model.score_softcap), "narrow" * model.narrow_values,
        "attention-dropout" * bool(model.attention_dropout),
        ("latent-q" if latent.q_rank else "latent") if latent else "",
    ]  # fmt: skip


def _frozen(plan: UnitPlan, part: str, *maps: str) -> list[str]:
    """The maps of a part that compute no gradients of weights."""
    return [f"no-{name}" for name in maps if plan.blueprint.freezes and not plan.trains_in(part, name)]


def _core_of(plan: UnitPlan) -> tuple[str, str, str]:
    """Core, documents and context of a mode. Recomputed cores save nothing."""
    layout, model = plan.layout, plan.model
    context = "whole" if layout.cp == 1 else layout.cpkind if layout.ulysses else "cut"
    if layout.recompute == "selective":
        return "", "", context
    if context == "ulysses" and kv_heads_held(model, layout.inner_ranks) < layout.cp:
        context = "ulysses-copies"
    documents = "documents" if plan.workload.isolate_documents and context != "cut" else "no"
    short = SHORTEST <= plan.workload.seq <= LONGEST_SHORT.get(layout.dtype, 0) and context != "cut"
    plain = model.plain_attention and not model.narrow_values and documents == "no"
    return "short" if layout.attention == "sdpa" and short and plain else layout.attention, documents, context


def sizes_of(plan: UnitPlan, part: str) -> dict[str, int]:
    """Symbol -> size on the plan's rank. Symbols whose sizes are multiples of others' come first."""
    layout, model, inner = plan.layout, plan.model, plan.layout.inner_ranks
    latent, experts = model.latent_attention, model.experts if plan.routes_in(part) else None
    heads, kv_heads = model.heads // inner, kv_heads_held(model, inner)
    element = DTYPE_BYTES[layout.dtype]
    sizes = {"e": element, "a": max(element, 4)}
    if experts:
        pairs, received = plan.routed_rows(part)
        sizes |= {"y": received, "p": pairs, "k": experts.active}
        sizes |= {"w": width_held(experts.shared * experts.ffn, inner), "g": width_held(experts.ffn, layout.expert_tp)}
    if layout.cp > 1 and layout.ulysses:
        sizes["N"] = plan.workload.seq
    sizes |= {"S": plan.sequence.local, "s": plan.stream_tokens // layout.micro, "B": layout.micro}
    if experts:
        sizes["r"] = plan.routed_places
    if not latent:
        sizes["Z"] = heads + 2 * kv_heads
    sizes["H"] = heads
    if layout.cp > 1 and layout.ulysses:
        sizes |= {"Hc": max(1, heads // layout.cp), "K": kv_heads, "Kc": max(1, kv_heads // layout.cp)}
    sizes |= {
        "K": kv_heads,
        "D": model.head_dim,
        "V": model.value_dim,
        "f": width_held(model.ffn, inner),
        "v": width_held(model.vocab, layout.tp),
    }
    if latent:
        sizes |= {"U": latent.nope_head_dim + latent.v_head_dim, "J": latent.kv_rank + latent.rope_head_dim}
        sizes |= {"Q": latent.q_rank, "L": latent.kv_rank, "R": latent.rope_head_dim}
    return sizes | {"h": model.hidden}


class Recordings:
    """Formulas of saved tensors by form and mode."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data

    @cached_property
    def lists(self) -> list[list[tuple[int, list[str]]]]:
        """(coefficient, symbols) of the saved tensors of each list of formulas."""
        words = [[formula.split("*") for formula in formulas] for formulas in self.data["lists"]]
        return [[(int(w[0]), w[1:]) if w[0].isdecimal() else (1, w) for w in formulas] for formulas in words]

    def find(self, key: Key) -> int | None:
        """The number of the list of formulas of a form and a mode, on CPUs; None where there is no recording."""
        form, mode = key
        tree: Any = self.data["forms"].get(form, {})
        for value in mode:
            tree = next((below for values, below in tree.items() if value in values.split("|")), {})
        return None if tree == {} else int(tree)

    def saved(self, plan: UnitPlan, part: str) -> list[int] | None:
        """Bytes of each tensor that a part's forward pass saves, inputs of the step included; None where one of its
        recordings is missing."""
        numbers = [None if plan.cuda else self.find(key) for key in keys_of(plan, part)]
        known = [number for number in numbers if number is not None]
        return self.at(sizes_of(plan, part), *known) if len(known) == len(numbers) else None

    def shared(self, plan: UnitPlan, part: str) -> int | None:
        """Bytes of the tensors that a block saves together with others."""
        form, mode = keys_of(plan, part)[0]
        number = None if plan.cuda else self.find((f"{SHARED} {form}", mode))
        return None if number is None else sum(self.at(sizes_of(plan, part), number))

    def at(self, sizes: Mapping[str, Any], *numbers: int) -> list[Any]:
        """Bytes by some lists of formulas. sizes: integers, or arrays of them for several layouts at once."""
        return [prod((c, *map(sizes.__getitem__, symbols))) for n in numbers for c, symbols in self.lists[n]]


@cache
def recordings() -> Recordings:
    """Of the package."""
    return Recordings(json.loads(files("shardwise.predict.memory").joinpath("recordings.json").read_text("utf-8")))

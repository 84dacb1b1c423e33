"""Experts, the story: a title and a few sentences for each chapter, with the state's numbers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwise.layout import Mesh
from shardwise.layout.axes import EDP, EP, ETP
from shardwise.model.parameters import blueprint, count
from shardwise.report.units import format_bytes, format_count, format_share
from shardwise.studio.data.experts_layer import ExpertLayer, example, routed_bytes, summed_bytes

TITLES = (
    "Who has which experts",
    "One layer, step by step",
    "The busiest rank",
    "Capacity and drops",
    "Spread experts, or cut them",
)


def chapters(layers: Mapping[str, ExpertLayer], limited: Mapping[str, ExpertLayer], load: str) -> list[dict[str, Any]]:
    """Title and sentences of each chapter.

    layers: the same layer under each load. limited: under a capacity as well. load: the one that is drawn.
    """
    layer = layers[load]
    texts = (_held(layer), _step(layer), _busiest(layers), _capacity(layers, limited), _cut(layer))
    return [{"title": title, "sentences": text} for title, text in zip(TITLES, texts, strict=True)]


def _held(layer: ExpertLayer) -> list[str]:
    model, layout, e = layer.model, layer.layout, layer.experts
    parts = blueprint(model).parts
    routed = sum(part.count * p.numel for part in parts for p in part.parameters if p.cut == "expert")
    shared = f", beside {e.shared} shared expert{'s' * (e.shared > 1)} that every token uses" if e.shared else ""
    first = layer.ranks[0]
    part = "whole" if len(first.columns) == e.ffn else f"{len(first.columns):,} of each one's {e.ffn:,} columns"
    return [
        f"{model.name} has {e.count} experts per layer. A token uses {e.active} of them{shared}.",
        f"All experts together are {format_share(routed / count(model))} of its {format_count(count(model))} weights.",
        f"Here each rank has {len(first.experts)} of the {e.count}, {part}. {_copies(layer)}",
        f"Attention sees the ranks as dp={layout.dp}, tp={layout.tp}. Experts see the same ranks as {_view(layer)}.",
    ]


def _copies(layer: ExpertLayer) -> str:
    copies = sum(one.place == 0 and one.columns.start == 0 for one in layer.ranks)
    return f"There are {copies} copies of every expert." if copies > 1 else "No expert is there twice."


def _view(layer: ExpertLayer) -> str:
    mesh = Mesh.of(layer.layout, layer.model)
    return ", ".join(f"{axes[0]}={mesh.size(axes)}" for axes in (EDP, EP, ETP))


def _step(layer: ExpertLayer) -> list[str]:
    e, first = layer.experts, layer.ranks[0]
    sent = len(first.routes) * layer.row_bytes
    return [
        "Experts stay where they are. Tokens travel to them and back, in every layer.",
        f"A rank's {len(first.tokens)} tokens are {len(first.routes)} rows for the all-to-all: "
        f"{len(first.tokens)} x {e.active} x {layer.model.hidden:,} numbers, {format_bytes(sent)}.",
        "In the backward pass, gradients travel the same ways.",
    ]


def _busiest(layers: Mapping[str, ExpertLayer]) -> list[str]:
    told = [
        f"{load.capitalize()}: the busiest rank has {layer.imbalance:.2f} times the mean, and ranks wait "
        f"{format_share(layer.waiting)} of the time."
        for load, layer in layers.items()
    ]
    return [
        "A rank continues when the results of all its rows have come back. So all ranks wait for the busiest one.",
        *told,
        "A balance loss, or a bias that the router moves after each step, makes loads even while a model trains.",
    ]


def _capacity(layers: Mapping[str, ExpertLayer], limited: Mapping[str, ExpertLayer]) -> list[str]:
    told = [
        f"{load.capitalize()}: {format_share(layer.dropped)} of all rows are dropped, and the busiest rank has "
        f"{layer.imbalance:.2f} times the mean, not {layers[load].imbalance:.2f}."
        for load, layer in limited.items()
    ]
    one = next(iter(limited.values()))
    most = replace(one.experts, capacity=one.capacity).most(one.tokens)
    return [
        f"With a capacity of {one.capacity:g} an expert takes at most {one.capacity:g} times its equal part of a "
        f"sequence: {most} of {one.tokens} tokens. Later tokens are dropped and skip that expert.",
        *told,
        "Each sequence is counted by itself, so that drops do not depend on the number of ranks.",
        "Without a capacity, the default, nothing is dropped.",
    ]


def _cut(layer: ExpertLayer) -> list[str]:
    model, e, dtype = layer.model, layer.experts, layer.layout.dtype
    ranks = example(model)
    spread, cut = (format_bytes(each(model, ranks, dtype)) for each in (routed_bytes, summed_bytes))
    return [
        "Tensor parallelism cuts every expert instead: each rank has a part of all of them. No token travels, but the "
        "ranks' partial results must be added up.",
        f"On {ranks} ranks a token costs {spread} with spread experts, and {cut} with cut ones.",
        f"On n ranks the ratio is n / {e.active}: rows of a token go to {e.active} experts, its sum needs all ranks.",
        "Spread experts keep whole matrices, but their loads can be uneven. Cut experts are always even.",
    ]

"""Experts: who has which experts, one layer step by step under a balanced or a skewed load, capacity, and what cutting
experts would send."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.codec import keyed
from shardwise.errors import UserError
from shardwise.layout import Layout, Mesh
from shardwise.layout.axes import DP, EDP, EP, ETP, TP
from shardwise.layout.legality import check, valid_ep, valid_tp
from shardwise.model import ModelConfig
from shardwise.model.catalog import resolve
from shardwise.studio.columns import Columns, Table, View
from shardwise.studio.data.experts_chapters import chapters
from shardwise.studio.data.experts_how import explanations
from shardwise.studio.data.experts_layer import ExpertLayer, ExpertRank, compared, steps
from shardwise.studio.data.experts_router import LOADS, draw
from shardwise.studio.data.sizes import offered
from shardwise.studio.query import Query

MOST_RANKS = 16
DEGREES = (1, 2, 4, 8, 16)
TOKENS = (8, 16, 32, 64, 128, 256)
CAPACITIES = (1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)


def data(params: Mapping[str, str]) -> View:
    """One layer of experts on the ranks of a layout; of a model without experts one sentence that says so."""
    query = Query(params)
    names, left_out = offered(_without_experts)
    model = resolve(query.text("model", "mixtral-8x7b"), fetch=False)
    if not model.experts:
        words = f"{model.name} {_without_experts(model)}. Nothing is routed: choose a model with experts."
        return View(query.state, {"model": names}, {}, {}, {"left_out": left_out, "dense": words, "offered": names})
    layout, choices = _layout(query, model)
    tokens = int(query.word("tokens", "64", [str(n) for n in TOKENS]))
    load = query.word("load", LOADS[1], LOADS)
    capacity = query.number("capacity", 1.25, 0.5, 16)
    query.done()
    query.state["tokens"] = tokens
    layers = {each: _layer(model, layout, tokens, each) for each in LOADS}
    limited = {each: replace(layer, capacity=capacity) for each, layer in layers.items()}
    layer = layers[load]
    tables = {
        "held": _held(layer),
        "routed": _routed(layer),
        "loads": _loads(layer),
        "capacity": _capacity(limited[load]),
        "dropped": _dropped(layers),
        "exchanged": _exchanged(model, layout),
    }
    more = {
        "left_out": left_out,
        **keyed(layer, "experts=experts.count columns=experts.ffn row_bytes mean"),
        "waits": [layer.waits(one) for one in layer.ranks],
        "steps": [step._asdict() for step in steps(layer)],
        "ranks": [_drawn(one) for one in layer.ranks],
        "chapters": chapters(layers, limited, load),
    }
    how = explanations(layer, limited[load])
    return View(query.state, {"model": names, "load": LOADS, "tokens": TOKENS, **choices}, tables, how, more)


def _without_experts(model: ModelConfig) -> str:
    return "" if model.experts else "has one feed-forward part per layer, which every token uses"


def _layout(query: Query, model: ModelConfig) -> tuple[Layout, dict[str, Sequence[float]]]:
    """The layout of a state, and the degrees to choose from. Raises `UserError` for what does not suit the model."""
    dp, tp = query.whole("dp", 4, 1, MOST_RANKS), query.whole("tp", 1, 1, MOST_RANKS)
    if dp * tp > MOST_RANKS:
        raise UserError(f"dp x tp = {dp * tp} ranks are more than the {MOST_RANKS} that are drawn: choose a smaller dp")
    etp = query.whole("etp", 1, 1, MOST_RANKS)
    eps = [n for n in valid_ep(model, dp * tp // etp) if n in DEGREES]
    layout = Layout(dp=dp, tp=tp, etp=etp, ep=query.whole("ep", eps[-1], 1, MOST_RANKS))
    check(layout, model)
    degrees = {
        "dp": [n for n in DEGREES if n * tp <= MOST_RANKS],
        "tp": [n for n in DEGREES if n in valid_tp(model) and n * dp <= MOST_RANKS],
    }
    return layout, {**degrees, "ep": eps, "etp": sorted({1, tp}), "capacity": CAPACITIES}


def _layer(model: ModelConfig, layout: Layout, tokens: int, load: str) -> ExpertLayer:
    assert model.experts
    return ExpertLayer(model, layout, draw(layout.data_ranks * tokens, model.experts, load), tokens)


def _drawn(one: ExpertRank) -> dict[str, Any]:
    spans = {name: [span.start, span.stop] for name, span in (("experts", one.experts), ("columns", one.columns))}
    names = ("group", "place", "routes", "sends", "receives", "loads")
    return {"tokens": len(one.tokens)} | spans | {name: getattr(one, name) for name in names}


def _held(layer: ExpertLayer) -> Table:
    mesh = Mesh.of(layer.layout, layer.model)

    def place(axes: tuple[str, ...]) -> tuple[str, Any]:
        return "", lambda one: mesh.index(axes, one.rank)

    columns: Columns = {
        "rank": ("", lambda one: one.rank),
        **{axes[0]: place(axes) for axes in (DP, TP, EDP, EP, ETP)},
        "first expert": ("", lambda one: one.experts[0]),
        "last expert": ("", lambda one: one.experts[-1]),
        "columns from": ("", lambda one: one.columns.start),
        "to": ("", lambda one: one.columns.stop),
        "weights of a layer": ("bytes", lambda one: layer.weight_bytes),
    }
    return Table.of("Experts of each rank, and its place on the axes", layer.ranks, columns)


def _routed(layer: ExpertLayer) -> Table:
    rows = [
        (one.rank, other, int(sent), int(sent) * layer.row_bytes, other == one.rank)
        for one in layer.ranks
        for other, sent in zip(one.group, one.sends, strict=True)
    ]
    units = {"from": "", "to": "", "rows": "", "bytes": "bytes", "stays": ""}
    return Table.of_rows("Rows of the all-to-all, from rank to rank", units, rows)


def _loads(layer: ExpertLayer) -> Table:
    columns: Columns = {
        "rank": ("", lambda one: one.rank),
        "rows": ("", lambda one: one.rows),
        "times the mean": ("", lambda one: one.rows / layer.mean),
        "FLOPs": ("count", lambda one: one.rows * layer.row_flops),
        "waits": ("share", layer.waits),
        "payload to experts": ("bytes", lambda one: layer.payloads(one)[0]),
        "payload back": ("bytes", lambda one: layer.payloads(one)[1]),
        "sends": ("bytes", lambda one: one.leaving * layer.row_bytes),
        "receives": ("bytes", lambda one: one.coming * layer.row_bytes),
    }
    return Table.of("Rows and bytes of each rank, forward, one layer", layer.ranks, columns)


def _capacity(layer: ExpertLayer) -> Table:
    pairs = zip(layer.chosen_loads.tolist(), layer.taken_loads.tolist(), strict=True)
    rows = [(expert, chosen, kept, chosen - kept) for expert, (chosen, kept) in enumerate(pairs)]
    units = dict.fromkeys(("expert", "chosen by", "takes", "drops"), "")
    return Table.of_rows("Rows of each expert, of all sequences", units, rows)


def _dropped(layers: Mapping[str, ExpertLayer]) -> Table:
    columns: dict[str, Sequence[float]] = {"capacity": CAPACITIES}
    for load, layer in layers.items():
        columns[load] = [replace(layer, capacity=factor).dropped for factor in CAPACITIES]
    return Table("Share of rows that are dropped", columns, dict.fromkeys(layers, "share"))


def _exchanged(model: ModelConfig, layout: Layout) -> Table:
    units = {"ranks": "", "experts spread (ep)": "bytes", "experts cut (tp)": "bytes"}
    return Table.of_rows("Bytes that all ranks send per token and layer, forward", units, compared(model, layout.dtype))

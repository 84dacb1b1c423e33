"""Tokens: who holds what of a model, what each device does for one token under two strategies, and what adds up."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from shardwise.cluster import Cluster
from shardwise.codec import keyed, plain
from shardwise.errors import UserError
from shardwise.layout import Layout
from shardwise.layout.serving import plan_of
from shardwise.layout.units import UnitPlan
from shardwise.model import ModelConfig
from shardwise.model.parameters import count
from shardwise.planner.strategies import Asked, Generated, StrategyComparison, compare, usual_layouts, usual_server
from shardwise.predict.memory.capacity import capacity_of
from shardwise.predict.time import decode_ops
from shardwise.predict.time.generation import DecodeStrategy
from shardwise.predict.time.profiles import engine
from shardwise.predict.time.strategy_training import TrainStepTime
from shardwise.predict.traffic.serving import padded_vocab
from shardwise.report import time_parts
from shardwise.report.step_report import DTYPE_BYTES
from shardwise.report.units import format_bytes, format_count, format_spans, format_time
from shardwise.studio.columns import Columns, How, Table, View, command_line, exact
from shardwise.studio.data import tokens_holdings, tokens_layer, tokens_product
from shardwise.studio.data.opens import opens
from shardwise.studio.data.sizes import offered, other_clusters, sized, sizes
from shardwise.studio.data.tokens_chapters import Side, chapters
from shardwise.studio.data.tokens_metrics import (
    headline,
    metrics,
    serving_fit,
    step_words,
    strategy_name,
    totals,
    training_fit,
)
from shardwise.studio.data.tokens_training import (
    device_counts,
    drawn,
    flip_sentences,
    flip_table,
    how_drawn,
    shares_table,
    trained_table,
    training_command,
    training_steps,
    usual_devices,
    zero_sentences,
    zero_table,
)
from shardwise.studio.data.tokens_uses import STRATEGIES, USES, how_uses, uses_table
from shardwise.studio.query import Query
from shardwise.validation.claims import claims

LINKS = (12.5, 25.0, 50.0, 100.0, 200.0, 300.0, 450.0, 900.0)
"""GB/s that a device sends inside its node, to choose from."""
CLUSTERS = ("8xH100", "4xH100", "8xA100", "8xH200", "8xB200", "8xL40S")
PRECISIONS = ("bf16", "fp32")
PROMPTS, OUTPUTS = (128, 256, 512, 1024, 2048, 4096), (16, 32, 64, 128, 200, 256, 512, 1024)
PROMPT, OUTPUT, MOST_OUTPUT = 1024, 256, 1024
CLAIMS = (
    "zero-inference-16gb",
    "zero-inference-layer-200mb",
    "ratio-6400",
    "tp-decode-nvlink",
    "inference-83-training-5",
)
"""Common figures that are wrong, of what this view shows."""


class _Asked(NamedTuple):
    state: dict[str, Any]
    choices: dict[str, list[Any]]
    left_out: dict[str, str]
    model: ModelConfig
    cluster: Cluster
    layouts: tuple[Layout, ...]
    request: Asked
    words: list[Any]
    """Of a command line: the model with its changes."""
    command: str


SHARES = "Seconds of the parts of a token and of a step, over their sums; waiting is bubbles and the host."


class _Computed(NamedTuple):
    """What the view's tables and drawings are made of. sides, held, devices, ways: by strategy."""

    it: _Asked
    comparison: StrategyComparison
    sides: list[Side]
    held: list[list[tokens_holdings.ParameterShard]]
    devices: list[list[tokens_holdings.DrawnDevice]]
    ways: list[list[decode_ops.DecodeOp]]
    product: tokens_product.WorkedProduct
    clock: dict[str, Any]
    flip: Table

    @property
    def ones(self) -> tuple[Generated, ...]:
        return self.comparison.strategies

    @property
    def steps(self) -> list[TrainStepTime]:
        return [side.trained for side in self.sides]

    @property
    def layers(self) -> list[tokens_layer.LayerSide]:
        layers = self.it.model.layers
        return [(side.layout, list(side.steps), layers, side.one.middle.seconds) for side in self.sides]


def data(params: Mapping[str, str]) -> View:
    """Two strategies for the same prompt: what each rank holds, one layer on one clock, one token, a training step."""
    it = _asked(params)
    model, cluster, layouts = it.model, it.cluster, it.layouts
    comparison = compare(model, layouts, cluster, it.request)
    steps = training_steps(model, layouts, cluster, int(it.state["gpus"]), it.request.seq)
    strategies = [_strategy(model, layout, cluster) for layout in layouts]
    half = it.request.prompt + it.request.output / 2
    ways = [decode_ops.way(one, it.request.batch, half) for one in strategies]
    inside = [tokens_layer.steps(model, *item, it.request.batch) for item in zip(layouts, ways, strict=True)]
    held = [tokens_holdings.pieces(model, layout) for layout in layouts]
    computed = _Computed(
        it,
        comparison,
        [Side(*item) for item in zip("AB", comparison.strategies, inside, steps, strict=False)],
        held,
        [
            tokens_holdings.devices(model, one.layout, parts, one.fit.fits)
            for one, parts in zip(comparison.strategies, held, strict=True)
        ],
        ways,
        tokens_product.product(model, layouts, inside),
        tokens_layer.clock(model, layouts, ways),
        flip_table(strategies),
    )
    return View(it.state, it.choices, _tables(computed), _hows(computed), _more(computed))


def _tables(one: _Computed) -> dict[str, Table]:
    it = one.it
    parts = [(str(item.layout), item.middle.parts) for item in one.ones]
    return {
        "compared": _compared(one.ones, it.request),
        "race": _raced(one.ones, it.request),
        "holds": tokens_holdings.holds_table(it.layouts, one.held),
        "product": tokens_product.product_table(one.product),
        "layer": tokens_layer.layer_table(one.layers),
        "clock": tokens_layer.clock_table(it.layouts, one.clock),
        "through": tokens_layer.through_table(it.model, it.layouts, one.ways),
        "where": Table.of_parts("Where a token's time goes", "strategy", time_parts.TOKEN, parts),
        "flip": one.flip,
        "trained": trained_table(one.steps),
        "shares": shares_table(one.ones, one.steps),
        "zero": zero_table(it.model, it.cluster, int(it.state["gpus"])),
        "uses": uses_table(),
    }


def _hows(one: _Computed) -> dict[str, How]:
    it, source = one.it, "docs/generation.md"
    usual_link = it.cluster == Cluster.parse(str(it.state["cluster"]))  # which `estimate` has no option for
    trains = command_line(*training_command(it.words, one.steps[-1])) if usual_link else ""
    zero = command_line("estimate", "--params", count(it.model), "--zero-table", it.state["gpus"])
    timed = [(item.layout, item.middle) for item in one.ones]
    sums = [f"{layout}: {time_parts.as_sum(time.parts, time_parts.TOKEN, time.seconds)}" for layout, time in timed]
    return {
        "compared": _how_compared(one.ones, it.model, it.request, it.command),
        "race": How([LINEAR, *_how_bytes(one.ones, it.model)], it.command, source),
        "holds": tokens_holdings.how_holds(it.model, it.layouts, one.devices),
        "product": tokens_product.how_product(one.product),
        "layer": tokens_layer.how_layer(one.layers, it.command),
        "clock": tokens_layer.how_layer(one.layers, it.command),
        "through": tokens_layer.how_through(it.layouts, one.ways, it.command),
        "where": How(sums, it.command, source),
        "flip": How([FLIP], it.command, source),
        "trained": How(how_drawn(one.steps), trains, "docs/prediction.md"),
        "shares": How([SHARES], it.command, source),
        "zero": How([ZERO], zero, "Rajbhandari et al. 2020, section 3.1"),
        "uses": how_uses(),
    }


def _more(one: _Computed) -> dict[str, Any]:
    it, model = one.it, one.it.model
    return {
        "matrices": tokens_holdings.matrices(model),
        "sides": [_side(model, *item) for item in zip(one.sides, one.held, one.devices, strict=True)],
        "product": one.product.to_json(),
        "clock": one.clock,
        "through": tokens_layer.through_drawn(it.layouts, one.ways),
        "flip": flip_sentences(model, one.ones, one.flip, next(iter(one.comparison.ratios), None)),
        "trained": drawn(model.layers, one.steps, one.ways),
        "zero": zero_sentences(model, it.cluster, int(it.state["gpus"])),
        "uses": [use._asdict() for use in USES],
        "strategies": STRATEGIES,
        "chapters": chapters(model, it.cluster, one.sides, it.request),
        "left_out": it.left_out,
        "opens": [opens(it.state, layout, "tokens") for layout in it.layouts],
        "metrics": metrics(one.ones, one.steps, it.request),
        "headline": headline(one.ones, it.request),
        "batch": it.request.batch,
        "layers": model.layers,
        "width": DTYPE_BYTES[it.layouts[0].dtype],
        "capacity": capacity_of(it.cluster),
        "ratios": plain(one.comparison.ratios),
        "claims": [keyed(claims()[name], "says why") for name in CLAIMS],
    }


LINEAR = "The areas are the bytes that a device sends for one step, on one linear scale."
FLIP = (
    "One pass of prompts of at most 2,048 tokens over all devices: a gather is as long as for one token; arithmetic "
    "and sums grow with the tokens."
)
ZERO = "16 P; 4 P + 12 P/N; 2 P + 14 P/N; 16 P/N bytes for P weights on N devices at the stages 0 to 3."


def spent(params: Mapping[str, str]) -> View:
    """Bytes sent and time needed by each strategy after every token of the longest answer, so that the page's slider
    asks nothing."""
    state, choices, _, model, cluster, layouts, request, _, command = _asked(params)
    ones = compare(model, layouts, cluster, request).strategies
    longest = min(MOST_OUTPUT, model.max_positions - request.prompt)
    columns: dict[str, list[Any]] = {"token": list(range(1, longest + 1))}
    units: dict[str, str] = {}
    for side, one in zip("AB", ones, strict=False):
        item = _seconds(model, one.layout, cluster, request.batch, request.prompt, longest)
        sent = float(one.round.volume.total)
        columns |= {
            f"{side} takes": item,
            f"{side} sends": [sent] * longest,
            f"{side} time so far": list(accumulate(item)),
            f"{side} sent so far": [sent * (i + 1) for i in range(longest)],
        }
        units |= {f"{side} takes": "seconds", f"{side} time so far": "seconds"}
        units |= {f"{side} sends": "bytes", f"{side} sent so far": "bytes"}
    how = How(
        [
            f"{side} = {one.layout}: for {step_words(request)}, a rank sends "
            f"{format_bytes(float(one.round.volume.total))}; the first takes {format_time(one.first.seconds)}, number "
            f"{request.output:,} {format_time(one.last.seconds)}, since more keys and values are read."
            for side, one in zip("AB", ones, strict=False)
        ]
        + ["So far: the sum of all tokens up to here, without the prompt."],
        command,
        "docs/generation.md",
    )
    last = request.output - 1
    sums = [[columns[f"{side} {what} so far"][last] for side in "AB"[: len(ones)]] for what in ("sent", "time")]
    more = {"metrics": totals(request, *sums)}
    return View(state, choices, {"spent": Table("Token by token", columns, units)}, {"spent": how}, more)


def _asked(params: Mapping[str, str]) -> _Asked:
    query = Query(params)
    model, changes = sized(query, "llama-3-70b")
    usual_cluster = Cluster.parse(query.text("cluster", "8xH100"))
    cluster = _linked(query, usual_cluster)
    usual = [str(layout) for layout in usual_layouts(model, cluster)]
    if not usual:
        raise UserError(f"{model.name} cannot be split over all {cluster.devices} devices: choose another cluster")
    a, b = query.text("a", usual[0]), query.text("b", usual[1 % len(usual)])
    precision = query.word("precision", "bf16", PRECISIONS)
    layouts = [replace(Layout.parse(text), precision=precision) for text in dict.fromkeys((a, b))]
    prompt, output = _lengths(query, model)
    request = Asked(prompt, output, query.whole("batch", 1, 1, 4096))
    if model.experts:
        raise UserError(f"{model.name}: {_EXPERTS}")
    trained = device_counts(cluster)
    usual_trained = trained[0] if query.has("gpus") else usual_devices(model, layouts, cluster, request.seq)
    gpus = query.whole("gpus", usual_trained, trained[0], trained[-1])
    if gpus not in trained:
        raise UserError(f"gpus={gpus}: choose one of {', '.join(map(str, trained))}")
    query.done()
    # What the state does not give follows the model.
    least = (prompt if query.has("prompt") else 1) + (output if query.has("output") else 1)
    names, left_out = offered(lambda one: _why_not(one, least))
    room = model.max_positions
    choices: dict[str, list[Any]] = {"model": names, "cluster": list(CLUSTERS), "precision": list(PRECISIONS)}
    choices |= {"a": usual, "b": usual, "prompt": sorted({prompt} | {n for n in PROMPTS if n + output <= room})}
    choices |= {"output": sorted({output} | {n for n in OUTPUTS if prompt + n <= room})}
    choices |= {"gpus": trained}
    choices |= sizes(model) | {"devices": _devices(model, str(query.state["cluster"]))}
    if link := float(query.state["link"]):
        choices["link"] = sorted({link, *LINKS})
    named = [query.state["model"], *changes]
    words = [*named, "--cluster", query.state["cluster"]]
    words += ["--link", exact(link)] * (cluster != usual_cluster)
    command = _command(words, layouts, request)
    return _Asked(query.state, choices, left_out, model, cluster, tuple(layouts), request, named, command)


@lru_cache(maxsize=64)
def _devices(model: ModelConfig, cluster: str) -> list[str]:
    return other_clusters(cluster, lambda other: len(usual_layouts(model, other)) > 1)


def _lengths(query: Query, model: ModelConfig) -> tuple[int, int]:
    """(tokens of the prompt, of the answer): where they are not given, at most what the model has positions for."""
    room = model.max_positions
    answer = query.whole("output", OUTPUT, 1, MOST_OUTPUT) if query.has("output") else min(OUTPUT, max(1, room // 2))
    prompt = query.whole("prompt", max(1, min(PROMPT, room - answer)), 1, 1 << 20)
    if not query.has("output"):
        answer = max(1, min(answer, room - prompt))
    return prompt, query.whole("output", answer, 1, MOST_OUTPUT)


_EXPERTS = "its layers have experts, which this view does not draw; the Experts view does"


def _why_not(model: ModelConfig, tokens: int) -> str:
    """Why the view does not show a model that generates so many tokens, the prompt among them; "" where it does."""
    if reason := model.why_not_runnable():
        return reason
    if model.experts:
        return _EXPERTS
    return f"{tokens:,} tokens exceed its {model.max_positions:,} positions" * (tokens > model.max_positions)


def _linked(query: Query, cluster: Cluster) -> Cluster:
    """The cluster with the link inside its nodes that the state wants: GB/s that a device sends, 0 where not known."""
    usual = (cluster.intra.bandwidth or 0.0) / 1e9
    target = query.number("link", usual, 0.0, 1e6)
    if target == usual or not target:
        return cluster
    return cluster.with_link(target * 1e9)


def _command(words: list[Any], layouts: list[Layout], request: Asked) -> str:
    """`generate --compare` with the same numbers. words: of the model and the cluster."""
    sizes = ("--prompt-tokens", request.prompt, "--max-new-tokens", request.output, "--batch", request.batch)
    return command_line("generate", *words, "--compare", *layouts, *sizes)


def _strategy(model: ModelConfig, layout: Layout, cluster: Cluster) -> DecodeStrategy:
    return DecodeStrategy(model, layout, engine(usual_server(cluster)), cluster)


@lru_cache(maxsize=64)
def _seconds(model: ModelConfig, layout: Layout, cluster: Cluster, batch: int, prompt: int, output: int) -> list[float]:
    contexts = range(prompt + 1, prompt + output + 1)
    return [token.seconds for token in _strategy(model, layout, cluster).tokens(batch, contexts)]


# -- both strategies


def _side(
    model: ModelConfig,
    side: Side,
    held: list[tokens_holdings.ParameterShard],
    devices: list[tokens_holdings.DrawnDevice],
) -> dict[str, Any]:
    one, layout = side.one, side.layout
    links = [tokens_layer.link(step, one.cluster) for step in side.steps]
    return {
        **keyed(one, "layout sends=round.volume.total seconds=middle.seconds"),
        "name": strategy_name(layout),
        "gathers": layout.stage == 3,
        "fits": serving_fit(one),
        "trains": training_fit(side.trained),
        "layer_bytes": float(one.round.volume.blocks) / model.layers,
        "speed": one.tokens_per_second(1),
        "stages": [_blocks_of(plan_of(model, layout, stage)) for stage in range(layout.pp)],
        "pieces": plain(held),
        "devices": plain(devices),
        "link": next(filter(None, links), ""),
    }


def _blocks_of(plan: UnitPlan) -> str:
    numbers = tuple(int(part.split(".")[1]) + 1 for part in plan.of_kind("block"))
    return f"layers {format_spans(numbers)}"


# -- one token, and a training step


def _compared(ones: tuple[Generated, ...], request: Asked) -> Table:
    columns: Columns = {
        "strategy": ("", lambda one: str(one.layout)),
        "a step sends": ("bytes", lambda one: float(one.round.volume.total)),
        "for blocks": ("bytes", lambda one: float(one.round.volume.blocks)),
        "for embedding and head": ("bytes", lambda one: float(one.round.volume.edges)),
        "prompt": ("seconds", lambda one: one.prompt.seconds),
        "first token": ("seconds", lambda one: one.first.seconds),
        "token half-way": ("seconds", lambda one: one.middle.seconds),
        "last token": ("seconds", lambda one: one.last.seconds),
        "80% from": ("seconds", lambda one: one.range[0]),
        "to": ("seconds", lambda one: one.range[1]),
        "tokens/s": ("count", lambda one: one.tokens_per_second(request.batch)),
        "weights": ("bytes", lambda one: one.fit.held.all_weights),
        "of them gathered": ("bytes", lambda one: one.fit.held.slots),
        "cache at the end": ("bytes", lambda one: one.cache_bytes[1]),
        "fits": ("", lambda one: one.fit.fits),
    }
    return Table.of(f"Two strategies, one prompt; bytes and times are those of {step_words(request)}", ones, columns)


def _raced(ones: tuple[Generated, ...], request: Asked) -> Table:
    columns: Columns = {
        "strategy": ("", lambda one: str(one.layout)),
        "name": ("", lambda one: strategy_name(one.layout)),
        "memory": ("", serving_fit),
        "tokens/s of a sequence": ("count", lambda one: one.tokens_per_second(1)),
        "a step takes": ("seconds", lambda one: one.middle.seconds),
        "a device sends": ("bytes", lambda one: float(one.round.volume.total)),
    }
    return Table.of(f"The race; bytes and times are those of {step_words(request)}", ones, columns)


def _how_compared(ones: tuple[Generated, ...], model: ModelConfig, request: Asked, command: str) -> How:
    lines = [
        f"Bytes: what one rank sends for {step_words(request)}, when collectives go round a ring (docs/generation.md).",
        *_how_bytes(ones, model),
        "Weights: the rank's own, and buffers for gathered ones.",
    ]
    return How(lines, command, "docs/generation.md")


def _how_bytes(ones: tuple[Generated, ...], model: ModelConfig) -> list[str]:
    return [f"{one.layout}: {_formula(one, model)}" for one in ones]


def _formula(one: Generated, model: ModelConfig) -> str:
    """Bytes that a rank sends per step: the formula of the pure strategies, the parts of others."""
    layout, width, volume = one.layout, DTYPE_BYTES[one.layout.dtype], one.round.volume
    sent, item = format_bytes(float(volume.total)), f" x {one.sequences} sequences" if one.sequences > 1 else ""
    if layout.stage == 3 and layout.tp == 1:
        p = layout.shard_ranks
        return f"({p} - 1)/{p} x {format_count(count(model))} weights x {width} bytes = {sent}, however many sequences"
    if layout.tp > 1 and layout.tp == layout.ranks:
        p = layout.tp
        return (
            f"(2 ({p} - 1)/{p} x (2 x {model.layers} layers + 1) x {model.hidden:,} numbers + the logits, "
            f"({p} - 1)/{p} x {padded_vocab(plan_of(model, layout)):,}) x {width} bytes{item} = {sent}"
        )
    blocks, edges, other = (format_bytes(float(part)) for part in (volume.blocks, volume.edges, volume.other))
    return f"layers and messages between stages {blocks} + embedding, head and logits {edges} + tokens {other} = {sent}"

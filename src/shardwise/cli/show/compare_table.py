"""`generate --compare`: strategies side by side for one prompt, predicted for a cluster or measured on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.clusters import NETWORK, cluster_of
from shardwise.cli.declare import CommandOptions, arg, leave_out
from shardwise.cli.output import print_result
from shardwise.cli.prompts import read_prompts
from shardwise.errors import UserError
from shardwise.layout import Layout
from shardwise.layout.model_size import size_words
from shardwise.model import ModelConfig
from shardwise.model.catalog import resolve
from shardwise.model.changes import change
from shardwise.records import dataclass
from shardwise.report import time_parts
from shardwise.report.table import rows_by_name
from shardwise.report.terminal import Renderable
from shardwise.report.units import format_bytes, format_count, format_share, format_time

if TYPE_CHECKING:
    from shardwise.cli.compare_local import Here
    from shardwise.planner.strategies import Asked, Generated, Ratio, StrategyComparison

PROMPT, OUTPUT = 1024, 256
"""Default tokens of prompt and answer, predicted for a cluster."""
SHORT_PROMPT, SHORT_OUTPUT = 32, 32
"""Strategies measured here."""


HERE = "prompt prompt_file tokens context cache reuse transport device threads hang"
"""Options of what runs on this machine, of which a prediction for a cluster knows nothing."""

COMPARED = "cluster set network link prompt_tokens train_seq engine"
"""Options of the comparison, which ask for it."""


@dataclass
class StrategyOptions(CommandOptions):
    """Strategies side by side."""

    title = "strategies side by side"
    compare: tuple[str, ...] | None = arg(
        'for one prompt, such as "tp=4" "zero=3,dp=4" "pp=4"; with --cluster and none named, those on all devices',
        "LAYOUT",
        nargs="*",
    )
    cluster: str | None = arg("predict for [NODESx]GPUSxDEVICE or a TOML file; needs no weights", "TEXT")
    network: str | None = NETWORK
    set: tuple[str, ...] = arg("change the model that is predicted, such as layers=2", "FIELD=VALUE,...", ())
    link: float | None = arg("what a device sends inside a node, one direction, in place of the cluster's", "GB/S")
    prompt_tokens: int | None = arg(f"of the prompt, in place of a text ({PROMPT:,})", "N")
    train_seq: int | None = arg("tokens of a sequence of the training step beside it (8,192)", "N")
    engine: str | None = arg("the software assumed on the cluster (tensorrt-llm; on CPUs shardwise-cpu)", "PROFILE")


def run(args: Any) -> int:
    """Print the comparison that `args` asks for: measured here, where there is no --cluster or a prompt for a folder of
    weights; predicted with --cluster. Raises `UserError`, and `RunFailed` when a rank dies."""
    prompted = bool(args.prompt or args.prompt_file or args.tokens)
    here = args.cluster is None or (prompted and Path(args.model).is_dir())
    idle = "layout report emulate stop prompts temperature top_k top_p seed"
    idle += " engine train_seq link network" * (args.cluster is None) + " prompt_tokens" * prompted
    leave_out(args, f"{idle} {'set' if here else HERE}", "does nothing here: leave it out with --compare")
    measured = _measured(args, prompted) if here else None
    data = {"measured": measured.to_json()} if measured else {}
    lines: Iterable[Renderable] = measured.tables() if measured else ()
    if args.cluster is not None:
        predicted = _predicted(args, measured)
        data["predicted"] = predicted.to_json()
        lines = chain(lines, [""] if measured else [], tables(predicted))
    return print_result(args, data, lines)


@dataclass(frozen=True)
class LocalMeasurement:
    """Strategies measured on this machine."""

    model: str
    prompts: list[list[int]]
    strategies: list[Here]

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt_tokens": [len(prompt) for prompt in self.prompts],
            "strategies": [one.to_json() for one in self.strategies],
        }

    def tables(self) -> Iterator[Renderable]:
        from shardwise.cli.compare_local import tables

        return tables(self.model, self.strategies, len(self.prompts))


def _measured(args: Any, prompted: bool) -> LocalMeasurement:
    from shardwise.cli import compare_local
    from shardwise.planner.strategies import check_different

    if not Path(args.model).is_dir():
        raise UserError(f"{args.model} is no folder of weights: give one, or predict with --cluster 8xH100")
    layouts = layouts_of(args)
    if not layouts:
        raise UserError('--compare needs layouts to run here, such as "tp=2" "zero=3,dp=2" "pp=2"')
    check_different(layouts)
    request = _asked(args, prompt=SHORT_PROMPT, output=SHORT_OUTPUT)
    prompts = read_prompts(args)[0] if prompted else _stand_ins(model_named(args).vocab, request)
    terminal = sys.stderr.isatty()
    measured = compare_local.measure(
        args, layouts, prompts, request.output, lambda line: print(line, file=sys.stderr) if terminal else None
    )
    return LocalMeasurement(args.model, prompts, measured)


def _stand_ins(vocab: int, request: Asked) -> list[list[int]]:
    """Tokens that are no text, different ones for each sequence."""
    return [[(7919 * i + 104729 * n + 1) % vocab for i in range(request.prompt)] for n in range(request.batch)]


def _predicted(args: Any, measured: LocalMeasurement | None) -> StrategyComparison:
    from shardwise.planner.strategies import compare, usual_layouts

    model, cluster = model_named(args), cluster_of(args)
    if args.link is not None:
        cluster = cluster.with_link(args.link * 1e9)
    layouts = layouts_of(args) or usual_layouts(model, cluster)
    if not layouts:
        raise UserError(f"no strategy splits {model.name} over all {cluster.devices} devices: name layouts to compare")
    request = _asked(args)
    if measured:
        output = len(measured.strategies[0].tokens[0])
        request = replace(request, prompt=max(map(len, measured.prompts)), batch=len(measured.prompts), output=output)
    return compare(model, layouts, cluster, request, args.engine)


def layouts_of(args: Any) -> list[Layout]:
    """Those that --compare names."""
    layouts = [Layout.parse(text) for text in args.compare or ()]
    return [replace(layout, precision=args.precision) for layout in layouts] if args.precision else layouts


def _asked(args: Any, prompt: int = PROMPT, output: int = OUTPUT) -> Asked:
    from shardwise.planner.strategies import CHUNK, SEQ, Asked

    def given(name: str, otherwise: int) -> int:
        value = getattr(args, name)
        return otherwise if value is None else value

    return Asked(
        given("prompt_tokens", prompt), given("max_tokens", output), given("batch", 1), given("chunk", CHUNK),
        given("train_seq", SEQ), args.quantize == "int8",
    )  # fmt: skip


def model_named(args: Any) -> ModelConfig:
    """The model of the catalog, of a config.json, or of a folder of weights. Raises `UserError`."""
    folder, changes = Path(args.model), ",".join(args.set)
    if folder.is_dir() and not (folder / "config.json").exists():
        from shardwise.serving.job import weights_in

        return change(weights_in(folder)[0], changes)
    return change(resolve(args.model), changes)


def tables(comparison: StrategyComparison) -> Iterator[Renderable]:
    """All that is printed."""
    request = comparison.asked
    many = "one sequence"
    if request.batch > 1:
        many = f"batch size {request.batch:,} (a step gives each sequence one token)"
    yield (
        f"{comparison.model.name}: {size_words(comparison.model)} on {comparison.cluster}, "
        f"predicted for the software of {comparison.engine}; {many}, a prompt of {request.prompt:,} tokens and an "
        f"answer of {request.output:,}\n"
    )
    rows = [(words, [cell(one) for one in comparison.strategies]) for words, cell in _rows(comparison)]
    yield rows_by_name([str(one.layout) for one in comparison.strategies], rows)
    yield from comparison.warnings
    yield from _ratios(comparison)
    for ratio in comparison.expert_ratios:
        yield (
            f"\n{ratio.spread} over {ratio.tensor}: a token sends {ratio.blocks:.3g} times the bytes for the blocks "
            f"({ratio.total:.3g} times in all) and takes {ratio.seconds:.3g} times as long"
        )
    yield from _notes(comparison)


Row = tuple[str, "Callable[[Generated], str]"]


def _rows(comparison: StrategyComparison) -> Iterator[Row]:
    yield f"a rank sends for {_step(comparison)} (ring volume)", lambda one: format_bytes(float(one.round.volume.total))
    yield "  blocks", lambda one: format_bytes(float(one.round.volume.blocks))
    yield "  embedding, head, logits", lambda one: format_bytes(float(one.round.volume.edges))
    yield "  control, chosen tokens", lambda one: format_bytes(float(one.round.volume.other))
    yield from _timed(comparison)
    yield from _held(comparison)
    yield from _trained(comparison)


def _step(comparison: StrategyComparison) -> str:
    """Unit of bytes and times: one more token of every sequence."""
    return "a token" if comparison.asked.batch == 1 else f"a step of {comparison.asked.batch:,} tokens"


def _timed(comparison: StrategyComparison) -> Iterator[Row]:
    def part(name: str) -> Callable[[Generated], str]:
        return lambda one: format_time(seconds) if (seconds := one.middle.parts.get(name, 0.0)) else ""

    yield f"time of {_step(comparison)}", lambda one: format_time(one.middle.seconds)
    yield "  80% range, from", lambda one: format_time(one.range[0])
    yield "  to", lambda one: format_time(one.range[1])
    for name, words in time_parts.TOKEN.items():
        if any(one.middle.parts.get(name) for one in comparison.strategies):
            yield f"  {words}", part(name)
    yield "  last token against first", lambda one: format_share(one.growth, signed=True)
    yield "tokens/s, all sequences", lambda one: format_count(one.tokens_per_second(comparison.asked.batch))
    yield "prompt until its first token", lambda one: format_time(one.prompt.seconds)


def _held(comparison: StrategyComparison) -> Iterator[Row]:
    yield "weights of a rank", lambda one: format_bytes(one.fit.held.all_weights)
    if any(one.fit.held.slots for one in comparison.strategies):
        yield "  of them gathered, in buffers", lambda one: format_bytes(slots) if (slots := one.fit.held.slots) else ""
    yield "cache of a rank after the prompt", lambda one: format_bytes(one.cache_bytes[0])
    yield "  at the end of the answer", lambda one: format_bytes(one.cache_bytes[1])
    yield "  fits", lambda one: "" if one.fit.room is None else "yes" if one.fit.fits else "no"


def _trained(comparison: StrategyComparison) -> Iterator[Row]:
    words = f"{comparison.strategies[0].layout.ranks} x {comparison.strategies[0].trained.seq:,} tokens"
    if len({one.layout.ranks for one in comparison.strategies}) > 1:
        words = f"{comparison.strategies[0].trained.seq:,} tokens a rank"
    yield f"a training step of {words}", lambda one: format_time(one.trained.seconds)
    yield "  needs of a rank", lambda one: format_bytes(one.trained.peak)
    yield "  fits", lambda one: {"fits": "yes", "does not fit": "no"}.get(one.trained.state, one.trained.state)
    yield "  moving data, not hidden", lambda one: format_share(one.trained.share)
    yield "  a block's arithmetic, forward", lambda one: format_time(one.trained.arithmetic)
    yield "  its gather, beside it", lambda one: format_time(one.trained.gather) if one.trained.gather else ""


def _ratios(comparison: StrategyComparison) -> Iterator[str]:
    for ratio in comparison.ratios:
        yield (
            f"\n{ratio.gathering} over {ratio.tensor}: a token sends {ratio.blocks:,.0f} times the bytes for the "
            f"blocks ({ratio.total:,.0f} times in all) and takes {ratio.seconds:.0f} times as long"
        )
        yield (
            f"  for the blocks of one token it is (block parameters) / (4 x layers x hidden) = {ratio.tokens:,.0f}, on "
            "any number of ranks"
        )
        yield (
            f"  a pass of {format_count(ratio.tokens)} tokens and more sends fewer bytes by gathering; {_faster(ratio)}"
        )


def _faster(ratio: Ratio) -> str:
    if ratio.faster is None:
        return "it is not faster with any number of tokens"
    return f"it is faster from about {format_count(ratio.faster)} on"


def _notes(comparison: StrategyComparison) -> Iterator[str]:
    host = comparison.cluster.device.kind == "cpu"
    gathering = [one for one in comparison.strategies if one.trained.gather]
    for one in gathering if not host else ():
        behind = "disappears behind" if one.trained.gather <= one.trained.arithmetic else "is longer than"
        yield f"\nin training, a block's gather under {one.layout} {behind} its arithmetic; for a token it is exposed"
    if gathering and comparison.asked.batch == 1:
        yield "one sequence: under zero=3 all ranks compute it, and gather for it what they would for one each"
    if host:
        yield "on CPUs nothing hides a gather; what Python takes between operations is not in a token's time"
    trained = comparison.strategies[0].trained
    words = f"--seq {trained.seq} --batch {trained.layout.ranks}"
    yield f"the training step is that of `shardwise estimate {words}`, as {trained.engine} runs it"

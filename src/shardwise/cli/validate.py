"""Score the time model on published measurements: predicted against measured, source by source.

TABLE.json is a list of objects, one a measurement; without it, the project's own small table is scored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from shardwise.cli.declare import CommandOptions, arg, word
from shardwise.cli.output import print_result
from shardwise.codec import keyed, plain
from shardwise.errors import UserError
from shardwise.records import dataclass
from shardwise.report.table import FittedTable, plain_table
from shardwise.report.terminal import Renderable
from shardwise.report.units import format_things
from shardwise.validation import scoreboard


@dataclass
class ValidateOptions(CommandOptions):
    tables: tuple[Path, ...] = word("published measurements", "TABLE.json", ())
    runs: bool = arg("large published runs, which no constant is fitted on")
    rows: bool = arg("every row, not the missed ones alone")
    experts: bool = arg("models with experts instead, each with ranges fitted without it")
    left_out: bool = arg("errors and ranges with each source left out of the fit, beside in-sample")
    memory: bool = arg("peak memory of published runs, engine by engine")
    blocks: Path | None = arg("kernels and blocks measured on one device instead", "FILE")


def run(args: ValidateOptions) -> int:
    if args.blocks:
        return _blocks(args, args.blocks)
    rows = [row for table in _tables(args) for row in scoreboard.read(table)]
    if args.memory:
        return _memory(args, scoreboard.memory_scores(rows))
    runs_to_score, skipped = scoreboard.cases(rows)
    if args.left_out:
        return _left_out(args, scoreboard.left_out_scores(runs_to_score, skipped))
    predictions, refused = scoreboard.predict(runs_to_score)
    if args.experts:
        return _experts(args, predictions)
    ranked = scoreboard.scores(predictions, [*skipped, *refused])
    sources = plain(ranked)
    for source in sources if args.rows else ():
        source["predictions"] = [_row(one) for one in predictions if one.case.source == source["source"]]
    shown = _row_lines(predictions, args.rows), _memory_lines(rows), _assumed_lines(predictions), _skipped_lines(ranked)
    return print_result(args, sources, chain([_scores(ranked)], *shown))


def _tables(args: ValidateOptions) -> list[Path]:
    if args.runs:
        return [*args.tables, scoreboard.RUNS]
    if args.memory:
        return list(args.tables) or [scoreboard.MEMORY]
    return list(args.tables) or [scoreboard.PUBLISHED]


def _memory(args: ValidateOptions, ranked: list[scoreboard.MemoryScore]) -> int:
    """Print the errors of peak memory, source by source; all rows with --rows."""
    headings = ("rows", "mean error", "held out", "mean error, held out", "bias")
    table = plain_table(["source"], headings, "peak memory, predicted against measured")
    for score in ranked:
        held_out = sum(not one.read for one in score.rows)
        shares = (score.mean_abs_error, score.held_out_error, score.bias)
        error, outside, bias = ("-" if share is None else f"{100 * share:.1f}%" for share in shares)
        table.add_row(score.source, len(score.rows), error, held_out, outside, bias)
    lines: list[Renderable] = [table]
    for score in ranked:
        for one in score.rows if args.rows else ():
            lines.append(one.describe())
        lines += _skipped_lines([score])
    lines.append("held out: rows that predict/memory/engines.toml was not read from")
    data = [
        keyed(score, "source mean_abs_error held_out_error bias skipped")
        | {"rows": [{"row": dict(one.row)} | keyed(one, "bytes=nbytes measured error read") for one in score.rows]}
        for score in ranked
    ]
    return print_result(args, data, lines)


def _experts(args: ValidateOptions, predictions: list[scoreboard.Prediction]) -> int:
    """Print the errors of models with experts, one model at a time."""
    ranked = scoreboard.mixture_scores(predictions)
    if not ranked:
        raise UserError("no row of these tables trains a model with experts that can be predicted")
    headings = ("rows", "mean error", "bias", "in the range fitted without it", "its width", "uncertainty")
    table = plain_table(["model"], headings, "models with experts, each left out")
    for score in ranked:
        shares = (score.mean_abs_error, score.bias, score.coverage, score.mean_width, score.routed)
        table.add_row(score.model, score.rows, *(f"{100 * share:.1f}%" for share in shares))
    note = "no constant is fitted on these rows, so their errors are the same with a model left out"
    return print_result(args, ranked, [table, note])


def _left_out(args: ValidateOptions, ranked: list[scoreboard.LeftOutScore]) -> int:
    """Print each source's error with and without it among what was fitted on."""
    if not any(score.rows for score in ranked):
        reasons = "; ".join(dict.fromkeys(why for score in ranked for why in score.skipped))
        raise UserError(f"no row of these tables can be predicted{f': {reasons}' if reasons else ''}")
    headings = ("rows", "in-sample", "left out", "dense", "bias", "in range", "width", "interval score")
    table = plain_table(["source"], headings, "mean errors, with each source left out of the fit")
    for score in ranked:
        shares = (score.in_sample, score.left_out, score.dense, score.bias, score.coverage, score.mean_width)
        shown = ("-" if share is None else f"{100 * share:.1f}%" for share in shares)
        name = score.source if score.fitted_on else f"{score.source} (never fitted on)"
        interval = "-" if score.interval_score is None else f"{score.interval_score:.2f}"
        table.add_row(name, score.rows, *shown, interval)
    lines: list[Renderable] = [table]
    large = [score.large for score in ranked if score.large is not None]
    if large:
        billions = f"{scoreboard.LARGE / 1e9:.0f}B"
        lines.append(f"dense models of {billions} and more, in-sample, mean over sources: {fmean(large):.1%}")
    lines.append(f"inside the 80% range, mean over sources: {scoreboard.weighted_coverage(ranked):.1%}")
    return print_result(args, ranked, chain(lines, _skipped_lines(ranked)))


def _blocks(args: ValidateOptions, file: Path) -> int:
    """Print the errors of kernels and blocks, one model left out at a time."""
    scores = scoreboard.block_scores(*scoreboard.read_blocks(file))
    table = plain_table(["kind"], ("rows", "mean error", "bias", "worst model"), "each model left out")
    for score in scores:
        shares = (score.mean_abs_error, score.bias, score.worst)
        table.add_row(score.kind, score.rows, *(f"{100 * share:.1f}%" for share in shares))
    return print_result(args, scores, [table])


def _row(one: scoreboard.Prediction) -> dict[str, Any]:
    reason = scoreboard.reason(one) if abs(one.error) > scoreboard.MISS else None
    keys = "seconds low=range.low high=range.high measured_seconds=measured error inside assumed=case.assumed"
    return {"case": one.case.describe(), **keyed(one, keys), "reason": reason}


def _scores(ranked: list[scoreboard.Score]) -> FittedTable:
    headings = ("rows", "median error", "mean", "90th percentile", "bias", "in the 80% range", "its width", "skipped")
    table = plain_table(["source"], headings, "predicted against measured", drop=("90th percentile", "skipped"))
    for score in ranked:
        errors = (score.median_abs_error, score.mean_abs_error, score.p90_abs_error, score.bias)
        shares = (*errors, score.coverage, score.mean_width)
        shown = ("-" if share is None else f"{100 * share:.1f}%" for share in shares)
        table.add_row(score.source, score.rows, *shown, sum(score.skipped.values()))
    return table


def _memory_lines(rows: list[Any]) -> Iterator[str]:
    """Errors of predicted states and activations for rows with measured memory."""
    for score in scoreboard.memory_scores(rows):
        if score.mean_abs_error is not None and score.bias is not None:
            yield (
                f"{score.source}: memory of {len(score.rows)} rows, mean error {100 * score.mean_abs_error:.1f}%, "
                f"bias {100 * score.bias:+.1f}%"
            )
        for why, count in score.skipped.items():
            yield f"{score.source}: memory of {format_things(count, 'row')} skipped: {why}"


def _assumed_lines(predictions: list[scoreboard.Prediction]) -> Iterator[str]:
    """The settings that rows leave out, with the values assumed for them."""
    counts = Counter((one.case.source, words) for one in predictions for words in one.case.assumed)
    for (source, words), count in counts.items():
        yield f"{source}: assumed for {format_things(count, 'row')}: {words}"


def _skipped_lines(
    ranked: Sequence[scoreboard.Score | scoreboard.LeftOutScore | scoreboard.MemoryScore],
) -> Iterator[str]:
    """How many rows of each source are not scored, by reason."""
    for score in ranked:
        for why, count in score.skipped.items():
            yield f"{score.source}: {format_things(count, 'row')} skipped: {why}"


def _row_lines(predictions: list[scoreboard.Prediction], every: bool) -> Iterator[str]:
    listed = [one for one in predictions if every or abs(one.error) > scoreboard.MISS]
    if not listed:
        return
    yield f"\n{'all rows' if every else f'rows off by more than {scoreboard.MISS:.0%}'}:"
    for one in sorted(listed, key=lambda one: (one.case.source, -abs(one.error))):
        why = scoreboard.reason(one) if abs(one.error) > scoreboard.MISS else ""
        yield f"{one.case.source}: {100 * one.error:+.0f}%  {one.case.describe()}{f': {why}' if why else ''}"

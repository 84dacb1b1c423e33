"""Score the time model on published measurements: predicted against measured, source by source.

TABLE.json is a list of objects, one a measurement; without it, the project's own small table is scored.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from shardwise.cli.output import print_json, show
from shardwise.errors import UserError
from shardwise.report.terminal import plain_table

if TYPE_CHECKING:
    from shardwise.validation import scoreboard
    from shardwise.validation.scoreboard import Prediction, Score


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tables", nargs="*", type=Path, metavar="TABLE.json", help="published measurements")
    parser.add_argument("--runs", action="store_true", help="large published runs, which no constant is fitted on")
    parser.add_argument("--rows", action="store_true", help="every row, not the missed ones alone")
    parser.add_argument(
        "--experts", action="store_true", help="models with experts instead, each with ranges fitted without it"
    )
    parser.add_argument(
        "--left-out",
        action="store_true",
        help="errors and ranges with each source left out of the fit, beside in-sample",
    )
    parser.add_argument("--memory", action="store_true", help="peak memory of published runs, engine by engine")
    parser.add_argument("--blocks", type=Path, metavar="FILE", help="kernels and blocks measured on one device instead")


def run(args: argparse.Namespace) -> int:
    from shardwise.validation import scoreboard

    if args.blocks:
        return _blocks(args)
    rows = [row for table in _tables(args) for row in scoreboard.read(table)]
    if args.memory:
        return _memory(scoreboard.memory_scores(rows), args.rows, args.json)
    runs_to_score, skipped = scoreboard.cases(rows)
    if args.left_out:
        return _left_out(scoreboard.left_out_scores(runs_to_score, skipped), args.json)
    predictions, refused = scoreboard.predict(runs_to_score)
    if args.experts:
        return _experts(predictions, args.json)
    ranked = scoreboard.scores(predictions, [*skipped, *refused])
    if args.json:
        sources = [asdict(score) for score in ranked]
        for source in sources if args.rows else ():
            source["predictions"] = [_row(one) for one in predictions if one.case.source == source["source"]]
        print_json(sources)
        return 0
    _print_scores(ranked)
    _print_rows(predictions, args.rows)
    _print_memory(rows)
    _print_assumed(predictions)
    _print_skipped(ranked)
    return 0


def _tables(args: argparse.Namespace) -> list[Path]:
    from shardwise.validation import scoreboard

    if args.runs:
        return [*args.tables, scoreboard.RUNS]
    if args.memory:
        return args.tables or [scoreboard.MEMORY]
    return args.tables or [scoreboard.PUBLISHED]


def _memory(ranked: list[scoreboard.MemoryScore], every: bool, as_json: bool) -> int:
    """Print the errors of peak memory, source by source; all rows if `every`."""
    if as_json:
        print_json([_memory_json(score) for score in ranked])
        return 0
    headings = ("rows", "mean error", "held out", "mean error, held out", "bias")
    table = plain_table(["source"], headings, "peak memory, predicted against measured")
    for score in ranked:
        held_out = sum(not one.read for one in score.rows)
        shares = (score.mean_abs_error, score.held_out_error, score.bias)
        error, outside, bias = ("-" if share is None else f"{100 * share:.1f}%" for share in shares)
        table.add_row(score.source, str(len(score.rows)), error, str(held_out), outside, bias)
    show(table)
    for score in ranked:
        for one in score.rows if every else ():
            print(one.describe())
        for why, count in score.skipped.items():
            print(f"{score.source}: {_rows(count)} skipped: {why}")
    print("held out: rows that predict/memory/engines.toml was not read from")
    return 0


def _memory_json(score: scoreboard.MemoryScore) -> dict[str, Any]:
    return {
        "source": score.source,
        "mean_abs_error": score.mean_abs_error,
        "held_out_error": score.held_out_error,
        "bias": score.bias,
        "skipped": score.skipped,
        "rows": [
            {"row": dict(one.row), "bytes": one.nbytes, "measured": one.measured, "error": one.error, "read": one.read}
            for one in score.rows
        ],
    }


def _experts(predictions: list[Prediction], as_json: bool) -> int:
    """Print the errors of models with experts, one model at a time."""
    from shardwise.validation import scoreboard

    ranked = scoreboard.mixture_scores(predictions)
    if not ranked:
        raise UserError("no row of these tables trains a model with experts that can be predicted")
    if as_json:
        print_json([asdict(score) for score in ranked])
        return 0
    headings = ("rows", "mean error", "bias", "in the range fitted without it", "its width", "uncertainty")
    table = plain_table(["model"], headings, "models with experts, each left out")
    for score in ranked:
        shares = (score.mean_abs_error, score.bias, score.coverage, score.mean_width, score.routed)
        table.add_row(score.model, str(score.rows), *(f"{100 * share:.1f}%" for share in shares))
    show(table)
    print("no constant is fitted on these rows, so their errors are the same with a model left out")
    return 0


def _left_out(ranked: list[scoreboard.LeftOutScore], as_json: bool) -> int:
    """Print each source's error with and without it among what was fitted on."""
    from shardwise.validation import scoreboard

    if not any(score.rows for score in ranked):
        reasons = "; ".join(dict.fromkeys(why for score in ranked for why in score.skipped))
        raise UserError(f"no row of these tables can be predicted{f': {reasons}' if reasons else ''}")
    if as_json:
        print_json([asdict(score) for score in ranked])
        return 0
    headings = ("rows", "in-sample", "left out", "dense", "bias", "in range", "width", "interval score")
    table = plain_table(["source"], headings, "mean errors, with each source left out of the fit")
    for score in ranked:
        shares = (score.in_sample, score.left_out, score.dense, score.bias, score.coverage, score.mean_width)
        shown = ("-" if share is None else f"{100 * share:.1f}%" for share in shares)
        name = score.source if score.fitted_on else f"{score.source} (never fitted on)"
        interval = "-" if score.interval_score is None else f"{score.interval_score:.2f}"
        table.add_row(name, str(score.rows), *shown, interval)
    show(table)
    large = [score.large for score in ranked if score.large is not None]
    if large:
        print(
            f"dense models of {scoreboard.LARGE / 1e9:.0f}B and more, in-sample, mean over sources: {fmean(large):.1%}"
        )
    print(f"inside the 80% range, mean over sources: {scoreboard.weighted_coverage(ranked):.1%}")
    _print_skipped(ranked)
    return 0


def _blocks(args: argparse.Namespace) -> int:
    """Print the errors of kernels and blocks, one model left out at a time."""
    from shardwise.validation import scoreboard

    scores = scoreboard.block_scores(*scoreboard.read_blocks(args.blocks))
    if args.json:
        print_json([asdict(score) for score in scores])
        return 0
    table = plain_table(["kind"], ("rows", "mean error", "bias", "worst model"), "each model left out")
    for score in scores:
        shares = (score.mean_abs_error, score.bias, score.worst)
        table.add_row(score.kind, str(score.rows), *(f"{100 * share:.1f}%" for share in shares))
    show(table)
    return 0


def _rows(count: int) -> str:
    return f"{count} row{'s' if count > 1 else ''}"


def _row(one: Prediction) -> dict[str, Any]:
    from shardwise.validation import scoreboard
    from shardwise.validation.scoreboard import MISS

    return {
        "case": one.case.describe(),
        "seconds": one.seconds,
        "low": float(one.range.low),
        "high": float(one.range.high),
        "measured_seconds": one.measured,
        "error": one.error,
        "inside": one.inside,
        "assumed": list(one.case.assumed),
        "reason": scoreboard.reason(one) if abs(one.error) > MISS else None,
    }


def _print_scores(ranked: list[Score]) -> None:
    headings = ("rows", "median error", "mean", "90th percentile", "bias", "in the 80% range", "its width", "skipped")
    table = plain_table(["source"], headings, "predicted against measured")
    for score in ranked:
        errors = (score.median_abs_error, score.mean_abs_error, score.p90_abs_error, score.bias)
        shares = (*errors, score.coverage, score.mean_width)
        shown = ("-" if share is None else f"{100 * share:.1f}%" for share in shares)
        table.add_row(score.source, str(score.rows), *shown, str(sum(score.skipped.values())))
    show(table)


def _print_memory(rows: list[Any]) -> None:
    """Errors of predicted states and activations for rows with measured memory."""
    from shardwise.validation import scoreboard

    for score in scoreboard.memory_scores(rows):
        if score.mean_abs_error is not None and score.bias is not None:
            print(
                f"{score.source}: memory of {len(score.rows)} rows, mean error {100 * score.mean_abs_error:.1f}%, "
                f"bias {100 * score.bias:+.1f}%"
            )
        for why, count in score.skipped.items():
            print(f"{score.source}: memory of {_rows(count)} skipped: {why}")


def _print_assumed(predictions: list[Prediction]) -> None:
    """Print the settings that rows leave out, with the values assumed for them."""
    counts = Counter((one.case.source, words) for one in predictions for words in one.case.assumed)
    for (source, words), count in counts.items():
        print(f"{source}: assumed for {_rows(count)}: {words}")


def _print_skipped(ranked: Sequence[Score | scoreboard.LeftOutScore]) -> None:
    """Print how many rows of each source are not scored, by reason."""
    for score in ranked:
        for why, count in score.skipped.items():
            print(f"{score.source}: {_rows(count)} skipped: {why}")


def _print_rows(predictions: list[Prediction], every: bool) -> None:
    from shardwise.validation import scoreboard
    from shardwise.validation.scoreboard import MISS

    listed = [one for one in predictions if every or abs(one.error) > MISS]
    if not listed:
        return
    print(f"\n{'all rows' if every else f'rows off by more than {MISS:.0%}'}:")
    for one in sorted(listed, key=lambda one: (one.case.source, -abs(one.error))):
        why = scoreboard.reason(one) if abs(one.error) > MISS else ""
        print(f"{one.case.source}: {100 * one.error:+.0f}%  {one.case.describe()}{f': {why}' if why else ''}")

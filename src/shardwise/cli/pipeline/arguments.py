"""Arguments of several actions: a schedule, what its actions take, which layers its stages have."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.cli.quantities import bytes_of
from shardwise.errors import UserError

if TYPE_CHECKING:
    from shardwise.schedule.pipeline import PipelineSchedule
    from shardwise.schedule.pipeline.times import Times

GENERATOR_OPTIONS = {
    "warmup": "forwards of rank 0 before its first pair (1f1b); left out, P - 1",
    "tokens": "tokens of each micro-batch (decode)",
}


def add_schedule(parser: argparse.ArgumentParser) -> None:
    """Flags that `schedule_of` reads."""
    parser.add_argument("schedule", metavar="SCHEDULE", nargs="?")
    parser.add_argument("--file", type=Path, help="instead: a schedule written by show, or by torch (.csv)")
    parser.add_argument("--ranks", type=int, metavar="P", help="stages of the pipeline, one a rank")
    parser.add_argument("--micro", type=int, metavar="M", help="micro-batches of a step")
    parser.add_argument(
        "--virtual", type=int, metavar="V", help="chunks of the model on each rank (as few as possible)"
    )
    add_variants(parser)
    for option, text in GENERATOR_OPTIONS.items():
        parser.add_argument(f"--{option}", type=int, metavar="N", help=text)


def add_variants(parser: argparse.ArgumentParser) -> None:
    """Flags of what any schedule may have besides."""
    parser.add_argument("--zero", type=int, default=0, metavar="Z", help="ZeRO stage: adds gathers and reductions")
    parser.add_argument("--tied", action="store_true", help="the embedding is the head's table, too")
    text = "a B sends its input's gradient before it computes those of weights (as training does)"
    parser.add_argument("--early", action="store_true", help=text)


def add_times(parser: argparse.ArgumentParser) -> None:
    """Flags that `timing_of` reads."""
    text = "what a rank takes for one micro-batch, all its chunks: F=20ms,I=20ms,W=20ms or F=20ms,B=40ms"
    parser.add_argument("--times", default="F=1,I=1,W=1", metavar="F=,I=,W=", help=text)
    parser.add_argument("--together", type=float, default=1.0, metavar="X", help="an overlapped F&B takes X (F + B)")
    parser.add_argument("--hop", default="0", metavar="TIME", help="latency of a message between stages")
    parser.add_argument("--bytes", metavar="SIZE", help="of one message, such as 16MB; with --bandwidth")
    parser.add_argument("--bandwidth", metavar="SIZE", help="bytes a second of a link, such as 50GB")
    parser.add_argument("--no-overlap", action="store_true", help="a sender stands still while its message leaves")


def add_stages(parser: argparse.ArgumentParser) -> None:
    """Flags that `shares_of` reads, and what stages hold."""
    parser.add_argument("--layers", type=int, metavar="N", help="layers of the model, as evenly as can be")
    parser.add_argument("--stages", metavar="N/N/...", help="layers of each stage: 21/20/20/19")
    parser.add_argument("--head", type=float, default=0.0, metavar="X", help="the head's work, in layers")
    parser.add_argument(
        "--weight-share", type=float, default=1.0, metavar="X", help="part of what F saves that W needs"
    )
    text = "recompute in backward: F keeps the part X of what it saves otherwise, and I does F once more"
    parser.add_argument("--recompute", type=float, metavar="X", help=text)


def schedule_of(args: argparse.Namespace) -> PipelineSchedule:
    """The schedule of --file, or of a name and numbers. Raises `UserError` where these are missing or not legal."""
    from shardwise.schedule.pipeline import build, find

    if bool(args.schedule) == bool(args.file):
        raise UserError(f"{args.action} needs either SCHEDULE or --file")
    if args.file:
        return read(args, ("ranks", "micro", "virtual", "early", *GENERATOR_OPTIONS))
    if args.ranks is None or args.micro is None:
        raise UserError(f"{args.action} needs --ranks and --micro")
    known = find(args.schedule)
    options = {name: value for name in GENERATOR_OPTIONS if (value := getattr(args, name)) is not None}
    virtual = known.virtual if args.virtual is None else args.virtual
    sized(args.ranks, args.micro, virtual, options.get("tokens", known.options.get("tokens", 1)))
    return build(
        known.name, args.ranks, args.micro, virtual, zero=args.zero, tied=args.tied, early=args.early, **options
    )


def sized(ranks: int, micro: int, virtual: int, tokens: int = 1) -> None:
    """Raise `UserError` for numbers that make no schedule, or one too large to be written out action by action."""
    from shardwise.schedule.pipeline.plan import MOST_PASSES

    for name, value in (("ranks", ranks), ("micro", micro), ("virtual", virtual), ("tokens", tokens)):
        if value < 1:
            raise UserError(f"--{name} must be a positive integer, not {value}")
    item = ranks * virtual * tokens
    if (cells := item * micro) > MOST_PASSES:
        counts = [count(ranks, "rank"), count(micro, "micro-batch")]
        counts += [count(n, what) for n, what in ((virtual, "chunk"), (tokens, "token")) if n > 1]
        most = f": --micro {MOST_PASSES // item} at most" if item <= MOST_PASSES else ""
        raise UserError(f"{' x '.join(counts)} are {cells:,} passes; up to {MOST_PASSES:,} are written out{most}")


def read(args: argparse.Namespace, others: Sequence[str]) -> PipelineSchedule:
    """The schedule of --file. Raises `UserError` that names it, and for those of the flags `others`, and of --zero and
    --tied, that say what stands in the file."""
    from shardwise.schedule.pipeline.show import from_csv, from_text

    path: Path = args.file
    if path.suffix != ".csv":
        others = (*others, "zero", "tied")
    absent = {"zero": 0, "tied": False, "early": False}
    if params := [name for name in others if getattr(args, name) != absent.get(name)]:
        raise UserError(f"a schedule of --file has its own numbers: leave --{params[0]} out")
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read schedule {path}: {getattr(error, 'strerror', None) or 'not text'}") from None
    try:
        return from_csv(text, path.stem, zero=args.zero, tied=args.tied) if path.suffix == ".csv" else from_text(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def check(schedule: PipelineSchedule) -> None:
    """Raises `UserError` for a schedule that is wrong."""
    from shardwise.schedule.pipeline.verify import verify

    if wrong := verify(schedule):
        raise UserError(f"this schedule is wrong: {wrong[0]}")


def timing_of(args: argparse.Namespace) -> Callable[[PipelineSchedule], Times]:
    """Schedule -> times, from the flags. Raises `UserError` for flags without effect."""
    from shardwise.schedule.pipeline.times import Times, parse_times, seconds_of

    params, alpha = parse_times(args.times), seconds_of(args.hop)
    if (args.bytes is None) != (args.bandwidth is None):
        raise UserError("--bytes and --bandwidth go together: a message takes --hop + bytes / bandwidth")
    nbytes = 0 if args.bytes is None else bytes_of("--bytes", args.bytes)
    bandwidth = 1 if args.bandwidth is None else bytes_of("--bandwidth", args.bandwidth)
    if not bandwidth or not 0 < args.together <= 1:
        raise UserError("--bandwidth must be positive, and --together above 0 and at most 1")
    recompute = getattr(args, "recompute", None) is not None

    def timing(schedule: PipelineSchedule) -> Times:
        again = params["F"] if recompute else 0.0
        times = Times.shared(schedule, params["F"], params["I"] + again, params["W"], shares_of(args, schedule))
        times = times.with_hop(alpha, 1 / bandwidth, nbytes, not args.no_overlap)
        return replace(times, together=args.together)

    return timing


def shares_of(args: argparse.Namespace, schedule: PipelineSchedule) -> tuple[float, ...]:
    """Each stage's part of the model's work; empty for equal ones. Raises `UserError` for layers that do not fit."""
    from shardwise.schedule.pipeline.plan import MOST_PASSES, StageLayers

    layers = getattr(args, "layers", None)
    if layers is not None and layers < 1:
        raise UserError(f"--layers must be a positive integer, not {layers}")
    if getattr(args, "stages", None) is not None:
        stages = StageLayers.parse(args.stages, schedule.stages, layers)
    elif layers:
        stages = StageLayers.even(layers, schedule.stages)
    elif getattr(args, "head", 0):
        raise UserError("--head counts in layers: give --layers or --stages, too")
    else:
        return ()
    if not 0 <= args.head <= MOST_PASSES:
        raise UserError(f"--head must lie between 0 and {MOST_PASSES:,} layers, not {args.head:g}")
    return stages.shares(head=args.head)


def title(schedule: PipelineSchedule) -> str:
    """A schedule in one line."""
    chunks = f", {schedule.virtual} chunks a rank" if schedule.virtual > 1 else ""
    total = sum(map(len, schedule.actions))
    size = f"{count(schedule.ranks, 'rank')}, {count(schedule.micro, 'micro-batch')}{chunks}"
    return f"{schedule.name}: {size}; {total:,} actions"


def count(n: int, what: str) -> str:
    """1 rank, 2 ranks; 1 micro-batch, 2 micro-batches."""
    return f"{n} {what}" if n == 1 else f"{n} {what}{'es' if what.endswith('ch') else 's'}"

"""Arguments of several actions: a schedule, what its actions take, which layers its stages have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.cli.declare import CommandOptions, arg, leave_out, word
from shardwise.cli.quantities import bytes_of
from shardwise.errors import UserError
from shardwise.records import dataclass
from shardwise.report.units import format_things
from shardwise.schedule import pipeline
from shardwise.schedule.pipeline.plan import MOST_PASSES, PipelineSchedule, StageLayers
from shardwise.schedule.pipeline.times import Times, parse_times, seconds_of
from shardwise.schedule.pipeline.verify import verify

IN_FILE = "is in the schedule of --file: leave it out"


@dataclass
class VariantOptions(CommandOptions):
    """What any schedule may have besides."""

    zero: int = arg("ZeRO stage: adds gathers and reductions", "Z", 0, shown="")
    tied: bool = arg("the embedding is the head's table, too")
    early: bool = arg("a B sends its input's gradient before it computes those of weights (as training does)")


@dataclass
class ScheduleOptions(VariantOptions):
    """A schedule, for `schedule_of`."""

    schedule: str | None = word("", "SCHEDULE")
    file: Path | None = arg(
        "instead: a schedule written by show, or by torch (.csv)",
        excludes="schedule ranks micro virtual early warmup tokens",
        idle=IN_FILE,
    )
    ranks: int | None = arg("stages of the pipeline, one a rank", "P", positive=True)
    micro: int | None = arg("micro-batches of a step", "M", positive=True)
    virtual: int | None = arg("chunks of the model on each rank (as few as possible)", "V", positive=True)
    warmup: int | None = arg("forwards of rank 0 before its first pair (1f1b); left out, P - 1", "N")
    tokens: int | None = arg("tokens of each micro-batch (decode)", "N", positive=True)


@dataclass
class TimeOptions(CommandOptions):
    """Times of computations and messages, for `timing_of`."""

    times: str = arg(
        "what a rank takes for one micro-batch, all its chunks: F=20ms,I=20ms,W=20ms or F=20ms,B=40ms",
        "F=,I=,W=",
        "F=1,I=1,W=1",
    )
    together: float = arg("an overlapped F&B takes X (F + B)", "X", 1.0, positive=True, most=1)
    hop: str = arg("latency of a message between stages", "TIME", "0")
    bytes: int | None = arg("of one message, such as 16MB", "SIZE", needs="bandwidth", read=bytes_of)
    bandwidth: int | None = arg(
        "bytes a second of a link, such as 50GB", "SIZE", needs="bytes", read=bytes_of, positive=True
    )
    no_overlap: bool = arg("a sender stands still while its message leaves")


@dataclass
class StageOptions(CommandOptions):
    """Layers of the stages, for `shares_of`, and what stages hold."""

    layers: int | None = arg("layers of the model, as evenly as can be", "N", positive=True)
    stages: str | None = arg("layers of each stage: 21/20/20/19", "N/N/...")
    head: float = arg("the head's work, in layers", "X", 0.0)
    weight_share: float = arg("part of what F saves that W needs", "X", 1.0, least=0, most=1)
    recompute: float | None = arg(
        "recompute in backward: F keeps the part X of what it saves otherwise, and I does F once more",
        "X",
        least=0,
        most=1,
    )


def schedule_of(args: ScheduleOptions) -> PipelineSchedule:
    """The schedule of --file, or of a name and numbers. Raises `UserError` where these are missing or not legal."""
    if args.file:
        return read(args)
    if args.schedule is None:
        raise UserError("give either SCHEDULE or --file")
    if args.ranks is None or args.micro is None:
        raise UserError(f"{args.schedule} needs --ranks and --micro")
    known = pipeline.find(args.schedule)
    options = {name: value for name in ("warmup", "tokens") if (value := getattr(args, name)) is not None}
    virtual = known.virtual if args.virtual is None else args.virtual
    sized(args.ranks, args.micro, virtual, options.get("tokens", known.options.get("tokens", 1)))
    return pipeline.build(
        known.name, args.ranks, args.micro, virtual, zero=args.zero, tied=args.tied, early=args.early, **options
    )


def sized(ranks: int, micro: int, virtual: int, tokens: int = 1) -> None:
    """Raise `UserError` for numbers that make no schedule, or one too large to be written out action by action."""
    item = ranks * virtual * tokens
    if (cells := item * micro) > MOST_PASSES:
        counts = [format_things(ranks, "rank"), format_things(micro, "micro-batch")]
        counts += [format_things(n, what) for n, what in ((virtual, "chunk"), (tokens, "token")) if n > 1]
        most = f": --micro {MOST_PASSES // item} at most" if item <= MOST_PASSES else ""
        raise UserError(f"{' x '.join(counts)} are {cells:,} passes; up to {MOST_PASSES:,} are written out{most}")


def read(args: Any) -> PipelineSchedule:
    """The schedule of --file. Raises `UserError` that names it, and for --zero and --tied, where these are in it."""
    from shardwise.schedule.pipeline.show import from_csv, from_text

    path: Path = args.file
    if path.suffix != ".csv":
        leave_out(args, "zero tied", IN_FILE)
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
    if wrong := verify(schedule):
        raise UserError(f"this schedule is wrong: {wrong[0]}")


def timing_of(args: TimeOptions) -> Callable[[PipelineSchedule], Times]:
    """Schedule -> times, from the flags. Raises `UserError` for flags without effect."""
    params, alpha = parse_times(args.times), seconds_of(args.hop)
    recompute = getattr(args, "recompute", None) is not None

    def timing(schedule: PipelineSchedule) -> Times:
        again = params["F"] if recompute else 0.0
        times = Times.shared(schedule, params["F"], params["I"] + again, params["W"], shares_of(args, schedule))
        times = times.with_hop(alpha, 1 / (args.bandwidth or 1), args.bytes or 0, not args.no_overlap)
        return replace(times, together=args.together)

    return timing


def shares_of(args: Any, schedule: PipelineSchedule) -> tuple[float, ...]:
    """Each stage's part of the model's work; empty for equal ones. Raises `UserError` for layers that do not fit."""
    layers = getattr(args, "layers", None)
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
    size = f"{format_things(schedule.ranks, 'rank')}, {format_things(schedule.micro, 'micro-batch')}{chunks}"
    return f"{schedule.name}: {size}; {total:,} actions"

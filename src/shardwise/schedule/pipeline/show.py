"""A pipeline as people read it: a grid of ranks and time, and a plot of bubbles.

A pipeline as text: our own form, which has everything, and the CSV of `torch.distributed.pipelining` (2.13).

Text: a headline `pipeline 1f1b micro=8 stages=0/1/2/3 warmup=3`, where `stages` gives the rank of each stage, then one
line for each rank, `rank 0: 0F0 0SEND_F0 ...`.

CSV: one row for each rank, one action a cell, empty cells allowed. Of torch's two formats, "compute_comms" has all that
torch knows (not the tied table and the loss), and "compute_only" the computations alone; reading the latter puts
messages, gathers and reductions where `complete` would. Rows have no peers: they follow from the stages of each row.
"""

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from shardwise.errors import UserError
from shardwise.schedule.pipeline.action import COMPUTE, OURS, Action, parse_action
from shardwise.schedule.pipeline.completion import completed, endings
from shardwise.schedule.pipeline.plan import MOST_PASSES, PipelineSchedule
from shardwise.schedule.pipeline.registry import ZERO_STAGES
from shardwise.schedule.pipeline.simulate import simulate
from shardwise.schedule.pipeline.times import Times

MOST_CELLS = 400
"""Time units up to which a grid is drawn."""

_MARKS = "●■▲◆○□△◇✚✖✦"


def grid(schedule: PipelineSchedule) -> Iterator[str]:
    """One line a rank, one column a time unit, where F, I and W of each stage take one (B takes two).

    Empty where there are more than `MOST_CELLS` units.
    """
    simulated = simulate(schedule, Times.equal(schedule.stages, 1, 1, 1))
    units = int(simulated.makespan)
    if units > MOST_CELLS:
        return
    labels = [[_label(schedule, a) for a in mine if a.kind in COMPUTE] for mine in schedule.actions]
    spans = [[(int(a), int(b)) for a, b in mine] for mine in simulated.computing]
    width = 1 + max(
        -(-len(label) // (end - start))
        for named, timed in zip(labels, spans, strict=True)
        for label, (start, end) in zip(named, timed, strict=True)
    )
    for rank, (named, timed) in enumerate(zip(labels, spans, strict=True)):
        line, at = "", 0
        for label, (start, end) in zip(named, timed, strict=True):
            line += "·".ljust(width) * (start - at) + label.ljust((end - start) * width)
            at = end
        yield f"rank {rank:<2} {line}{'·'.ljust(width) * (units - at)}".rstrip()


def _label(schedule: PipelineSchedule, action: Action) -> str:
    """F3, or with the stage where a rank has several: 4F3, 4F3+3B1."""
    plain = schedule.virtual == 1
    return "+".join(f"{'' if plain else leaf.stage}{leaf.kind}{leaf.micro}" for leaf in action.leaves())


def plot(
    curves: Mapping[str, Sequence[tuple[int, float]]], width: int = 64, height: int = 16, wanted: float | None = None
) -> Iterator[str]:
    """Bubbles (fractions) over micro-batches as lines of text: name -> (micro-batches, bubble), ascending.

    wanted: drawn as a line of dashes. Where curves meet, the one named first is seen.
    """
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return
    first, last = min(m for m, _ in points), max(m for m, _ in points)
    top = max(max(bubble for _, bubble in points), wanted or 0) or 1.0

    def place(m: int, bubble: float) -> tuple[int, int]:
        return round((m - first) / max(1, last - first) * (width - 1)), round(bubble / top * height)

    rows = [[" "] * width for _ in range(height + 1)]
    if wanted is not None:
        rows[place(first, wanted)[1]] = ["╌"] * width
    for mark, curve in reversed(list(zip(_MARKS, curves.values(), strict=False))):
        for m, bubble in curve:
            x, y = place(m, bubble)
            rows[y][x] = mark
    for y in range(height, -1, -1):
        share = f"{100 * top * y / height:5.1f}% " if y % 4 == 0 else " " * 7
        yield f"{share}│{''.join(rows[y])}".rstrip()
    yield " " * 7 + "└" + "─" * width
    yield " " * 8 + f"{first}{f'{last} micro-batches':>{width - len(str(first))}}"
    yield " " * 8 + "  ".join(f"{mark} {name}" for mark, name in zip(_MARKS, curves, strict=False))


Format = Literal["compute_only", "compute_comms"]
"""torch's formats."""

_FLAGS = {"forward-only": ("train", False), "gather": ("gather", True), "tied": ("tied", True)}


def to_text(schedule: PipelineSchedule) -> str:
    """Our own form; `from_text` reads it back to an equal schedule."""
    words = [f"pipeline {schedule.name} micro={schedule.micro} stages={'/'.join(map(str, schedule.placement))}"]
    words += [word for word, (name, value) in _FLAGS.items() if getattr(schedule, name) == value]
    words += ["reduce=micro"] if schedule.reduce == "micro" else []
    words += [f"ring={schedule.ring}"] if schedule.ring else []
    words += [f"{name}={value}" for name, value in schedule.options.items()]
    lines = [f"rank {rank}: {' '.join(map(str, mine))}" for rank, mine in enumerate(schedule.actions)]
    return "\n".join([" ".join(words), *lines]) + "\n"


def from_text(text: str) -> PipelineSchedule:
    """The inverse of `to_text`. Raises `UserError` that names the line."""
    head, *lines = [line for line in text.splitlines() if line.strip()] or [""]
    bare = _headline(head)
    rows = []
    for rank, line in enumerate(lines):
        label, given, actions = line.partition(":")
        if label.strip() != f"rank {rank}" or not given:
            raise UserError(f"pipeline text: line {rank + 2} must begin with 'rank {rank}:', not {line[:20]!r}")
        rows.append([parse_action(word) for word in actions.split()])
    if sorted(set(bare.placement)) != list(range(len(rows))):
        raise UserError(
            f"pipeline text: stages= must name ranks 0 to {len(rows) - 1}, as many as there are lines below"
        )
    return replace(bare, actions=_with_peers(replace(bare, actions=tuple(map(tuple, rows))), rows))


def _headline(line: str) -> PipelineSchedule:
    """The schedule that a text's first line describes, without actions."""
    words = line.split()
    if len(words) < 2 or words[0] != "pipeline":
        raise UserError("a pipeline's text begins with a line such as: pipeline 1f1b micro=8 stages=0/1/2/3")
    placement: tuple[int, ...] = ()
    flags: dict[str, Any] = {}
    numbers: dict[str, int] = {}
    for word in words[2:]:
        key, _, value = word.partition("=")
        try:
            if word in _FLAGS:
                flags[_FLAGS[word][0]] = _FLAGS[word][1]
            elif key == "stages":
                placement = tuple(map(_whole, value.split("/")))
            elif word == "reduce=micro":
                flags["reduce"] = "micro"
            else:
                numbers[key] = _whole(value)
        except ValueError:
            raise UserError(f"pipeline text: {word[:60]!r} in the first line is not known") from None
    micro, ring = numbers.pop("micro", 0), numbers.pop("ring", 0)
    if micro < 1 or not placement:
        raise UserError("pipeline text: the first line needs micro=, and stages= with the rank of each stage")
    _sized(len(placement), micro)
    return PipelineSchedule(words[1], micro, placement, (), ring=ring, options=numbers, **flags)


def _whole(text: str) -> int:
    """Raises `ValueError` for what is no number of at most nine digits."""
    if not re.fullmatch(r"\d{1,9}", text):
        raise ValueError
    return int(text)


def _sized(stages: int, micro: int) -> None:
    """Raise `UserError` for numbers of a schedule too long to follow action by action."""
    if stages * micro > MOST_PASSES:
        passes = f"stages x micro-batches are {stages} x {micro} = {stages * micro:,} passes"
        raise UserError(f"{passes}; schedules of up to {MOST_PASSES:,} are read")


def to_csv(schedule: PipelineSchedule, format: Format = "compute_comms") -> str:
    """torch's CSV in one of its formats."""
    wanted = (lambda kind: kind in COMPUTE) if format == "compute_only" else (lambda kind: kind not in OURS)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for mine in schedule.actions:
        writer.writerow([str(action) for action in mine if wanted(action.kind)])
    return out.getvalue()


def from_csv(text: str, name: str = "csv", *, zero: int = 0, tied: bool = False) -> PipelineSchedule:
    """A schedule from torch's CSV: "compute_comms" where it has messages or reductions, else "compute_only".

    What torch does not know is added: the loss for every rank, and the exchange of the tied table (`tied`). `zero` is
    for "compute_only", see `build`. Raises `UserError` for words that are no actions, for stages on two ranks, for
    ranks without any, and for a `zero` that the rows have no place for.
    """
    if zero not in ZERO_STAGES:
        raise UserError(f"zero must be 0, 1, 2 or 3, not {zero!r}")
    try:
        rows = [[parse_action(cell) for cell in row if cell.strip()] for row in csv.reader(io.StringIO(text))]
    except csv.Error as error:
        raise UserError(f"this is no CSV: {error}") from None
    while rows and not rows[-1]:
        rows.pop()
    placement, kinds = _placement(rows), {action.kind for row in rows for action in row}
    leaves = [leaf for row in rows for action in row for leaf in action.leaves()]
    micro = 1 + max(leaf.micro for leaf in leaves)
    _sized(len(placement), micro)
    train = any(leaf.kind in "IWB" for leaf in leaves)
    fed = [leaf.micro for leaf in leaves if leaf.kind == "RECV_F" and leaf.stage == 0]
    alone = kinds <= COMPUTE
    if zero and not alone:
        raise UserError("zero is for computations alone: these rows have messages or reductions of their own")
    by_micro = (zero >= 2 and train) or any(leaf.kind == "REDUCE_GRAD" and leaf.micro >= 0 for leaf in leaves)
    bare = PipelineSchedule(
        name,
        micro,
        placement,
        tuple(map(tuple, rows)),
        train=train,
        gather=zero == 3 or "UNSHARD" in kinds,
        reduce="micro" if by_micro else "step",
        tied=tied,
        ring=min(fed, default=0),
    )
    if alone:
        return completed(bare)
    lists = [(*mine, *endings(bare, rank)) for rank, mine in enumerate(_with_peers(bare, rows))]
    return replace(bare, actions=tuple(lists))


def _placement(rows: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """Stage -> rank, from where each stage computes."""
    found: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            for leaf in action.leaves() if action.kind in COMPUTE else ():
                if found.setdefault(leaf.stage, rank) != rank:
                    raise UserError(f"stage {leaf.stage} computes on rank {found[leaf.stage]} and on rank {rank}")
    if not found or sorted(found) != list(range(len(found))):
        raise UserError(f"the computations must be of stages 0, 1, 2, ...; found {sorted(found) or 'none'}")
    if idle := sorted(set(range(len(rows))) - set(found.values())):
        raise UserError(f"row {idle[0] + 1} has no computations, though each row is a rank")
    return tuple(found[stage] for stage in range(len(found)))


def _with_peers(bare: PipelineSchedule, rows: Iterable[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    def peer(action: Action) -> Action:
        if action.kind == "SHARE_LOSS":
            return action._replace(peer=bare.loss_rank)
        if action.kind == "SUM_TIED" and bare.tied_ends:
            return action._replace(peer=bare.tied_ends[action.stage == 0])
        if action.kind.startswith(("SEND_", "RECV_")) and action.stage < bare.stages:
            partner = bare.partner(action)
            return action._replace(peer=bare.placement[partner.stage]) if partner else action
        return action

    return tuple(tuple(map(peer, row)) for row in rows)

"""The pipeline schedules by name, and `build`, which turns one into a `PipelineSchedule`.

A generator is a function (p, m, v, rank, options) -> the order in which that rank computes; messages, gathers and
reductions follow from it (`complete`). It becomes known by the decorator `generator`.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal

from shardwise.errors import UserError
from shardwise.records import dataclass
from shardwise.schedule.algorithms.registry import first_paragraph, nearest
from shardwise.schedule.pipeline.action import Action, without_collections
from shardwise.schedule.pipeline.completion import AHEAD, RESIDENT, complete
from shardwise.schedule.pipeline.plan import PipelineSchedule, loop, vee

Order = list[Action]
Rule = Callable[[int, int, int], str]
"""(p, m, v) -> what would be legal instead, or "" where these are."""

ZERO_STAGES = (0, 1, 2, 3)


def one_chunk(p: int, m: int, v: int) -> str:
    return "" if v == 1 else "it has one chunk a rank: v=1"


@dataclass(frozen=True)
class ScheduleGenerator:
    """One way to order a pipeline's work.

    summary: what it does, in one line. source: who published it. rule: which (p, m, v) it is for. shape: how its stages
    lie on the ranks. train: whether it has a backward pass.
    """

    name: str
    summary: str
    order: Callable[..., Order]
    source: str
    rule: Rule = one_chunk
    shape: Literal["loop", "vee"] = "loop"
    train: bool = True
    settles: int | None = None
    """Micro-batches, as a multiple of p, after which a schedule is in its steady state (`steady.py`)."""
    grows: bool = False
    """Whether a rank holds all micro-batches of a step at once."""
    period: Callable[[int, int], int] = lambda p, m: 1
    """(p, m) -> micro-batches after which the steady state repeats itself."""

    @cached_property
    def options(self) -> dict[str, int]:
        """Option -> default; 0 means that it follows from p and m."""
        parameters = list(inspect.signature(self.order).parameters.values())[4:]
        return {parameter.name: parameter.default for parameter in parameters}

    @property
    def virtual(self) -> int:
        """The fewest chunks a rank that it is for."""
        return next(v for v in (1, 2) if not self.rule(4, 16, v))

    def placement(self, p: int, v: int) -> tuple[int, ...]:
        """Stage -> rank."""
        return vee(p) if self.shape == "vee" else loop(p, v)

    def objection(self, p: int, m: int, v: int) -> str:
        """Why it cannot be built for p ranks, m micro-batches and v chunks a rank; empty where it can."""
        return self.rule(p, m, v)


_KNOWN: dict[str, ScheduleGenerator] = {}
_ALIASES = {
    "interleaved-1f1b": "interleaved",
    "interleaved1f1b": "interleaved",
    "loopedbfs": "breadth-first",
    "looped-breadth-first": "breadth-first",
    "zbh1": "zb-h1",
    "zbh2": "zb-h2",
    "zbv": "zb-v",
    "zbvzerobubble": "zb-v",
    "dualpipev": "dualpipe-v",
}


def generator(name: str, summary: str = "", **fields: Any) -> Callable[[Callable[..., Order]], Callable[..., Order]]:
    """Make a generator known under a name. summary: left out, the first paragraph of the function's docstring. fields:
    further ones of `ScheduleGenerator`, `source` at least."""

    def register(order: Callable[..., Order]) -> Callable[..., Order]:
        _KNOWN[name] = ScheduleGenerator(name, summary or first_paragraph(order), order, **fields)
        return order

    return register


def _known() -> dict[str, ScheduleGenerator]:
    """All generators by name: this package's are registered on first use."""
    from shardwise.schedule.pipeline import training  # noqa: F401

    return _KNOWN


def generators() -> list[ScheduleGenerator]:
    """All of them, in the order in which they are listed."""
    return list(_known().values())


def find(name: str) -> ScheduleGenerator:
    """One generator. Raises `UserError` with the nearest names when there is none."""
    wanted = name.strip().lower().replace("_", "-")
    wanted = _ALIASES.get(wanted, wanted)
    if wanted not in (known := _known()):
        raise UserError(f"no pipeline schedule {name!r}; {nearest(wanted, known)}")
    return known[wanted]


def build(
    name: str,
    p: int,
    m: int,
    v: int = 1,
    *,
    zero: int = 0,
    tied: bool = False,
    ahead: int = AHEAD,
    resident: int = RESIDENT,
    early: bool = False,
    **options: int,
) -> PipelineSchedule:
    """The schedule `name` for p ranks, m micro-batches and v chunks a rank.

    zero: the ZeRO stage: from 2 on, gradients are reduced for each micro-batch; at 3, parameters are gathered and freed
    by stage, `resident` of them at a time. tied: the embedding is the head's table, too. ahead: receives posted ahead.
    early: a B whose input's gradient another rank waits for is I, the message, then W; what formulas say of a schedule
    holds without. options: the generator's own (`warmup`, `tokens`: see `shardwise list schedules`).
    Raises `UserError` for unknown names and options, and for numbers that the schedule is not for, with what would be.
    """
    found = find(name)
    for label, value, least in (("p", p, 1), ("m", m, 1), ("v", v, 1), ("ahead", ahead, 0), ("resident", resident, 1)):
        if type(value) is not int or value < least:
            raise UserError(f"{label} must be an integer of at least {least}, not {value!r}")
    if zero not in ZERO_STAGES:
        raise UserError(f"zero must be 0, 1, 2 or 3, not {zero!r}")
    if legal := found.objection(p, m, v):
        raise UserError(f"{found.name} cannot have p={p}, m={m}, v={v}: {legal}")
    chosen = with_defaults(found, options, p)
    with without_collections():
        return complete(
            found.name,
            [found.order(p, m, v, rank, **chosen) for rank in range(p)],
            found.placement(p, v),
            m * chosen.get("tokens", 1),
            train=found.train,
            gather=zero == 3,
            reduce="micro" if zero >= 2 and found.train else "step",
            tied=tied,
            ring=m if "tokens" in chosen else 0,
            ahead=ahead,
            resident=resident,
            early=early,
            options=chosen,
        )


def with_defaults(found: ScheduleGenerator, options: Mapping[str, int], p: int) -> dict[str, int]:
    """The options of a generator with their values, defaults included.

    Raises `UserError` for others, and for values that are too small.
    """
    for option, value in options.items():
        if option not in found.options:
            raise UserError(f"{found.name} has no option {option!r}; it has {', '.join(found.options) or 'none'}")
        least = p - 1 if option == "warmup" else 1
        if type(value) is not int or value < least:
            raise UserError(f"{option} must be an integer of at least {least}, not {value!r}")
    chosen = {**found.options, **options}
    if "warmup" in chosen:
        chosen["warmup"] = chosen["warmup"] or p - 1
    return chosen

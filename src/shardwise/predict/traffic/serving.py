"""The ledger of one turn of generation in closed form: every logical collective of one rank, with its count.

A turn is one pass of some tokens through the model: chunks of prompts, single tokens of answers, or both. What a rank
moves in it depends on its `UnitPlan`, on how many tokens it computes and on how many rows it wants logits of, on what
weights an earlier turn has left in the slots, and, where replicas have experts for each other's tokens, on what these
have chosen. A test holds it to the ledger that the engine observes, row by row.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from shardwise.layout.axes import CP, PP, TP
from shardwise.layout.experts import across_axes, expert_share, experts_across
from shardwise.layout.gathers import generating_uses
from shardwise.layout.mesh import Mesh
from shardwise.layout.placement import cache_shape
from shardwise.layout.serving import lockstep_axes, replicas_in_step, rows_here
from shardwise.layout.unit import Gather
from shardwise.layout.units import UnitPlan
from shardwise.predict.traffic.ledger import Rows, ledger_of
from shardwise.report.step_report import LedgerRow, Phase

CONTROL, TOKENS = "control", "tokens"
"""Units of what ranks in step hear, and of the tokens that the last stage has chosen."""


@dataclass(frozen=True)
class ForwardPass:
    """One forward pass of an engine. tokens: rows of the blocks' input; rows: their subset with logits.
    phase: "prefill" where any of them is a prompt's, else "decode". known: rows of the turn whose tokens come back in
    this one, under a pipeline of p stages p - 1 turns ago; None for as many as `rows`. heard: bytes of the messages
    that reach the ranks at its beginning (requests and cancels). top, known_top: likeliest tokens that are reported
    with each token of this turn, and of the one whose tokens come back."""

    phase: Phase
    tokens: int
    rows: int
    known: int | None = None
    heard: int = 0
    top: int = 0
    known_top: int = 0

    @classmethod
    def decode(cls, sequences: int) -> Self:
        """One token more for each of so many sequences, with nothing heard: the steady state."""
        return cls("decode", sequences, sequences)


class Routed(NamedTuple):
    """Pairs of a token and an expert of one mixture in a turn."""

    sent: float
    """From this rank to the experts of its place, its own included."""
    taken: float
    """To this rank's experts."""


def turn_ledger(
    plan: UnitPlan,
    turn: ForwardPass,
    gathered: tuple[Gather, ...] = (),
    own: bool = True,
    routed: Mapping[str, Routed] | None = None,
) -> tuple[LedgerRow, ...]:
    """All rows of `plan`'s rank in one turn, sorted. gathered: what is gathered in it, such as
    `steady_gathers`. own: under zero=3, whether data ranks have requests of their own, or all of them the same. routed:
    part -> its pairs, such as `balanced`, where replicas have experts for each other's tokens."""
    rows: Rows = Counter()
    _control(rows, plan, turn, own and replicas_in_step(plan.layout) > 1)
    here = replace(turn, tokens=rows_here(plan.layout, turn.tokens))
    if plan.layout.tp > 1 and turn.tokens:
        _tensor_parallel(rows, plan, here)
    if plan.layout.cp > 1 and turn.tokens:
        _context_parallel(rows, plan, here)
    for part, pairs in (routed or {}).items():
        axes, width = across_axes(plan.layout), plan.model.hidden
        share = expert_share(plan.layout, plan.model.experts.count, plan.tp_rank)  # type: ignore[union-attr]
        rows[(turn.phase, "all_to_all", axes, part, "int64", share.across * share.count)] += 1
        for count in pairs:
            rows[(turn.phase, "all_to_all", axes, part, plan.layout.dtype, round(count * width))] += 1
    for gather in gathered:
        padded = plan.by_name[gather.unit].padded
        rows[(turn.phase, "all_gather_into", gather.axes, gather.unit, gather.dtype, padded)] += 1
    if plan.layout.pp > 1:
        _pipeline(rows, plan, here)
    return ledger_of(rows, Mesh.of(plan.layout, plan.model))


def _control(rows: Rows, plan: UnitPlan, turn: ForwardPass, own: bool) -> None:
    """Requests that the first rank of a replica has received reach the others: over the ranks in step at once, from
    stage to stage under a pipeline. The message itself is for the replica's ranks alone."""
    stage, *_ = plan.stages
    axes = lockstep_axes(plan.layout)
    hearers = TP if own else axes
    header = 1 + (replicas_in_step(plan.layout) if own else 1)
    for dtype, elements, group in (("int64", header, axes), ("uint8", turn.heard, hearers)):
        if not elements:
            continue
        if stage == 0:
            rows[(turn.phase, "all_reduce", group, CONTROL, dtype, elements)] += 1
        if stage > 0:
            rows[(turn.phase, "recv", PP, CONTROL, dtype, elements)] += 1
        if stage < plan.layout.pp - 1:
            rows[(turn.phase, "send", PP, CONTROL, dtype, elements)] += 1


_SUMS = {"embedding": 1, "block": 2, "head": 0}
"""Kind of a part -> its sums over tp."""


def _tensor_parallel(rows: Rows, plan: UnitPlan, turn: ForwardPass) -> None:
    """Sums of a block's attention and feed-forward part, routed and shared experts in one, and after the lookup
    (Shoeybi et al. 2019), statistics of norms over all heads, and the logits."""
    dtype = plan.layout.dtype
    for part in plan.parts:
        elements = turn.tokens * plan.model.hidden
        rows[(turn.phase, "all_reduce", TP, part, dtype, elements)] += _SUMS[plan.blueprint.kind(part)]
        for numbers in plan.blueprint.part(part).statistics:
            wide = "float32" if dtype == "bfloat16" else dtype
            rows[(turn.phase, "all_reduce", TP, part, wide, numbers * turn.tokens)] += 1
    if plan.of_kind("head") and turn.rows:
        rows[(turn.phase, "all_gather_into", TP, "logits", dtype, turn.rows * padded_vocab(plan))] += 1


def _context_parallel(rows: Rows, plan: UnitPlan, turn: ForwardPass) -> None:
    """Queries, keys and values of each block's rows; the outputs over each rank's keys with their log-sum-exp; and the
    head's inputs. turn: with the rows of one rank."""
    model, layout, dtype = plan.model, plan.layout, plan.layout.dtype
    tokens, heads = turn.tokens * layout.cp, model.heads // layout.tp
    shape = cache_shape(model, layout.tp)
    gathered = tokens * (heads + shape.rows) * shape.width
    wide = "float32" if dtype == "bfloat16" else dtype
    for part in plan.of_kind("block"):
        rows[(turn.phase, "all_gather_into", CP, part, dtype, gathered)] += 1
        rows[(turn.phase, "all_to_all", CP, part, wide, tokens * heads * (shape.values + 1))] += 1
    for part in plan.of_kind("head") if turn.rows else ():
        rows[(turn.phase, "all_reduce", CP, part, dtype, turn.rows * model.hidden)] += 1


def mixtures_of(plan: UnitPlan) -> list[str]:
    return [part for part in plan.of_kind("block") if plan.blueprint.part(part).routes]


def balanced(plan: UnitPlan, tokens: float, together: float) -> dict[str, Routed]:
    """Part -> expected pairs, where tokens choose all experts equally often; empty where no replica has experts for
    another one's tokens. tokens: of the rank; together: of all ranks across which experts are."""
    layout, experts = plan.layout, plan.model.experts
    if experts is None or experts_across(layout) == 1:
        return {}
    share = expert_share(layout, experts.count, plan.tp_rank)
    each = experts.active / share.places
    return dict.fromkeys(mixtures_of(plan), Routed(tokens * each, together * each / share.across))


def _pipeline(rows: Rows, plan: UnitPlan, turn: ForwardPass) -> None:
    """The residual stream from stage to stage; chosen tokens, and the logarithms of their probabilities, from the last
    stage to every other one."""
    (stage,), last = plan.stages, plan.layout.pp - 1
    stream = plan.layout.dtype, turn.tokens * plan.model.hidden
    if stage and turn.tokens:
        rows[(turn.phase, "recv", PP, f"stage {stage}", *stream)] += 1
    if stage < last and turn.tokens:
        rows[(turn.phase, "send", PP, f"stage {stage + 1}", *stream)] += 1
    known = turn.rows if turn.known is None else turn.known
    if stage == last and turn.rows:
        rows[(turn.phase, "send", PP, TOKENS, "float64", 2 * (1 + turn.top) * turn.rows)] += last
    if stage < last and known:
        rows[(turn.phase, "recv", PP, TOKENS, "float64", 2 * (1 + turn.known_top) * known)] += 1


def padded_vocab(plan: UnitPlan) -> int:
    """Logits of one row, the padding of the vocabulary over tp included."""
    return -(-plan.model.vocab // plan.layout.tp) * plan.layout.tp


def steady_gathers(plan: UnitPlan) -> tuple[Gather, ...]:
    """Gathers of every step but the first: a slot remembers its unit until another one takes it."""
    if plan.layout.stage < 3:
        return ()
    _, later = generating_uses(plan, "decode")
    return tuple(gather for use in later for gather in use.gathers)

"""Whether weights and cache fit, before anything is loaded: bytes of a rank by class, and what would fit.

Weights are exact, from the `UnitPlan`; so are the cache's pages and the slots of gathered weights. What passes through
memory in a turn is a bound: the widest tensors of a block for all its tokens, and the logits.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout, UnitPlan
from shardwise.layout.context import CHUNK, PAGE, PageCut
from shardwise.layout.experts import expert_share, matrices
from shardwise.layout.gathers import slot_elements
from shardwise.layout.legality import valid_ep, valid_tp
from shardwise.layout.pipeline import stages
from shardwise.layout.placement import Placed, cache_shape, width_held
from shardwise.layout.serving import check_generation, plan_of, rows_here
from shardwise.model import ModelConfig
from shardwise.model.formats import weight_format
from shardwise.ops.limits import BYTE_ROWS, SCORES, WIDE_OUTPUTS, row_int8_bytes, tiled_int8_bytes
from shardwise.predict.memory.capacity import capacity_of
from shardwise.predict.memory.engine_workspace import engine_room, engine_workspace
from shardwise.predict.time.profiles import EngineProfile
from shardwise.predict.traffic.serving import padded_vocab
from shardwise.report.step_report import DTYPE_BYTES
from shardwise.report.units import format_bytes

MOST = 1 << 20
"""Sequences beyond which nobody asks for more."""


@dataclass(frozen=True)
class ServingSetup:
    """Settings with which a model is served. context: tokens of the longest sequence; batch: the most sequences at a
    time in a replica; page: tokens of a page; chunk: tokens of prompts in a turn; cpu: on CPUs, where int8 matrices
    are laid out in tiles (`tiled_int8_bytes`); cache: pages, where they are given in place of as many as all sequences
    fill (0)."""

    context: int
    batch: int = 8
    page: int = PAGE
    chunk: int = CHUNK
    cpu: bool = False
    cache: int = 0
    weights: str = ""
    """Format of the blocks' matrices (`weight_format`); empty: the layout's precision."""
    cache_type: str = ""
    """torch's name of the type of keys and values; empty: the layout's precision."""
    padded: tuple[int, int] = (1, 1)
    """Multiples of hidden size and width to which experts in MXFP4 are padded (`expert_padding`)."""
    engine: EngineProfile | None = None
    """Other software than this project's, whose workspace is counted (`engine_workspace`)."""

    def __post_init__(self) -> None:
        for name in ("context", "batch", "page", "chunk"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}")

    @property
    def full(self) -> int:
        """Pages that all sequences fill, each of the whole context."""
        return self.batch * -(-self.context // self.page)

    @property
    def pages(self) -> int:
        """Pages of the cache."""
        return self.cache or self.full


@dataclass(frozen=True)
class ServingMemory:
    """Bytes of one rank. weights: as they stay; slots: of gathered weights; cache; passing: in a turn, a bound."""

    weights: int
    slots: int
    cache: int
    passing: int

    @property
    def all_weights(self) -> int:
        """Weights of a rank, buffers of gathered ones included."""
        return self.weights + self.slots

    @property
    def total(self) -> int:
        return self.all_weights + self.cache + self.passing


@dataclass(frozen=True)
class MemoryFit:
    """Memory needed and available on the fullest rank. held: of the fullest rank; room: bytes that a rank has, None
    where that is not known.

    largest_context: tokens of each of `served.batch` sequences; largest_batch: sequences of `served.context` tokens; 0
    where the weights alone do not fit, None where the room is not known.
    tps, pps: degrees that suit the model.
    """

    model: ModelConfig
    layout: Layout
    served: ServingSetup
    held: ServingMemory
    room: float | None
    largest_context: int | None
    largest_batch: int | None
    tps: tuple[int, ...]
    pps: tuple[int, ...]
    eps: tuple[int, ...] = ()
    """Of experts; none for a model without any."""

    @property
    def fits(self) -> bool:
        return self.room is None or self.held.total <= self.room

    def lines(self) -> Iterator[str]:
        """For people: what is held, whether it fits, the largest context that does, and the valid degrees."""
        held = self.held
        slots = f" ({format_bytes(held.slots)} of them buffers of gathered ones)" if held.slots else ""
        served = self.served
        whole = f"{served.batch} x {served.context:,}"
        tokens = whole if served.pages == served.full else f"{served.pages * served.page:,}"
        yield (
            f"{self._name}: on the fullest rank weights {format_bytes(held.all_weights)}{slots} + cache of {tokens} "
            f"tokens {format_bytes(held.cache)} + what passes through {format_bytes(held.passing)} = "
            f"{format_bytes(held.total)}"
        )
        if self.room is not None:
            verdict = "fits" if self.fits else "does not fit"
            yield f"{verdict} {format_bytes(self.room)} a rank; {self._largest()}"
        ep = f"; valid ep: {_degrees(self.eps)}" if self.eps else ""
        yield f"valid tp: {_degrees(self.tps)}; valid pp: 1 to {self.pps[-1]}{ep}"

    def refusal(self) -> str:
        """One line: what is missing, and what would fit."""
        assert self.room is not None
        missing = format_bytes(self.held.total - self.room)
        what = f"{self.served.batch} sequences of {self.served.context:,} tokens"
        if self.served.pages != self.served.full:
            what = f"a cache of {format_bytes(self.held.cache)}"
        return (
            f"{self._name} with {what} needs {format_bytes(self.held.total)} a rank, {missing} more than the "
            f"{format_bytes(self.room)} there are; {self._largest()}"
        )

    @property
    def _name(self) -> str:
        return f"{self.model.name} on one rank" if self.layout.ranks == 1 else f"{self.model.name} as {self.layout}"

    def _largest(self) -> str:
        """Alternatives that fit: in a shorter context, with fewer sequences, or else how the weights would."""
        assert self.room is not None
        left = self.room - self.held.total + self.held.cache
        if self.served.pages != self.served.full and left > 0:
            return f"the largest cache that fits is {format_bytes(left)}"
        batch, context = f"{self.served.batch:,} sequences", f"{self.served.context:,} tokens"
        fewer = f"{self.largest_batch:,} sequences of {context} fit" if self.largest_batch else ""
        if self.largest_context:
            fewer = fewer or f"not even one sequence of {context} fits"
            return f"the largest context for {batch} is {self.largest_context:,} tokens, and {fewer}"
        if fewer:
            return f"no context fits {batch}, but {fewer}"
        bare = self.held.all_weights
        if bare > self.room:
            how = "split them further (tp, pp, zero=3), or use int8"
        else:
            how = "give fewer sequences and a shorter context, or split them further (tp, pp, zero=3)"
        return f"no context fits {batch}, and the weights alone take {format_bytes(bare)}: {how}"


def serving_fit(model: ModelConfig, layout: Layout, served: ServingSetup, room: float | None = None) -> MemoryFit:
    """Memory of serving on the fullest rank, against `room` bytes a rank. Raises `LayoutError` for layouts that
    generation does not know, `UserError` for models that do not run."""
    check_generation(layout, model)
    if (words := served.weights) and weight_format(words).lossy and layout.stage == 3:
        raise UserError(f"{words} weights are not gathered: use zero=0 with {words}, or leave {words} out")
    plans = [plan_of(model, layout, stage) for stage in range(layout.pp)]
    held = max((held_by(plan, served) for plan in plans), key=lambda one: one.total)
    context = batch = None
    if room is not None:
        # The stage that is fullest with one cache need not be with another: each must have the room.
        context = min(_longest(plan, served, room) for plan in plans)
        batch = bisect_right(
            range(1, MOST),
            room,
            key=lambda n: max(held_by(plan, replace(served, batch=n, cache=0)).total for plan in plans),
        )
    pps = tuple(pp for pp in range(1, model.layers + 1))
    eps = tuple(valid_ep(model, model.experts.count)) if model.experts else ()
    return MemoryFit(model, layout, served, held, room, context, batch, tuple(valid_tp(model)), pps, eps)


def fit_on_host(model: ModelConfig, layout: Layout, served: ServingSetup, memory: int | None) -> MemoryFit:
    """`serving_fit` where all ranks share `memory` bytes of one host. None: not known."""
    return serving_fit(model, layout, replace(served, cpu=True), None if memory is None else memory / layout.ranks)


def fit_on_cluster(model: ModelConfig, layout: Layout, served: ServingSetup, cluster: Cluster) -> MemoryFit:
    """`serving_fit` on the devices of a cluster. Raises `LayoutError` where there are too few."""
    check_generation(layout, model, cluster.devices)
    served = replace(served, cpu=cluster.device.kind != "cuda")
    room = capacity_of(cluster) if served.engine is None else engine_room(cluster, served.engine)
    return serving_fit(model, layout, served, room)


def weight_bytes(plan: UnitPlan, *, cpu: bool = False, weights: str = "", padded: tuple[int, int] = (1, 1)) -> int:
    """Weights of a rank as they stay: in the layout's precision, at stage 3 its interval of each unit; with a format of
    `weights`, as `parameter_bytes` has them."""
    if plan.layout.stage == 3:
        return sum(unit.shard_numel for unit in plan.units) * DTYPE_BYTES[plan.layout.dtype]
    each = (parameter_bytes(plan, p, weights, cpu=cpu, padded=padded) for unit in plan.units for p in unit.placed)
    return int(sum(each))


def parameter_bytes(
    plan: UnitPlan, placed: Placed, weights: str, *, cpu: bool = False, padded: tuple[int, int] = (1, 1)
) -> float:
    """Bytes of a parameter on a rank: as the model's files have it, else in a format of weights where it
    `has_fewer_bits`, else in the layout's precision. cpu, padded: as in `ServingSetup`."""
    width = DTYPE_BYTES[plan.layout.dtype]
    if plan.model.counted and plan.model.counted.stored:
        stored = placed.parameter.stored
        if not stored:
            return placed.numel * width
        many = 1.0
        if padded != (1, 1) and plan.model.experts and weight_format(stored).form == "mxfp4":
            sides = plan.model.hidden, width_held(plan.model.experts.ffn, plan.layout.expert_tp)
            many = math.prod(-(-side // of) * of / side for side, of in zip(sides, padded, strict=True))
        return weight_format(stored).nbytes(placed.shape) * many
    if not weights or not weight_format(weights).lossy or not has_fewer_bits(plan, placed, weights):
        return placed.numel * width
    if weights == "int8":
        count, outputs, inputs = matrices(placed)
        # Activations of 16 bits on a CPU are multiplied as bytes, with matrices in tiles.
        tiled = cpu and width == 2
        return count * (tiled_int8_bytes(outputs, inputs) if tiled else row_int8_bytes(outputs, inputs, width=width))
    return weight_format(weights).nbytes(placed.shape)


def has_fewer_bits(plan: UnitPlan, placed: Placed, weights: str) -> bool:
    """Whether a parameter is stored in this type of weights: the blocks' matrices are, and with int8 the head's, too,
    where it has one of its own. Tables and routers stay as they are."""
    kinds = ("block", "head") if weights == "int8" else ("block",)
    matrix = len(placed.shape) == 2 and not placed.parameter.absorbed and not placed.name.endswith(".router.weight")
    return matrix and plan.blueprint.kind(placed.parameter.part) in kinds


def page_bytes(
    plan: UnitPlan, page: int = PAGE, context: int = 0, cache_type: str = "", engine: EngineProfile | None = None
) -> int:
    """Bytes of one page of keys and values on a rank, all its blocks. context: tokens of a sequence, over which windows
    and states are averaged: of a model that is only counted, and of all under an engine with a `windowed_cache`.
    cache_type: torch's name of its type; empty for the layout's."""
    names = plan.of_kind("block")
    first = int(names[0].rpartition(".")[2]) if names else 0
    served = ServingSetup(max(context, 1), page=page, cache_type=cache_type, engine=engine)
    return _page_of_blocks(plan.model, plan.layout, served, range(first, first + len(names)))


def _page_of_blocks(model: ModelConfig, layout: Layout, served: ServingSetup, blocks: range) -> int:
    """Bytes of one page of these blocks on a rank."""
    each = weight_format(served.cache_type).each if served.cache_type else DTYPE_BYTES[layout.dtype]
    slots = PageCut(served.page, layout.cp).slots
    if model.counted:
        kept = model.counted.cache_bytes(served.context, layout.tp, blocks.start, blocks.stop, each)
        return math.ceil(kept / served.context * slots)
    block = cache_shape(model, layout.tp).numbers * slots * each
    if served.engine is None or not served.engine.windowed_cache:
        return math.ceil(len(blocks) * block)
    windows = (model.layer_window(i) or served.context for i in blocks)
    return math.ceil(sum(min(1.0, window / served.context) for window in windows) * block)


def largest_page_bytes(model: ModelConfig, layout: Layout, page: int = PAGE) -> int:
    """Bytes of one page on the rank that holds most of it."""
    return max(page_bytes(plan_of(model, layout, stage), page) for stage in range(layout.pp))


def held_by(plan: UnitPlan, served: ServingSetup) -> ServingMemory:
    slots = sum(slot_elements(plan).values()) if plan.layout.stage == 3 else 0
    return ServingMemory(
        weight_bytes(plan, cpu=served.cpu, weights=served.weights, padded=served.padded),
        slots * DTYPE_BYTES[plan.layout.dtype],
        served.pages * page_bytes(plan, served.page, served.context, served.cache_type, served.engine),
        workspace_bytes(plan, served),
    )


def workspace_bytes(plan: UnitPlan, served: ServingSetup) -> int:
    """What passes through memory on a rank: this runtime's bound, or what another engine sets aside."""
    if served.engine is None:
        return passing_bytes(plan, served)
    head = bool(plan.of_kind("head"))
    return engine_workspace(plan.model, plan.layout, head, served.engine, served.engine.most_tokens, served.batch)


class ServedStage(NamedTuple):
    """A rank of one pipeline stage, before there is anything in its cache."""

    weights: float
    page: int
    """Bytes of a page of the cache."""
    head: bool
    """Whether it has the output head."""


def stage_bytes(model: ModelConfig, layout: Layout, served: ServingSetup) -> list[ServedStage]:
    """The stages of a layout without weight gathering, each with its own blocks and ends, as `held_by` counts them."""
    alone = replace(layout, pp=1) if layout.ep > 1 else Layout(tp=layout.tp, precision=layout.precision)
    blocks, first, last, tied = _part_bytes(model, alone, served.weights, served.cpu, served.padded)
    made, start = [], 0
    for stage, count in enumerate(stages(model, layout).layers):
        mine = range(start, start + count)
        begins, ends = stage == 0, stage == layout.pp - 1
        weights = sum(blocks[i] for i in mine) + begins * first + ends * last + (begins or ends) * tied
        made.append(ServedStage(int(weights), _page_of_blocks(model, layout, served, mine), ends))
        start += count
    return made


@lru_cache(maxsize=256)
def _part_bytes(
    model: ModelConfig, layout: Layout, weights: str, cpu: bool, padded: tuple[int, int]
) -> tuple[tuple[float, ...], float, float, float]:
    """Bytes of each block, of embedding, head, and a table that both share, without a pipeline."""
    plan = plan_of(model, layout)
    each = {
        unit.name: sum(parameter_bytes(plan, p, weights, cpu=cpu, padded=padded) for p in unit.placed)
        for unit in plan.units
    }
    blocks = tuple(sum(each[unit.name] for unit in plan.units_of(part)) for part in plan.of_kind("block"))
    return blocks, each.get("embedding", 0.0), each.get("head", 0.0), each.get("tied", 0.0)


_INDEX = 16
"""Bytes that name a slot of the cache and its page."""


def passing_bytes(plan: UnitPlan, served: ServingSetup, head: bool = True) -> int:
    """A turn's widest moment: residual stream, its normed copy and what the feed-forward opens up to, with the rows of
    experts, or queries, keys, values and their output, and a copy of one block's cache with its mask, where pages do
    not follow each other; or the logits of every sequence, gathered, and again in fp32. With int8 also some rows of
    activations in bytes and of sums in 32 bits, or, without instructions for bytes, some rows of the matrix as they
    were. head: whether a rank that the plan gives an output head has it."""
    model, tp, cp = plan.model, plan.layout.tp, plan.layout.cp
    width, tokens = DTYPE_BYTES[plan.layout.dtype], rows_here(plan.layout, served.chunk + served.batch)
    opened = tokens * (3 if model.gated else 2) * width_held(_widest(model), tp) * width
    if model.experts:
        opened += _passing_experts(plan, tokens)
    shape, heads = cache_shape(model, tp), model.heads // tp
    attended = tokens * (heads * (shape.width + shape.values) + shape.numbers) * width
    if model.latent_attention:
        attended += _passing_latents(plan, tokens, served)
    copied = (
        min(served.pages, served.full) * served.page // cp * (shape.numbers * width + _INDEX)
        + served.chunk * served.context // cp
    )
    if cp > 1:
        copied += _passing_exchange(plan, tokens * cp, served)
    block = tokens * 3 * model.hidden * width + max(opened, attended + copied)
    if served.weights == "int8":
        ffn, own = width_held(_widest(model), tp), heads * model.head_dim
        opens = max(model.hidden, ffn * (2 if model.gated else 1), own + shape.numbers)
        block += _passing_product(tokens, max(model.hidden, ffn, own), opens, width)
    return max(block, _passing_logits(plan, served, served.batch) if head else 0)


def _passing_logits(plan: UnitPlan, served: ServingSetup, rows: int) -> int:
    """Bytes of so many rows of logits, where the rank has the head."""
    if not plan.of_kind("head"):
        return 0
    width, vocab = DTYPE_BYTES[plan.layout.dtype], padded_vocab(plan)
    logits = rows * vocab * (2 * width + 4)
    if served.weights == "int8" and not plan.model.tied:
        logits += _passing_product(rows, plan.model.hidden, vocab // plan.layout.tp, width)
    return logits


def logit_rows(plan: UnitPlan, served: ServingSetup) -> int:
    """Rows of logits in an engine step that `passing_bytes` has room for: a row per sequence, or more where prompts are
    scored. plan: of a rank with the head."""
    most, fits = served.chunk + served.batch, passing_bytes(plan, served)
    return max(served.batch, bisect_right(range(1, most + 1), fits, key=lambda n: _passing_logits(plan, served, n)))


def _widest(model: ModelConfig) -> int:
    """Width of the widest feed-forward part that every token goes through."""
    if not (e := model.experts):
        return model.ffn
    return max(e.ffn, e.shared * e.ffn, model.ffn if e.dense_layers else 0)


def _passing_experts(plan: UnitPlan, tokens: int) -> int:
    """Bytes of the rows of a mixture, where all tokens of the ranks that exchange rows choose experts of this one: rows
    sent and taken, by rank and by expert, outputs likewise and weighted, what one expert opens up to, and the logits
    and scores of the router. tokens: of a step."""
    layout, e, width = plan.layout, plan.model.experts, DTYPE_BYTES[plan.layout.dtype]
    assert e is not None
    share, wide = expert_share(layout, e.count, plan.tp_rank), max(width, 4)
    sent, most = tokens * e.active, tokens * share.across
    taken = most * min(e.active, share.count)
    copies = 2 if share.across > 1 else 1
    rows = sent * (2 * width + 2 * wide) + copies * taken * 2 * width
    router = tokens * (plan.model.hidden * (wide + width) + e.count * 6 * wide) + sent * 10 * _INDEX
    return rows * plan.model.hidden + router + most * 3 * width_held(e.ffn, layout.expert_tp) * width


def _passing_latents(plan: UnitPlan, tokens: int, served: ServingSetup) -> int:
    """Bytes of latent attention beside the queries that meet latents and the means of these: queries as projected,
    twice their other parts, values; and some rows' scores, in two copies of at least 32 bits and one as wide as the
    cache's."""
    model, width = plan.model, DTYPE_BYTES[plan.layout.dtype]
    heads, shape = model.heads // plan.layout.tp, cache_shape(model, plan.layout.tp)
    projected = heads * (model.head_dim + model.value_dim) + 2 * (heads + 1) * shape.width
    scores = min(max(SCORES, heads * served.context), tokens * heads * served.context)
    return tokens * projected * width + scores * (2 * max(width, 4) + width)


def _passing_exchange(plan: UnitPlan, tokens: int, served: ServingSetup) -> int:
    """Bytes beside a block's rows under cp: queries, keys and values of all rows, gathered; twice the outputs over a
    rank's keys; the mask of rows and keys, also as it is added to the scores; and some rows' scores, or the shares of
    the outputs. tokens: of a step, with padding."""
    model, width = plan.model, DTYPE_BYTES[plan.layout.dtype]
    heads, shape, wide = model.heads // plan.layout.tp, cache_shape(model, plan.layout.tp), max(width, 4)
    gathered = tokens * (heads * shape.width + 2 * shape.numbers) * width
    outputs = tokens * heads * (shape.values + 1) * wide
    keys = PageCut(served.page, plan.layout.cp).slots * -(-served.context // served.page)
    scores = min(max(SCORES, heads * served.batch * keys), tokens * heads * keys)
    return gathered + 2 * outputs + tokens * keys * (1 + wide) + max(4 * scores * wide, 2 * outputs)


def _passing_product(rows: int, inputs: int, outputs: int, width: int) -> int:
    """Bytes that a product with an 8-bit matrix takes beside its result, by bytes or with the matrix turned back."""
    return max(
        min(rows, BYTE_ROWS) * (16 * inputs + 18 * outputs), (inputs + rows) * min(outputs, WIDE_OUTPUTS) * width
    )


def _longest(plan: UnitPlan, served: ServingSetup, room: float) -> int:
    """Tokens that each of the sequences may have, whole pages, at most as many as the model knows positions."""
    most = plan.model.max_positions
    page = page_bytes(plan, served.page, most, served.cache_type, served.engine)
    one_each = max(1, served.batch * page)  # 0 on a stage without blocks
    pages = min(-(-most // served.page), int(room // one_each))
    fitting = bisect_right(
        range(1, pages + 1), room, key=lambda n: held_by(plan, replace(served, context=n * served.page, cache=0)).total
    )
    return min(fitting * served.page, most)


def _degrees(degrees: tuple[int, ...]) -> str:
    return ", ".join(map(str, degrees))

"""A lower bound of a device's bytes, for many candidates at once: of their fullest rank.

What may fit by the bound is followed event by event (`exact.py`).

One evaluation of a formula for many candidates: `Lanes` take the place of a formula's integers.

Formulas of `predict.memory` are written for one layout. They compute all at once if their integers are arrays in
disguise: arithmetic is elementwise, and a comparison has one answer for all lanes. Where lanes differ in the answer,
`by_path` evaluates the two groups apart, so that every candidate takes the path of its own numbers.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cache, cached_property, lru_cache, partial, reduce
from itertools import accumulate, product
from typing import Any

import numpy as np

from shardwise.arrays import Num
from shardwise.layout import Layout, UnitPlan, Workload, unit_plan
from shardwise.layout.unit import Backend, Unit
from shardwise.model import ModelConfig
from shardwise.model.blueprint import Blueprint
from shardwise.model.lora import BASES
from shardwise.model.parameters import Model, count, count_trained
from shardwise.planner.rank_bound import WEIGHT, MicroBatchBytes, RankBound
from shardwise.planner.space import ON_DEVICE, BatchChoice, LayoutColumns, Space
from shardwise.predict.memory import peak
from shardwise.predict.memory.activations import kept_items, saved_items
from shardwise.predict.memory.engine_bytes import OWN
from shardwise.predict.memory.latent_tensors import block_tensors
from shardwise.predict.memory.sizes import Sizes
from shardwise.predict.memory.step import state_bytes
from shardwise.predict.memory.transients import LiveBytes

SHARED = ("schedules", "fused", "local", "micro_batches")
"""Fields of a plan that are equal in all lanes."""


class Diverged(Exception):
    """Lanes that do not take the same path."""

    def __init__(self, first: Any) -> None:
        super().__init__()
        self.first = first
        """Mask of the lanes of one path."""


def _elementwise(operation: Callable[[Any, Any], Any]) -> Callable[[Lanes, Any], Lanes]:
    return lambda self, other: Lanes(operation(self.values, other.values if isinstance(other, Lanes) else other))


def _reflected(operation: Callable[[Any, Any], Any]) -> Callable[[Lanes, Any], Lanes]:
    return lambda self, other: Lanes(operation(other, self.values))


def _compared(operation: Callable[[Any, Any], Any]) -> Callable[[Lanes, Any], bool]:
    return lambda self, other: _same(operation(self.values, other.values if isinstance(other, Lanes) else other))


def _same(answers: Any) -> bool:
    """The answer of all lanes. Raises `Diverged` where they differ."""
    if answers.all():
        return True
    if answers.any():
        raise Diverged(answers)
    return False


class Lanes:
    """An integer of each candidate, which computes as one integer does."""

    __slots__ = ("values",)

    def __init__(self, values: Any) -> None:
        self.values = values

    __add__, __radd__ = _elementwise(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _elementwise(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _elementwise(operator.mul), _reflected(operator.mul)
    __floordiv__, __rfloordiv__ = _elementwise(operator.floordiv), _reflected(operator.floordiv)
    __mod__, __rmod__ = _elementwise(operator.mod), _reflected(operator.mod)
    __lt__, __le__ = _compared(operator.lt), _compared(operator.le)
    __gt__, __ge__ = _compared(operator.gt), _compared(operator.ge)
    __eq__, __ne__ = _compared(operator.eq), _compared(operator.ne)  # type: ignore[assignment]

    def __neg__(self) -> Lanes:
        return Lanes(-self.values)

    def __bool__(self) -> bool:
        return _same(self.values != 0)

    def __index__(self) -> int:
        """The integer of all lanes, for what takes no other. Raises `Diverged` where they differ."""
        first = int(self.values[0])
        _same(self.values == first)
        return first

    __int__ = __index__

    def __hash__(self) -> int:
        return hash(int(self))


def _larger(a: Any, b: Any) -> Any:
    if not (isinstance(a, Lanes) or isinstance(b, Lanes)):
        return max(a, b)
    return Lanes(np.maximum(*(each.values if isinstance(each, Lanes) else each for each in (a, b))))


class LiveLanes(LiveBytes):
    """The most bytes at one time of each lane, whichever moment that is."""

    __slots__ = ()

    def allocate(self, nbytes: Any) -> None:
        self.now += nbytes
        self.most = _larger(self.most, self.now)

    def transient(self, nbytes: Any) -> None:
        """As of `LiveBytes`."""
        self.most = _larger(self.most, self.now + nbytes)


def by_path(formula: Callable[..., Sequence[Any]], columns: Sequence[Any]) -> list[Any]:
    """Numbers of `formula` for each row of some columns of integers, an array for each number that it returns."""
    columns = [np.asarray(column) for column in columns]
    rows = len(columns[0])
    paths, results = [np.arange(rows)], list[Any]()
    while paths:
        at = paths.pop()
        try:
            numbers = formula(*(_lanes(column[at]) for column in columns))
        except Diverged as diverged:
            paths += [at[diverged.first], at[~diverged.first]]
            continue
        results = results or [np.empty(rows) for _ in numbers]
        for result, number in zip(results, numbers, strict=True):
            result[at] = number.values if isinstance(number, Lanes) else number
    return results


def _lanes(values: Any) -> Any:
    first = int(values[0])
    return first if (values == first).all() else Lanes(values)


def with_lanes(plan: UnitPlan, keys: Mapping[str, Any]) -> UnitPlan:
    """The plan of another layout of the same micro-batches. keys: those of the layout that may be lanes."""
    layout = copy(plan.layout)
    for key, value in keys.items():
        object.__setattr__(layout, key, value)
    wide = replace(plan, layout=layout)
    vars(wide).update({name: getattr(plan, name) for name in SHARED})
    return wide


_RowKey = tuple[int, int, Any]
"""tp, ep, and what of a row changes its memory."""


def places(model: Model, stages: Sequence[int], pp: int, schedule: str = "") -> list[int]:
    """The ranks of a pipeline that can be the fullest under a schedule, "" for any. stages: blocks by stage.

    Of ranks between the ends with the same blocks in each chunk, the first holds most micro-batches; only zb-h1 delays
    gradients of weights the longer, the later a rank is.
    """
    if isinstance(model, Blueprint):  # whose blocks may all differ
        return list(range(pp))
    kinds = tuple(2 * model.has_experts(layer) + (model.layer_window(layer) > 0) for layer in range(sum(stages)))
    return _fullest(kinds, tuple(stages), pp, schedule in ("", "zb-h1"))


@lru_cache(maxsize=4096)
def _fullest(kinds: tuple[int, ...], stages: tuple[int, ...], pp: int, delayed: bool) -> list[int]:
    """As `places`. kinds: of each block."""
    by_stage = [Counter(kinds[end - n : end]) for end, n in zip(accumulate(stages), stages, strict=True)]
    between = {rank: [count[kind] for count in by_stage[rank::pp] for kind in range(4)] for rank in range(1, pp - 1)}
    fullest = {0, pp - 1}
    for ranks in ([*between], [*between][::-1])[: 1 + delayed]:
        most = list[list[int]]()
        for rank in ranks:
            if not any(all(map(operator.le, between[rank], other)) for other in most):
                most.append(between[rank])
                fullest.add(rank)
    return sorted(fullest)


def all_places(model: Model, frame: LayoutColumns) -> list[int]:
    """`places` of all orders of a frame."""
    schedule = "zb-h1" if any(order.schedule == "zb-h1" for order in frame.orders) else "1f1b"
    return sorted({place for order in frame.orders for place in places(model, frame.stages(order), frame.pp, schedule)})


def state_floor(space: Space) -> float:
    """Bytes below which no candidate's fullest device is, without a search: weights, gradients and optimizer state of
    all parameters, spread evenly over all devices. Of frozen parameters weights alone; 0 where state may be off the
    devices, and for other engines, whose state differs."""
    model, homes = space.model, space.homes
    if homes != ON_DEVICE or model.trace or space.engine.name not in OWN:
        return 0.0
    trained = count_trained(model)
    base = model.lora.base if model.lora else ""
    frozen = (count(model) - trained) * (BASES[base].each if base else WEIGHT)
    return (trained * (state_bytes("bf16", space.workload.optimizer) + WEIGHT) + frozen) / space.cluster.devices


class ExactBound:
    """Bytes of candidates of a traced module, followed one by one: there are few."""

    def __init__(self, total: Callable[[Layout], float]) -> None:
        self._total = total

    def add(self, frames: Iterable[LayoutColumns]) -> None:
        """No-op: as of `MemoryBound`."""

    def total(self, frame: LayoutColumns) -> Num:
        """As of `MemoryBound`."""
        candidates = product(frame.rows, frame.shardings, frame.orders)
        return np.array([float(self._total(frame.layout(*each))) for each in candidates]).reshape(frame.shape)


class MemoryBound:
    """Least bytes of candidates of one model and workload."""

    def __init__(self, model: ModelConfig, workload: Workload, attention: str, backend: Backend) -> None:
        self.model, self.workload, self.attention, self.backend = model, workload, attention, backend
        self._units = cache(self._of_tp)
        self._places: dict[_RowKey, int] = {}
        """Columns of the table, by row."""
        self._table = np.empty((len(MicroBatchBytes._fields), 0))

    def add(self, frames: Iterable[LayoutColumns]) -> None:
        """Compute the micro-batches of all candidates at once: many together take little longer than one."""
        rows = {self._key(frame, row): (frame.tp, frame.ep, row) for frame in frames for row in frame.rows}
        new = {key: row for key, row in rows.items() if key not in self._places}
        if not new:
            return
        self._places |= {key: len(self._places) + at for at, key in enumerate(new)}
        asked = list(new.values())
        # Of blocks with experts and without them, the least of each number.
        least = reduce(np.minimum, (self._of_blocks(model, asked) for model in self._one_block))
        self._table = np.concatenate([self._table, least], axis=1)

    def total(self, frame: LayoutColumns) -> Num:
        """At least the bytes of each candidate's fullest rank, an array of the frame's shape."""
        self.add([frame])
        # The frame with those rows only that differ in memory, and which of them stands for each row.
        kinds: dict[Any, int] = {}
        row = [kinds.setdefault(self._alike(each), len(kinds)) for each in frame.rows]
        standing = dict(zip(reversed(row), reversed(frame.rows), strict=True))
        few = replace(frame, rows=tuple(standing[kind] for kind in range(len(kinds))))
        at = [self._places[self._key(few, each)] for each in few.rows]
        micro = MicroBatchBytes(*self._table[:, at, None, None])
        units = self._units(few.tp)
        ranks = (
            RankBound(self.model, few, place, units, micro, self.backend, self.workload.optimizer).total()
            for place in all_places(self.model, few)
            # With no more blocks than the first, the second of several has fewer micro-batches: hardly ever more bytes.
            if place != 1
            or few.pp == 2
            or self.model.experts
            or self.model.full_attention_every
            or any(held[1] > held[0] for held in few.held)
        )
        return np.broadcast_to(reduce(np.maximum, ranks), few.shape)[row]

    def _key(self, frame: LayoutColumns, row: BatchChoice) -> _RowKey:
        return frame.tp, frame.ep, self._alike(row)

    def _alike(self, row: BatchChoice) -> Any:
        """Equal for rows of the same bytes: on CUDA, without explicit attention or masks, they depend on the tokens of
        a micro-batch and not on the length of its sequences; but of a single one, pieces are cut without a copy."""
        if self.attention != "sdpa" or self.workload.isolate_documents or self.backend != "nccl":
            return row
        return row.cp, row.sp, row.recompute, row.micro == 1, row.micro * self.workload.seq

    def _of_blocks(self, model: ModelConfig, rows: list[tuple[int, int, BatchChoice]]) -> Num:
        """Bytes of micro-batches, an array of fields x rows. rows: tp, ep and row of each."""
        groups: dict[Any, tuple[UnitPlan, list[int]]] = {}
        plan_of = cache(partial(self._alone, model))
        for at, (tp, ep, row) in enumerate(rows):
            plan = plan_of(tp, ep if model.experts else 1, row.sp)
            # Formulas take other paths where a degree is 1, or a rank has one head: what diverges for certain is
            # evaluated apart.
            heads = tp >= model.kv_heads, tp >= model.heads
            paths = plan.fused, row.sp, row.recompute, tp > 1, ep > 1, row.cp > 1, row.micro > 1, heads
            groups.setdefault(paths, (plan, []))[1].append(at)
        table = np.empty((len(MicroBatchBytes._fields), len(rows)))
        for plan, group in groups.values():
            columns = zip(*((tp, ep, row.cp, row.micro) for tp, ep, row in (rows[at] for at in group)), strict=True)
            recompute = rows[group[0]][2].recompute
            table[:, group] = by_path(partial(self._micro_batch, plan, recompute), list(columns))
        return table

    @cached_property
    def _one_block(self) -> list[ModelConfig]:
        one, e = partial(self.model.replace, layers=1), self.model.experts
        mixed = [one(experts=replace(e, dense_layers=0))] if e and e.dense_layers < self.model.layers else []
        return mixed + ([one(experts=None)] if not e or e.dense_layers else [])

    def _alone(self, model: ModelConfig, tp: int, ep: int, sp: bool) -> UnitPlan:
        """The plan of one micro-batch of one sequence per rank."""
        layout = Layout(dp=ep, tp=tp, ep=ep, sp=sp, attention=self.attention)
        return unit_plan(model, layout, replace(self.workload, batch=ep), backend=self.backend)

    def _micro_batch(self, plan: UnitPlan, recompute: str, tp: Num, ep: Num, cp: Num, micro: Num) -> MicroBatchBytes:
        """plan: of one block's model, whose layout has these keys in place of its own: integers or `Lanes`."""
        spread = {"ep": ep, "dp": ep} if plan.model.experts else {}
        plan = with_lanes(plan, {"tp": tp, "cp": cp, "micro": micro, "recompute": recompute, **spread})
        s, parts = Sizes.of(plan), ["embedding", "blocks.0", "head"]
        embedding, block, head = (sum(saved_items(plan, s, part).values()) for part in parts)
        in_block, in_block_apart = (_backward(plan, s, parts[1], apart) for apart in (False, True))
        in_embedding, in_embedding_apart = (
            peak.backwards(plan, s, parts[:1], apart)["backward", "embedding"] for apart in (False, True)
        )
        return MicroBatchBytes(
            embedding=embedding,
            block=block,
            head=head,
            known_embedding=peak.saved_inputs(plan, s, "embedding"),
            known_head=peak.saved_inputs(plan, s, "head"),
            kept_embedding=sum(kept_items(plan, s, "embedding").values()),
            kept_block=sum(kept_items(plan, s, "blocks.0").values()),
            loss=peak.loss(plan, s),
            in_head=peak.backwards(plan, s, parts[2:])["backward", "head"] - head,
            in_block=in_block,
            in_block_apart=in_block_apart,
            in_embedding=in_embedding,
            in_embedding_apart=in_embedding_apart,
            inputs=s.tokens * 8 * (1 + (self.model.positions != "learned")),
            tables=self._tables(plan, s),
        )

    def _tables(self, plan: UnitPlan, s: Sizes) -> int:
        """Bytes that the blocks of a rank share at least: where some blocks have windows, a rank may have others."""
        if not self.model.full_attention_every:
            return peak.tables(plan, s)
        plain = replace(plan, subject=self.model.replace(layers=1, window=0, full_attention_every=0))
        return min(peak.tables(plan, s), peak.tables(plain, Sizes.of(plain)))

    def _of_tp(self, tp: int) -> dict[str, Unit]:
        one_block = self.model.replace(layers=1, experts=None)
        return unit_plan(one_block, Layout(tp=tp), self.workload, backend=self.backend).by_name


def _backward(plan: UnitPlan, s: Sizes, part: str, apart: bool) -> Num:
    block = block_tensors(plan, s, part, apart)
    block.live = LiveLanes()
    return block.backward(False)

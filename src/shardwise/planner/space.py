"""Search space: every legal way to split a model over all devices of a cluster.

A candidate is a `Layout` and, where several are asked for, a variant of the engine (which overlaps it does). Candidates
come in frames that share a mesh; inside a frame every entry of one list goes with every entry of the others, so that a
frame is a grid of arrays and never a list of layouts. `Space` defines exactly what is in it (docs/planner.md).
"""

from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from functools import cached_property, lru_cache
from itertools import product
from math import ceil
from typing import Any, NamedTuple, Self

import numpy as np

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.layout.keys import APART, divisors
from shardwise.layout.layout import cut_layout, traced_cut
from shardwise.layout.legality import check_positions, valid_ep
from shardwise.layout.pipeline import splits_backward
from shardwise.model.parameters import Model, blueprint
from shardwise.options import runs_text
from shardwise.predict.fixing import check_fixed, words_of
from shardwise.predict.memory.engine_settings import USUAL, EngineSettings
from shardwise.predict.supported import check_size, in_closed_form, why_not_planned
from shardwise.predict.time.features import Features
from shardwise.predict.time.profiles import EngineProfile
from shardwise.predict.traced_layout import SearchedCut, check_row_length, searched_cuts, searched_tp
from shardwise.records import dataclass
from shardwise.schedule.pipeline import find
from shardwise.schedule.pipeline.plan import BARE_ENDS, StageLayers

RECOMPUTE = ("none", "selective", "full")
EVEN = 0, 0
"""What the ends of even stages count as."""
MOST_CHUNKS = 8
"""Most chunks a rank of stages that are neither even nor have the embedding and the head alone."""
LIGHTER = 0.97
"""Work of the busiest rank, over that of even stages, from which on other stages are tried."""


class BatchChoice(NamedTuple):
    """Size of a micro-batch and how its activations are kept: what of memory and time depends on it is computed
    apart."""

    cp: int
    sp: bool
    recompute: str
    micro: int


class ZeroChoice(NamedTuple):
    """A ZeRO stage, the size of its shard group (1 at stage 0), and the ranks of a second copy."""

    zero: int
    shard: int
    hpz: int = 0

    @property
    def copied(self) -> float:
        """Part of its parameters that a rank keeps as a second copy."""
        return 1 / self.hpz if self.hpz else 0.0


class Homes(NamedTuple):
    """Homes of optimizer state and parameters, the same for all candidates of a space."""

    offload: str = "none"
    offload_params: str = "none"

    @property
    def layout(self) -> Layout:
        """A layout with these homes, whose other keys mean nothing."""
        return Layout(zero=3, offload=self.offload, offload_params=self.offload_params)


ON_DEVICE = Homes()


class ScheduleChoice(NamedTuple):
    """A pipeline schedule, its chunks per rank, and the blocks that the embedding and the head count as where stages
    are cut (`StageLayers.weighed`)."""

    schedule: str
    virtual: int
    ends: tuple[int, int] = EVEN


@dataclass(frozen=True)
class LayoutColumns:
    """Candidates of one tp, pp and ep: rows x shardings x orders, where `possible`, whose fields are keys of a layout.
    data: ranks of a model's part, which is dp x cp; blocks: of the model."""

    tp: int
    pp: int
    data: int
    attention: str
    batch: int
    blocks: int
    rows: tuple[BatchChoice, ...]
    shardings: tuple[ZeroChoice, ...]
    orders: tuple[ScheduleChoice, ...]
    ep: int = 1
    homes: Homes = ON_DEVICE

    @property
    def expert_tp(self) -> int:
        """Ranks that share the width of one expert (`Layout.expert_tp`)."""
        return self.tp if self.ep == 1 else 1

    @property
    def expert_replicas(self) -> int:
        """Ranks of a stage that hold the same experts."""
        return self.data * self.tp // (self.ep * self.expert_tp)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        return tuple(self.batch * row.cp // (self.data * row.micro) for row in self.rows)

    @cached_property
    def columns(self) -> dict[str, Any]:
        """Key of a layout -> its values in rows, shardings or orders, an array that broadcasts to `shape`."""
        lists: Any = ((BatchChoice, self.rows), (ZeroChoice, self.shardings), (ScheduleChoice, self.orders))
        return {
            name: np.array([getattr(choice, name) for choice in choices]).reshape(
                [-1 if i == axis else 1 for i in range(3)]
            )
            for axis, (kind, choices) in enumerate(lists)
            for name in kind._fields
            if name != "ends"
        }

    @cached_property
    def possible(self) -> tuple[tuple[bool, ...], ...]:
        """For each row and order, whether the schedule is for that many micro-batches, and has closed forms there."""
        of = {
            m: tuple(in_closed_form(o.schedule, o.virtual, self.pp, m) for o in self.orders) for m in set(self.counts)
        }
        return tuple(of[m] for m in self.counts)

    @cached_property
    def orders_possible(self) -> int:
        """Number of possible pairs of a row and an order."""
        return sum(map(sum, self.possible))

    @property
    def size(self) -> int:
        return self.orders_possible * len(self.shardings)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of arrays over its candidates: rows, shardings, orders."""
        return len(self.rows), len(self.shardings), len(self.orders)

    def stages(self, order: ScheduleChoice) -> tuple[int, ...]:
        """Blocks by stage."""
        return weighed(self.blocks, self.pp * order.virtual, order.ends)

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """Blocks by rank of the pipeline, for each order."""
        return tuple(held_by(self.stages(order), self.pp) for order in self.orders)

    def layout(self, row: BatchChoice, sharding: ZeroChoice, order: ScheduleChoice) -> Layout:
        keys = row._asdict() | sharding._asdict() | order._asdict() | self.homes._asdict()
        del keys["ends"]
        keys["shard"] *= sharding.zero > 0 and self.data > 1
        if (stages := self.stages(order)) != weighed(self.blocks, len(stages), EVEN):
            keys["stages"] = stages
        return Layout(dp=self.data // row.cp, tp=self.tp, pp=self.pp, ep=self.ep, attention=self.attention, **keys)


@lru_cache(maxsize=4096)
def weighed(blocks: int, stages: int, ends: tuple[int, int]) -> tuple[int, ...]:
    """As `StageLayers.weighed`."""
    return StageLayers.weighed(blocks, stages, ends).layers


@lru_cache(maxsize=4096)
def held_by(stages: tuple[int, ...], pp: int) -> tuple[int, ...]:
    """Blocks by rank of a pipeline, from those by stage."""
    return tuple(sum(stages[rank::pp]) for rank in range(pp))


def why_not_fixed(model: Model, fixed: Mapping[str, Any]) -> str:
    """Why no layout of this model, on any cluster, has what is fixed; empty where one may."""
    ep = fixed.get("ep", 1)
    if (cuts := searched_cuts(model)) is not None:
        apart = {key: fixed[key] for key in APART if key in fixed}
        if any(apart.items() <= vars(cut.layout).items() for cut in cuts.values()):
            return ""
        known = " or ".join(cut or "neither" for cut in cuts)
        words = ",".join(f"{key}={value}" for key, value in apart.items())
        return (
            f"{model.name} was not traced with {words}; of cp and ep the trace has {known}: choose, or trace it again"
        )
    if (stages := fixed.get("stages")) and sum(stages) != model.layers:
        return f"stages={runs_text(stages)} adds up to {sum(stages)} layers, but {model.name} has {model.layers}"
    if ep > 1 and not model.experts:
        return f"ep={ep} splits experts, and {model.name} is a model without experts; leave ep out"
    if model.lora and fixed.get("offload_params", "none") != "none":
        return f"offload_params={fixed['offload_params']} is not priced beside adapters yet: leave it out"
    if model.experts and model.experts.count % ep:
        valid = ", ".join(map(str, divisors(model.experts.count)))
        return f"ep={ep} does not divide the {model.experts.count} experts of {model.name}; valid ep: {valid}"
    return ""


@dataclass(frozen=True)
class Space:
    """All candidates for a model on a cluster with a workload.

    engine: the profile that prices them. fixed: keys of a layout and the only value that they may have, as
    `fixing.fixed_of` reads them. Raises `UserError` for what cannot be searched, in one line.
    """

    model: Model
    cluster: Cluster
    workload: Workload
    engine: EngineProfile
    fixed: Mapping[str, Any] = field(default_factory=dict, hash=False)
    settings: EngineSettings = USUAL
    """Of the engine, beside its layouts."""

    def __post_init__(self) -> None:
        check_fixed(self.fixed)
        if not self.workload.batch:
            raise UserError(
                "a search needs a training workload: give a sequence length and a batch (--seq and --batch)"
            )
        if reason := why_not_planned(self.model):
            raise UserError(f"{self.model.name} cannot be planned yet: {reason}")
        if reason := why_not_fixed(self.model, self.fixed):
            raise UserError(reason)
        if self.model.experts and not self.features.experts:
            raise UserError(f"{self.engine.name} does not run models with experts, such as {self.model.name}")
        if reason := self.features.objection(self.fixed):
            raise UserError(f"{self.engine.name} cannot run {words_of(self.fixed)}: {reason}")
        check_size(self.cluster)
        if self.model.trace:
            check_row_length(self.model, self.workload)
        check_positions(self.model, self.workload.seq)

    @property
    def features(self) -> Features:
        """Features of the engine's software: candidates use no others."""
        return self.engine.features

    @property
    def attention(self) -> str:
        explicit = self.engine.attention == "scores" or self.model.attention_dropout
        return "math" if explicit else "sdpa"

    @property
    def homes(self) -> Homes:
        """Homes of all candidates: what is fixed, else the device."""
        return Homes(*(self.fixed.get(key, "none") for key in Homes._fields))

    def on_nodes(self, nodes: int) -> Self:
        """The same on so many nodes."""
        return replace(self, cluster=replace(self.cluster, nodes=nodes))

    @cached_property
    def frames(self) -> tuple[LayoutColumns, ...]:
        return tuple(frame for frame in self._frames() if frame.size)

    @cached_property
    def size(self) -> int:
        return sum(frame.size for frame in self.frames)

    def allows(self, key: str, value: Any) -> bool:
        """Whether a key of the layout may have this value."""
        return self.fixed.get(key, value) == value

    def _frames(self) -> Iterator[LayoutColumns]:
        rows: dict[tuple[int, int, int], list[BatchChoice]] = {}
        for tp, pp, cp, dp in self.meshes(self.cluster.devices):
            rows.setdefault((tp, pp, dp * cp), []).extend(self._rows(tp, pp, cp, dp))
        for (tp, pp, data), of in rows.items():
            orders, shardings = tuple(self._orders(pp)), tuple(self._shardings(tp, data, pp))
            for ep in self._expert_degrees(tp, data):
                known = tuple(row for row in of if self._known(row, ep, tp))
                yield LayoutColumns(
                    tp, pp, data, self.attention, self.workload.batch, self.model.layers, known, shardings,
                    orders, ep, self.homes,
                )  # fmt: skip

    def _known(self, row: BatchChoice, ep: int, tp: int) -> bool:
        """Whether the model is known under the row's cp and sp, this ep and this tp."""
        if self._cuts is None:
            return True
        cut = traced_cut(cut_layout({"cp": row.cp, "ep": ep}))
        return cut in self._cuts and (not row.sp or tp in self._cuts[cut].sp)

    @cached_property
    def _cuts(self) -> dict[str, SearchedCut] | None:
        return searched_cuts(self.model)

    def meshes(self, devices: int) -> Iterator[tuple[int, int, int, int]]:
        """(tp, pp, cp, dp) whose product is `devices`, where the model can be split so."""
        for tp in searched_tp(self.model) if self.features.tensor else (1,):
            if devices % tp or not self.allows("tp", tp):
                continue
            for pp in divisors(devices // tp) if self.features.schedules else (1,):
                layers = self.model.layers
                if not (pp <= layers and (self.features.uneven or layers % pp == 0)) or not self.allows("pp", pp):
                    continue
                for cp in divisors(devices // (tp * pp)) if "ring" in self.features.context else (1,):
                    dp = devices // (tp * pp * cp)
                    if self.allows("cp", cp) and self.allows("dp", dp):
                        yield tp, pp, cp, dp

    def _rows(self, tp: int, pp: int, cp: int, dp: int) -> Iterator[BatchChoice]:
        seq, batch = self.workload.seq, self.workload.batch
        if (cp > 1 and seq % (2 * cp)) or batch % dp:
            return
        whole = tp > 1 and seq % ((2 * cp if cp > 1 else 1) * tp) == 0
        cut = whole and self.features.sequence and (pp == 1 or self._cuts is None)
        kinds = (False, True) if cut else (False,)
        for sp, recompute, micro in product(kinds, self.features.recompute, divisors(batch // dp)):
            if self.allows("sp", sp) and self.allows("recompute", recompute) and self.allows("micro", micro):
                yield BatchChoice(cp, sp, recompute, micro)

    def _expert_degrees(self, tp: int, data: int) -> Iterator[int]:
        if self._cuts is None:
            degrees = valid_ep(self.model, data * tp)
        else:
            degrees = sorted({cut.layout.ep for cut in self._cuts.values() if data * tp % cut.layout.ep == 0})
        return (ep for ep in degrees if self.allows("ep", ep))

    def _shardings(self, tp: int, data: int, pp: int) -> Iterator[ZeroChoice]:
        # What is offloaded comes and goes by the stage even without other data ranks.
        groups = (divisors(data)[1:] or (1,)) if self.features.hybrid else (data,)
        staged = data > 1 or self.homes.offload != "none"
        for stage in self.features.stages_of(pp) if staged else (0,):
            if not self.allows("zero", stage) or (stage < 3 and self.homes.offload_params != "none"):
                continue
            for ranks in groups if stage else (1,):
                # shard=0 is how a layout says dp x cp, and all that it says without ZeRO.
                if self.allows("shard", ranks) or ((not stage or ranks == data) and self.allows("shard", 0)):
                    copies = self._copies(tp, ranks) if stage == 3 else (0,)
                    yield from (ZeroChoice(stage, ranks, copy) for copy in copies if self.allows("hpz", copy))

    def _copies(self, tp: int, ranks: int) -> tuple[int, ...]:
        """Ranks over which a second copy may be cut: none, and those of a shard group that share a node, or what is
        fixed. tp: ranks between two of them; ranks: of a shard group."""
        if not self.features.copies:
            return (0,)
        near = self.fixed.get("hpz") or (self.cluster.devices_per_node // tp if self.cluster.nodes > 1 else 0)
        inside = [n for n in divisors(ranks)[1:-1] if n <= near]
        return (0, inside[-1]) if inside else (0,)

    def _orders(self, pp: int) -> Iterator[ScheduleChoice]:
        for schedule in self.features.schedules if pp > 1 else ("1f1b",):
            if pp > 1 and self.model.lora and splits_backward(schedule):
                continue
            several = pp > 1 and find(schedule).virtual > 1
            for virtual in range(2, (self.model.layers + BARE_ENDS) // pp + 1) if several else (1,):
                if self.allows("schedule", schedule) and self.allows("virtual", virtual):
                    for ends in self._ends(pp, virtual):
                        stages, even = (weighed(self.model.layers, pp * virtual, some) for some in (ends, EVEN))
                        if self.fixed.get("stages") in (None, stages, () if stages == even else None):
                            yield ScheduleChoice(schedule, virtual, ends)

    def _ends(self, pp: int, virtual: int) -> Iterator[tuple[int, int]]:
        """Blocks that the embedding and the head may count as. Several chunks a rank are as large. Beside even
        stages those come that make the busiest rank lighter, or more chunks than even ones have."""
        layers = self.model.layers
        evenly = [v for v in divisors(max(1, layers // pp)) if v == 1 or layers % (pp * v) == 0]
        if virtual in evenly:
            yield EVEN
        some = {(1, 1), *product((0, 1), range(ceil(self._head) + 1))} - {EVEN}
        lighter = {
            ends: self._busiest(pp, virtual, ends) for ends in sorted(some) if self._may_count(pp, virtual, ends)
        }
        if not lighter:
            return
        ends = min(lighter, key=lambda some: (lighter[some], some != (1, 1)))
        if lighter[ends] < LIGHTER * self._busiest(pp, 1, EVEN) or virtual > max(evenly):
            yield ends

    def _may_count(self, pp: int, virtual: int, ends: tuple[int, int]) -> bool:
        layers, stages = self.model.layers, pp * virtual
        chunk, rest = divmod(layers + sum(ends), stages)
        if pp == 1 or (rest and virtual > 1):
            return False
        if stages > layers:
            bare = self.features.bare_ends and not self.model.experts
            return bare and ends == (1, 1) and stages == layers + BARE_ENDS
        return self.features.listed and virtual <= MOST_CHUNKS and chunk >= max(ends) + (virtual == 1)

    def _busiest(self, pp: int, virtual: int, ends: tuple[int, int]) -> float:
        """Work of the busiest rank, in blocks."""
        *others, last = held_by(weighed(self.model.layers, pp * virtual, ends), pp)
        return max(*others, last + self._head)

    @cached_property
    def _head(self) -> float:
        """FLOPs of the head over those of a block, in the mean; 0 of a traced module."""
        if self.model.trace:
            return 0.0
        *blocks, head = (
            part.count * sum(op.flops_per_token(self.workload.seq, True) for op in part.operations)
            for part in blueprint(self.model).parts
        )
        return head * self.model.layers / sum(blocks)


def powers(most: int) -> list[int]:
    """1, 2, 4, ... and the number itself; nothing for 0."""
    return sorted({most, *(1 << k for k in range(most.bit_length()))}) if most > 0 else []

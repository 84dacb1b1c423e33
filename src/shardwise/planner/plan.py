"""`plan`: model, cluster and workload in; the best layouts with their figures out, and why they are the best."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from functools import cached_property, partial
from typing import Any

from shardwise.cluster import Cluster
from shardwise.cluster.catalog import DevicePrice, price_of
from shardwise.codec import keyed
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.layout.legality import beyond_positions
from shardwise.layout.usual_workload import odd_part
from shardwise.model.flops import MFU, training_flops_per_sequence
from shardwise.model.parameters import Model, count
from shardwise.planner import shortfall
from shardwise.planner.answer import SHOWN, Answer, By, numbers_of, winners
from shardwise.planner.common import Alternative, resembling
from shardwise.planner.price_words import priced
from shardwise.planner.pricing import Priced
from shardwise.planner.ranking import Candidate
from shardwise.planner.runnable import space_for, why_not_trained
from shardwise.planner.space import Space
from shardwise.predict.arguments import Length, as_cluster, as_model, as_workload
from shardwise.predict.fixing import fixed_of
from shardwise.predict.memory.capacity import explained, room_of
from shardwise.predict.memory.engine_settings import MUON, USUAL, EngineSettings
from shardwise.predict.time.constants import constants
from shardwise.predict.time.ranges import large_run
from shardwise.predict.traffic.slow_links import tensor_warnings
from shardwise.records import dataclass
from shardwise.report.printing import Bar, Printable
from shardwise.report.room import DeviceRoom
from shardwise.report.tables import memory_bar, time_bar
from shardwise.report.terminal import Renderable
from shardwise.report.units import format_bytes

EXPERTS = (
    "experts: published steps of such models are predicted 14% off on average, from -59% to +6% (27 rows of "
    "Megatron-Bridge, docs/prediction.md), so the ranges are wide, and layouts this close are not told apart",
    "tokens are taken to spread evenly over the experts, none dropped: a rank whose experts get a fifth more than the "
    "mean takes that much longer for them, and keeps as much more of their activations",
)
"""Notes on every plan of a model with experts."""


@dataclass(frozen=True, repr=False)
class Plan(Answer[Priced], Printable):
    """The best layouts of a model on a cluster, best first, and what there is to say about the first.

    cluster: the whole one; `by="cost"` may choose layouts on fewer of its nodes.
    """

    alternatives: tuple[Alternative, ...]
    unlimited: Priced | None
    """The fastest layout if memory were no limit; None where that is the winner."""
    none_runs: str = ""
    """Reason why none of the layouts runs here yet, in a plan for this runtime; empty if all run."""
    capacity: str = ""
    """Derivation of the usable bytes; empty where nothing is reserved."""
    device_price: DevicePrice | None = None
    """Of one device; None where it has no list price and none was given."""
    fastest: Priced | None = None
    """The fastest layout that fits, where the first is as fast within the error and more common."""
    same: tuple[Candidate, ...] = ()
    """Layouts that may fit and are as fast as the fastest within the error, the most common first."""
    room: DeviceRoom = field(default_factory=lambda: DeviceRoom(0.0))
    """A device's room. Layouts fit with its margin, unless none does."""
    settings: EngineSettings = USUAL
    """Of the engine, beside its layouts."""
    shown: int = SHOWN
    """Layouts of `tables`."""
    assumed: tuple[str, ...] = ()
    """Numbers of the workload that were not given."""

    @property
    def searched(self) -> float:
        """Bytes of a device that layouts were held to."""
        at_risk = any(self.room.state(one.held.total) == "at risk" for one in self.ranked)
        return self.room.usable if at_risk else self.room.safe

    def tables(self) -> Iterator[Renderable]:
        from shardwise.planner.plan_tables import plan_tables

        return plan_tables(self)

    def why(self) -> Iterator[Renderable]:
        """Memory and time of the best layout by part, why not another, and assumptions, as texts and tables."""
        from shardwise.planner.plan_tables import why_tables

        return why_tables(self)

    def conclusion(self) -> str:
        from shardwise.planner.plan_tables import plan_conclusion

        return plan_conclusion(self)

    def bars(self) -> Iterator[Bar]:
        yield time_bar(self.winner.parts)
        yield memory_bar(self.winner.held)

    def records(self) -> list[dict[str, Any]]:
        """The ranked layouts, as --json has them, with the bytes of the fullest device."""
        rows = ((one, self._row(one)) for one in self.ranked)
        nested = ["bytes", "parts", "resembles", "node_bytes"]
        return [{k: v for k, v in row.items() if k not in nested} | {"bytes": one.held.total} for one, row in rows]

    @property
    def notes(self) -> tuple[str, ...]:
        narrow = self.settings.precision
        products = (f"products in {narrow}, as {self.engine} has them",) if narrow else ()
        experts, muon = EXPERTS if self.model.experts else (), (MUON,) if self.workload.optimizer == "muon" else ()
        longer = beyond_positions(self.model, self.workload.seq)
        return (*longer, MFU, *products, *muon, *experts, *large_run(self.winner.layout.ranks))

    @property
    def warnings(self) -> tuple[str, ...]:
        """The best layout's risk to run out of memory; and layouts shown whose tensor parallelism runs over slow links,
        a line for each tp."""
        risk = self.room.warning(self.winner.held.total)
        shown = ((one.layout.tp, one.parts) for one in self.ranked[: self.shown])
        slow = tensor_warnings(self.cluster, shown, "the step")
        return (*([risk] if risk else []), *slow)

    def tokens_per_second(self, one: Priced) -> float:
        """Tokens per second, summed over all devices."""
        return self.workload.batch * self.workload.seq / one.seconds

    def utilisation(self, one: Priced) -> float:
        """Model FLOPs over the peak of the devices that are used (MFU), in bf16; causal attention counted once."""
        peak = self.cluster.device.peak("bfloat16")
        assert peak
        return self._flops / (one.seconds * one.layout.ranks * peak)

    @cached_property
    def _flops(self) -> float:
        return float(self.workload.batch * training_flops_per_sequence(self.model, self.workload.seq))

    def price(self, one: Priced) -> dict[str, Any] | None:
        """US dollars per hour and per million tokens, with the source; None where the device has no price."""
        return priced(self.device_price, one.layout.ranks, self.tokens_per_second(one))

    def device_seconds(self, one: Priced) -> float:
        """Device-seconds of one step: its cost, up to the price of a device."""
        return one.layout.ranks * one.seconds

    def to_json(self) -> dict[str, Any]:
        return self.asked_json() | {
            "ranked": [self._row(one) for one in self.ranked],
            "usable": self.capacity or None,
            "room": self.room.to_json(self.winner.held.total),
            "none_runs_here": self.none_runs or None,
            "fastest": None if self.fastest is None else self._row(self.fastest),
            "as_fast": [{"layout": str(one.place.layout), "seconds": one.seconds} for one in self.same],
            "unlimited": None if self.unlimited is None else self._row(self.unlimited),
            "alternatives": [_alternative_json(each) for each in self.alternatives],
            "price": self.price(self.winner),
            **keyed(self, "notes assumed warnings"),
        }

    def not_runnable(self, one: Priced) -> str | None:
        """Why this project's `train` rejects a layout; None where it runs it."""
        return why_not_trained(one.layout, self.model, self.workload)

    def _row(self, one: Priced) -> dict[str, Any]:
        return {
            **keyed(one, "layout devices=layout.ranks seconds low=range.low high=range.high"),
            "tokens_per_second": self.tokens_per_second(one),
            "mfu": self.utilisation(one),
            "device_seconds": self.device_seconds(one),
            "bytes": one.held.to_json() | {"total": one.held.total},
            "memory": self.room.state(one.held.total),
            **({"node_bytes": one.node._asdict()} if any(one.node) else {}),
            **keyed(one, "pipeline_rank=place parts"),
            "not_runnable": self.not_runnable(one),
            "resembles": resembling(count(self.model), one.layout),
        }


def plan(
    model: Model | str,
    cluster: Cluster | str,
    workload: Workload | None = None,
    *,
    engine: str | None = None,
    by: By = "throughput",
    top: int | None = None,
    fix: Mapping[str, Any] | str | None = None,
    reserve: float | None = None,
    explain: bool = True,
    seq: Length = None,
    batch: Length = None,
    price: float | None = None,
    refuses: Callable[[bool, Layout], str] | None = None,
    settings: EngineSettings = USUAL,
    assumed: tuple[str, ...] = (),
) -> Plan:
    """The best `top` layouts (10; 3 are printed) for training `model` on `cluster`, exactly: every layout that
    the engine can run is compared with a device's memory, and priced if it fits.

    model, cluster: objects, or their names: "llama-3-8b", "8xH100". workload: a `Workload`; in its place `seq` tokens
    per sequence and `batch` sequences per step, usual ones where they are left out. engine: a profile of
    `predict.time.ENGINES`; None is this project's runtime. Where the runtime can run none, layouts are ranked as if it
    could, and `none_runs` says so. by: "throughput", of layouts that are as fast as the fastest within the error
    (`SAME`) the most common first; "fastest", whatever they are; "memory"; "cost" (device-seconds per step, on as many
    nodes as pay off: 1, 2, 4, ... and all); or "pareto" (all that no other one beats in time and memory). fix: keys
    of the layout and the value that they must have, or their text. reserve: bytes of a device that training cannot
    have; None is the usual, with a margin (`room_of`) that the best layouts keep, unless none does. explain: with
    alternatives and what memory costs, or, where nothing fits, with what would have to change. price: US dollars per
    device-hour; None is the lowest list price. refuses: why a layout is not to be ranked, "" where it is, if memory
    keeps its margin (True) or need not. settings: of the engine. assumed: notes on numbers that were not given.
    Raises `UserError` in one line where no layout is legal or fits, with what would have to change; for unknown names;
    and for what cannot be planned: devices without constants, decoders of other kinds, engines that do not train.
    """
    model, cluster = as_model(model), as_cluster(cluster)
    workload, usual = as_workload(model, workload, seq, batch, odd_part(cluster.devices))
    shown, top = numbers_of(top, by)
    fixed = fixed_of(fix or "")
    space, none_runs = space_for(model, cluster, workload, engine, fixed, settings)
    room = room_of(cluster, space.engine.name, bool(model.experts), reserve)
    constants(cluster.device)  # raises for a device without any
    if explain and (rejected := shortfall.why_no_state_fits(space, room.usable, reserve)):
        raise rejected
    result = winners(space, by, top, usable := room.safe, explain, refuses and partial(refuses, True))
    if not result.best and room.margin:
        result = winners(space, by, top, usable := room.usable, explain, refuses and partial(refuses, False))
    if not result.best:
        if refuses and (others := winners(space, by, 1, usable, explain).best):
            best = others[0].layout
            raise UserError(f"no layout that fits will do; the best, {best}: {refuses(False, best)}")
        raise _nothing(space, usable, reserve, explain)
    explained_too = explain and by in ("throughput", "fastest", "cost")
    other = by == "throughput" and result.fastest != result.best[0]
    return Plan(
        model, cluster, workload, space.engine.name, by, room.usable, result.best, result.considered, result.fitting,
        tuple(result.alternatives(usable)) if explained_too else (), result.unlimited() if explained_too else None,
        none_runs, explained(cluster, reserve), price_of(cluster.device, price), result.fastest if other else None,
        result.same, room, settings, shown, assumed or usual,
    )  # fmt: skip


def _nothing(space: Space, usable: float, reserved: float | None, explain: bool) -> UserError:
    """explain: with a search for what would have to change."""
    if not explain and space.frames:
        return UserError(
            f"does not fit {space.cluster}: none of {space.size:,} layouts needs at most {format_bytes(usable)} per "
            "device"
        )
    leanest = shortfall.least(space) if explain else None
    if leanest is None:
        return shortfall.why_not_on_the_host(space) if space.size else shortfall.why_no_layout(space)
    return shortfall.why_nothing_fits(space, usable, leanest, reserved)


def _alternative_json(one: Alternative) -> dict[str, Any]:
    keys = f"key value {'layout=best.layout' if one.best else 'layout=best'} least_bytes=least slower_seconds=slower"
    data = keyed(one, f"{keys} part? grew_seconds=grew crosses_nodes=crosses") | {"least_bytes": float(one.least)}
    return data if one.best else data | {"slower_seconds": None, "grew_seconds": None}

"""`plan`: model, cluster and workload in; the best layouts with their figures out, and why they are the best."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Workload
from shardwise.model import ModelConfig
from shardwise.model.flops import MFU, training_flops_per_sequence
from shardwise.planner import shortfall
from shardwise.planner.alternatives import Alternative, ByChoice, against
from shardwise.planner.answer import Answer
from shardwise.planner.exact import HIGH, Exact
from shardwise.planner.pricing import Priced
from shardwise.planner.ranking import CandidateIndex, Found, Listing, price_places, search
from shardwise.planner.runnable import OWN, needs, why_none_runs, why_not_trained, widened
from shardwise.planner.space import Space
from shardwise.predict.arguments import as_cluster, as_model, as_workload
from shardwise.predict.memory.capacity import explained, usable_bytes
from shardwise.predict.step_seconds import own_engine
from shardwise.predict.time.features import Features
from shardwise.predict.time.pricing import Pricing
from shardwise.predict.time.profiles import ENGINES, EngineProfile
from shardwise.predict.time.profiles import engine as engine_of
from shardwise.predict.traffic.slow_links import tensor_warnings
from shardwise.report.units import format_bytes

By = Literal["throughput", "memory", "cost", "pareto"]

EXPERTS = (
    "experts: published steps of such models are predicted 27% off on average, from -69% to +71% (26 rows of "
    "Megatron-Bridge, docs/prediction.md), so the ranges are wide, and layouts this close are not told apart",
    "tokens are taken to spread evenly over the experts, none dropped: a rank whose experts get a fifth more than the "
    "mean takes that much longer for them, and keeps as much more of their activations",
    "every token is sent to each of its experts apart: software that sends it to a node once loses less between nodes",
)
"""What is said with every plan of a model with experts."""


@dataclass(frozen=True)
class Plan(Answer[Priced]):
    """The best layouts of a model on a cluster, best first, and what there is to say about the first.

    cluster: the whole one; `by="cost"` may choose layouts on fewer of its nodes.
    """

    alternatives: tuple[Alternative, ...]
    unlimited: Priced | None
    """The fastest layout if memory were no limit; None where that is the winner."""
    none_runs: str = ""
    """Reason why none of the layouts runs here yet, in a plan for this runtime; empty if all run."""
    beyond: Priced | None = None
    """A better layout with features that this runtime lacks; None if there is none, or it was not searched."""
    capacity: str = ""
    """Where the usable bytes come from; empty where nothing is reserved."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Assumptions behind the numbers, a sentence each."""
        return (MFU, *(EXPERTS if self.model.experts else ()))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Layouts shown whose tensor parallelism runs over slow links, a line for each tp."""
        return tensor_warnings(self.cluster, ((one.layout.tp, one.parts) for one in self.ranked), "the step")

    @property
    def beyond_needs(self) -> str:
        """The features that `beyond` needs and the runtime here lacks."""
        return needs(self.beyond.layout) if self.beyond else ""

    def tokens_per_second(self, one: Priced) -> float:
        """Of all devices together."""
        return self.workload.batch * self.workload.seq / one.seconds

    def utilisation(self, one: Priced) -> float:
        """Model FLOPs over the peak of the devices that are used (MFU), in bf16; causal attention counted once."""
        peak = self.cluster.device.peak("bfloat16")
        assert peak
        return self._flops / (one.seconds * one.layout.ranks * peak)

    @cached_property
    def _flops(self) -> float:
        return float(self.workload.batch * training_flops_per_sequence(self.model, self.workload.seq))

    def device_seconds(self, one: Priced) -> float:
        """Of one step: what it costs, up to the price of a device."""
        return one.layout.ranks * one.seconds

    def to_json(self) -> dict[str, Any]:
        """Plain data: what `shardwise plan --json` prints."""
        return self.asked_json() | {
            "ranked": [self._row(one) for one in self.ranked],
            "usable": self.capacity or None,
            "none_runs_here": self.none_runs or None,
            "beyond": None if self.beyond is None else self._row(self.beyond) | {"needs": self.beyond_needs},
            "unlimited": None if self.unlimited is None else self._row(self.unlimited),
            "alternatives": [_told(each) for each in self.alternatives],
            "notes": list(self.notes),
            "warnings": list(self.warnings),
        }

    def not_runnable(self, one: Priced) -> str | None:
        """Why this project's `train` rejects a layout; None where it runs it."""
        return why_not_trained(one.layout, self.model, self.workload)

    def _row(self, one: Priced) -> dict[str, Any]:
        return {
            "layout": str(one.layout),
            "devices": one.layout.ranks,
            "seconds": one.seconds,
            "low": float(one.range.low),
            "high": float(one.range.high),
            "tokens_per_second": self.tokens_per_second(one),
            "mfu": self.utilisation(one),
            "device_seconds": self.device_seconds(one),
            "bytes": one.held.to_json(),
            "pipeline_rank": one.place,
            "parts": one.parts,
            "not_runnable": self.not_runnable(one),
        }


def plan(
    model: ModelConfig | str,
    cluster: Cluster | str,
    workload: Workload | None = None,
    *,
    engine: str | None = None,
    by: By = "throughput",
    top: int = 10,
    fixed: Mapping[str, Any] | None = None,
    reserved: float | None = None,
    explain: bool = True,
) -> Plan:
    """The best `top` layouts for training `model` on `cluster`, exactly: every layout that the engine can run is
    compared with a device's memory, and priced if it fits.

    model, cluster: objects, or their names: "llama-3-8b", "8xH100". engine: a profile of `predict.time.ENGINES`; None
    is this project's runtime. Where the runtime can run none, as with experts, layouts are ranked as if it could, and
    `none_runs` says so. by: "throughput", "memory", "cost" (device-seconds per step, on as many nodes as pay off: 1, 2,
    4, ... and all), or "pareto" (all that no other one beats in time and memory). fixed: keys of the layout and the
    value that they must have. reserved: bytes of a device that training cannot have; None is the usual. explain: with
    alternatives, what memory costs, and the best layout that the runtime cannot run yet.
    Raises `UserError` in one line where there is no legal layout or none fits, with what would have to change; for
    unknown names; and for what cannot be planned: devices without constants, decoders of other kinds, engines that do
    not train.
    """
    model, cluster, workload = as_model(model), as_cluster(cluster), as_workload(workload)
    if top < 1:
        raise UserError(f"--top must be a positive integer, not {top}")
    usable = usable_bytes(cluster, reserved)
    space, none_runs = space_for(model, cluster, workload, engine, fixed or {})
    result = _search(space, by, top, usable, explain)
    if not result.found.best or (explain and _fits_after_all(result, usable)):
        # The closed form was too high for something that fits.
        result = _search(space, by, top, usable, explain, HIGH)
    if not result.found.best:
        result, none_runs = _beyond_what_runs(space, none_runs, by, top, usable)
    if not result.found.best:
        raise _nothing(space, usable, reserved)
    winner = result.found.best[0]
    explained_too = explain and by in ("throughput", "cost")
    return Plan(
        model, cluster, workload, space.engine.name, by, usable, result.found.best, result.found.considered,
        result.found.fitting, tuple(_alternatives(result, winner, usable)) if explained_too else (),
        _unlimited(result, winner) if explained_too else None, none_runs,
        _better(result.found, by), explained(cluster, reserved),
    )  # fmt: skip


def space_for(
    model: ModelConfig, cluster: Cluster, workload: Workload, engine: str | None, fixed: Mapping[str, Any]
) -> tuple[Space, str]:
    """The candidates for an engine, this project's runtime if None; and why none of them runs here, empty where that is
    not known of all. Raises `UserError`."""
    profile = training_engine(engine or own_engine(cluster))
    none_runs = why_none_runs(model, fixed) if profile.name in OWN else ""
    return Space(model, cluster, workload, widened(profile) if none_runs else profile, dict(fixed)), none_runs


def training_engine(name: str) -> EngineProfile:
    """The profile of that name. Raises `UserError` for one that there is not, and for one that only serves."""
    found = engine_of(name)
    training = [e.name for e in ENGINES.values() if not e.facts["optimizer_bytes"].startswith("not used")]
    if name not in training:
        raise UserError(f"{name} does not train; profiles that do are {', '.join(training)}")
    return found


class _Result(NamedTuple):
    """What a search found, and where: the winner's space, prices and choices."""

    found: Found
    space: Space
    pricing: Pricing
    choices: ByChoice
    listing: Listing
    ranked: Features | None = None


def _search(space: Space, by: By, top: int, usable: float, explain: bool, slack: float = 1.0) -> _Result:
    """The search of a space. With `explain`, for this runtime, also for the best layout that it cannot run yet."""
    ranked = space.features if explain and space.engine.name in OWN and not space.features.context else None
    wide = replace(space, engine=widened(space.engine)) if ranked else space
    if by == "cost":
        return _cheapest(wide, usable, top, ranked, slack)
    pricing, choices = Pricing(space.cluster), ByChoice()
    keepers = [choices] if explain else []
    listing = Listing(Exact(space.model, space.workload, space.cluster), slack)
    found = search(
        wide, pricing, by, top, usable, keepers=keepers, unlimited=explain, ranked=ranked, listing=listing
    )  # fmt: skip
    return _Result(found, wide, pricing, choices, listing, ranked)


def _fits_after_all(result: _Result, usable: float) -> bool:
    """Whether the fastest of all, which does not fit by the closed form's bytes, does."""
    unlimited = result.choices.unlimited
    if unlimited is None or not unlimited[0] < result.found.best[0].seconds:
        return False
    return result.listing.slack == 1.0 and result.listing.exact.of(unlimited[1].layout)[0].total <= usable


def _beyond_what_runs(space: Space, none_runs: str, by: By, top: int, usable: float) -> tuple[_Result, str]:
    """If no layout of this runtime fits: the search over layouts that it cannot run yet, and the missing features."""
    if space.engine.name not in OWN or none_runs:
        return _empty(space), none_runs
    result = _search(replace(space, engine=widened(space.engine)), by, top, usable, explain=True)
    if not result.found.best:
        return result, none_runs
    found = shortfall.least(space)
    why = f" (the leanest layout, {found.layout}, needs {format_bytes(found.nbytes)} per device)" if found else ""
    return result, f"{needs(result.found.best[0].layout)}; without it nothing fits{why}"


def _empty(space: Space, considered: int = 0, fitting: int = 0) -> _Result:
    listing = Listing(Exact(space.model, space.workload, space.cluster))
    return _Result(Found((), considered, fitting), space, Pricing(space.cluster), ByChoice(), listing)


def _better(found: Found, by: By) -> Priced | None:
    """The best layout that this runtime cannot run yet, if it is better than all that it can run."""
    one, winner = found.beyond, found.best[0]
    if one is None or not needs(one.layout):
        return None
    figures: dict[By, Callable[[Priced], float]] = {
        "memory": lambda one: one.held.total,
        "cost": lambda one: one.layout.ranks * one.seconds,
    }
    figure = figures.get(by, lambda one: one.seconds)
    return one if figure(one) < figure(winner) else None


def _nothing(space: Space, usable: float, reserved: float | None) -> UserError:
    found = shortfall.least(space)
    return shortfall.why_nothing_fits(space, usable, found, reserved) if found else shortfall.why_no_layout(space)


def _cheapest(space: Space, usable: float, top: int, ranked: Features | None, slack: float) -> _Result:
    """The candidates of least device-seconds over clusters of 1, 2, 4, ... and all nodes; and the winner's search."""
    nodes = space.cluster.nodes
    counts = sorted({nodes, *(2**k for k in range(nodes.bit_length()) if 2**k <= nodes)})
    rows, beyond, considered, fitting = [], [], 0, 0
    for count in counts:
        part = replace(space, cluster=replace(space.cluster, nodes=count))
        pricing, choices = Pricing(part.cluster), ByChoice()
        listing = Listing(Exact(part.model, part.workload, part.cluster), slack)
        found = search(
            part, pricing, "throughput", top, usable, keepers=[choices], unlimited=True, ranked=ranked, listing=listing
        )
        considered, fitting = considered + found.considered, fitting + found.fitting
        search_of = part, pricing, choices, listing, ranked
        rows += [(one.layout.ranks * one.seconds, i, one, *search_of) for i, one in enumerate(found.best)]
        beyond += [found.beyond] if found.beyond else []
    rows.sort(key=lambda row: row[:2])
    best = tuple(row[2] for row in rows[:top])
    if not best:
        return _empty(space, considered, fitting)
    least = min(beyond, key=lambda one: one.layout.ranks * one.seconds, default=None)
    return _Result(Found(best, considered, fitting, least), *rows[0][3:])


def _alternatives(result: _Result, winner: Priced, usable: float) -> list[Alternative]:
    space, choices, listing = result.space, result.choices, result.listing
    asked = list(choices.neighbours(winner))
    places: dict[tuple[str, Any], CandidateIndex] = {}
    others: dict[tuple[str, Any], Priced] = {}
    for choice in asked:
        place = choices.fastest[choice][1] if choice in choices.fastest else None
        if place and listing.exact.of(place.layout, usable)[0].total <= usable:
            places[choice] = place
        elif place or choices.least[choice][0] <= usable * HIGH:
            others |= _fixed_to(result, *choice, usable)
    priced = price_places(space, list(places.values()), result.pricing, None, listing)
    others |= dict(zip(places, priced, strict=True))
    leanest = {c: listing.exact.of(choices.least[c][1].layout)[0].total for c in asked if c not in others}
    return [
        against(winner, key, value, others.get((key, value)), leanest.get((key, value), 0.0), space.cluster)
        for key, value in asked
    ]


def _fixed_to(result: _Result, key: str, value: Any, usable: float) -> dict[tuple[str, Any], Priced]:
    """The fastest candidate with this value that fits, by a search for it alone; empty where none does."""
    one = replace(result.space, fixed={**result.space.fixed, key: value})
    listing = Listing(result.listing.exact, HIGH)
    best = search(one, result.pricing, top=1, usable=usable, ranked=result.ranked, listing=listing).best
    return {(key, value): best[0]} if best else {}


def _unlimited(result: _Result, winner: Priced) -> Priced | None:
    space, pricing, choices = result.space, result.pricing, result.choices
    if choices.unlimited is None or not choices.unlimited[0] < winner.seconds:
        return None
    place = choices.unlimited[1]
    return price_places(space, [place], pricing, None, result.listing)[0]


def _told(one: Alternative) -> dict[str, Any]:
    return {
        "key": one.key,
        "value": one.value,
        "layout": None if one.best is None else str(one.best.layout),
        "least_bytes": one.least,
        "slower_seconds": one.slower if one.best else None,
        "part": one.part or None,
        "grew_seconds": one.grew if one.best else None,
        "crosses_nodes": one.crosses,
    }

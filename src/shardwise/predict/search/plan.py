"""`plan`: model, cluster and workload in; the best layouts with their figures out, and why they are the best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Workload
from shardwise.model import ModelConfig
from shardwise.model.flops import training_flops_per_sequence
from shardwise.predict.answer import Answer
from shardwise.predict.search import shortfall
from shardwise.predict.search.alternatives import Alternative, ByChoice, against
from shardwise.predict.search.fitting import RESERVED_BYTES
from shardwise.predict.search.pricing import Priced, price_all, price_one
from shardwise.predict.search.ranking import Found, search
from shardwise.predict.search.runnable import why_not_trained
from shardwise.predict.search.space import Space
from shardwise.predict.slow_links import tensor_warnings
from shardwise.predict.step_seconds import usual_engine
from shardwise.predict.time.pricing import Pricing
from shardwise.predict.time.profiles import ENGINES, Engine
from shardwise.predict.time.profiles import engine as engine_of

By = Literal["throughput", "memory", "cost", "pareto"]
ENGINE = "megatron-bridge"
"""The profile that is planned for where none is named, but on CPUs: today's Megatron-Core."""


EXPERTS = (
    "experts: published steps of such models are predicted 27% off on average, from -69% to +71% (26 rows of "
    "Megatron-Bridge, docs/prediction.md), so the ranges are wide, and layouts this close are not told apart",
    "tokens are taken to spread evenly over the experts, none dropped: a rank whose experts get a fifth more than the "
    "mean takes that much longer for them, and keeps as much more of their activations",
    "every token is sent to each of its experts apart: software that sends it to a node once loses less between nodes",
)
"""What is said with every plan of a model with experts."""

MFU = "MFU counts causal attention once: a token attends to itself and those before it, half of the square"


@dataclass(frozen=True)
class Plan(Answer[Priced]):
    """The best layouts of a model on a cluster, best first, and what there is to say about the first.

    cluster: the whole one; `by="cost"` may choose layouts on fewer of its nodes. unlimited: the fastest layout if
    memory were no limit, None where that is the winner.
    """

    alternatives: tuple[Alternative, ...]
    unlimited: Priced | None

    @property
    def notes(self) -> tuple[str, ...]:
        """What the figures assume that a person would want to know, a sentence each."""
        return (MFU, *(EXPERTS if self.model.experts else ()))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Layouts shown whose tensor parallelism runs over slow links, a line for each tp."""
        return tensor_warnings(self.cluster, ((one.layout.tp, one.parts) for one in self.ranked), "the step")

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
            "unlimited": None if self.unlimited is None else self._row(self.unlimited),
            "alternatives": [_told(each) for each in self.alternatives],
            "notes": list(self.notes),
            "warnings": list(self.warnings),
        }

    def not_runnable(self, one: Priced) -> str | None:
        """Why this project's `train` refuses its layout, which is for the engine's software; None where it runs it."""
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
    model: ModelConfig,
    cluster: Cluster,
    workload: Workload,
    *,
    engine: str | None = None,
    by: By = "throughput",
    top: int = 10,
    fixed: Mapping[str, Any] | None = None,
    reserved: float = RESERVED_BYTES,
    explain: bool = True,
) -> Plan:
    """The best `top` layouts for training `model` on `cluster`, exactly: all legal ones are held against memory, and
    those that fit are priced.

    engine: a profile of `predict.time.ENGINES`, the software whose overlaps and kernels are assumed; None is `ENGINE`,
    on CPUs this project's own. by: "throughput",
    "memory", "cost" (device-seconds of a step, on as many nodes as pay off: 1, 2, 4, ... and all), or "pareto" (all
    that no other one beats in time and memory). fixed: keys of the layout and the value that they must have. reserved:
    bytes of a device that training cannot have. explain: with alternatives, and what memory costs.
    Raises `UserError` in one line where there is no legal layout or none fits, with what would have to change; and for
    what is not known: devices without constants, decoders of other kinds, engines that do not train.
    """
    if top < 1:
        raise UserError(f"--top must be a positive integer, not {top}")
    engine = engine or usual_engine(cluster, ENGINE)
    space = Space(model, cluster, workload, training_engine(engine), dict(fixed or {}))
    usable = shortfall.usable_bytes(cluster, reserved)
    choices = ByChoice()
    pricing = Pricing(cluster)
    if by == "cost":
        found, space, pricing, choices = _cheapest(space, usable, top)
    else:
        found = search(space, pricing, by, top, usable, keepers=[choices] if explain else [], unlimited=explain)
    if not found.best:
        raise _nothing(space, usable, reserved)
    winner = found.best[0]
    explained = explain and by in ("throughput", "cost")
    return Plan(
        model, cluster, workload, engine, by, usable, found.best, found.considered, found.fitting,
        tuple(_alternatives(space, pricing, winner, choices)) if explained else (),
        _unlimited(space, pricing, winner, choices) if explained else None,
    )  # fmt: skip


def training_engine(name: str) -> Engine:
    """The profile of that name. Raises `UserError` for one that there is not, and for one that only serves."""
    found = engine_of(name)
    training = [e.name for e in ENGINES.values() if not e.facts["optimizer_bytes"].startswith("not used")]
    if name not in training:
        raise UserError(f"{name} does not train; profiles that do are {', '.join(training)}")
    return found


def _nothing(space: Space, usable: float, reserved: float) -> UserError:
    found = shortfall.least(space)
    return shortfall.why_nothing_fits(space, usable, found, reserved) if found else shortfall.why_no_layout(space)


def _cheapest(space: Space, usable: float, top: int) -> tuple[Found, Space, Pricing, ByChoice]:
    """The candidates of least device-seconds over clusters of 1, 2, 4, ... and all nodes; and the winner's search."""
    nodes = space.cluster.nodes
    counts = sorted({nodes, *(2**k for k in range(nodes.bit_length()) if 2**k <= nodes)})
    rows, considered, fitting = [], 0, 0
    for count in counts:
        part = replace(space, cluster=replace(space.cluster, nodes=count))
        pricing, choices = Pricing(part.cluster), ByChoice()
        found = search(part, pricing, "throughput", top, usable, keepers=[choices], unlimited=True)
        considered, fitting = considered + found.considered, fitting + found.fitting
        rows += [(one.layout.ranks * one.seconds, i, one, part, pricing, choices) for i, one in enumerate(found.best)]
    rows.sort(key=lambda row: row[:2])
    best = tuple(row[2] for row in rows[:top])
    if not best:
        return Found((), considered, fitting), space, Pricing(space.cluster), ByChoice()
    return Found(best, considered, fitting), *rows[0][3:]


def _alternatives(space: Space, pricing: Pricing, winner: Priced, choices: ByChoice) -> list[Alternative]:
    asked = list(choices.neighbours(winner))
    places = {choice: choices.fastest[choice][1] for choice in asked if choice in choices.fastest}
    chosen = [(place.layout, place.engine) for place in places.values()]
    others = dict(zip(places, price_all(space.model, chosen, space.workload, pricing), strict=True))
    return [
        against(winner, key, value, others.get((key, value)), choices.least[key, value], space.cluster)
        for key, value in asked
    ]


def _unlimited(space: Space, pricing: Pricing, winner: Priced, choices: ByChoice) -> Priced | None:
    if choices.unlimited is None or not choices.unlimited[0] < winner.seconds:
        return None
    place = choices.unlimited[1]
    return price_one(space.model, place.layout, space.workload, place.engine, pricing)


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

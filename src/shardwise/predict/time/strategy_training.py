"""Generation's strategies in a training step, where the gather of a block has its arithmetic to hide behind."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from shardwise.cluster import Cluster
from shardwise.codec import Json
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.model import ModelConfig
from shardwise.predict.estimate import estimate
from shardwise.predict.time.decode_ops import GATHER, SUM, DecodeOp
from shardwise.predict.time.pieces import Pieces, pieces, total
from shardwise.predict.time.pricing import Pricing
from shardwise.predict.time.profiles import EngineProfile
from shardwise.predict.time.profiles import engine as engine_of
from shardwise.predict.time.split import StepShape
from shardwise.predict.time.traffic import Traffic, traffic

FORWARD, BACKWARD, REDUCE = "forward", "backward", "reduce-scatter"
"""Kinds of pieces of a training step, besides GATHER and SUM."""


@dataclass(frozen=True)
class BlockSeconds:
    """One block of one micro-batch on one rank, in seconds."""

    forward: float
    """Arithmetic of the forward pass."""
    backward: float
    sums: tuple[float, float]
    """Exposed collectives over tp and cp, forward and backward."""
    gather: float
    """Seconds of gathering the block's weights per pass; 0 where nothing is gathered."""
    reduce: float
    """Seconds of reducing its gradients; 0 where that is not done block by block."""
    slowed: float
    """Seconds that arithmetic takes longer for each second of a transfer beside it."""
    hides: tuple[bool, bool]
    """Whether gathers and reductions run beside arithmetic."""


@dataclass(frozen=True)
class TrainStepTime(Json):
    """One training step with a sequence for each rank, as `estimate` predicts it."""

    json_keys = (
        "layout cluster engine seconds moving share block_arithmetic=arithmetic block_gather=gather block parts "
        "micro_batches seq peak_bytes=peak room"
    )

    layout: Layout
    cluster: Cluster
    engine: str
    """Profile of the software that is assumed."""
    parts: Mapping[str, float]
    """Seconds of the step by part."""
    arithmetic: float
    """Seconds of one block's forward pass in one micro-batch: what a gather can hide behind."""
    gather: float
    """Seconds of gathering a block's weights; 0 where nothing is gathered."""
    block: BlockSeconds
    micro_batches: int
    """Of a rank."""
    seq: int
    """Tokens of each sequence."""
    peak: int
    """Bytes that the fullest rank needs."""
    room: Mapping[str, Any] | None
    """A device's room and whether the step fits (`DeviceRoom.to_json`); None where its memory is not known."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def moving(self) -> float:
        """Seconds of exposed collectives and messages."""
        return sum(self.parts[name] for name in ("tensor", "data", "pipeline", "experts"))

    @property
    def waiting(self) -> float:
        """Seconds of pipeline bubbles."""
        return self.parts["bubble"]

    @property
    def share(self) -> float:
        """Share of the step that is spent on moving data."""
        return self.moving / self.seconds

    @property
    def state(self) -> str:
        """ "fits", "at risk" or "does not fit"; empty where the device's memory is not known."""
        return self.room["state"] if self.room else ""


def trained(model: ModelConfig, layout: Layout, seq: int, cluster: Cluster) -> TrainStepTime:
    """A step of `layout.ranks` sequences of `seq` tokens, one per micro-batch: the time and memory that `estimate`
    predicts for this project's runtime. Sequences are no longer than learned positions allow;
    attention that drops probabilities needs attention=math. Raises `UserError` where
    the devices have no constants."""
    seq = min(seq, model.max_positions) if model.positions == "learned" else seq
    attention = "math" if model.attention_dropout else layout.attention
    layout, workload = replace(layout, micro=1, attention=attention), Workload(seq=seq, batch=layout.ranks)
    if layout.ranks != cluster.devices:  # the layout leaves some of them out
        node = gcd(layout.ranks, cluster.devices_per_node)
        cluster = replace(cluster.without_paths(), nodes=layout.ranks // node, devices_per_node=node)
    report = estimate(model, layout, workload, cluster)
    if report.timing is None:
        raise UserError(f"{layout}: {report.notes[-1]}")
    name, pricing = report.timing["engine"], Pricing(cluster, layout=layout)
    split, engine = StepShape.of(layout, workload), engine_of(name)
    found, sent = pieces(model, split, engine, pricing), traffic(model, split, engine, pricing)
    return TrainStepTime(
        layout, cluster, name, dict(report.timing["parts"]), float(found.forward),
        float(sent.unit_gather) if layout.stage == 3 else 0.0,
        _block(layout, found, sent, engine, pricing), int(split.micro_batches), seq,
        max(role.peak_bytes for role in report.roles), report.room,
    )  # fmt: skip


def _block(layout: Layout, found: Pieces, sent: Traffic, engine: EngineProfile, pricing: Pricing) -> BlockSeconds:
    ahead = float(found.ahead)
    back = float(found.block["tensor"]) - ahead
    everything = float(total(found.block, "host"))
    sharded = layout.stage == 3 and not (engine.gathers_by_stage and layout.pp > 1)
    return BlockSeconds(
        float(found.forward) - ahead,
        everything - float(found.forward) - back,
        (ahead, back),
        float(sent.unit_gather) * sharded,
        float(sent.unit_reduce) * sharded,
        pricing.constants.value("contention"),
        (engine.gather_overlap, engine.grad_overlap),
    )


def passes(block: BlockSeconds, layers: int) -> tuple[list[DecodeOp], list[DecodeOp]]:
    """The pieces of a forward and of a backward pass through so many layers, each beginning at 0. The gather of the
    next block begins with a block's arithmetic, and so does the reduction of the block before."""
    ahead, back = list(range(layers)), list(reversed(range(layers)))
    # The last block stays gathered for the backward pass, which begins with it.
    forward = _pass(ahead, block, FORWARD, block.forward, block.sums[0], [block.gather] * layers, 0.0)
    backward = _pass(back, block, BACKWARD, block.backward, block.sums[1],
                     [0.0] + [block.gather] * (layers - 1), block.reduce)  # fmt: skip
    return forward, backward


def _pass(
    order: list[int], block: BlockSeconds, what: str, computes: float, sums: float, gathers: list[float], reduce: float
) -> list[DecodeOp]:
    """One pass: what of a transfer the arithmetic beside it does not cover comes after it."""
    part = [f"blocks.{i}" for i in order]
    found = [DecodeOp(0, part[0], GATHER, 0.0, gathers[0])]
    now = gathers[0]
    for place, name in enumerate(part):
        coming = gathers[place + 1] if place + 1 < len(part) else 0.0
        going = reduce if place else 0.0
        beside, after, wire = coming * block.hides[0] + going * block.hides[1], 0.0, now
        for on, then, seconds, which in (
            (block.hides[0], GATHER, coming, place + 1), (block.hides[1], REDUCE, going, place - 1)
        ):  # fmt: skip
            if on and seconds:
                found.append(DecodeOp(0, part[which], then, wire, seconds))
                wire += seconds
            after += 0.0 if on else seconds
        busy = computes + block.slowed * min(beside, computes + sums)
        for does, seconds in ((what, busy / 2), (SUM, sums / 2)) * 2 if sums else ((what, busy),):
            found.append(DecodeOp(0, name, does, now, seconds))
            now += seconds
        now = max(now, wire)
        found += [DecodeOp(0, name, GATHER if coming and not block.hides[0] else REDUCE, now, after)]
        now += after
    found.append(DecodeOp(0, part[-1], REDUCE, now, reduce))
    return [piece for piece in found if piece.seconds]

"""The same strategies in a training step, where the gather of a block has its arithmetic to hide behind."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.cluster import Cluster
from shardwise.layout import Layout, Workload
from shardwise.model import ModelConfig
from shardwise.predict.time.pieces import pieces
from shardwise.predict.time.pricing import Pricing
from shardwise.predict.time.profiles import Engine
from shardwise.predict.time.split import Split
from shardwise.predict.time.step import training_step
from shardwise.predict.time.traffic import traffic


@dataclass(frozen=True)
class Trained:
    """One training step with a sequence for each rank. seconds: of the step; moving: exposed collectives and messages;
    waiting: bubbles. arithmetic, gather: of one block and micro-batch, forward: what a gather can hide behind, and the
    gather (0 where nothing is gathered)."""

    seconds: float
    moving: float
    waiting: float
    arithmetic: float
    gather: float

    @property
    def share(self) -> float:
        """Of the step, what is spent on moving data."""
        return self.moving / self.seconds


def trained(model: ModelConfig, layout: Layout, seq: int, engine: Engine, cluster: Cluster) -> Trained:
    """The time of a step of `layout.ranks` sequences of `seq` tokens, one in a micro-batch; whether it fits is not
    asked. Raises `UserError` where the devices have no constants."""
    split = Split.of(replace(layout, micro=1), Workload(seq=seq, batch=layout.ranks))
    pricing = Pricing(cluster)
    step = training_step(model, split, engine, pricing)
    parts = {name: float(seconds) for name, seconds in step.parts.items()}
    found = pieces(model, split, engine, pricing)
    sent = traffic(model, split, engine, pricing)
    return Trained(
        sum(parts.values()),
        parts["tensor"] + parts["data"] + parts["pipeline"] + parts["experts"],
        parts["bubble"],
        float(found.forward),
        float(sent.unit_gather) if layout.stage == 3 else 0.0,
    )

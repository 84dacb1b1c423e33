"""A rank that computes every engine step twice: decode steps in their static form, and all steps eagerly with a cache
of their own."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.generation import Script, Seen, _hearing, run
from shardwise.ops.paged import Rows
from shardwise.runtime.job.setup import make_comms
from shardwise.serving.engine import TokenGenerator
from shardwise.serving.graphs import Result
from shardwise.serving.job import weights_in
from shardwise.serving.lockstep import Lockstep
from shardwise.serving.sampling import likeliest
from shardwise.serving.scheduler import EngineStep


@dataclass
class Twice:
    """errors: largest difference of a logit in each static step. rows: of each of these steps. wrong: tokens that
    differ. buckets: (rows, pages per sequence)."""

    seen: Seen = field(default_factory=Seen)
    errors: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    wrong: int = 0
    buckets: list[tuple[int, int]] = field(default_factory=list)


class _Twice(TokenGenerator):
    eager: TokenGenerator
    twice: Twice

    def forward(self, turn: EngineStep, rows: Rows, x: Tensor | None = None) -> Tensor:
        self.eager.forward(turn, self.eager.rows(turn), x)
        return super().forward(turn, rows, x)

    def decode(self, turn: EngineStep) -> Result | None:
        decoded = super().decode(turn)
        if decoded is not None:
            logits, tokens = decoded
            expected = self.eager.forward(turn, self.eager.rows(turn))
            self.twice.errors.append(float((logits - expected).abs().max()))
            self.twice.rows.append(len(logits))
            self.twice.wrong += int((tokens != likeliest(expected)).sum())
        return decoded


def compare(rank: int, script: Script) -> Twice:
    """Run a script on one rank, whose caches hold no numbers before they are written."""
    job = script.job
    comms = make_comms(job.layout, job.model, rank, timeout=60.0, transport=job.transport)
    device = torch.device("cpu")
    static = _Twice(job, comms, rank, device, static=True)
    static.eager = TokenGenerator(job, comms, rank, device)
    static.twice = Twice()
    assert not static.eager.static, "on a CPU the eager form is the default"
    for generator in (static, static.eager):
        for cache in generator.caches.values():
            cache.tensor[:, :, : job.pages * job.page] = torch.nan  # what was never written must not be read
        generator.load(weights_in(job.weights)[1])
    run(Lockstep(static, _hearing(script.asked[0])), static.twice.seen)
    assert static.steps is not None, static.notices
    static.twice.buckets = static.steps.buckets
    comms.close()
    return static.twice

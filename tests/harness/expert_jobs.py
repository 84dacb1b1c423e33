"""What ranks run for the tests of experts: training whose first step tells which experts computed which tokens."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from harness.jobs import RankOutcome, Training, train
from harness.reference import Case, global_batch, make_batch, plain_decoder
from shardwise.decoder.experts import Mixture, Routing, auxiliary_loss, taken
from shardwise.layout.axes import DP, EP, ETP
from shardwise.ops.experts import Assignment, RoutedForm
from shardwise.runtime.expert.exchange import ExpertLoad, ExpertLoads
from shardwise.runtime.zero.optimizer import Optimizer

Pair = int
"""A token of the global batch and one of its k experts: (sequence * seq + place) * k + slot."""


@dataclass
class Routed:
    """What one rank has seen of one mixture of experts in a step."""

    etp: int = 0
    """Which part of every expert's width it has."""
    chosen: dict[Pair, int] = field(default_factory=dict)
    """Pairs that it routes -> the chosen expert."""
    dropped: set[Pair] = field(default_factory=set)
    arrived: list[tuple[Pair, int]] = field(default_factory=list)
    """Pairs whose rows have come to experts here, each with that expert."""
    sent: int = 0
    """Rows to all ranks."""
    received: int = 0
    """Rows from all ranks."""


@dataclass
class Traced:
    """What a rank's training has given, and the routing of the first step."""

    outcome: RankOutcome
    routed: dict[str, Routed]
    """Mixture -> what this rank has seen of it."""
    loads: dict[str, ExpertLoad]
    """Mixture -> its load as reported."""


def traced(rank: int, asked: Training) -> Traced:
    """`train`, with the routing of the first step."""
    loads: dict[str, ExpertLoad] = {}
    finish = ExpertLoads.finish_step

    def note_loads(mine: ExpertLoads, optimizer: Optimizer) -> None:
        finish(mine, optimizer)
        if not loads:
            loads.update(mine.latest)

    with _tracing() as routed, patch.object(ExpertLoads, "finish_step", note_loads):
        return Traced(train(rank, asked), dict(routed), loads)


@contextmanager
def _tracing() -> Iterator[dict[str, Routed]]:
    """Pairs take the way of their rows: after each assignment of a first forward pass their numbers are exchanged."""
    routed: dict[str, Routed] = defaultdict(Routed)
    passes: dict[str, int] = defaultdict(int)
    plain = RoutedForm.assign

    def assign(form: RoutedForm, chosen: Tensor, takes: Tensor | None) -> Assignment:
        assignment = plain(form, chosen, takes)
        exchange: Any = form.exchange
        if exchange.comms.phase == "forward" and passes[form.unit] < exchange.plan.micro_batches:
            _note(routed[form.unit], form, chosen, assignment, passes[form.unit])
            passes[form.unit] += 1
        return assignment

    with patch.object(RoutedForm, "assign", assign):
        yield routed


def _note(seen: Routed, form: RoutedForm, chosen: Tensor, a: Assignment, micro_batch: int) -> None:
    exchange: Any = form.exchange
    plan, comms, k = exchange.plan, exchange.comms, form.e.active
    first = comms.index(DP) * plan.workload.batch // plan.layout.dp + micro_batch * plan.layout.micro
    places = exchange.places(plan.layout.micro)
    pairs = ((first * exchange.seq + places)[:, None] * k + torch.arange(k)).flatten()
    real = (places >= 0).repeat_interleave(k)
    seen.etp = comms.index(ETP)
    seen.chosen |= dict(zip(pairs[real].tolist(), chosen.flatten()[real].tolist(), strict=True))
    seen.dropped |= set(pairs[real].tolist()) - set(pairs[a.order].tolist())
    arrived = form.to_experts(pairs[a.order][:, None], a).flatten()
    here = torch.bucketize(torch.arange(len(arrived)), torch.tensor(a.ends), right=True)
    expert = comms.index(EP) * len(a.ends) + here
    seen.arrived += zip(arrived.tolist(), expert.tolist(), strict=True)
    seen.sent += sum(a.sent)
    seen.received += sum(a.received)


@dataclass
class Plain:
    """One mixture of experts on one device in the first step."""

    chosen: Tensor
    """Expert of each pair."""
    takes: Tensor
    """Whether it takes the token."""
    auxiliary_loss: float


def plain_routing(case: Case) -> dict[str, Plain]:
    """Mixture -> its routing of all pairs of the first step on one device."""
    decoder = plain_decoder(case)
    found: dict[str, Plain] = {}
    losses: list[Tensor] = []

    def keep(mixture: Mixture, routing: Routing) -> None:
        e = mixture.config
        whole = routing.chosen.unflatten(0, (case.workload.batch, -1))
        takes = taken(whole, e) if e.capacity else torch.ones_like(whole, dtype=torch.bool)
        loss = sum(losses, torch.zeros(())) / whole.shape[0] / whole.shape[1]
        found[mixture.name.removesuffix(".mlp")] = Plain(whole.flatten(), takes.flatten(), float(loss))
        losses.clear()

    for module in decoder.modules():
        if isinstance(module, Mixture):
            router = module.router
            router.register_forward_hook(lambda router, _, routing: setattr(router, "latest", routing))
            module.register_forward_hook(lambda mixture, *_: keep(mixture, mixture.router.latest))

    def auxiliary(*arguments: Any) -> Tensor:
        losses.append(auxiliary_loss(*arguments))
        return losses[-1]

    with torch.no_grad(), patch("shardwise.decoder.experts.auxiliary_loss", auxiliary):
        decoder(make_batch(case, global_batch(case, 0), 0))
    return found

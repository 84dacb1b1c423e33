"""Loads of experts: what the tokens of a step have chosen, on all ranks together, and the routers' biases after it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.decoder.experts import Mixture, bias_step
from shardwise.layout.axes import PP
from shardwise.layout.experts import LOADS, RoutedRows, load_axes
from shardwise.layout.units import UnitPlan
from shardwise.model.config import Experts
from shardwise.ops.experts import RoutedForm
from shardwise.runtime.transport.comms import Comms
from shardwise.runtime.zero.optimizer import Optimizer


class ExpertLoad(NamedTuple):
    """Choices of one mixture of experts in a step, on all ranks together."""

    tokens: tuple[int, ...]
    """Tokens that chose each expert, dropped ones included."""
    dropped: int
    """Pairs of a token and an expert that had no capacity left."""
    auxiliary_loss: float


class ExpertLoads:
    """The mixtures of experts of one rank."""

    def __init__(self, parts: dict[str, nn.Module], plan: UnitPlan, comms: Comms, device: torch.device) -> None:
        self.plan, self.comms, self.device = plan, comms, device
        self.mixtures = [part for part in plan.blueprint.names if plan.routes and plan.routes_in(part)]
        """Parts of the whole model with experts."""
        self.forms: dict[str, RoutedForm] = {
            name: module.__dict__["routed_form"]
            for name, part in parts.items()
            for module in part.modules()
            if isinstance(module, Mixture) and "routed_form" in module.__dict__
        }
        self.latest: dict[str, ExpertLoad] = {}
        """Part -> its load in the step before."""
        self.routed: RoutedRows | None = None
        """Rows that were exchanged in it."""

    def forget(self) -> None:
        """Leave out what has been routed since the last step: trials before training."""
        for form in self.forms.values():
            form.loads, form.exchanged = None, []

    def finish_step(self, optimizer: Optimizer) -> None:
        """After the optimizer's step: sum the loads over ranks, and move the biases that follow them."""
        if not self.mixtures:
            return
        sums = self._summed()
        if not self.comms.moves_data:
            return
        self.routed = RoutedRows.of({part: form.exchanged for part, form in self.forms.items()})
        for form in self.forms.values():
            form.exchanged = []
        self.latest = {}
        for part, summed in zip(self.mixtures, sums.cpu(), strict=True):
            tokens, (dropped, loss) = summed[:-2], summed[-2:].tolist()
            self.latest[part] = ExpertLoad(tuple(map(int, tokens.tolist())), int(dropped), loss)
            if part in self.forms and (e := self.forms[part].e).bias_rate and not optimizer.skipped:
                optimizer.shift(part, f"{part}.mlp.router.bias", bias_step(tokens, e))

    def event(self) -> dict[str, Any] | None:
        """Load of the last step, as events and charts have it; None for a model without experts. imbalance: the busiest
        expert's tokens over the mean, the most of any block."""
        if not self.latest:
            return None
        loads = self.latest.values()
        return {
            "tokens": {part: list(load.tokens) for part, load in self.latest.items()},
            "imbalance": max(max(load.tokens) * len(load.tokens) / max(1, sum(load.tokens)) for load in loads),
            "dropped": sum(load.dropped for load in loads),
            "balance_loss": sum(load.auxiliary_loss for load in loads),
        }

    def _summed(self) -> Tensor:
        """[mixtures, E + 2]: loads, dropped pairs, auxiliary losses."""
        e = self.plan.model.experts
        assert isinstance(e, Experts)
        sums = torch.zeros(len(self.mixtures), e.count + 2, dtype=torch.float64, device=self.device)
        for part, form in self.forms.items():
            if form.loads is not None:
                sums[self.mixtures.index(part)] = form.loads
                form.loads.zero_()
        with self.comms.in_phase("optimizer"):
            self.comms.all_reduce(sums, load_axes(self.plan.layout) + PP, LOADS)
        sums[:, -1] *= self.plan.layout.expert_tp  # each rank that has a part of an expert has a part of the loss
        return sums

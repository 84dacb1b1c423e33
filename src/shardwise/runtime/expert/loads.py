"""Loads of experts: what the tokens of a step have chosen, on all ranks together, and the routers' biases after it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardwise.decoder.experts import Mixture, bias_step
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
        self.forms: dict[str, tuple[Mixture, RoutedForm]] = {
            name: (module, module.__dict__["routed_form"])
            for name, part in parts.items()
            for module in part.modules()
            if isinstance(module, Mixture) and "routed_form" in module.__dict__
        }
        self.latest: dict[str, ExpertLoad] = {}
        """Part -> its load in the step before."""
        self.routed: RoutedRows | None = None
        """Rows that were exchanged in it."""

    def finish_step(self, optimizer: Optimizer) -> None:
        """After the optimizer's step: sum the loads over ranks, and move the biases that follow them."""
        if not self.forms:
            return
        sums = self._summed()
        self.routed = RoutedRows.of({part: form.exchanged for part, (_, form) in self.forms.items()})
        for _, form in self.forms.values():
            form.exchanged = []
        self.latest = {}
        for (part, (_, form)), summed in zip(self.forms.items(), sums, strict=True):
            tokens, (dropped, loss) = summed[:-2], summed[-2:].tolist()
            self.latest[part] = ExpertLoad(tuple(map(int, tokens.tolist())), int(dropped), loss)
            if form.e.bias_rate:
                optimizer.shift(part, f"{part}.mlp.router.bias", bias_step(tokens, form.e))

    def _summed(self) -> Tensor:
        """[mixtures, E + 2]: loads, dropped pairs, auxiliary losses."""
        e = self.plan.model.experts
        assert isinstance(e, Experts)
        sums = torch.zeros(len(self.forms), e.count + 2, dtype=torch.float64, device=self.device)
        for row, (_, form) in zip(sums, self.forms.values(), strict=True):
            if form.loads is not None:
                row.copy_(form.loads)
                form.loads.zero_()
        with self.comms.in_phase("optimizer"):
            self.comms.all_reduce(sums, load_axes(self.plan.layout), LOADS)
        return sums.cpu()

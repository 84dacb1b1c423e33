"""The way of tokens to experts on other ranks and back.

Which tokens a rank routes follows from the layout. Where tensor parallelism splits experts as it splits all else, every
rank of a tensor-parallel group routes all of the group's tokens, which enter and leave as those of a dense block do.
Else each routes its own: its shard of the residual stream, or an equal part of the tokens that all of the group have.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.decoder.experts import Mixture, bias_step
from shardwise.layout.axes import EP, PP, TP, Axes
from shardwise.layout.experts import (
    LOADS,
    RoutedRows,
    gathers_sequences,
    load_axes,
    sequence_axes,
    slice_of,
    slices_tokens,
)
from shardwise.layout.tensor import edges
from shardwise.layout.units import UnitPlan
from shardwise.model.config import Experts
from shardwise.ops.context import COMPLETE, Pending
from shardwise.ops.exchange import TokenExchange
from shardwise.ops.experts import RoutedForm
from shardwise.runtime.context.view import local_places
from shardwise.runtime.tensor.redistribute import redistribution
from shardwise.runtime.transport.comms import Comms, gather_dim
from shardwise.runtime.zero.optimizer import Optimizer


def even(total: int, parts: int) -> list[int]:
    """Parts of a number that differ by one at most."""
    return [total // parts + (part < total % parts) for part in range(parts)]


class RankExchange(TokenExchange):
    """The exchange of one part of the model on one rank. axes: of the ranks that exchange rows."""

    def __init__(self, plan: UnitPlan, comms: Comms, part: str, axes: Axes = EP) -> None:
        share = plan.layout.independent / plan.workload.batch if plan.trains else 0.0
        super().__init__(plan.workload.seq, share / (plan.layout.tp if gathers_sequences(plan.layout) else 1))
        self.plan, self.comms, self.part, self.axes = plan, comms, part, axes
        table = edges(plan.layout)
        self._enter = redistribution(table["column"].enter, comms, part)
        self._leave = redistribution(table["row"].leave, comms, part)
        self._sequence = sequence_axes(plan.layout)
        self._slices, self._whole = slices_tokens(plan.layout), gathers_sequences(plan.layout)
        self._places: dict[int, list[Tensor]] = {}
        self.crowd = 1
        """In a step without values: rows that come for each one that goes, where no layout tells them."""

    # -- the residual stream and the rows of this rank

    def enter(self, x: Tensor) -> Tensor:
        if self._slices:
            return self._slice(x.flatten(0, 1))
        return (self._enter.forward(x) if self._whole else x).flatten(0, 1)

    def enter_backward(self, grad: Tensor, like: Tensor) -> tuple[Tensor, Pending]:
        if self._slices:
            return self._joined(grad, like), COMPLETE
        if not self._whole:
            return grad.view_as(like), COMPLETE
        return self._enter.backward(grad.view(len(like), -1, like.shape[2]))

    def leave(self, rows: Tensor, like: Tensor) -> Tensor:
        if self._slices:
            return self._joined(rows, like)
        if not self._whole:
            return rows.view_as(like)
        return self._leave.forward(rows.view(len(like), -1, like.shape[2]))

    def leave_backward(self, grad: Tensor) -> Tensor:
        if self._slices:
            return self._slice(grad.flatten(0, 1))
        return (self._leave.backward(grad)[0] if self._whole else grad).flatten(0, 1)

    def _slice(self, tokens: Tensor) -> Tensor:
        """This rank's part of tokens that all tensor-parallel ranks have. The last parts may be shorter."""
        each = slice_of(self.plan.layout, len(tokens))
        return tokens[self.plan.tp_rank * each : (self.plan.tp_rank + 1) * each]

    def _joined(self, rows: Tensor, like: Tensor) -> Tensor:
        tokens = like.shape[0] * like.shape[1]
        each = slice_of(self.plan.layout, tokens)
        padded = F.pad(rows, (0, 0, 0, each - len(rows))) if len(rows) < each else rows
        whole = gather_dim(self.comms, padded, 0, TP, self.part)
        return whole[:tokens].view_as(like)

    # -- whole sequences

    @property
    def padded(self) -> bool:
        return self.plan.routing.pairs < self.plan.routing.places * self.plan.model.experts.active  # type: ignore[union-attr]

    def places(self, batch: int) -> Tensor:
        return self._of_ranks(batch)[self.comms.index(self._sequence)]

    def _of_ranks(self, batch: int) -> list[Tensor]:
        """`places` of each rank along the axes of a sequence."""
        if batch not in self._places:
            plan, cut = self.plan, self.plan.sequence
            found = []
            for cp_rank in range(plan.layout.cp):
                where = local_places(cut, cp_rank, torch.device("cpu")) if cut.cp > 1 else torch.arange(cut.seq)
                stream = where.expand(batch, -1) + cut.seq * torch.arange(batch)[:, None]
                stream = torch.where(where < cut.seq, stream, -1)
                if self._whole:
                    found.append(stream.flatten())
                elif plan.layout.sp:
                    found += [shard.flatten() for shard in stream.chunk(plan.layout.tp, 1)]
                else:
                    parts = stream.flatten().split(slice_of(plan.layout, stream.numel()))
                    found += [*parts, *[parts[0][:0]] * (plan.layout.tp - len(parts))]
            self._places[batch] = found
        return self._places[batch]

    def everywhere(self, chosen: Tensor, batch: int) -> Tensor:
        places = self._of_ranks(batch)
        most, end = max(map(len, places)), batch * self.seq
        padded = F.pad(chosen, (0, 0, 0, most - len(chosen)))
        pieces = gather_dim(self.comms, padded, 0, self._sequence, self.part).unflatten(0, (-1, most))
        whole = chosen.new_zeros(end + 1, chosen.shape[1])  # padding goes to the last row
        # Pieces come in the order of ranks, which need not be that of places.
        ranks = self.comms.mesh.group(self._sequence, self.comms.rank)
        for piece, rank in zip(pieces, sorted(ranks), strict=True):
            where = places[ranks.index(rank)]
            whole.index_copy_(0, (where % (end + 1)).to(whole.device), piece[: len(where)])
        return whole[:end]

    def sum_loads(self, loads: Tensor, scope: str) -> Tensor:
        # Summed in place: what is given remains this rank's.
        loads = loads.sum(0, keepdim=True) if scope == "global" else loads.clone()
        axes = load_axes(self.plan.layout) if scope == "global" else self._sequence
        self.comms.all_reduce(loads, axes, self.part)
        return loads

    @property
    def sequences(self) -> int:
        return self.plan.layout.dp // self.plan.layout.independent

    # -- between ranks

    def counts(self, sent: Tensor, pairs: int | None = None) -> tuple[Sequence[int], Sequence[Sequence[int]]]:
        ranks = self.comms.size(self.axes)
        theirs = torch.empty_like(sent)
        self.comms.all_to_all(theirs, sent, self.axes, self.part)
        if not self.comms.moves_data:
            mine = self.comms.index(self.axes)
            pairs, come = self.plan.routing.rows(self.part) if pairs is None else (pairs, self.crowd * pairs)
            expected = even(pairs, ranks)
            received = even(come - expected[mine], ranks - 1) if ranks > 1 else []
            received.insert(mine, expected[mine])
            return expected, [even(rows, len(sent) // ranks) for rows in received]
        both = torch.stack([sent, theirs]).unflatten(1, (ranks, -1)).tolist()
        return [sum(of_rank) for of_rank in both[0]], both[1]

    def kept(self, order: Tensor, takes: Tensor) -> Tensor:
        return order[takes] if self.comms.moves_data else order[: self.plan.routing.rows(self.part)[0]].clone()

    def to_experts(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return self._exchange(rows, sent, received)

    def to_tokens(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return self._exchange(rows, received, sent)

    def _exchange(self, rows: Tensor, given: Sequence[int], taken: Sequence[int]) -> Tensor:
        if self.comms.size(self.axes) == 1:
            return rows
        out = rows.new_empty(sum(taken), rows.shape[1])
        self.comms.all_to_all(out, rows.contiguous(), self.axes, self.part, sent=given, received=taken)
        return out


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
        routes = plan.blueprint.routes
        self.mixtures = [part for part in plan.blueprint.names if routes and plan.blueprint.routes_in(part)]
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

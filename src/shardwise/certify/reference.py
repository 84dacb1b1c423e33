"""The plain model on one device: everything that an engine's trainer is compared with, and that guesses need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.certify.adapter import OPTIMIZER, Adapter
from shardwise.certify.tiny import IGNORED, ROWS, STEPS, batch

Tensors = dict[str, Tensor]
SEED = 7
TOLERANCE = 1e-8
"""Largest error in float64, as a share of a norm."""
NEGLIGIBLE = {True: 1e-6, False: 1e-3}
"""By `Adapter.exact`: an error counts as a share of a tensor's norm, or of so much of the norm of all, since some
are zero but for rounding."""
ROUNDINGS = 16
"""In float32: the largest error is so many times that of the plain model, computed in float32."""
BINDING = 0.37
"""The norm to which gradients are clipped, as a share of the first step's."""


@dataclass
class StepTrace:
    """Three steps. parameters: after the updates."""

    losses: list[float | None] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    clipped: list[Tensors] = field(default_factory=list)
    parameters: list[Tensors] = field(default_factory=list)


class Reference:
    """Three steps of an adapter's model under a variant."""

    def __init__(
        self, adapter: Adapter, model: str, variant: str, layout: str = "", *, dtype: torch.dtype = torch.float64
    ) -> None:
        """layout: needed for dropout, whose masks depend on it."""
        self.adapter, self.model, self.variant, self.layout, self.dtype = adapter, model, variant, layout, dtype
        self.parts, self.pieces, _ = adapter.masks(adapter.parse(layout)) if variant == "dropout" else (1, 1, 0)
        module = self.module().train()
        self.names = [name for name, _ in module.named_parameters()]
        self.frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
        self.start = self._values(module)
        self.batches = [batch(step, variant) for step in range(STEPS)]
        self.tokens = [int((labels != IGNORED).sum()) for _, labels in self.batches]
        self.most = float("inf")
        self.trace = self.train(module)

    def module(self) -> nn.Module:
        """The plain model, with the same weights on every rank."""
        torch.manual_seed(SEED)
        return self.adapter.models[self.model](self.variant).to(self.dtype)

    def train(
        self, module: nn.Module, change: Callable[[int, Tensors], Tensors] = lambda step, gradients: gradients,
        forget: int | None = None,
    ) -> StepTrace:  # fmt: skip
        """Three steps. change: of the gradients, before they are clipped. forget: the step before which the optimizer
        starts anew."""
        trace, adam = StepTrace(), self._optimizer(module)
        for step in range(STEPS):
            adam = self._optimizer(module) if step == forget else adam
            trace.losses.append(self.backward(module, step, slice(None), self.tokens[step]))
            for name, gradient in change(step, self._gradients(module)).items():
                module.get_parameter(name).grad = gradient
            trace.gradients.append(self._gradients(module))
            total = sum(float(g.double().square().sum()) for g in trace.gradients[-1].values()) ** 0.5
            self.most = total * BINDING if self.most == float("inf") else self.most
            trace.norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), self.most, foreach=False)))
            trace.clipped.append(self._gradients(module))
            adam.step()
            adam.zero_grad()
            trace.parameters.append(self._values(module))
        return trace

    def at(self, step: int) -> nn.Module:
        """The model before a step."""
        module = self.module()
        module.load_state_dict(self.trace.parameters[step - 1] if step else self.start, strict=False)
        return module

    def of_rows(self, step: int, rows: slice) -> tuple[float, Tensors]:
        """(loss, gradients) of some rows alone, divided by all labels that count."""
        module = self.at(step)
        return self.backward(module, step, rows, self.tokens[step]), self._gradients(module)

    def share(self, index: int, count: int) -> slice:
        """Rows of one of `count` data ranks."""
        return slice(index * ROWS // count, (index + 1) * ROWS // count)

    @cached_property
    def bounds(self) -> dict[str, float]:
        """Property -> largest error that counts as equal."""
        if self.adapter.exact:
            return dict.fromkeys(("loss", "gradients", "norm", "clipped", "steps", "resume"), TOLERANCE)
        narrow = Reference(self.adapter, self.model, self.variant, self.layout, dtype=torch.float32)
        mine, other = self.trace, narrow.trace
        errors = {
            "loss": max(share_of(o or 0.0, m or 0.0) for o, m in zip(other.losses, mine.losses, strict=True)),
            "gradients": max(self.errors(o, m)[1] for o, m in zip(other.gradients, mine.gradients, strict=True)),
            "norm": max(map(share_of, other.norms, mine.norms)),
            "clipped": max(self.errors(o, m)[1] for o, m in zip(other.clipped, mine.clipped, strict=True)),
            "steps": max(self.moved(step, other.parameters[step])[1] for step in range(STEPS)),
        }
        least = torch.finfo(torch.float32).eps
        return {name: ROUNDINGS * max(error, least) for name, error in (errors | {"resume": errors["steps"]}).items()}

    def errors(self, mine: Tensors, right: Tensors, bound: float = float("inf")) -> tuple[str, float]:
        """(first name whose error exceeds the bound, its error); without one, ("", the largest error)."""
        everything = sum(float(t.double().square().sum()) for t in right.values()) ** 0.5
        largest = 0.0
        for name in self.names:
            if name not in mine and name not in right:
                continue
            a, b = mine.get(name), right.get(name)
            if a is not None and b is not None and a.shape != b.shape:
                return name, float("inf")
            shape = a if a is not None else b
            assert shape is not None
            zero = torch.zeros_like(shape, dtype=torch.float64)
            a, b = (zero if t is None else t.double() for t in (a, b))
            norm = max(float(b.norm()), NEGLIGIBLE[self.adapter.exact] * everything) or 1.0
            error = float((a - b).norm()) / norm
            if not error <= bound:
                return name, error
            largest = max(largest, error)
        return "", largest

    def moved(self, step: int, mine: Tensors, bound: float = float("inf")) -> tuple[str, float]:
        """As `errors`, of parameters after a step: as shares of how far they have moved since the start."""
        names, right = [name for name in mine if name in self.start], self.trace.parameters[step]
        return self.errors(
            {name: mine[name].double() - self.start[name].double() for name in names},
            {name: right[name].double() - self.start[name].double() for name in names},
            bound,
        )

    def backward(self, module: nn.Module, step: int, rows: slice, tokens: int) -> float:
        total = 0.0
        for share in [self.share(index, self.parts) for index in range(self.parts)] if rows == slice(None) else [rows]:
            ids, labels = self.rows(step, share)
            with PieceMasks([self.seed(step, share, piece) for piece in range(self.pieces)]):
                loss = self.adapter.loss(self.adapter.logits(module, ids), labels) / tokens
            loss.backward()
            total += loss.item()
        return total

    def rows(self, step: int, share: slice, piece: int = 0) -> Iterator[Tensor]:
        """Ids and labels. Seeds the masks that are drawn for a piece of their sequences."""
        torch.manual_seed(self.seed(step, share, piece))
        return (item[share] for item in self.batches[step])

    @staticmethod
    def seed(step: int, share: slice, piece: int) -> int:
        return 100_000 * piece + 1000 * step + (share.start or 0)

    def _optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        decayed: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, p in module.named_parameters():
            decayed[self.adapter.decays(name, p)].append(p)
        rates = {True: OPTIMIZER["weight_decay"], False: 0.0}
        groups = [{"params": group, "weight_decay": rates[key]} for key, group in decayed.items() if group]
        return torch.optim.AdamW(groups, foreach=False, **OPTIMIZER)  # type: ignore[arg-type]

    @staticmethod
    def _gradients(module: nn.Module) -> Tensors:
        return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}

    @staticmethod
    def _values(module: nn.Module) -> Tensors:
        return {name: p.detach().clone() for name, p in module.named_parameters()}


class PieceMasks(TorchFunctionMode):
    """Dropout whose masks are drawn piece by piece of the sequence (dimension 1), each from its seed."""

    def __init__(self, seeds: list[int]) -> None:
        super().__init__()
        self.states = [torch.Generator().manual_seed(seed).get_state() for seed in seeds]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.dropout:
            return func(*args, **(kwargs or {}))
        parts = []
        for number, part in enumerate(args[0].chunk(len(self.states), 1)):
            torch.set_rng_state(self.states[number])
            parts.append(func(part, *args[1:], **kwargs))
            self.states[number] = torch.get_rng_state()
        return torch.cat(parts, 1)


def share_of(mine: float, right: float) -> float:
    """Error as a share of what is right; of a loss that is zero as it is."""
    return abs(mine - right) / (abs(right) or 1.0)

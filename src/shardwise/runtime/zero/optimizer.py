"""AdamW over flat intervals, with a gradient norm that counts every parameter of the whole model once.

Each rank updates the interval that it owns. Weight decay and replication are spans of the interval, so the update is a
handful of fused calls, whatever the number of parameters. bf16 weights have fp32 masters: here, or, at stage 3, as the
engine's own intervals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.layout.units import Span
from shardwise.ops.limits import optimizer_chunk
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.transport.comms import Comms
from shardwise.runtime.zero.engine import Engine
from shardwise.runtime.zero.flat_unit import FlatUnit, Values


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of `step` (from 0): linear warm-up over `warmup` steps, then a cosine down to `final_share`."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, steps - config.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.lr * (config.final_share + (1 - config.final_share) * cosine)


class _State:
    """Optimizer state of one unit's interval: moments, and master weights: the engine's own interval where it is in
    that precision."""

    def __init__(self, flat: FlatUnit, values: Values) -> None:
        initial = flat.fill(values)
        self.flat = flat
        self.master = flat.interval if flat.interval.dtype == initial.dtype else initial
        self.first = torch.zeros_like(self.master)
        self.second = torch.zeros_like(self.master)
        inside = (span.within(flat.start, flat.stop) for span in flat.unit.spans)
        self.spans: list[Span] = [span for span in inside if span is not None]

    def owned(self) -> list[Tensor]:
        masters = [] if self.master is self.flat.interval else [self.master]
        return [*masters, self.first, self.second]


class Optimizer:
    """AdamW for everything that `engine` holds. Creating it sets the parameters to `values`.

    looks_at_norm: compute the gradients' norm even where nothing is clipped by it. It costs a pass over the gradients,
    which trainers that do not clip leave out.
    """

    def __init__(self, engine: Engine, comms: Comms, config: OptimizerConfig, values: Values) -> None:
        self.engine, self.comms, self.config = engine, comms, config
        self.states = [_State(flat, values) for flat in engine.units.values()]
        self.looks_at_norm = True
        self.steps = 0
        self._step = torch.zeros((), device=self.states[0].master.device)

    def step(self, lr: float) -> float:
        """Clip, update, and release the gradients; returns their global norm before clipping (L2, over the model), NaN
        where it is not needed."""
        self.comms.pulse.work("the optimizer")
        norm, coefficient = math.nan, 1.0
        if self.config.clip or self.looks_at_norm:
            with self.comms.in_phase("optimizer"):
                norm = self._norm()
        if self.config.clip:
            # torch.nn.utils.clip_grad_norm_'s own coefficient
            coefficient = min(1.0, self.config.clip / (norm + 1e-6))
        self.steps += 1
        self._step.fill_(self.steps)
        for state in self.states:
            self._update(state, lr, coefficient)
            state.flat.grads.free()
        return norm

    def _norm(self) -> float:
        """Each value counts once: replicas over tp share it, intervals over the shard group and stages of the pipeline
        add up, and of a tied table at both ends the embedding's counts."""
        total = torch.zeros(1, dtype=torch.float64, device=self.states[0].master.device)
        copied = "tied" if self.engine.plan.copies_table else None
        for state in self.states:
            if state.flat.unit.name == copied:
                continue
            grads = state.flat.grads_interval
            wide = torch.float32 if grads.dtype == torch.bfloat16 else grads.dtype
            for span in state.spans:
                part = torch.linalg.vector_norm(grads[span.start : span.stop], dtype=wide).double()
                total += part * part / span.replicas
        self.comms.all_reduce(total, self.engine.plan.norm_over, "gradient norm")
        return math.sqrt(self.comms.read(total))

    def _update(self, state: _State, lr: float, coefficient: float) -> None:
        """One fused call a chunk: low-precision gradients and weights are converted while the cache holds them."""
        self.comms.pulse.work(f"the optimizer for {state.flat.unit.name}")
        grads, weights = state.flat.grads_interval, state.flat.interval
        apart = state.master is not weights
        low = grads.dtype != state.master.dtype or apart
        for span in state.spans:
            step = optimizer_chunk(len(weights)) if low and not weights.is_cuda else span.stop - span.start
            every = (grads, weights, state.master, state.first, state.second)
            for chunk in zip(*(each[span.start : span.stop].split(step) for each in every), strict=True):
                gradient, weight, master, first, second = chunk
                own = gradient.to(master.dtype)
                if coefficient < 1.0:
                    own.mul_(coefficient)
                adamw((master, own, first, second), self._step, self.config, lr, span.decay)
                if apart:
                    weight.copy_(master)
                del own  # before the next one is made

    def shift(self, unit: str, name: str, change: Tensor) -> None:
        """Add `change`, a vector that every rank has, to a parameter that no gradient moves."""
        state = next(state for state in self.states if state.flat.unit.name == unit)
        for start, placed in zip(state.flat.unit.offsets, state.flat.unit.placed, strict=True):
            a, b = max(start, state.flat.start), min(start + placed.numel, state.flat.stop)
            if placed.name == name and a < b:
                here = slice(a - state.flat.start, b - state.flat.start)
                state.master[here].add_(change[a - start : b - start].to(state.master))
                if state.master is not state.flat.interval:
                    state.flat.interval[here].copy_(state.master[here])

    def owned(self) -> list[Tensor]:
        """The tensors that count as optimizer state."""
        return [tensor for state in self.states for tensor in state.owned()]


def adamw(tensors: Sequence[Tensor], step: Tensor, config: OptimizerConfig, lr: float, decay: bool) -> None:
    """AdamW's update in one fused call. tensors: flat weights, gradient, first and second moments. step: how many
    updates there are with this one."""
    weights, gradient, first, second = ([tensor] for tensor in tensors)
    torch._fused_adamw_(
        weights,
        gradient,
        first,
        second,
        [],
        [step],
        lr=lr,
        beta1=config.betas[0],
        beta2=config.betas[1],
        weight_decay=config.weight_decay if decay else 0.0,
        eps=config.eps,
        amsgrad=False,
        maximize=False,
    )

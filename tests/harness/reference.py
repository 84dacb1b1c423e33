"""The judge: the same decoder on one device, in a plain training loop with torch's own optimizer and loss."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.decoder import Batch, Decoder, random
from shardwise.decoder.experts import bias_step
from shardwise.decoder.random import initial_values
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.model import ModelConfig
from shardwise.model.adapters import stored
from shardwise.model.parameters import Parameter, parameters
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.zero.flat_unit import BaseValues
from shardwise.runtime.zero.optimizer import learning_rate

STEPS = 3
"""Steps that a case trains: the first, one from changed weights, and one whose buffers have all been used before."""
BF16_STEPS = 5
"""The same in bf16, whose errors are judged by their root mean square over the steps."""
SEED = 11


@dataclass(frozen=True)
class Case:
    """What is trained, apart from how it is split. precision: "fp64", "fp32" or "bf16"."""

    model: ModelConfig
    workload: Workload
    precision: str = "fp64"
    attention: str = "sdpa"
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-2, warmup=2, clip=0.5))
    ignore: str = "some"
    """Which targets do not count: "none", "some" (uneven between sequences), "most" (whole sequences are empty)."""
    data: int = 1000
    """Seed of the tokens."""
    steps: int = STEPS
    pool: int = 1
    """Sequences of a micro-batch, over which a model's experts may be balanced."""


def dtype_of(precision: str) -> torch.dtype:
    return {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}[precision]


def values(parameter: Parameter, index: Tensor) -> Tensor:
    """Initial weights with every bias and norm weight away from 0 and 1, so that a mistake there shows."""
    plain = initial_values(parameter, index, SEED)
    if parameter.init == "normal":
        return plain * 3
    return plain + 0.3 * random.normal(random.key(SEED, parameter.name, "jitter"), index)


def step_key(step: int) -> int:
    return random.key(SEED, "dropout", step)


def global_batch(case: Case, step: int) -> dict[str, Tensor]:
    """All sequences of a step: ids, targets, index, positions, documents; each [batch, seq]."""
    w = case.workload
    generator = torch.Generator().manual_seed(case.data + step)
    tokens = torch.randint(case.model.vocab, (w.batch, w.seq + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    drop = torch.rand(w.batch, w.seq, generator=generator)
    if case.ignore == "some":
        targets[drop < torch.linspace(0, 0.9, w.batch)[:, None]] = -100
    elif case.ignore == "most":
        targets[1:] = -100
        targets[0, w.seq // 2 :] = -100
    index = torch.arange(step * w.batch * w.seq, (step + 1) * w.batch * w.seq).view(w.batch, w.seq)
    documents = torch.cumsum(torch.rand(w.batch, w.seq, generator=generator) < 0.15, 1)
    positions = torch.arange(w.seq).expand(w.batch, w.seq).contiguous()
    if w.isolate_documents:
        first = torch.stack([torch.searchsorted(row, row) for row in documents])
        positions = positions - first
    return {
        "ids": tokens[:, :-1].contiguous(),
        "targets": targets,
        "index": index,
        "positions": positions,
        "documents": documents,
    }


def make_batch(case: Case, rows: dict[str, Tensor], step: int) -> Batch:
    documents = rows["documents"] if case.workload.isolate_documents else None
    return Batch(
        rows["ids"], rows["positions"], rows["index"], documents, rows["positions"], rows["index"], step_key(step),
        auxiliary=1 / case.workload.batch, pool=case.pool, loads={},
    )  # fmt: skip


@dataclass
class Outcome:
    """losses, norms: one a step; first_grads: step 0, unclipped; final: parameters after the last step."""

    losses: list[float]
    norms: list[float]
    first_grads: dict[str, Tensor]
    final: dict[str, Tensor]


def _move_biases(case: Case, master: dict[str, Tensor], batch: Batch) -> None:
    if case.model.experts and case.model.experts.bias_rate:
        for mixture, loads in (batch.loads or {}).items():
            master[f"{mixture}.router.bias"].data.add_(bias_step(loads, case.model.experts))


def _optimizer(case: Case, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """torch's optimizer; of SGD without weight decay, which it adds to gradients (`_decay` does it by hand)."""
    config, kind = case.optimizer, case.workload.optimizer
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, foreach=False)
    momentum = config.momentum if kind == "momentum" else 0.0
    return torch.optim.SGD([p for group in groups for p in group["params"]], lr=config.lr, momentum=momentum)


def _decay(decayed: list[Tensor], by: float) -> None:
    for tensor in decayed:
        tensor.data.mul_(by)


def plain_decoder(case: Case, given: Callable[[Parameter, Tensor], Tensor] = values) -> Decoder:
    """A case's whole decoder with its first weights."""
    decoder = Decoder(case.model)
    for spec in parameters(case.model):
        tensor = decoder.get_parameter(spec.name)
        kept = stored(spec)
        dtype = tensor.dtype if spec.dtype else dtype_of(case.precision)
        tensor.data = given(kept, torch.arange(kept.numel)).view(kept.shape).to(dtype)
    for block in decoder.blocks:
        block.attention.core.kind = case.attention
    return decoder


class OneDevice:
    """A case's decoder on one device with torch's optimizer. share: of the global batch that it trains on."""

    def __init__(self, case: Case, share: float = 1.0) -> None:
        self.case, self.dtype = case, dtype_of(case.precision)
        self.auxiliary = 1 / (case.workload.batch * share)
        table = {p.name: p for p in parameters(case.model)}
        plan = unit_plan(case.model, Layout(precision=case.precision), case.workload)
        self.decoder = plain_decoder(case, BaseValues(plan, values))
        self.named = dict(self.decoder.named_parameters())
        assert {n: tuple(p.shape) for n, p in self.named.items()} == {n: stored(p).shape for n, p in table.items()}
        for name, tensor in self.named.items():
            tensor.requires_grad_(not table[name].frozen)
        self.trained = trained = {name: p for name, p in self.named.items() if not table[name].frozen}
        narrow = case.precision == "bf16"
        self.master = {n: p.detach().float().clone() for n, p in self.named.items()} if narrow else self.named
        config = case.optimizer
        groups = [
            {"params": [self.master[n] for n in trained if table[n].decay], "weight_decay": config.weight_decay},
            {"params": [self.master[n] for n in trained if not table[n].decay], "weight_decay": 0.0},
        ]
        self._decayed = groups[0]["params"]
        self.optimizer = _optimizer(case, groups)
        self.grads: dict[str, Tensor] = {}
        """Those of the first step, before they were clipped."""

    def step(self, rows: dict[str, Tensor], step: int) -> tuple[float, float]:
        """Train on some sequences; (loss, gradient norm)."""
        case, config = self.case, self.case.optimizer
        batch = replace(make_batch(case, rows, step), auxiliary=self.auxiliary)
        logits = self.decoder(batch)
        wide = logits.float() if self.dtype == torch.bfloat16 else logits
        valid = (rows["targets"] != -100).sum()
        loss = F.cross_entropy(wide.flatten(0, 1), rows["targets"].flatten(), reduction="sum") / valid.clamp(min=1)
        for tensor in self.named.values():
            tensor.grad = None
        loss.backward()
        for name, tensor in self.named.items():
            if tensor.grad is None and name.endswith("router.bias"):
                tensor.grad = torch.zeros_like(tensor)
        if not self.grads:
            self.grads = {n: p.grad.double().clone() for n, p in self.trained.items()}
        if self.master is not self.named:
            for name, tensor in self.trained.items():
                self.master[name].grad = tensor.grad.float()
        norm = torch.nn.utils.clip_grad_norm_([self.master[n] for n in self.trained], config.clip or float("inf"))
        lr = learning_rate(config, step, case.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if case.workload.optimizer != "adamw":
            _decay(self._decayed, 1 - lr * config.weight_decay)
        self.optimizer.step()
        _move_biases(case, self.master, batch)
        self.show()
        return loss.item(), float(norm)

    def show(self) -> None:
        if self.master is not self.named:
            for name, tensor in self.named.items():
                tensor.data.copy_(self.master[name])


@lru_cache(maxsize=256)
def reference(case: Case) -> Outcome:
    device, losses, norms = OneDevice(case), [], []
    for step in range(case.steps):
        loss, norm = device.step(global_batch(case, step), step)
        losses.append(loss)
        norms.append(norm)
    return Outcome(losses, norms, device.grads, {n: p.detach().double().clone() for n, p in device.master.items()})

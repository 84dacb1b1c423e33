"""Second oracles of the catalog's models: transformers trains the same weights, on one device in float64, or on real
ranks by its own expert parallelism."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from harness.float64 import oracle
from harness.huggingface import BATCH, RankProgram, tokens
from shardwise.layout import Layout
from shardwise.model import ModelConfig
from shardwise.runtime.job.config import OptimizerConfig

STEPS, LR = 6, 1e-2
OPTIMIZER = OptimizerConfig(lr=LR, clip=0.0)


def ours(rank: int, payload: tuple[Path, ModelConfig, Layout]) -> list[float]:
    source, model, layout = payload
    run = RankProgram(source, model, layout, rank, OPTIMIZER)
    return [run.step(step, LR) for step in range(STEPS)]


def alone(source: Path) -> list[float]:
    import transformers

    eager = {"experts_implementation": "eager"}  # the default form of experts has no float64
    model = oracle(transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **eager).train())
    return [float(loss) for loss in _train(model, 1, 0)]


def theirs(rank: int, payload: tuple[Path, dict[str, int]]) -> list[float]:
    """The same by transformers' `DistributedConfig(**options)`: under FSDP each rank has its part of the sequences."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    source, options = payload
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).train()
    config, _, mesh = type(plain).prepare_distribute_model(DistributedConfig(**options))
    model = type(plain).maybe_distribute_model(plain, config, mesh)
    losses = []
    for mean in _train(model, options.get("fsdp_size", 1), rank):
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    return losses


def _train(model: Any, shares: int, rank: int) -> Iterator[Tensor]:
    """The loss of each step, on one of `shares` parts of the sequences."""
    weights = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [w for w in weights if w.ndim > 1], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [w for w in weights if w.ndim == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=LR, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, foreach=False)
    for step in range(STEPS):
        rows = tokens(step).split(BATCH // shares)[rank % shares]
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        adam.step()
        adam.zero_grad()
        yield loss.detach()

"""Adapters on the ranks of a test: from `peft`'s folder, one step or several, and back to a checkpoint."""

from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn

from harness.huggingface import BATCH, RankProgram, _logits
from harness.jobs import _errors
from harness.own_modules import llama
from shardwise.checkpoint.huggingface import PeftAdapters
from shardwise.layout import Layout
from shardwise.runtime.checkpointing import Position, Saver, start_adapters
from shardwise.runtime.job.config import OptimizerConfig


@dataclass(frozen=True)
class LoraJob:
    """Weights, adapters and gradients of the first step by our names; out: where a checkpoint is saved."""

    weights: Path
    adapters: Path
    layout: Layout
    grads: dict[str, Tensor]
    out: Path
    steps: int = 3


@dataclass
class LoraResult:
    """losses: of every step. errors: parameter -> squared distance of its first gradient, over the rank's interval.
    before, after: logits [BATCH, SEQ, local vocabulary], for vocabulary ids [start, stop); None under a pipeline."""

    losses: list[float] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    before: Tensor | None = None
    after: Tensor | None = None
    vocabulary: tuple[int, int] = (0, 0)


def wrapped_llama() -> nn.Module:
    """A Llama of `transformers` that `peft` has given adapters, none of them zero."""
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "o_proj", "down_proj"])
    model = peft.get_peft_model(llama(), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3)
    return model


def train_adapters(rank: int, job: LoraJob) -> LoraResult:
    from shardwise.model.huggingface import from_huggingface

    model = PeftAdapters.open(job.adapters, from_huggingface(job.weights)).model
    run = RankProgram(job.weights, model, job.layout, rank, OptimizerConfig(lr=1e-2, clip=0.0))
    program, result = run.program, LoraResult()
    start_adapters(program, PeftAdapters.open(job.adapters, model))
    plain_step, whole = program.optimizer.step, job.layout.pp == 1
    result.before = _logits(program) if whole else None

    def keep_gradients(lr: float) -> float:
        if not result.losses:
            for flat in program.engine.trained:
                result.errors |= _errors(flat, flat.grads_interval, job.grads)
        return plain_step(lr)

    program.optimizer.step = keep_gradients  # type: ignore[method-assign]
    for step in range(job.steps):
        result.losses.append(run.step(step, 1e-2))
    about = {"model": model.to_json(), "layout": str(job.layout), "weights": str(job.weights)}
    saver = Saver(program, job.out, seed=0, about=about, keep=0, later=False, timeout=60)
    saver.save(Position(job.steps, job.steps * BATCH, program.optimizer.steps))
    start = program.vocabulary[0]
    if whole:
        result.after = _logits(program)
        result.vocabulary = start, min(start + result.after.shape[-1], model.vocab)
    dist.barrier()
    return result

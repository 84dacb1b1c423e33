"""Hugging Face folders with random weights, as `transformers` writes them, and what a rank does with one for a test."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.cases import table
from shardwise.checkpoint.huggingface import open_weights
from shardwise.decoder import Batch
from shardwise.decoder.modules import soft_cap
from shardwise.layout import Layout, Mesh, UnitPlan, Workload, unit_plan
from shardwise.layout.axes import DP
from shardwise.model import ModelConfig
from shardwise.runtime.checkpointing import Position, Saver, start_from
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.job.setup import local_view, make_comms
from shardwise.runtime.pipeline.step import TrainProgram
from shardwise.runtime.tensor.loss import IGNORED


def _families(name: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Family -> (type of its configuration, fields)."""
    bases = table(__file__, "bases")
    return {family: (kind, bases[base] | fields) for family, (kind, base, fields) in table(__file__, name).items()}


LLAMA = table(__file__, "bases")["llama"]
FAMILIES, MIXTURES = _families("families"), _families("mixtures")
"""Dense models, and mixtures of experts."""
SEQ, BATCH, STEPS = 12, 4, 20


def pretrained(name: str, **changes: Any) -> Any:
    """A model of the family with random weights, biases and norms among them; changes: to its configuration."""
    import transformers

    kind, fields = (FAMILIES | MIXTURES)[name]
    config = transformers.AutoConfig.for_model(kind, bos_token_id=None, eos_token_id=None, **fields | changes)
    torch.manual_seed(7)
    # The default form of experts has no float64.
    eager = {"experts_implementation": "eager"} if name in MIXTURES else {}
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **eager).eval()
    biases = (buffer for at, buffer in model.named_buffers() if at.endswith("e_score_correction_bias"))
    with torch.no_grad():
        for tensor in (*model.parameters(), *biases):
            tensor.add_(torch.randn_like(tensor), alpha=0.2)
    return model


def tokens(seed: int, batch: int = BATCH) -> Tensor:
    return torch.randint(LLAMA["vocab_size"], (batch, SEQ + 1), generator=torch.Generator().manual_seed(seed))


@dataclass
class RankResult:
    """logits before and after training, [BATCH, SEQ, local vocabulary]; vocabulary: the rank's [start, stop)."""

    before: Tensor
    after: Tensor
    vocabulary: tuple[int, int]


class RankProgram:
    def __init__(self, source: Path, model: ModelConfig, layout: Layout, rank: int, optimizer: OptimizerConfig) -> None:
        torch.set_float32_matmul_precision("highest")
        comms = make_comms(layout, model, rank, timeout=60.0)
        self.plan = unit_plan(model, layout, Workload(seq=SEQ, batch=BATCH), rank=rank)
        self.program = TrainProgram(self.plan, comms, optimizer, _nothing, torch.device("cpu"))
        self.share = Mesh.of(layout, model).index(DP, rank)
        start_from(self.program, open_weights(source, model))

    def step(self, step: int, lr: float) -> float:
        layout = self.plan.layout
        rows = tokens(step).chunk(layout.dp)[self.share]
        return self.program.step([_micro_batch(row, self.plan) for row in rows.split(layout.micro)], lr)[0]


def load_train_save(rank: int, payload: tuple[Path, ModelConfig, Layout, Path]) -> RankResult:
    """Start from a folder, train `STEPS` steps and save step-N in the last folder."""
    source, model, layout, out = payload
    run = RankProgram(source, model, layout, rank, OptimizerConfig(lr=1e-2))
    program = run.program
    before = _logits(program)
    for step in range(STEPS):
        run.step(step, 1e-2)
    saver = Saver(
        program, out, seed=0, about={"model": model.to_json(), "layout": str(layout)}, keep=0, later=False, timeout=60
    )
    saver.save(Position(STEPS, STEPS * BATCH, program.optimizer.steps))
    start = program.vocabulary[0]
    after = _logits(program)
    dist.barrier()
    return RankResult(before, after, (start, min(start + after.shape[-1], model.vocab)))


def _nothing(parameter: Any, index: Tensor) -> Tensor:
    """Initial weights that no test could mistake for those of a folder."""
    return torch.full(index.shape, torch.nan, dtype=torch.float64)


def _micro_batch(rows: Tensor, plan: UnitPlan) -> tuple[Batch, Tensor]:
    positions = torch.arange(SEQ).expand(len(rows), SEQ).contiguous()
    batch = Batch(rows[:, :-1].contiguous(), positions, positions, None, positions, positions)
    assert IGNORED not in rows
    return local_view(batch, rows[:, 1:].contiguous(), plan)


def _logits(program: TrainProgram) -> Tensor:
    """This rank's logits for the tokens of `STEPS`, which no step trains on."""
    batch, _ = _micro_batch(tokens(STEPS), program.plan)
    with torch.no_grad():
        program.engine.begin_evaluation()
        x = None
        for name, part in program.decoder.parts():
            program.engine.use_unit("forward", name)
            x = part(x, batch)
    assert x is not None
    cap = program.plan.model.logit_softcap
    return soft_cap(x, cap) if cap else x.clone()

"""Measured steps of modules that were traced, in ranks of the pool."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.own_modules import (
    FAMILIES,
    GPT2_PARTS,
    GPT2_PLAN,
    MIXTURES,
    OWN,
    PARTS,
    PLANS,
    own_batch,
    summed_loss,
    token_example,
)
from shardwise import Blueprint, StepReport, split, trace
from shardwise.layout import Layout
from shardwise.layout.axes import DP


@dataclass(frozen=True)
class TracedCase:
    """A module under a layout, whose `micro` is the rows of a micro-batch."""

    name: str
    layout: str
    accumulate: int = 1

    @property
    def family(self) -> bool:
        return self.name in BUILT

    @property
    def parts(self) -> list[str] | None:
        return {**PARTS, "gpt2": GPT2_PARTS}.get(self.name)

    @property
    def plan(self) -> dict[str, str] | None:
        return {**PLANS, "gpt2": GPT2_PLAN}.get(self.name)

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return BUILT[self.name](**_WIDE.get(self.name, _WIDER)) if self.family else OWN[self.name]()

    def batch(self, rows: int, seed: int = 0) -> Any:
        return token_example(rows, SEQ) if self.family else own_batch(self.name, rows, seed)

    def loss(self) -> Any:
        if not self.family:
            return summed_loss
        return aligned_loss if "cp=" in self.layout else token_loss


def of_two_rows(*rows: tuple[str, str, int]) -> list[TracedCase]:
    """Cases of (name, layout, micro-batches); of two rows each where the layout does not say."""
    return [TracedCase(name, at if "micro=" in at else f"{at},micro=2", count) for name, at, count in rows]


SEQ = 12
BUILT = FAMILIES | MIXTURES
_WIDER = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 32, "num_hidden_layers": 4}
_WIDE = {"gpt2": {"n_embd": 64, "n_layer": 4}}


def token_loss(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, int]:
    """(cross-entropy of the next tokens, summed; how many)."""
    logits = model(**batch).logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits.float(), batch["input_ids"][:, 1:].flatten(), reduction="sum"), logits.shape[0]


def aligned_loss(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, int]:
    """The same of the tokens themselves, as of targets that were shifted before."""
    logits = model(**batch).logits.flatten(0, 1)
    return F.cross_entropy(logits.float(), batch["input_ids"].flatten(), reduction="sum"), logits.shape[0]


@cache
def traced(
    name: str, cut: str, tp: int, precision: str, piped: bool = False, modes: Sequence[str] = ("none", "full")
) -> Blueprint:
    case = TracedCase(name, cut)
    return trace(
        case.build, case.batch(2), case.plan, loss=case.loss(), parts=case.parts if piped else None, tp=[tp],
        precisions=[precision], cuts=[cut], modes=modes,
    )  # fmt: skip


def measured(rank: int, case: TracedCase) -> StepReport:
    layout = Layout.parse(case.layout)
    plan, parts = case.plan if layout.tp > 1 else None, case.parts if layout.pp > 1 else None
    example = case.batch(1) if layout.cp > 1 else None
    model = split(case.build(), layout, plan, example, parts=parts, accumulate=case.accumulate)
    place = model.program.comms.index(DP)
    for step in range(2):
        batches = [case.batch(layout.micro, place + step) for _ in range(case.accumulate)]
        model.train_step(case.loss(), batches, measure=step == 1)
    return model.report()

"""The space of experts: expert parallelism with every other way to split, drawn and covered as `space.py` does it."""

import random
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any
from unittest.mock import patch

from torch import Tensor

from harness.pipelines import stage_layers
from harness.reference import BF16_STEPS, STEPS, Case, reference
from harness.space import MODELS, WORLDS, Point, covering, first_with, possible_copies, stratified
from harness.today import EVERY_LAYOUT, seed
from shardwise.decoder.experts import Routing, route
from shardwise.decoder.experts import _within_groups as within_groups
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload, check_runnable
from shardwise.model import ModelConfig
from shardwise.model.config import Experts

POOL = 2000
LEAST = 96
EIGHT_RANKS = 16
ONE_EXPERT = 4
GAP, TRIES = 2e-6, 40
"""Least difference of scores in fp32, which rounds at 1e-7, and data to look for it in."""
SAMPLE = 7

# Hidden sizes and widths are odd or prime, as in `space.py`; eight experts, which ep=2, 4 and 8 divide.
_LLAMA = MODELS["llama"]
EXPERT_MODELS: dict[str, ModelConfig] = {
    model.name: model
    for model in (
        _LLAMA.replace(
            name="mixtral", hidden=25, head_dim=6, experts=Experts(8, 2, 13, balance_loss=0.02),
        ),
        _LLAMA.replace(
            name="qwen3-moe", hidden=23, heads=6, kv_heads=3, head_dim=8, vocab=59, qk_norm=True, tied=True,
            experts=Experts(8, 3, 11, balance="micro-batch", balance_loss=0.05),
        ),
        _LLAMA.replace(
            name="deepseek", hidden=26, head_dim=8, layers=3, ffn=43,
            experts=Experts(
                8, 2, 9, shared=2, dense_layers=1, router_bias=True, scoring="sigmoid", scale=2.5, groups=4,
                active_groups=2, bias_rate=0.05,
            ),
        ),
    )
}  # fmt: skip

CHOICES: dict[str, list[Any]] = {
    "model": list(EXPERT_MODELS),
    "ep": [1, 2, 2, 2, 4, 4, 4, 4, 8, 8, 8],
    "etp": ["default", "whole", "tp", "tp"],
    "dp": [1, 2, 2, 3, 4, 8],
    "tp": [1, 1, 2, 3, 4],
    "cp": [1, 1, 1, 2, 3],
    "pp": [1, 2, 2, 3],
    "sp": [False, True, True],
    "cpkind": ["ring", "ulysses", "allgather"],
    "virtual": [1, 1, 2],
    "schedule": ["naive", "gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"],
    "stages": ["even", "uneven", "ends"],
    "zero": [0, 1, 2, 3],
    "shard": [0, 0, 2],
    "hpz": [0, 2],
    "recompute": ["none", "none", "selective", "full", "input"],
    "attention": ["sdpa", "sdpa", "math"],
    "seq": [12, 12, 13, 17],
    "micro": [1, 2],
    "accumulate": [1, 1, 2, 3, 4, 6],
    "balance": ["model's", "sequence", "micro-batch", "global"],
    "capacity": [0.0, 0.0, 0.7, 1.3],
    "z_loss": [0.0, 0.01],
    "documents": [False, False, True],
    "ignore": ["some", "some", "none", "most"],
    "precision": ["fp64"] * 7 + ["fp32", "bf16"],
    "order": ["pp-dp-cp-tp", "pp-tp-cp-dp", "cp-dp-tp-pp"],
    "transport": ["shared", "shared", "gloo"],
}
FIELDS = (
    "ep", "dp", "tp", "cp", "cpkind", "pp", "virtual", "schedule", "zero", "shard", "hpz", "sp", "recompute",
    "attention", "micro", "order", "precision",
)  # fmt: skip
PLAIN: dict[str, dict[str, Any]] = {
    "pp": {"virtual": 1, "schedule": "1f1b", "stages": "even"},
    "tp": {"sp": False, "etp": "default"},
    "cp": {"cpkind": "ring"},
    "zero": {"shard": 0},
}
"""Axis -> values of the choices that mean nothing without it."""


def _layout(chosen: dict[str, Any], generator: random.Random) -> Layout:
    stages = stage_layers(chosen["stages"], chosen["pp"] * chosen["virtual"], generator)
    etp = {"default": 0, "whole": 1, "tp": chosen["tp"]}[chosen["etp"]]
    return Layout(**{key: chosen[key] for key in FIELDS}, etp=etp, stages=stages)


def _model(chosen: dict[str, Any], layout: Layout) -> ModelConfig:
    """The model of a draw, with layers for all stages and the draw's losses and bound on an expert's tokens."""
    model, chunks = EXPERT_MODELS[chosen["model"]], layout.pp * layout.virtual
    assert model.experts is not None
    changes: dict[str, Any] = {"capacity": chosen["capacity"], "z_loss": chosen["z_loss"]}
    if chosen["balance"] != "model's":
        changes |= {"balance": chosen["balance"], "balance_loss": 0.05}
    layers = sum(layout.stages) or (max(2, chunks + chunks % 3) if layout.pp > 1 else model.layers)
    return model.replace(layers=layers, experts=Experts(**(vars(model.experts) | changes)))


def pointless(chosen: dict[str, Any]) -> bool:
    """Whether a draw needs another number of ranks, or cannot be compared with one device."""
    ranks = chosen["pp"] * chosen["cp"] * chosen["dp"] * chosen["tp"]
    return (
        ranks not in WORLDS
        or ranks == 1
        or (chosen["balance"] == "global" and chosen["accumulate"] > 1)  # the device it is compared with has one batch
        or (chosen["precision"] == "bf16" and chosen["accumulate"] > 3)  # rounds that often, where one device does once
    )


def _draw(generator: random.Random) -> Point | None:
    """A random point; None when the draw is illegal or pointless."""
    chosen = {name: generator.choice(values) for name, values in CHOICES.items()}
    for axis, values in PLAIN.items():
        if chosen[axis] == min(CHOICES[axis]):
            chosen |= values
    chosen["hpz"] = possible_copies(chosen, chosen["dp"] * chosen["cp"])
    if pointless(chosen):
        return None
    try:
        layout = _layout(chosen, generator)
        model = _model(chosen, layout)
        batch = layout.dp * layout.micro * chosen["accumulate"]
        workload = Workload(chosen["seq"], batch, isolate_documents=chosen["documents"])
        check_runnable(layout, model, workload)
    except UserError:
        return None
    e = model.experts
    assert e is not None
    steps = BF16_STEPS if layout.precision == "bf16" else STEPS
    case = Case(
        model, workload, layout.precision, layout.attention, ignore=chosen["ignore"], steps=steps, pool=layout.micro
    )
    words = [model.name, str(layout), f"{chosen['seq']}x{chosen['accumulate']}", chosen["transport"], e.balance]
    words += [f"capacity-{e.capacity}"] * bool(e.capacity) + ["z-loss"] * bool(e.z_loss)
    words += ["documents"] * chosen["documents"] + [f"ignore-{chosen['ignore']}"] * (chosen["ignore"] != "some")
    return Point(":".join(words), case, layout, tuple(chosen.items()))


@cache
def expert_cases() -> tuple[Point, ...]:
    """At least `LEAST` points that cover every pair of choices seen in a large draw, and some with ep=8."""
    covered = covering(_draw, POOL, LEAST, EIGHT_RANKS)
    return tuple(dict.fromkeys((*covered, *first_with(_draw, ONE_EXPERT, ep=8))))


def settled(case: Case) -> Case:
    """The case, in fp32 on the first data for which no choice of an expert on one device is nearly a tie.

    Rounding, which differs between layouts, must not decide one. bf16 is compared with one device in bf16, which also
    decides some otherwise than fp32.
    """
    if case.precision != "fp32":
        return case
    drawn = (replace(case, data=case.data + 100 * i) for i in range(TRIES))
    return next(each for each in drawn if _least_gap(each) > GAP)


@lru_cache(maxsize=64)
def _least_gap(case: Case) -> float:
    """The smallest difference between scores of a chosen expert, or group, and of one that is not, over all steps."""
    gaps = []

    def watched(logits: Tensor, bias: Tensor | None, e: Experts, chosen: Tensor | None = None) -> Routing:
        scores = logits.sigmoid() if e.scoring == "sigmoid" else logits.softmax(-1)
        choice = scores.detach() if bias is None else scores.detach() + bias
        if e.active_groups < e.groups:
            best = choice.unflatten(-1, (e.groups, -1)).topk(2, -1).values.sum(-1).sort(-1, descending=True).values
            gaps.append((best[:, e.active_groups - 1] - best[:, e.active_groups]).min())
            choice = within_groups(choice, e)
        best = choice.topk(e.active + 1, -1).values
        gaps.append((best[:, -2] - best[:, -1]).min())
        return route(logits, bias, e, chosen)

    with patch("shardwise.decoder.experts.route", watched):
        reference.__wrapped__(case)
    return float(min(gaps))


def _features(point: Point) -> set[tuple[str, Any]]:
    names = ("model", "ep", "cp", "pp", "zero", "sp", "schedule", "recompute", "precision", "balance", "capacity",
             "transport")  # fmt: skip
    layout = point.layout
    return {(name, point[name]) for name in names} | {("etp", layout.expert_tp > 1, layout.ep > 1, layout.tp > 1)}


def selected_experts() -> tuple[Point, ...]:
    """What the tests run: every case with SHARDWISE_ALL=1, else today's sample."""
    return expert_cases() if EVERY_LAYOUT else stratified(expert_cases(), _features, seed(), SAMPLE)

"""Random pairs of a model and a layout, from both spaces of layouts, wide enough for tensors to decide a peak.

The models of `space.py` are made to run quickly: at 24 numbers a token, vectors of a few bytes, which nothing counts,
are percents of a peak. Here a token has 72 to 384 of them, as little as keeps a dry run below a second.
"""

import random
from dataclasses import replace
from typing import Any

from harness.space import EXPERT_MODELS, MODELS, SPACES, stage_layers
from shardwise.errors import UserError
from shardwise.layout import Layout, Mesh, UnitPlan, Workload, check_runnable, unit_plan
from shardwise.layout.unit import Backend
from shardwise.model import ModelConfig
from shardwise.model.lora import Lora

WIDER = (3, 5, 8)
"""How many times as wide as in `space.py` a model is."""
EXACT = ("parameters", "gradients", "optimizer", "saved", "comm")
"""Classes of bytes whose prediction equals the dry run."""
KEYS = ("dp", "tp", "zero", "sp", "recompute", "attention", "micro", "order")
FEATURES: dict[str, tuple[Any, ...]] = {
    "offload": ("none", "cpu", "cpu", "cpu:0.5", "cpu:0.3"),
    "offload_params": ("none", "none", "cpu"),
    "offload_activations": ("none", "cpu"),
    "cp": (1, 1, 2),
    "cpkind": ("ring", "ulysses", "allgather"),
    "hpz": (0, 0, 2),
    "qgz": (False, False, False, True),
    "ep": (1, 2, 4),
    "etp": (0, 1),
    "lora": (None, None, None, Lora(4), Lora(8, base="int8")),
}
"""What `featured` draws besides: keys of a layout, and adapters."""


def featured(seed: int, index: int) -> tuple[UnitPlan, int]:
    """As `pair`, with offloaded state and activations, context and expert parallelism, hpz, qgz and adapters."""
    return pair(seed, index, featured=True)


def pair(seed: int, index: int, featured: bool = False) -> tuple[UnitPlan, int]:
    """(plan, rank) number `index` drawn by `seed`, of a rank on a random place of its pipeline."""
    generator = random.Random(f"{seed} {index}")
    while True:
        try:
            model, layout, workload = _drawn(generator, featured)
            check_runnable(layout, model, workload)
        except UserError:
            continue
        rank = Mesh.of(layout, model).rank(pp=generator.randrange(layout.pp))
        backend: Backend = generator.choice(("shared", "shared", "gloo"))
        return unit_plan(model, layout, workload, rank=rank, backend=backend), rank


def _drawn(generator: random.Random, featured: bool) -> tuple[ModelConfig, Layout, Workload]:
    piped = generator.random() < 0.7
    choices = SPACES["pipelines" if piped else "dense"]["choices"]
    chosen = {name: generator.choice(values) for name, values in choices.items()}
    chosen["precision"] = generator.choice(("bf16", "bf16", "fp32", "fp64"))
    more = _features(generator) if featured else {}
    lora = more.pop("lora", None)
    models = EXPERT_MODELS if more.get("ep", 1) > 1 else MODELS
    name = generator.choice(list(models)) if more else chosen["model"]
    model = _wider(models[name], generator)
    if piped:
        chunks = chosen["pp"] * chosen["virtual"]
        keys = (*KEYS, "precision", "schedule", "pp", "virtual")
        stages = stage_layers(chosen["stages"], chunks, generator)
        layout = Layout(**{key: chosen[key] for key in keys} | more, stages=stages)
        layers = sum(stages) or chunks + generator.randrange(chunks)
    else:
        layout = Layout(**{key: chosen[key] for key in (*KEYS, "precision", "shard")} | more)
        layers = generator.randrange(1, 5)
    micro_batches = generator.choice((1, 2, 3, 4, 6, 8) if piped else (1, 2, 3))
    batch = layout.dp * layout.micro * micro_batches
    workload = Workload(generator.choice((12, 64, 128, 192)), batch, isolate_documents=generator.random() < 0.25)
    return model.replace(layers=layers, lora=lora), layout, workload


def _features(generator: random.Random) -> dict[str, Any]:
    """A draw of `FEATURES` without what means nothing alone."""
    more = {name: generator.choice(values) for name, values in FEATURES.items()}
    needs = {"cpkind": ("cp", 1), "etp": ("ep", 1), "offload_params": ("offload", "none")}
    return {name: value for name, value in more.items() if name not in needs or more[needs[name][0]] != needs[name][1]}


def _wider(model: ModelConfig, generator: random.Random) -> ModelConfig:
    by, vocab, heads = generator.choice(WIDER), generator.choice((53, 211, 1009)), generator.choice((2, 4))
    latent = model.latent_attention
    if latent:
        ranks = {"q_rank": latent.q_rank * by, "kv_rank": latent.kv_rank * by}
        widths = ("nope_head_dim", "rope_head_dim", "v_head_dim")
        latent = replace(latent, **ranks, **{name: getattr(latent, name) * heads for name in widths})
    return model.replace(
        vocab=vocab,
        hidden=model.hidden * by,
        head_dim=model.head_dim * heads,
        latent_attention=latent,
        ffn=model.ffn * by + generator.randrange(3),
        max_positions=256,
        tied=generator.random() < 0.4,
    )

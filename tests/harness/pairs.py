"""Random pairs of a model and a layout, from both spaces of layouts, wide enough for tensors to decide a peak.

The models of `space.py` are made to run quickly: at 24 numbers a token, vectors of a few bytes, which nothing counts,
are percents of a peak. Here a token has 72 to 384 of them, as little as keeps a dry run below a second.
"""

from __future__ import annotations

import random
from dataclasses import replace

from harness import pipelines, space
from harness.space import MODELS
from shardwise.errors import UserError
from shardwise.layout import Layout, Mesh, UnitPlan, Workload, check_runnable, unit_plan
from shardwise.layout.units import Backend
from shardwise.model import ModelConfig

WIDER = (3, 5, 8)
"""How many times as wide as in `space.py` a model is."""
EXACT = ("parameters", "gradients", "optimizer", "saved", "comm")
"""Classes of bytes whose prediction equals the dry run."""
KEYS = ("dp", "tp", "zero", "sp", "recompute", "attention", "micro", "order")


def pair(seed: int, index: int) -> tuple[UnitPlan, int]:
    """(plan, rank) number `index` drawn by `seed`, of a rank on a random place of its pipeline."""
    generator = random.Random(f"{seed} {index}")
    while True:
        try:
            model, layout, workload = _drawn(generator)
            check_runnable(layout, model, workload)
        except UserError:
            continue
        rank = Mesh.of(layout, model).rank(pp=generator.randrange(layout.pp))
        backend: Backend = generator.choice(("shared", "shared", "gloo"))
        return unit_plan(model, layout, workload, rank=rank, backend=backend), rank


def _drawn(generator: random.Random) -> tuple[ModelConfig, Layout, Workload]:
    piped = generator.random() < 0.7
    space_of = pipelines.CHOICES if piped else space.CHOICES
    chosen = {name: generator.choice(values) for name, values in space_of.items()}
    chosen["precision"] = generator.choice(("bf16", "bf16", "fp32", "fp64"))
    model = _wider(MODELS[chosen["model"]], generator)
    if piped:
        chunks = chosen["pp"] * chosen["virtual"]
        keys = (*KEYS, "precision", "schedule", "pp", "virtual")
        stages = pipelines.stage_layers(chosen["stages"], chunks, generator)
        layout = Layout(**{key: chosen[key] for key in keys}, stages=stages)
        layers = sum(stages) or chunks + generator.randrange(chunks)
    else:
        layout = Layout(**{key: chosen[key] for key in (*KEYS, "precision", "shard")})
        layers = generator.randrange(1, 5)
    micro_batches = generator.choice((1, 2, 3, 4, 6, 8) if piped else (1, 2, 3))
    batch = layout.dp * layout.micro * micro_batches
    workload = Workload(generator.choice((12, 64, 128, 192)), batch, isolate_documents=generator.random() < 0.25)
    return model.replace(layers=layers), layout, workload


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

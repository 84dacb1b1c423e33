"""Mixtral: Llama with a mixture of experts in every block. Counted and planned, not run here yet."""

from __future__ import annotations

from typing import Any

from shardwise.model.config import Experts
from shardwise.model.families.common import llama_like
from shardwise.model.families.family import Family
from shardwise.model.fields import Fields, full_attention, words


def _mixtral(f: Fields) -> dict[str, Any]:
    config = llama_like(f, max_positions=131072, kv_heads=8, eps=1e-5, theta=1e6)
    full_attention(f, config, f.integer("sliding_window", default=None))
    count = f.integer("num_local_experts", "num_experts", default=8)
    active = f.integer("num_experts_per_tok", default=2)
    return config | {"experts": read_experts(f, count, active, config["ffn"])}


def read_experts(f: Fields, count: int, active: int, ffn: int, **more: Any) -> Experts:
    if active > count:
        raise f.error(f"num_experts_per_tok={active} is more than the {count} experts that there are")
    return Experts(count, active, ffn, **more)


MIXTRAL = Family(
    "mixtral",
    fits=lambda c: c.experts is not None,
    read=_mixtral,
    module="llama",
    harmless=words("output_router_logits router_aux_loss_coef router_jitter_noise"),
)

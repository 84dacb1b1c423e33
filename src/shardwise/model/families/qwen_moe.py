"""Qwen3-MoE: Qwen3 with a mixture of experts in every block."""

from typing import Any

from shardwise.model.config import ModelConfig
from shardwise.model.families.common import llama_like
from shardwise.model.families.family import Family
from shardwise.model.families.llama import NAMES
from shardwise.model.families.mixtral import balance_loss, expert_lacks, expert_names, read_experts
from shardwise.model.families.qwen import write_qwen
from shardwise.model.fields import Fields, full_attention, words


def _read(f: Fields) -> dict[str, Any]:
    config = llama_like(f, max_positions=32768, kv_heads=4)
    window = f.integer("sliding_window", default=4096)
    full_attention(f, config, window if f.flag("use_sliding_window", False) else None)
    f.must_be("attention_bias", False, why="biases on the attention matrices alone")
    f.must_be("decoder_sparse_step", 1, why="dense layers between the expert layers")
    f.must_be("mlp_only_layers", [], why="dense layers between the expert layers")
    experts = read_experts(
        f,
        count=f.integer("num_experts", "num_local_experts", default=128),
        active=f.integer("num_experts_per_tok", default=8),
        ffn=f.integer("moe_intermediate_size", default=768),
        normalized=f.flag("norm_topk_prob", False),
        balance_loss=balance_loss(f),
    )
    return config | {"qk_norm": True, "experts": experts}


def _write(c: ModelConfig) -> dict[str, Any]:
    e = c.experts
    assert e
    return write_qwen(c) | {
        "num_experts": e.count,
        "num_experts_per_tok": e.active,
        "moe_intermediate_size": e.ffn,
        "norm_topk_prob": e.normalized,
        "router_aux_loss_coef": e.balance_loss,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


QWEN3_MOE = Family(
    "qwen3_moe",
    fits=lambda c: c.experts is not None and c.qk_norm,
    read=_read,
    module="llama",
    harmless=words("output_router_logits max_window_layers"),
    names=expert_names(NAMES, "mlp", "gate_proj", "up_proj", "down_proj"),
    architecture="Qwen3MoeForCausalLM",
    write=_write,
    lacks=expert_lacks,
)

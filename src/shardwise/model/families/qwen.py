"""Qwen2, with biases on queries, keys and values, and Qwen3, which norms the heads of queries and keys."""

from dataclasses import replace
from typing import Any

from shardwise.codec import keyed
from shardwise.model.config import ModelConfig
from shardwise.model.families.common import llama_like
from shardwise.model.families.family import Family
from shardwise.model.families.llama import NAMES, llama_lacks, write_llama
from shardwise.model.families.mixtral import balance_loss, expert_lacks, expert_names, read_experts
from shardwise.model.fields import Fields, full_attention, words


def _qwen_window(f: Fields, config: dict[str, Any]) -> None:
    window = f.integer("sliding_window", default=4096)
    from_layer = f.integer("max_window_layers", default=28, least=0)
    full_attention(f, config, window if f.flag("use_sliding_window", False) else None, from_layer)


def _qwen2(f: Fields) -> dict[str, Any]:
    config = llama_like(f, max_positions=32768, kv_heads=32)
    _qwen_window(f, config)
    f.must_be("use_mrope", False, why="positions of several axes")
    return config | {"bias": "qkv"}


def _qwen3(f: Fields) -> dict[str, Any]:
    config = llama_like(f, max_positions=32768, kv_heads=32, head_dim=128)
    _qwen_window(f, config)
    f.must_be("attention_bias", False, why="biases on the attention matrices alone")
    return config | {"qk_norm": True}


def write_qwen(c: ModelConfig) -> dict[str, Any]:
    return write_llama(c) | {"use_sliding_window": False}


QWEN2 = Family(
    "qwen2",
    fits=lambda c: c.norm == "rmsnorm" and c.bias == "qkv",
    read=_qwen2,
    module="llama",
    names=NAMES,
    architecture="Qwen2ForCausalLM",
    write=write_qwen,
    lacks=llama_lacks,
)
QWEN3 = replace(
    QWEN2,
    model_type="qwen3",
    fits=lambda c: c.norm == "rmsnorm" and c.qk_norm,
    read=_qwen3,
    architecture="Qwen3ForCausalLM",
)


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
    keys = "num_experts=count num_experts_per_tok=active moe_intermediate_size=ffn norm_topk_prob=normalized"
    experts = keyed(c.experts, f"{keys} router_aux_loss_coef=balance_loss")
    return write_qwen(c) | experts | {"decoder_sparse_step": 1, "mlp_only_layers": []}


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

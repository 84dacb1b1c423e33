"""A model as Megatron-LM's arguments."""

from __future__ import annotations

from typing import Any

from shardwise.model import ModelConfig
from shardwise.model.config import Experts, RopeScaling

_LLAMA_ROPE = (1.0, 4.0, 8192)
"""low_freq_factor, high_freq_factor and original_max_positions of --use-rope-scaling, which has no flags for them."""


def objection(model: ModelConfig) -> str:
    """Why the arguments cannot describe a model; empty where they can."""
    scaling = model.rope_scaling
    llama = isinstance(scaling, RopeScaling) and (
        scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_positions
    ) == _LLAMA_ROPE  # fmt: skip
    reasons = {
        "latent attention": model.latent_attention is not None,
        "a gated GELU": model.gated and model.activation != "silu",
        "SiLU without a gate": not model.gated and model.activation == "silu",
        "ALiBi positions": model.positions == "alibi",
        f"norms {model.norm_placement} attention and feed-forward": model.norm_placement != "pre",
        "norms that multiply by 1 + weight": model.norm_zero_centered,
        "one norm over all query heads": model.qk_norm and model.qk_norm_scope != "head",
        "softcaps, windows or a scale of attention scores": not model.plain_attention or bool(model.logit_softcap),
        "a scaled embedding": model.scaled_embedding,
        "a parallel residual": model.parallel_residual,
        "a norm after the embedding": model.embedding_norm,
        "this scaling of rotary angles": scaling is not None and not llama,
        "capacity factors of experts": bool(model.experts and model.experts.capacity),
    }
    found = [reason for reason, holds in reasons.items() if holds]
    return f"its arguments have no word here for {found[0]}" if found else ""


def flags(model: ModelConfig, seq: int) -> dict[str, Any]:
    """Flag -> value. Sizes that Megatron-LM would derive or pad are explicit, and so is dropout, 0.1 unless given."""
    grouped = model.kv_heads != model.heads
    learned = model.positions == "learned"
    scaling = model.rope_scaling
    return {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "group_query_attention": grouped,
        "num_query_groups": model.kv_heads if grouped else None,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": model.ffn,
        "seq_length": seq,
        "max_position_embeddings": model.max_positions,
        "vocab_size": model.vocab,
        "make_vocab_size_divisible_by": 1,
        "normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "norm_epsilon": model.norm_eps,
        "position_embedding_type": "learned_absolute" if learned else "rope",
        "rotary_base": None if learned else f"{model.rope_theta:.0f}",
        "rotary_percent": None if learned or model.rotary_fraction == 1 else model.rotary_fraction,
        "use_rope_scaling": scaling is not None,
        "rope_scaling_factor": f"{scaling.factor:g}" if scaling else None,
        "swiglu": model.gated,
        "disable_bias_linear": model.bias != "all",
        "add_qkv_bias": model.bias == "qkv",
        "qk_layernorm": model.qk_norm,
        "untie_embeddings_and_output_weights": not model.tied,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.dropout,
        **(_experts(model.experts, model.layers) if model.experts else {}),
    }


def _experts(experts: Experts, layers: int) -> dict[str, Any]:
    dense = experts.dense_layers
    grouped = experts.groups > 1
    return {
        "num_experts": experts.count,
        "moe_router_topk": experts.active,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_shared_expert_intermediate_size": experts.shared * experts.ffn or None,
        "moe_layer_freq": f"([0]*{dense}+[1]*{layers - dense})" if dense else None,
        "moe_router_score_function": experts.scoring,
        "moe_router_pre_softmax": experts.scoring == "softmax" and not experts.normalized,
        "moe_router_enable_expert_bias": experts.router_bias,
        "moe_router_bias_update_rate": experts.bias_rate or None,
        "moe_router_topk_scaling_factor": experts.scale if experts.scale != 1 else None,
        "moe_router_num_groups": experts.groups if grouped else None,
        "moe_router_group_topk": experts.active_groups if grouped else None,
        "moe_router_load_balancing_type": "seq_aux_loss" if experts.balance_loss else "none",
        "moe_aux_loss_coeff": experts.balance_loss,
        "moe_z_loss_coeff": experts.z_loss or None,
        "moe_token_dispatcher_type": "alltoall",
    }

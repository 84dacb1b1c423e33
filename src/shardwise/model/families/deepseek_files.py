"""DeepSeek's files: names of the tensors, the fields of a written `config.json`, and what they cannot hold."""

from dataclasses import replace
from typing import Any

from shardwise.model.config import ModelConfig
from shardwise.model.families.llama import NAMES, llama_lacks, write_llama
from shardwise.model.families.mixtral import expert_names

_PLAIN = expert_names(NAMES, "mlp", "gate_proj", "up_proj", "down_proj")
_MODULES = {
    "attention.q": "self_attn.q_proj",
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_down_norm": "self_attn.q_a_layernorm",
    "attention.q_up": "self_attn.q_b_proj",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_down_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
    "mlp.shared.gate_up.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.gate_up.up": "mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
}
DEEPSEEK_NAMES = replace(
    _PLAIN,
    names={**_PLAIN.names, **_MODULES},
    whole={**_PLAIN.whole, "mlp.router.bias": "mlp.gate.e_score_correction_bias"},
)
RANKS = {
    "kv_rank": ("kv_lora_rank", 512),
    "nope_head_dim": ("qk_nope_head_dim", 128),
    "rope_head_dim": ("qk_rope_head_dim", 64),
    "v_head_dim": ("v_head_dim", 128),
}
"""Field of `LatentAttention` -> theirs, and its default."""


def write_deepseek(c: ModelConfig) -> dict[str, Any]:
    """`Family.write` of both versions."""
    a, e = c.latent_attention, c.experts
    assert a and e
    greedy = "group_limited_greedy" if e.groups > 1 else "greedy"
    return write_llama(c) | {
        **{theirs: getattr(a, ours) for ours, (theirs, _) in RANKS.items()},
        "head_dim": a.rope_head_dim,
        "q_lora_rank": a.q_rank or None,
        "n_routed_experts": e.count,
        "num_experts_per_tok": e.active,
        "moe_intermediate_size": e.ffn,
        "n_shared_experts": e.shared,
        "first_k_dense_replace": e.dense_layers,
        "n_group": e.groups,
        "topk_group": e.active_groups,
        "topk_method": "noaux_tc" if e.router_bias else greedy,
        "routed_scaling_factor": e.scale,
        "norm_topk_prob": e.normalized,
        "scoring_func": e.scoring,
        "aux_loss_alpha": e.balance_loss,
        "seq_aux": e.balance == "sequence",
    }


def deepseek_lacks(c: ModelConfig, third: bool) -> dict[str, bool]:
    """`Family.lacks` of both versions. third: V3."""
    e = c.experts
    if e is None:
        return {"model without experts": True}
    return llama_lacks(c) | {
        "query and key norms": c.qk_norm,
        "norms with another epsilon than 1e-6": c.norm_eps != 1e-6,
        "mixture without shared experts": not e.shared,
        f"router {'without' if third else 'with'} a bias": e.router_bias != third,
        "other score of groups": e.active_groups < e.groups and e.group_score != ("top 2" if third else "max"),
        "weights of experts divided by their sum": e.normalized and not third,
    }

"""DeepSeek-V2 and V3: latent attention, and experts with shared ones beside them after a few dense layers."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

from shardwise.codec import keyed
from shardwise.model.config import LatentAttention, ModelConfig
from shardwise.model.families.common import llama_like
from shardwise.model.families.family import Family
from shardwise.model.families.llama import NAMES, llama_lacks, write_llama
from shardwise.model.families.mixtral import expert_names, read_experts
from shardwise.model.fields import Fields, words

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


_EXPERTS = (
    "n_routed_experts=count num_experts_per_tok=active moe_intermediate_size=ffn n_shared_experts=shared "
    "first_k_dense_replace=dense_layers n_group=groups topk_group=active_groups routed_scaling_factor=scale "
    "norm_topk_prob=normalized scoring_func=scoring aux_loss_alpha=balance_loss"
)


def write_deepseek(c: ModelConfig) -> dict[str, Any]:
    """`Family.write` of both versions."""
    a, e = c.latent_attention, c.experts
    assert a and e
    greedy = "group_limited_greedy" if e.groups > 1 else "greedy"
    return write_llama(c) | {
        **{theirs: getattr(a, ours) for ours, (theirs, _) in RANKS.items()},
        **keyed(a, "head_dim=rope_head_dim q_lora_rank?=q_rank"),
        **keyed(e, _EXPERTS),
        "topk_method": "noaux_tc" if e.router_bias else greedy,
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


def _read_v2(f: Fields) -> dict[str, Any]:
    f.must_be("norm_topk_prob", False, why="transformers does not read it")
    f.must_be("topk_method", "greedy", "group_limited_greedy", why="another choice of experts")
    limited = f.take("topk_method", default="greedy") == "group_limited_greedy"
    groups = _groups(f, 1, 1) | {"group_score": "max"}
    more = {"scoring": "softmax", "normalized": False} | (groups if limited else {})
    return _read(f, 2048, shared=2, dense=0, scale=1.0, more=more)


def _read_v3(f: Fields) -> dict[str, Any]:
    f.must_be("topk_method", "noaux_tc", why="another choice of experts")
    f.must_be("rope_interleave", True, why="another pairing of the rotated elements")
    more = {"scoring": "sigmoid", "router_bias": True, "normalized": f.flag("norm_topk_prob", True)}
    return _read(f, 4096, shared=1, dense=3, scale=2.5, more=more | _groups(f, 8, 4))


def _groups(f: Fields, groups: int, active: int) -> dict[str, Any]:
    return {"groups": f.integer("n_group", default=groups), "active_groups": f.integer("topk_group", default=active)}


def _read(f: Fields, longest: int, shared: int, dense: int, scale: float, more: dict[str, Any]) -> dict[str, Any]:
    """The configuration. The numbers are the version's defaults; more: fields of its `Experts`."""
    ranks = {ours: f.integer(theirs, default=default) for ours, (theirs, default) in RANKS.items()}
    # An explicit null means one direct map of the queries.
    latent = LatentAttention(f.integer("q_lora_rank", default=0 if f.is_null("q_lora_rank") else 1536), **ranks)
    config = llama_like(f, longest, yarn=True)
    f.must_be("scoring_func", more["scoring"], why="transformers does not read it")
    for name in ("attention_bias", "mlp_bias"):
        f.must_be(name, False, why="biases")
    f.must_be("num_key_value_heads", config["heads"], why="all heads have keys of their own")
    f.must_be("moe_layer_freq", 1, why="dense layers between the expert layers")
    f.must_be("rms_norm_eps", 1e-6, why="the norms of the low ranks have 1e-6 in transformers")
    experts = read_experts(
        f,
        count=f.integer("n_routed_experts", "num_local_experts", "num_experts"),
        active=f.integer("num_experts_per_tok"),
        ffn=f.integer("moe_intermediate_size"),
        shared=f.integer("n_shared_experts", default=shared),
        dense_layers=f.integer("first_k_dense_replace", default=dense, least=0),
        scale=f.number("routed_scaling_factor", default=scale),
        balance="sequence" if f.flag("seq_aux", True) else "micro-batch",
        balance_loss=f.number("aux_loss_alpha", default=0.0, positive=False),
        **more,
    )
    # transformers writes the rotated part as head_dim; a query head is that and the part without positions.
    return config | {"head_dim": latent.head_dim, "latent_attention": latent, "experts": experts}


_HARMLESS = "qk_head_dim ep_size output_router_logits quantization_config"
_IGNORED = re.compile(rf"{DEEPSEEK_NAMES.ignored.pattern}|model\.layers\.61\..*")
"""The published V3 keeps its multi-token-prediction module as one more layer."""
DEEPSEEK_V2 = Family(
    "deepseek_v2",
    fits=lambda c: c.latent_attention is not None,
    read=_read_v2,
    module="llama",
    harmless=words(_HARMLESS),
    names=DEEPSEEK_NAMES,
    architecture="DeepseekV2ForCausalLM",
    write=write_deepseek,
    lacks=partial(deepseek_lacks, third=False),
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    fits=lambda c: c.latent_attention is not None and c.experts is not None and c.experts.scoring == "sigmoid",
    read=_read_v3,
    module="llama",
    harmless=words(f"{_HARMLESS} num_nextn_predict_layers num_mtp_layers"),
    names=replace(DEEPSEEK_NAMES, ignored=_IGNORED),
    architecture="DeepseekV3ForCausalLM",
    write=write_deepseek,
    lacks=partial(deepseek_lacks, third=True),
)

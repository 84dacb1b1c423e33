"""Llama and Mistral: RMSNorm, rotary positions, a gated SiLU feed-forward part."""

import re
from typing import Any

from shardwise.codec import keyed
from shardwise.model.config import ModelConfig
from shardwise.model.families.common import SHAPE, llama_like, write_scaling
from shardwise.model.families.family import Family
from shardwise.model.fields import Fields, full_attention, words
from shardwise.model.foreign import ForeignNames

NAMES = ForeignNames(
    trunk="model.",
    layers="model.layers.",
    names={
        "embedding.tokens": "model.embed_tokens",
        "head.norm": "model.norm",
        "head.out": "lm_head",
        "attention_norm": "input_layernorm",
        "attention.qkv.q": "self_attn.q_proj",
        "attention.qkv.k": "self_attn.k_proj",
        "attention.qkv.v": "self_attn.v_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "attention.out": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate_up.gate": "mlp.gate_proj",
        "mlp.gate_up.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
    ignored=re.compile(r".*\brotary_emb\.inv_freq"),
)


def _llama(f: Fields) -> dict[str, Any]:
    config = llama_like(f, max_positions=2048)
    f.must_be("sliding_window", why="Llama's attention sees the whole sequence")
    f.must_be("rope_interleaved", False, why="another pairing of the rotated elements")
    attention, mlp = f.flag("attention_bias", False), f.flag("mlp_bias", False)
    if attention != mlp:
        given = "attention_bias" if attention else "mlp_bias"
        raise f.error(f"{given}=true alone is not supported; attention_bias and mlp_bias must be equal")
    return config | {"bias": "all" if attention else "none"}


def _mistral(f: Fields) -> dict[str, Any]:
    config = llama_like(f, max_positions=131072, kv_heads=8)
    window = None if f.is_null("sliding_window") else 4096
    full_attention(f, config, f.integer("sliding_window", default=window))
    return config


def write_llama(c: ModelConfig) -> dict[str, Any]:
    more = (
        "num_key_value_heads=kv_heads head_dim intermediate_size=ffn rms_norm_eps=norm_eps rope_theta attention_dropout"
    )
    return keyed(c, f"{SHAPE} {more}") | {"hidden_act": "silu", "rope_scaling": write_scaling(c.rope_scaling)}


def llama_lacks(c: ModelConfig) -> dict[str, bool]:
    """`Family.lacks` of the RMSNorm families without further mechanisms."""
    return rmsnorm_lacks(c) | {
        "activation but silu": c.activation != "silu",
        "query and key norms over all heads": c.qk_norm and c.qk_norm_scope != "head",
        **gemma_mechanisms(c),
    }


def gemma_mechanisms(c: ModelConfig) -> dict[str, bool]:
    """Features of Gemma-2 alone -> whether a model has them."""
    return {
        "norms that multiply by 1 + weight": c.norm_zero_centered,
        "soft caps": bool(c.score_softcap or c.logit_softcap),
        "sliding window": c.window > 0,
        "scale of attention scores of its own": c.score_scale not in (None, c.head_dim),
        "scaled embedding": c.scaled_embedding,
    }


def rmsnorm_lacks(c: ModelConfig) -> dict[str, bool]:
    """Features of no RMSNorm family -> whether a model has them."""
    return {
        "query and key norms together with biases": c.qk_norm and c.bias != "none",
        "dropout outside attention": c.dropout > 0,
        "partly rotated heads": c.rotary_fraction != 1.0,
        "parallel residual": c.parallel_residual,
        "norm after the embedding": c.embedding_norm,
    }


LLAMA = Family(
    "llama",
    fits=lambda c: True,
    read=_llama,
    module="llama",
    harmless=words("is_llama_config"),
    names=NAMES,
    architecture="LlamaForCausalLM",
    write=write_llama,
    lacks=llama_lacks,
)
MISTRAL = Family("mistral", fits=lambda c: False, read=_mistral, module="llama", names=NAMES)

"""Gemma-2: norms before and after each branch, soft caps, local attention in every second layer, scaled embedding."""

from dataclasses import replace
from typing import Any

from shardwise.model.config import ModelConfig
from shardwise.model.families.common import HIDDEN_ACT, llama_like
from shardwise.model.families.family import Family
from shardwise.model.families.llama import NAMES, rmsnorm_lacks, write_llama
from shardwise.model.fields import LAYER_TYPES, Fields, layer_types, words

_FULL, _LOCAL = LAYER_TYPES
_NAMES = replace(
    NAMES,
    names={
        **NAMES.names,
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
)


def _types(layers: int, every: int) -> list[str]:
    return [_LOCAL if not every or (i + 1) % every else _FULL for i in range(layers)]


def _read(f: Fields) -> dict[str, Any]:
    f.must_be("attention_bias", False, why="biases on the attention matrices alone")
    f.must_be("use_bidirectional_attention", False, why="attention to later tokens")
    config = llama_like(f, 8192, kv_heads=4, head_dim=256, activation=("hidden_activation", "gelu_tanh"), tied=True)
    f.must_be("hidden_act", *HIDDEN_ACT.values(), why="the activation is hidden_activation, which is read")
    scores, logits = "attn_logit_softcapping", "final_logit_softcapping"
    config |= _window(f, config["layers"])
    return config | {
        "norm_placement": "both",
        "norm_zero_centered": True,
        "score_scale": f.number("query_pre_attn_scalar", default=256.0),
        "score_softcap": f.number(scores, default=None if f.is_null(scores) else 50.0),
        "logit_softcap": f.number(logits, default=None if f.is_null(logits) else 30.0),
        "scaled_embedding": True,
    }


def _window(f: Fields, layers: int) -> dict[str, int]:
    window = f.integer("sliding_window", default=0 if f.is_null("sliding_window") else 4096)
    types = layer_types(f, layers)
    if not window or (types and _LOCAL not in types):
        return {}
    every = 2 if types is None else types.index(_FULL) + 1 if _FULL in types else 0
    if types is not None and types != _types(layers, every):
        raise f.error("layer_types must repeat: some layers of sliding_attention, then one of full_attention")
    return {"window": window, "full_attention_every": every}


def _scale(c: ModelConfig) -> float:
    return c.head_dim if c.score_scale is None else c.score_scale


def _write(c: ModelConfig) -> dict[str, Any]:
    theirs = write_llama(c) | {
        "hidden_activation": HIDDEN_ACT[c.activation],
        "query_pre_attn_scalar": int(_scale(c)),
        "attn_logit_softcapping": c.score_softcap,
        "final_logit_softcapping": c.logit_softcap,
        "sliding_window": c.window or None,
        "layer_types": _types(c.layers, c.full_attention_every if c.window else 1),
    }
    del theirs["hidden_act"]
    return theirs


def _lacks(c: ModelConfig) -> dict[str, bool]:
    return rmsnorm_lacks(c) | {
        "activation but tanh-GELU": c.activation != "gelu_tanh",
        "biases": c.bias != "none",
        "query and key norms": c.qk_norm,
        "norms that multiply by their weight alone": not c.norm_zero_centered,
        "embedding without scale": not c.scaled_embedding,
        "scale of attention scores that is no integer": _scale(c) % 1 > 0,
        "hidden size that heads do not divide": c.hidden % c.heads > 0,
    }


GEMMA2 = Family(
    "gemma2",
    fits=lambda c: c.norm_placement == "both",
    read=_read,
    module="gemma2",
    harmless=words("cache_implementation"),
    names=_NAMES,
    architecture="Gemma2ForCausalLM",
    write=_write,
    lacks=_lacks,
)

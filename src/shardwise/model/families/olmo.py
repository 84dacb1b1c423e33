"""OLMo-2: norms of what attention and feed-forward put out, and of all queries' and keys' heads together."""

from dataclasses import replace
from typing import Any

from shardwise.model.config import ModelConfig
from shardwise.model.families.common import llama_like
from shardwise.model.families.family import Family
from shardwise.model.families.llama import NAMES, gemma_mechanisms, rmsnorm_lacks, write_llama
from shardwise.model.fields import Fields

_NAMES = replace(
    NAMES,
    names={
        **{ours: theirs for ours, theirs in NAMES.names.items() if "norm" not in ours},
        "head.norm": "model.norm",
        "attention.qk_norm.q": "self_attn.q_norm",
        "attention.qk_norm.k": "self_attn.k_norm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
)


def _read(f: Fields) -> dict[str, Any]:
    f.must_be("attention_bias", False, why="biases on the attention matrices alone")
    config = llama_like(f, max_positions=2048, eps=1e-5)
    return config | {"norm_placement": "post", "qk_norm": True, "qk_norm_scope": "all heads"}


def _lacks(c: ModelConfig) -> dict[str, bool]:
    return rmsnorm_lacks(c) | {
        "activation but silu": c.activation != "silu",
        "biases": c.bias != "none",
        "queries and keys without a norm over all heads": not c.qk_norm or c.qk_norm_scope == "head",
        **gemma_mechanisms(c),
    }


OLMO2 = Family(
    "olmo2",
    fits=lambda c: c.norm_placement == "post",
    read=_read,
    module="olmo2",
    names=_NAMES,
    architecture="Olmo2ForCausalLM",
    write=write_llama,
    lacks=_lacks,
)

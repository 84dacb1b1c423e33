"""BLOOM: GPT with ALiBi and a norm after the embedding. Counted and planned, not run here."""

from __future__ import annotations

from typing import Any

from shardwise.model.families.common import gpt_like
from shardwise.model.families.family import Family
from shardwise.model.fields import Fields, words


def _bloom(f: Fields) -> dict[str, Any]:
    hidden, heads = f.integer("hidden_size", "n_embed"), f.integer("n_head", "num_attention_heads")
    f.must_be("apply_residual_connection_post_layernorm", False, why="another residual branch")
    f.must_be("n_inner", 4 * hidden, why="BLOOM's feed-forward is four times as wide as the model")
    return gpt_like(f, hidden, heads, ("n_layer", "num_hidden_layers"), "layer_norm_epsilon", tied=True) | {
        "ffn": 4 * hidden,
        # ALiBi has no longest sequence; this is the length that it was trained on.
        "max_positions": f.integer("seq_length", default=2048),
        "positions": "alibi",
        "activation": "gelu_tanh",
        "embedding_norm": True,
        "dropout": f.number("hidden_dropout", default=0.0, positive=False),
        "attention_dropout": f.number("attention_dropout", default=0.0, positive=False),
    }


BLOOM = Family(
    "bloom",
    fits=lambda c: c.positions == "alibi",
    read=_bloom,
    module="gpt",
    harmless=words(
        """
        attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion offset_alibi skip_bias_add
        skip_bias_add_qkv slow_but_exact
        """
    ),
)

"""The model that Megatron-LM's arguments describe, where they say enough."""

from __future__ import annotations

import re
from typing import Literal

from shardwise.errors import UserError
from shardwise.interop.reading.fields import ConfigFields
from shardwise.model import ModelConfig
from shardwise.model.config import Experts

_OTHERS = ("multi_latent_attention", "heterogeneous_layers_config_path", "hybrid_layer_pattern")
"""Flags of models that are not described here, and, below, those that belong to them."""
_OF_OTHERS = (
    "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "mamba_num_heads",
    "mamba_head_dim", "mamba_num_groups", "mamba_state_dim", "is_hybrid_model",
)  # fmt: skip


def described(fields: ConfigFields, tp: int) -> ModelConfig | None:
    """The model; None where its sizes are not there, or where it has latent attention or layers of other kinds.

    tp: the vocabulary is padded for it. Raises `UserError` for sizes that contradict each other.
    """
    gqa = fields.flag("group_query_attention")
    sizes = {
        name: fields.integer(name) for name in ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups")
    }
    vocab = fields.integer("padded_vocab_size") or _padded(fields, fields.integer("vocab_size"), tp)
    hidden, gated = sizes["hidden_size"], fields.flag("swiglu")
    # Without a width of its own the feed-forward is 4h, or as many parameters with a gate (arguments.py).
    usual = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    ffn = fields.integer("ffn_hidden_size", usual)
    norm = fields.word("normalization", "LayerNorm", ("LayerNorm", "RMSNorm"))
    positions = fields.word("position_embedding_type", "learned_absolute")
    plain, qkv_bias = fields.flag("disable_bias_linear"), fields.flag("add_qkv_bias")
    head_dim, qk_norm = fields.integer("kv_channels"), fields.flag("qk_layernorm")
    longest = fields.integer("max_position_embeddings", fields.integer("seq_length", 1))
    untied = fields.flag("untie_embeddings_and_output_weights")
    if fields.flag("squared_relu"):
        fields.fact("--squared-relu is taken as gelu, which saves as much")
    experts, known = _experts(fields, ffn)
    others = [key for key in (*_OTHERS, *_OF_OTHERS) if fields.given(key)]
    if others:
        fields.fact(f"its model is not described here ({', '.join(map(fields.name, others))}): --model names it")
    if others or not known or not (hidden and vocab and sizes["num_layers"] and sizes["num_attention_heads"]):
        return None
    if positions not in ("learned_absolute", "rope", "none"):
        raise UserError(f"--position-embedding-type {positions} is not known here; learned_absolute and rope are")
    return ModelConfig(
        "the model of these arguments",
        vocab,
        hidden,
        sizes["num_layers"],
        sizes["num_attention_heads"],
        ffn,
        longest,
        kv_heads=(sizes["num_query_groups"] or 1) if gqa else 0,
        head_dim=head_dim,
        norm="rmsnorm" if norm.lower() == "rmsnorm" else "layernorm",
        positions="learned" if positions == "learned_absolute" else "rope",
        activation="silu" if gated else "gelu",
        gated=gated,
        bias=("qkv" if qkv_bias else "none") if plain else "all",
        qk_norm=qk_norm,
        tied=not untied,
        experts=experts,
    )


def _experts(fields: ConfigFields, ffn: int) -> tuple[Experts | None, bool]:
    """(Experts, whether they are all that the flags say). ffn: width of a dense feed-forward, and of an expert's where
    it has none of its own."""
    count, active = fields.integer("num_experts"), fields.integer("moe_router_topk", 2)
    width = fields.integer("moe_ffn_hidden_size", max(1, ffn))
    shared = fields.integer("moe_shared_expert_intermediate_size")
    layers = re.fullmatch(r"1|\(?\[0\]\s*\*\s*(\d+)\s*\+\s*\[1\]\s*\*\s*\d+\)?", fields.word("moe_layer_freq", "1"))
    bias = fields.flag("moe_router_enable_expert_bias")
    scoring = fields.word("moe_router_score_function", "softmax", ("softmax", "sigmoid"))
    if not count:
        return None, True
    if shared % width or not layers:
        fields.fact("its experts are not described here (layers in turns, or a shared expert of another width): "
                    "--model names it")  # fmt: skip
        return None, False
    dense = int(layers[1] or 0)
    kind: Literal["softmax", "sigmoid"] = "sigmoid" if scoring == "sigmoid" else "softmax"
    return Experts(count, active, width, shared // width, dense_layers=dense, router_bias=bias, scoring=kind), True


def _padded(fields: ConfigFields, vocab: int, tp: int) -> int:
    multiple = fields.integer("make_vocab_size_divisible_by", 128) * tp
    return -(-vocab // multiple) * multiple

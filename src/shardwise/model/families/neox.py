"""GPT-NeoX: LayerNorm, partly rotated heads, attention and feed-forward part of the same input."""

import re
from typing import Any

from shardwise.codec import keyed
from shardwise.model.config import ModelConfig
from shardwise.model.families.common import GELU, SHAPE, gpt_lacks, gpt_like, write_scaling
from shardwise.model.families.family import Family
from shardwise.model.fields import Fields, read_activation, rotary
from shardwise.model.foreign import FUSED, ForeignNames

NAMES = ForeignNames(
    trunk="gpt_neox.",
    layers="gpt_neox.layers.",
    names={
        "embedding.tokens": "gpt_neox.embed_in",
        "head.norm": "gpt_neox.final_layer_norm",
        "head.out": "embed_out",
        "attention_norm": "input_layernorm",
        **{f"attention.qkv.{part}": "attention.query_key_value" for part in FUSED},
        "attention.out": "attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    ignored=re.compile(r".*\battention\.((masked_)?bias|rotary_emb\.inv_freq)"),
    fused="by head",
)


def _gpt_neox(f: Fields) -> dict[str, Any]:
    hidden, heads = f.integer("hidden_size"), f.integer("num_attention_heads")
    longest = f.integer("max_position_embeddings", default=2048)
    for other_name in ("attention_probs_dropout_prob", "hidden_dropout_prob"):
        f.must_be(other_name, 0.0, why="transformers does not read it; use attention_dropout and hidden_dropout")
    f.must_be("attention_bias", True, why="attention without biases beside a feed-forward with them")
    return gpt_like(f, hidden, heads, ("num_hidden_layers",), "layer_norm_eps", tied=False) | {
        "ffn": f.integer("intermediate_size"),
        "max_positions": longest,
        "activation": read_activation(f, "hidden_act", "gelu", ("gelu", "gelu_tanh")),
        "parallel_residual": f.flag("use_parallel_residual", True),
        "dropout": f.number("hidden_dropout", default=0.0, positive=False),
        "attention_dropout": f.number("attention_dropout", default=0.0, positive=False),
        **rotary(
            f,
            longest,
            theta_names=("rotary_emb_base", "rope_theta"),
            fraction_names=("rotary_pct", "partial_rotary_factor"),
            fraction=0.25,
        ),
    }


def _write(c: ModelConfig) -> dict[str, Any]:
    more = "intermediate_size=ffn layer_norm_eps=norm_eps rotary_emb_base=rope_theta rotary_pct=rotary_fraction "
    more += "use_parallel_residual=parallel_residual hidden_dropout=dropout attention_dropout"
    scaling = write_scaling(c.rope_scaling)
    return keyed(c, f"{SHAPE} {more}") | {"hidden_act": GELU[c.activation], "rope_scaling": scaling}


GPT_NEOX = Family(
    "gpt_neox",
    fits=lambda c: c.norm == "layernorm",
    read=_gpt_neox,
    module="gpt",
    names=NAMES,
    architecture="GPTNeoXForCausalLM",
    write=_write,
    lacks=gpt_lacks,
)

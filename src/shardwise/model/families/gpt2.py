"""GPT-2: LayerNorm, learned positions, GELU, biases everywhere."""

import re
from typing import Any

from shardwise.codec import keyed
from shardwise.model.config import ModelConfig
from shardwise.model.families.common import GELU, gpt_lacks, gpt_like
from shardwise.model.families.family import Family
from shardwise.model.fields import Fields, read_activation, words
from shardwise.model.foreign import FUSED, ForeignNames

NAMES = ForeignNames(
    trunk="transformer.",
    layers="transformer.h.",
    names={
        "embedding.tokens": "transformer.wte",
        "head.norm": "transformer.ln_f",
        "head.out": "lm_head",
        "attention_norm": "ln_1",
        **{f"attention.qkv.{part}": "attn.c_attn" for part in FUSED},
        "attention.out": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    ignored=re.compile(r".*\battn\.(masked_)?bias"),
    fused="side by side",
    transposed=True,
    whole={"embedding.positions": "transformer.wpe.weight"},
)


def _gpt2(f: Fields) -> dict[str, Any]:
    hidden, heads = f.integer("n_embd", "hidden_size"), f.integer("n_head", "num_attention_heads")
    longest = f.integer("n_positions", "max_position_embeddings", default=1024)
    f.take("n_ctx", default=None)  # in early configurations; transformers ignores it
    f.must_be("scale_attn_weights", True, why="attention scores without the square root of the head size")
    f.must_be("scale_attn_by_inverse_layer_idx", False, why="attention scores scaled by the layer's index")
    f.must_be("reorder_and_upcast_attn", False, why="another order and precision of the attention scores")
    residual = f.number("resid_pdrop", default=0.1, positive=False)
    embedding = f.number("embd_pdrop", default=0.1, positive=False)
    if residual != embedding:
        raise f.error(f"embd_pdrop={embedding} must equal resid_pdrop={residual}: there is one rate for both")
    return gpt_like(f, hidden, heads, ("n_layer", "num_hidden_layers"), "layer_norm_epsilon", tied=True) | {
        "ffn": f.integer("n_inner", default=4 * hidden),
        "max_positions": longest,
        "positions": "learned",
        "activation": read_activation(f, "activation_function", "gelu_new", ("gelu", "gelu_tanh")),
        "dropout": residual,
        "attention_dropout": f.number("attn_pdrop", default=0.1, positive=False),
    }


def _write(c: ModelConfig) -> dict[str, Any]:
    return {"activation_function": GELU[c.activation]} | keyed(
        c, "n_embd=hidden n_layer=layers n_head=heads n_inner=ffn n_positions=max_positions "
        "layer_norm_epsilon=norm_eps resid_pdrop=dropout embd_pdrop=dropout attn_pdrop=attention_dropout",
    )  # fmt: skip


GPT2 = Family(
    "gpt2",
    fits=lambda c: c.norm == "layernorm" and c.positions == "learned",
    read=_gpt2,
    module="gpt",
    harmless=words("summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout"),
    names=NAMES,
    architecture="GPT2LMHeadModel",
    write=_write,
    lacks=gpt_lacks,
)

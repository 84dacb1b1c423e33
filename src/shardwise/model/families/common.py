"""Shared code of families: fields of a `config.json` with the same meaning, and the way back."""

from typing import Any

from shardwise.model.config import ModelConfig, RopeScaling, YarnScaling
from shardwise.model.fields import Fields, read_activation, rotary

HIDDEN_ACT = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
"""Our activation of a gated feed-forward -> theirs."""


def llama_like(
    f: Fields,
    max_positions: int,
    kv_heads: int | None = None,
    head_dim: int = 0,
    eps: float = 1e-6,
    theta: float = 10000.0,
    yarn: bool = False,
    activation: tuple[str, str] = ("hidden_act", "silu"),
    tied: bool = False,
) -> dict[str, Any]:
    """Configuration shared by the RMSNorm families; the arguments are the family's defaults for absent fields.
    activation: the field, and the only value by our name."""
    heads = f.integer("num_attention_heads")
    longest = f.integer("max_position_embeddings", default=max_positions)
    # An explicit null means no grouping, also where the family's default is grouped.
    grouped = heads if f.is_null("num_key_value_heads") or not kv_heads else kv_heads
    return {
        "vocab": f.integer("vocab_size"),
        "hidden": f.integer("hidden_size"),
        "layers": f.integer("num_hidden_layers"),
        "heads": heads,
        "ffn": f.integer("intermediate_size"),
        "max_positions": longest,
        "kv_heads": f.integer("num_key_value_heads", default=grouped),
        "head_dim": f.integer("head_dim", default=0 if f.is_null("head_dim") else head_dim),
        "norm": "rmsnorm",
        "norm_eps": f.number("rms_norm_eps", default=eps),
        "activation": read_activation(f, activation[0], HIDDEN_ACT[activation[1]], activation[1:]),
        "gated": True,
        "tied": f.flag("tie_word_embeddings", tied),
        "attention_dropout": f.number("attention_dropout", default=0.0, positive=False),
        **rotary(f, longest, theta, yarn=yarn),
    }


def gpt_like(f: Fields, hidden: int, heads: int, layers: tuple[str, ...], eps: str, tied: bool) -> dict[str, Any]:
    """Configuration shared by the LayerNorm families. layers, eps: the fields' names. tied: the default."""
    if hidden % heads:
        raise f.error(f"hidden size {hidden} is not divisible by {heads} attention heads")
    return {
        "vocab": f.integer("vocab_size"),
        "hidden": hidden,
        "heads": heads,
        "layers": f.integer(*layers),
        "norm": "layernorm",
        "norm_eps": f.number(eps, default=1e-5),
        "tied": f.flag("tie_word_embeddings", tied),
        "gated": False,
        "bias": "all",
    }


SHAPE = "hidden_size=hidden num_hidden_layers=layers num_attention_heads=heads max_position_embeddings=max_positions"
"""Keys of a `config.json` -> our fields that most families write, as of `keyed`."""


def write_scaling(scaling: RopeScaling | YarnScaling | None) -> dict[str, Any] | None:
    """The `rope_scaling` of a `config.json`."""
    if scaling is None:
        return None
    table = {"factor": scaling.factor, "original_max_position_embeddings": scaling.original_max_positions}
    if isinstance(scaling, YarnScaling):
        of_yarn = {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        return {"rope_type": "yarn", **table, **of_yarn, "mscale": scaling.mscale, "mscale_all_dim": scaling.mscale}
    of_llama = {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    return {"rope_type": "llama3", **table, **of_llama}


GELU = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
"""Our activation -> theirs."""


def gpt_lacks(c: ModelConfig) -> dict[str, bool]:
    return {
        "model without biases": c.bias != "all",
        "grouped key/value heads": c.kv_heads != c.heads,
        "head_dim other than hidden / heads": c.head_dim * c.heads != c.hidden,
        "activation but gelu": c.activation == "silu",
        "query and key norms": c.qk_norm,
        "parallel residual": c.positions == "learned" and c.parallel_residual,
        "norm after the embedding": c.embedding_norm,
    }

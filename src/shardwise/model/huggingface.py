"""Hugging Face's `config.json`, read into a `ModelConfig` and written back.

Every field is accounted for: it is read, it must have one value, or it is on a list of fields that leave the
mathematics alone. Any other field is refused by its name, because a field that is overlooked is a model computed
wrongly. Defaults and meanings follow the configuration classes of transformers 4.57 and 5.23.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import UserError
from shardwise.model.config import Activation, Experts, LatentAttention, ModelConfig, RopeScaling
from shardwise.small_files import read_small

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    # The same tanh approximation under four names.
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Book-keeping, tokens, generation settings and storage types: the next-token distribution does not depend on them.
_HARMLESS = _words(
    """
    model_type transformers_version _name_or_path name_or_path _commit_hash auto_map torch_dtype dtype use_bfloat16
    use_cache return_dict output_attentions output_hidden_states output_scores torchscript tf_legacy_loss
    gradient_checkpointing chunk_size_feed_forward initializer_range is_decoder pretraining_tp max_sequence_length
    attn_implementation _attn_implementation _attn_implementation_autoset _attn_implementation_internal
    id2label label2id num_labels problem_type finetuning_task task_specific_params classifier_dropout
    transformers.js_config unsloth_fixed unsloth_version
    tokenizer_class prefix bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    """
)


def from_huggingface(source: str | Path | Mapping[str, Any], name: str | None = None) -> ModelConfig:
    """Read a `config.json`: its path, the folder that holds it, or its parsed contents.

    Families: llama, mistral, qwen2, qwen3, gpt2, gpt_neox; for counting only mixtral, deepseek_v3, bloom. `name`
    defaults to the folder's name, or to `_name_or_path` of parsed contents. Raises `UserError` in one line when the
    file cannot be read, a value is missing, of the wrong type or not supported, or a field is not known.
    """
    data, where, default_name = _load(source)
    family = data.get("model_type")
    if not isinstance(family, str) or family not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise UserError(f"{where}: model_type {family!r} is not supported; supported are {known}")
    fields, rules = _Fields(data, where), _FAMILIES[family]
    for field, (allowed, why) in _FIXED.items():
        if field not in rules.harmless:
            fields.must_be(field, *allowed, why=why)
    _language_model_head(fields)
    config = rules.read(fields)
    fields.refuse_unknown(family, _HARMLESS | rules.harmless)
    return ModelConfig(name=name or default_name or family, **config)


def to_huggingface(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of a runnable model, in the spelling that transformers 4 and 5 both read.

    `from_huggingface` gives the same `ModelConfig` back, but for `published_params`. Raises `UserError` when no
    family of Hugging Face computes this model.
    """
    if reason := config.why_not_runnable():
        raise UserError(f"model {config.name!r} cannot be written for Hugging Face: {reason}")
    family, wrong = _family_of(config)
    if wrong:
        raise UserError(f"model {config.name!r} cannot be written for Hugging Face: {family} has no {wrong[0]}")
    fields = _WRITERS[family](config)
    if family != "gpt2":
        fields |= {"rope_scaling": _rope_scaling_to_json(config.rope_scaling)}
    return {
        "_name_or_path": config.name,
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": config.vocab,
        "tie_word_embeddings": config.tied,
        **fields,
    }


def _load(source: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], str, str | None]:
    """(contents, what to call it in errors, the model's name if it can be told)."""
    if isinstance(source, Mapping):
        found = source.get("_name_or_path")
        return dict(source), "config.json", found if isinstance(found, str) else None
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    try:
        data = json.loads(read_small(path))
    except OSError as error:
        wanted = "give a config.json or the folder that holds it"
        raise UserError(f"cannot read {path}: {error.strerror}; {wanted}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} is JSON, but not the object that a config.json is")
    return data, str(path), path.resolve().parent.name or None


_REQUIRED = object()


class _Fields:
    """The fields of one JSON object. Reading a field marks it as understood; null counts as absent."""

    def __init__(self, data: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.data, self.where, self.prefix = data, where, prefix
        self.understood: set[str] = set()

    def error(self, text: str) -> UserError:
        return UserError(f"{self.where}: {text}")

    def take(self, *names: str, default: Any = _REQUIRED) -> Any:
        """The value of a field that goes under any of `names`, which must not contradict each other."""
        self.understood.update(names)
        given = [n for n in names if self.data.get(n) is not None]
        for other in given[1:]:
            if self.data[other] != self.data[given[0]]:
                raise self.error(
                    f"{self.prefix}{given[0]}={self.data[given[0]]!r} and "
                    f"{self.prefix}{other}={self.data[other]!r} contradict each other"
                )
        if given:
            return self.data[given[0]]
        if default is _REQUIRED:
            raise self.error(f"required field {self.prefix}{names[0]} is missing")
        return default

    def is_null(self, name: str) -> bool:
        """Whether the field is written down as null, which for some fields differs from leaving it out."""
        return name in self.data and self.data[name] is None

    def integer(self, *names: str, default: Any = _REQUIRED, least: int = 1) -> Any:
        value = self.take(*names, default=default)
        if value is not default and (type(value) is not int or value < least):
            raise self.error(f"{self.prefix}{names[0]} must be an integer of at least {least}, not {value!r}")
        return value

    def number(self, *names: str, default: Any = _REQUIRED, positive: bool = True) -> Any:
        value = self.take(*names, default=default)
        if value is default:
            return value
        # The bound also turns away nan, infinity and integers that no float holds.
        if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max or (positive and value == 0):
            kind = "positive" if positive else "non-negative"
            raise self.error(f"{self.prefix}{names[0]} must be a {kind} number, not {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.take(name, default=default)
        if type(value) is not bool:
            raise self.error(f"{self.prefix}{name} must be true or false, not {value!r}")
        return value

    def table(self, name: str) -> dict[str, Any]:
        value = self.take(name, default={})
        if not isinstance(value, dict):
            raise self.error(f"{self.prefix}{name} must be a JSON object or null, not {value!r}")
        return value

    def must_be(self, name: str, *allowed: Any, why: str) -> None:
        """Refuse every value but `allowed`; absent and null are fine."""
        value = self.take(name, default=None)
        if value is not None and value not in allowed:
            only = " or ".join(json.dumps(a) for a in allowed if a is not None) or "null"
            raise self.error(f"{self.prefix}{name}={value!r} is not supported ({why}); only {only} is")

    def refuse_unknown(self, family: str, harmless: frozenset[str] = frozenset()) -> None:
        unknown = sorted(set(self.data) - self.understood - harmless)
        if unknown:
            raise self.error(
                f"field {self.prefix}{unknown[0]} is not known for {family} and may change the mathematics; "
                "delete it if it does not"
            )


# Field -> (values under which it changes nothing, what any other value would mean).
_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "is_encoder_decoder": ((False,), "an encoder-decoder is another model"),
    "add_cross_attention": ((False,), "cross-attention is another model"),
    "cross_attention_hidden_size": ((), "cross-attention is another model"),
    "tie_encoder_decoder": ((False,), "an encoder-decoder is another model"),
    "pruned_heads": (({},), "pruned heads change the shapes"),
    "quantization_config": ((), "quantised weights are not the weights that are trained"),
    "per_layer_config": (({},), "layers that differ from each other"),
}


def _language_model_head(f: _Fields) -> None:
    names = f.take("architectures", default=[])
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise f.error(f"architectures must be a list of names, not {names!r}")
    for name in names:
        if re.search("For(?!CausalLM)|DoubleHeads", name):
            raise f.error(f"architectures names {name}, whose head does not predict the next token")


def _activation(f: _Fields, name: str, default: str, allowed: tuple[str, ...]) -> Activation:
    value = f.take(name, default=default)
    if _ACTIVATIONS.get(value if isinstance(value, str) else "") not in allowed:
        names = ", ".join(n for n, ours in _ACTIVATIONS.items() if ours in allowed)
        raise f.error(f"{name}={value!r} is not supported; supported are {names}")
    return _ACTIVATIONS[value]


def _rope(
    f: _Fields,
    max_positions: int,
    theta: float = 10000.0,
    theta_names: tuple[str, ...] = ("rope_theta",),
    fraction_names: tuple[str, ...] = ("partial_rotary_factor",),
    fraction: float | None = None,
    counted: bool = False,
) -> dict[str, Any]:
    """Rotary positions from `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (5).

    fraction: the default share of a head that is rotated; None in families that rotate all of it. counted: the family
    is only counted, and how its angles are stretched changes no shape.
    """
    beside = {n: f.take(n, default=None) for n in (*theta_names, *fraction_names)}
    merged: dict[str, Any] = {}
    for table in (f.table("rope_parameters"), f.table("rope_scaling"), beside):
        for key, value in table.items():
            if value is not None and merged.setdefault(key, value) != value:
                raise f.error(f"{key} is given twice, as {merged[key]!r} and as {value!r}")
    rope = _Fields(merged, f.where)
    if counted:
        return {"positions": "rope", "rope_theta": rope.number(*theta_names, default=theta)}
    _refuse_unread(f, ((theta_names, theta), (fraction_names, fraction)))
    kind = rope.take("rope_type", "type", default="default")
    if kind not in ("default", "llama3"):
        raise f.error(f"rope type {kind!r} is not supported; supported are default and llama3")
    rotated = rope.number(*fraction_names, default=1.0 if fraction is None else fraction)
    if rotated > 1 or (fraction is None and rotated != 1):
        raise f.error(
            f"{fraction_names[0]}={rotated} is not supported; it must be {'1' if fraction is None else '<= 1'}"
        )
    result = {
        "positions": "rope",
        "rope_theta": rope.number(*theta_names, default=theta),
        "rotary_fraction": rotated,
    }
    if kind == "llama3":
        result["rope_scaling"] = _llama3(rope, max_positions)
    rope.prefix = "rope_parameters."
    rope.refuse_unknown(f"rope type {kind}")
    return result


def _refuse_unread(f: _Fields, settings: tuple[tuple[tuple[str, ...], float | None], ...]) -> None:
    """Refuse rotary settings that transformers reads over, so that its model would be another one.

    settings: for each its names, of which beside a table only the first is read, and its default.
    """
    scaling, parameters = f.table("rope_scaling"), f.table("rope_parameters")
    for name, value in parameters.items():
        if scaling and value is not None and name not in scaling:
            raise f.error(f"rope_parameters.{name} is not read by transformers beside rope_scaling; write it there")
    table = scaling or parameters
    for (read, *others), default in settings:
        for name in others:
            value = f.take(name, default=None)
            if value is not None and table.get(name) is None and value != f.take(read, default=default):
                raise f.error(f"{name}={value!r} is not read by transformers; write it as {read}")


def _llama3(rope: _Fields, max_positions: int) -> RopeScaling:
    scaling = RopeScaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_positions=rope.integer("original_max_position_embeddings", default=max_positions),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise rope.error("high_freq_factor must be greater than low_freq_factor")
    return scaling


def _full_attention(f: _Fields, config: dict[str, Any], window: int | None, from_layer: int = 0) -> None:
    """Refuse attention that does not see the whole sequence. `window` applies from layer `from_layer` on."""
    layers, longest = config["layers"], config["max_positions"]
    types = f.take("layer_types", default=None)
    if types is None:
        types, slides = [], window is not None and from_layer < layers
    elif not isinstance(types, list) or len(types) != layers:
        raise f.error(f"layer_types must be a list with one entry for each of the {layers} layers")
    else:
        slides = "sliding_attention" in types
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise f.error(f"layer_types has {kind!r}, which is not supported; only full_attention is")
    if slides and (window is None or window < longest):
        raise f.error(
            f"sliding_window={window} hides part of a sequence of max_position_embeddings={longest}, which is not "
            "supported; set sliding_window to null, or max_position_embeddings to at most the window"
        )


def _qwen_window(f: _Fields, config: dict[str, Any]) -> None:
    window = f.integer("sliding_window", default=4096)
    from_layer = f.integer("max_window_layers", default=28, least=0)
    _full_attention(f, config, window if f.flag("use_sliding_window", False) else None, from_layer)


def _llama_like(
    f: _Fields,
    max_positions: int,
    kv_heads: int | None = None,
    head_dim: int = 0,
    eps: float = 1e-6,
    theta: float = 10000.0,
    counted: bool = False,
) -> dict[str, Any]:
    """What the RMSNorm families share; the arguments are the family's defaults for absent fields."""
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
        "activation": _activation(f, "hidden_act", "silu", ("silu",)),
        "gated": True,
        "tied": f.flag("tie_word_embeddings", False),
        "attention_dropout": f.number("attention_dropout", default=0.0, positive=False),
        **_rope(f, longest, theta, counted=counted),
    }


def _llama(f: _Fields) -> dict[str, Any]:
    config = _llama_like(f, max_positions=2048)
    f.must_be("sliding_window", why="Llama's attention sees the whole sequence")
    f.must_be("rope_interleaved", False, why="another pairing of the rotated elements")
    attention, mlp = f.flag("attention_bias", False), f.flag("mlp_bias", False)
    if attention != mlp:
        given = "attention_bias" if attention else "mlp_bias"
        raise f.error(f"{given}=true alone is not supported; attention_bias and mlp_bias must be equal")
    return config | {"bias": "all" if attention else "none"}


def _mistral(f: _Fields) -> dict[str, Any]:
    config = _llama_like(f, max_positions=131072, kv_heads=8)
    window = None if f.is_null("sliding_window") else 4096
    _full_attention(f, config, f.integer("sliding_window", default=window))
    return config


def _qwen2(f: _Fields) -> dict[str, Any]:
    config = _llama_like(f, max_positions=32768, kv_heads=32)
    _qwen_window(f, config)
    f.must_be("use_mrope", False, why="positions of several axes")
    return config | {"bias": "qkv"}


def _qwen3(f: _Fields) -> dict[str, Any]:
    config = _llama_like(f, max_positions=32768, kv_heads=32, head_dim=128)
    _qwen_window(f, config)
    f.must_be("attention_bias", False, why="biases on the attention matrices alone")
    return config | {"qk_norm": True}


def _mixtral(f: _Fields) -> dict[str, Any]:
    config = _llama_like(f, max_positions=131072, kv_heads=8, eps=1e-5, theta=1e6)
    _full_attention(f, config, f.integer("sliding_window", default=None))
    count = f.integer("num_local_experts", "num_experts", default=8)
    active = f.integer("num_experts_per_tok", default=2)
    return config | {"experts": _experts(f, count, active, config["ffn"])}


def _experts(f: _Fields, count: int, active: int, ffn: int, **more: Any) -> Experts:
    if active > count:
        raise f.error(f"num_experts_per_tok={active} is more than the {count} experts that there are")
    return Experts(count, active, ffn, **more)


def _deepseek_v3(f: _Fields) -> dict[str, Any]:
    latent = LatentAttention(
        q_rank=f.integer("q_lora_rank"),
        kv_rank=f.integer("kv_lora_rank", default=512),
        nope_head_dim=f.integer("qk_nope_head_dim", default=128),
        rope_head_dim=f.integer("qk_rope_head_dim", default=64),
        v_head_dim=f.integer("v_head_dim", default=128),
    )
    config = _llama_like(f, max_positions=4096, counted=True)
    f.must_be("attention_bias", False, why="biases on the attention matrices alone")
    f.must_be("moe_layer_freq", 1, why="dense layers between the expert layers")
    experts = _experts(
        f,
        count=f.integer("n_routed_experts", "num_local_experts"),
        active=f.integer("num_experts_per_tok"),
        ffn=f.integer("moe_intermediate_size"),
        shared=f.integer("n_shared_experts", default=0, least=0),
        dense_layers=f.integer("first_k_dense_replace", default=3, least=0),
        router_bias=True,
    )
    # transformers writes the rotated part as head_dim; a query head is that and the part without positions.
    head_dim = latent.nope_head_dim + latent.rope_head_dim
    return config | {"head_dim": head_dim, "latent_attention": latent, "experts": experts}


def _gpt_like(f: _Fields, hidden: int, heads: int) -> dict[str, Any]:
    """What the LayerNorm families share."""
    if hidden % heads:
        raise f.error(f"hidden size {hidden} is not divisible by {heads} attention heads")
    return {
        "vocab": f.integer("vocab_size"),
        "hidden": hidden,
        "heads": heads,
        "norm": "layernorm",
        "gated": False,
        "bias": "all",
    }


def _gpt2(f: _Fields) -> dict[str, Any]:
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
    return _gpt_like(f, hidden, heads) | {
        "layers": f.integer("n_layer", "num_hidden_layers"),
        "ffn": f.integer("n_inner", default=4 * hidden),
        "max_positions": longest,
        "norm_eps": f.number("layer_norm_epsilon", default=1e-5),
        "positions": "learned",
        "activation": _activation(f, "activation_function", "gelu_new", ("gelu", "gelu_tanh")),
        "tied": f.flag("tie_word_embeddings", True),
        "dropout": residual,
        "attention_dropout": f.number("attn_pdrop", default=0.1, positive=False),
    }


def _gpt_neox(f: _Fields) -> dict[str, Any]:
    hidden, heads = f.integer("hidden_size"), f.integer("num_attention_heads")
    longest = f.integer("max_position_embeddings", default=2048)
    for other_name in ("attention_probs_dropout_prob", "hidden_dropout_prob"):
        f.must_be(other_name, 0.0, why="transformers does not read it; use attention_dropout and hidden_dropout")
    f.must_be("attention_bias", True, why="attention without biases beside a feed-forward with them")
    return _gpt_like(f, hidden, heads) | {
        "layers": f.integer("num_hidden_layers"),
        "ffn": f.integer("intermediate_size"),
        "max_positions": longest,
        "norm_eps": f.number("layer_norm_eps", default=1e-5),
        "activation": _activation(f, "hidden_act", "gelu", ("gelu", "gelu_tanh")),
        "tied": f.flag("tie_word_embeddings", False),
        "parallel_residual": f.flag("use_parallel_residual", True),
        "dropout": f.number("hidden_dropout", default=0.0, positive=False),
        "attention_dropout": f.number("attention_dropout", default=0.0, positive=False),
        **_rope(
            f,
            longest,
            theta_names=("rotary_emb_base", "rope_theta"),
            fraction_names=("rotary_pct", "partial_rotary_factor"),
            fraction=0.25,
        ),
    }


def _bloom(f: _Fields) -> dict[str, Any]:
    hidden, heads = f.integer("hidden_size", "n_embed"), f.integer("n_head", "num_attention_heads")
    f.must_be("apply_residual_connection_post_layernorm", False, why="another residual branch")
    f.must_be("n_inner", 4 * hidden, why="BLOOM's feed-forward is four times as wide as the model")
    return _gpt_like(f, hidden, heads) | {
        "layers": f.integer("n_layer", "num_hidden_layers"),
        "ffn": 4 * hidden,
        # ALiBi has no longest sequence; this is the length that it was trained on.
        "max_positions": f.integer("seq_length", default=2048),
        "norm_eps": f.number("layer_norm_epsilon", default=1e-5),
        "positions": "alibi",
        "activation": "gelu_tanh",
        "tied": f.flag("tie_word_embeddings", True),
        "embedding_norm": True,
        "dropout": f.number("hidden_dropout", default=0.0, positive=False),
        "attention_dropout": f.number("attention_dropout", default=0.0, positive=False),
    }


@dataclass(frozen=True)
class _Family:
    """How one `model_type` is read, and which of its own fields leave the mathematics alone.

    For the families that are only counted, these are the fields that leave every shape alone.
    """

    read: Callable[[_Fields], dict[str, Any]]
    harmless: frozenset[str] = frozenset()


_FAMILIES: dict[str, _Family] = {
    "llama": _Family(_llama, _words("is_llama_config")),
    "mistral": _Family(_mistral),
    "qwen2": _Family(_qwen2),
    "qwen3": _Family(_qwen3),
    "gpt2": _Family(
        _gpt2,
        _words("summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout"),
    ),
    "gpt_neox": _Family(_gpt_neox),
    "mixtral": _Family(_mixtral, _words("output_router_logits router_aux_loss_coef router_jitter_noise")),
    "deepseek_v3": _Family(
        _deepseek_v3,
        _words(
            """
            qk_head_dim rope_interleave routed_scaling_factor n_group topk_group topk_method norm_topk_prob
            scoring_func aux_loss_alpha seq_aux ep_size num_nextn_predict_layers num_mtp_layers
            output_router_logits quantization_config
            """
        ),
    ),
    "bloom": _Family(
        _bloom,
        _words(
            """
            attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion offset_alibi skip_bias_add
            skip_bias_add_qkv slow_but_exact
            """
        ),
    ),
}

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
}


def _family_of(c: ModelConfig) -> tuple[str, list[str]]:
    """(the nearest family, what of this model it lacks)."""
    if c.decoder == "llama":
        family = "qwen3" if c.qk_norm else "qwen2" if c.bias == "qkv" else "llama"
        lacks = {
            "activation but silu": c.activation != "silu",
            "query and key norms together with biases": c.qk_norm and c.bias != "none",
            "dropout outside attention": c.dropout > 0,
            "partly rotated heads": c.rotary_fraction != 1.0,
            "parallel residual": c.parallel_residual,
            "norm after the embedding": c.embedding_norm,
        }
    else:
        family = "gpt2" if c.positions == "learned" else "gpt_neox"
        lacks = {
            "model without biases": c.bias != "all",
            "grouped key/value heads": c.kv_heads != c.heads,
            "head_dim other than hidden / heads": c.head_dim * c.heads != c.hidden,
            "activation but gelu": c.activation == "silu",
            "query and key norms": c.qk_norm,
            "parallel residual": family == "gpt2" and c.parallel_residual,
            "norm after the embedding": c.embedding_norm,
        }
    return family, [what for what, missing in lacks.items() if missing]


def _llama_to_json(c: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_size": c.hidden,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.ffn,
        "max_position_embeddings": c.max_positions,
        "rms_norm_eps": c.norm_eps,
        "hidden_act": "silu",
        "rope_theta": c.rope_theta,
        "attention_dropout": c.attention_dropout,
    }


def _qwen_to_json(c: ModelConfig) -> dict[str, Any]:
    return _llama_to_json(c) | {"use_sliding_window": False}


def _gpt2_to_json(c: ModelConfig) -> dict[str, Any]:
    return {
        "n_embd": c.hidden,
        "n_layer": c.layers,
        "n_head": c.heads,
        "n_inner": c.ffn,
        "n_positions": c.max_positions,
        "layer_norm_epsilon": c.norm_eps,
        "activation_function": {"gelu": "gelu", "gelu_tanh": "gelu_new"}[c.activation],
        "resid_pdrop": c.dropout,
        "embd_pdrop": c.dropout,
        "attn_pdrop": c.attention_dropout,
    }


def _gpt_neox_to_json(c: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_size": c.hidden,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "intermediate_size": c.ffn,
        "max_position_embeddings": c.max_positions,
        "layer_norm_eps": c.norm_eps,
        "hidden_act": {"gelu": "gelu", "gelu_tanh": "gelu_new"}[c.activation],
        "rotary_emb_base": c.rope_theta,
        "rotary_pct": c.rotary_fraction,
        "use_parallel_residual": c.parallel_residual,
        "hidden_dropout": c.dropout,
        "attention_dropout": c.attention_dropout,
    }


_WRITERS: dict[str, Callable[[ModelConfig], dict[str, Any]]] = {
    "llama": _llama_to_json,
    "qwen2": _qwen_to_json,
    "qwen3": _qwen_to_json,
    "gpt2": _gpt2_to_json,
    "gpt_neox": _gpt_neox_to_json,
}


def _rope_scaling_to_json(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_positions,
    }

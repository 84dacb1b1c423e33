"""Hugging Face's `config.json`, read into a `ModelConfig` and written back, by the rules of the model's family.

A field that is not known is refused by its name, because a field that is overlooked is a model computed wrongly.
Defaults and meanings follow the configuration classes of transformers 4.57 and 5.23.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import UserError, os_errors
from shardwise.model.config import ModelConfig
from shardwise.model.families import FAMILIES, family_of
from shardwise.model.fields import Fields, words
from shardwise.small_files import read_small

# Book-keeping, tokens, generation settings and storage types: the next-token distribution does not depend on them.
_HARMLESS = words(
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

    Families: llama, mistral, qwen2, qwen3, olmo2, gemma2, gpt2, gpt_neox, mixtral, qwen3_moe, deepseek_v2, deepseek_v3.
    `name` defaults to the folder's name, or to `_name_or_path` of parsed contents. Raises
    `UserError` in one line when the file cannot be read, a value is missing, of the wrong type or not supported, or a
    field is not known.
    """
    data, where, default_name = _load(source)
    family = data.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UserError(f"{where}: model_type {family!r} is not supported; supported are {known}")
    fields, rules = Fields(data, where), FAMILIES[family]
    for field, (allowed, why) in _FIXED.items():
        if field not in rules.harmless:
            fields.must_be(field, *allowed, why=why)
    _language_model_head(fields)
    config = rules.read(fields)
    fields.refuse_unknown(family, _HARMLESS | rules.harmless)
    return ModelConfig(name=name or default_name or family, **config)


def read_model(source: str | Path, name: str | None = None) -> ModelConfig:
    """Read a `config.json` for planning: strictly where a decoder here computes it, else by its tensors' shapes.

    Raises `UserError` in one line for what is no language model's configuration.
    """
    data, where, default_name = _load(source)
    return read_fields(data, name or default_name or "model", where, _beside(Path(source)))


def read_fields(
    data: dict[str, Any], name: str, where: str = "config.json", beside: dict[str, Any] | None = None
) -> ModelConfig:
    """`read_model` of a file's contents. beside: those of `hf_quant_config.json`. Raises `UserError`."""
    _check_sizes(data, where)
    try:
        if beside is not None or data.get("quantization_config") is not None:
            raise UserError(f"{where}: quantization_config")
        model = from_huggingface(data, name)
        if reason := model.why_not_runnable():
            return _shapes(data, where, name, re.sub(" (is|are) counted but not runnable here$", "", reason), None)
        return model
    except UserError as error:
        reason = str(error).removeprefix("config.json: ").removeprefix(f"{where}: ")
        kind = data.get("model_type")
        known = isinstance(kind, str) and kind in FAMILIES and "quantization_config" not in reason
        if known and reason.startswith("required field"):
            raise UserError(f"{where}: {reason}") from None  # the class has a default, which is no one's model
        try:
            return _shapes(data, where, name, reason, beside)
        except UserError as other:
            raise (UserError(f"{where}: {reason}") if known else other) from None


_LARGEST = (
    (re.compile("layers?$|blocks$"), 10_000),
    (re.compile("size|dim|rank|heads|experts|width|n_embd|n_inner"), 1 << 40),
)
"""Names of fields -> largest value of any model."""


def _check_sizes(data: Any, where: str) -> None:
    """Raise `UserError` for sizes that no model has, which would take forever to count."""
    for name, value in data.items():
        if isinstance(value, dict):
            _check_sizes(value, where)
            continue
        most = next((most for names, most in _LARGEST if names.search(name)), value)
        if type(value) in (int, float) and value > most:
            raise UserError(f"{where}: {name} must be at most {most:,}, not {str(value)[:24]}")


def _shapes(data: dict[str, Any], where: str, name: str, reason: str, beside: dict[str, Any] | None) -> ModelConfig:
    from shardwise.model.shapes.reader import read_shapes

    short = reason if len(reason) <= 160 else f"{reason[:157]}..."
    if "quantization_config" in reason:
        short = "its weights are quantized, which must be dequantized to 16 bits first"
    elif " is not supported; supported are " in reason:
        short = "no decoder here computes it"
    return read_shapes(data, name, where, short, beside)


def _beside(source: Path) -> dict[str, Any] | None:
    """The contents of `hf_quant_config.json` in the folder of a `config.json`."""
    path = (source if source.is_dir() else source.parent) / "hf_quant_config.json"
    if not path.is_file() or (not source.is_dir() and source.name != "config.json"):
        return None
    try:
        data = json.loads(read_small(path))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    return data if isinstance(data, dict) else None


def to_huggingface(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of a runnable model, in the spelling that transformers 4 and 5 both read.

    `from_huggingface` gives the same `ModelConfig` back, but for `published_params` and options of experts that only
    training reads. Raises `UserError` when no family of Hugging Face computes this model.
    """
    if reason := config.why_not_runnable():
        raise UserError(f"model {config.name!r} cannot be written for Hugging Face: {reason}")
    family = family_of(config)
    assert family.lacks and family.write
    if wrong := next((what for what, missing in family.lacks(config).items() if missing), None):
        raise UserError(f"model {config.name!r} cannot be written for Hugging Face: {family.model_type} has no {wrong}")
    return {
        "_name_or_path": config.name,
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab,
        "tie_word_embeddings": config.tied,
        **family.write(config),
    }


def _load(source: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], str, str | None]:
    """(contents, what to call it in errors, the model's name if it can be told)."""
    if isinstance(source, Mapping):
        found = source.get("_name_or_path")
        return dict(source), "config.json", found if isinstance(found, str) else None
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    instead, damaged = "; give a config.json or the folder that holds it", f"{path} is not valid JSON:"
    with os_errors(f"read {path}", instead, typed=path, damaged=damaged):
        data = json.loads(read_small(path))
    if not isinstance(data, dict):
        raise UserError(f"{path} is JSON, but not the object that a config.json is")
    stem = path.resolve().parent.name if path.name == "config.json" else path.stem
    return data, str(path), stem or None


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


def _language_model_head(f: Fields) -> None:
    names = f.take("architectures", default=[])
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise f.error(f"architectures must be a list of names, not {names!r}")
    for name in names:
        if re.search("For(?!CausalLM)|DoubleHeads", name):
            raise f.error(f"architectures names {name}, whose head does not predict the next token")

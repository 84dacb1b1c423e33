"""Changes of a model in words: `layers=2,experts.capacity=1.25`, as `--set` has them."""

from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass, replace
from typing import Any, Literal, get_args, get_origin

from shardwise.errors import UserError, did_you_mean
from shardwise.model.config import ModelConfig
from shardwise.model.parameters import count
from shardwise.options import kinds

MOST_LAYERS, MOST_PARAMETERS = 10_000, 10**15
"""Of a model; some hundred times what anybody has trained, and few enough for 64-bit counts of bytes."""
_ELSEWHERE = {
    "hidden_size": "hidden", "num_hidden_layers": "layers", "num_attention_heads": "heads", "vocab_size": "vocab",
    "num_key_value_heads": "kv_heads", "intermediate_size": "ffn", "intermediate": "ffn",
    "num_experts_per_tok": "active", "topk": "active",
}  # fmt: skip
"""Words of a config.json and of papers -> fields."""
LONGEST_NAME = 200
"""Characters of a model's name, which messages are about."""


def change(model: ModelConfig, text: str) -> ModelConfig:
    """A model with the fields in `text` (`layers=2,experts.ffn=64`) replaced; derived fields follow, unless named.

    Raises `UserError` for a field that a model does not have, and a value that the field cannot have.
    """
    changes: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        name, equals, value = (part.strip() for part in word.partition("="))
        outer, dot, inner = name.partition(".")
        owner = _part(model, word, outer) if dot else model
        field, where = (inner, outer) if dot else (outer, "a model")
        _known(word, field, owner, where)
        if not equals or not value:
            raise UserError(f"--set {word}: {name} needs a value, such as {name}={getattr(owner, field)}")
        target = parts.setdefault(outer, {}) if dot else changes
        target[field] = _value(_short(word), _fields(owner)[field], value)
    changes |= {outer: replace(getattr(model, outer), **inner) for outer, inner in parts.items()}
    if not changes:
        return _counted(model)
    if len(changes.get("name", "")) > LONGEST_NAME:
        raise UserError(f"--set name: a name has at most {LONGEST_NAME} characters")
    changes.setdefault("published_params", None)
    if model.kv_heads == model.heads and "heads" in changes:
        changes.setdefault("kv_heads", 0)
    derived = {"latent_attention"} | ({"hidden", "heads"} if model.q_width == model.hidden else set())
    if changes.keys() & derived:
        changes.setdefault("head_dim", 0)
    return _counted(model.replace(**changes))


def _part(model: ModelConfig, word: str, name: str) -> Any:
    _known(word, name, model, "a model")
    if not is_dataclass(part := getattr(model, name)):
        has = f"has no {name}" if part is None else f"has {part} as {name}, which is no table"
        raise UserError(f"--set {word}: model {model.name!r} {has}")
    return part


def _known(word: str, field: str, owner: Any, where: str) -> None:
    """Raise `UserError` for a field that `owner` lacks."""
    fields = _fields(owner)
    meant = _ELSEWHERE.get(field, field)
    if field not in fields:
        raise UserError(f"--set {word}: {where} has no field {field!r}; {did_you_mean(meant, fields, 'fields:')}")


def _fields(owner: Any) -> dict[str, Any]:
    of: Any = type(owner)
    types = kinds(of)
    return {field.name: types[field.name] for field in dataclass_fields(of)}


def _counted(model: ModelConfig) -> ModelConfig:
    """The model. Raises `UserError` for one so large that nothing here could count it."""
    if model.layers > MOST_LAYERS:
        raise UserError(f"model {model.name!r}: {model.layers:,} layers; at most {MOST_LAYERS:,} are planned for")
    if (parameters := count(model)) > MOST_PARAMETERS:
        raise UserError(
            f"model {model.name!r}: {parameters:.3g} parameters; at most {MOST_PARAMETERS:.0e} are planned for"
        )
    return model


def _value(word: str, kind: Any, value: str) -> Any:
    """A field's value from its text. A dataclass checks no types: the words that a field may have are checked here."""
    words = ("true", "false") if kind is bool else get_args(kind) if get_origin(kind) is Literal else ()
    if words:
        if value.lower() not in words:
            raise UserError(f"--set {word}: choose one of {', '.join(words)}")
        return value.lower() == "true" if kind is bool else value.lower()
    if kind is str:
        return value
    if value.lower() == "none" and type(None) in get_args(kind):
        return None
    convert = {int: int, float: float, float | None: float}.get(kind)
    if convert is None:
        name = word.partition("=")[0].strip()
        part = next(iter(kinds(get_args(kind)[0])))
        raise UserError(f"--set {word}: name a field of it, such as {name}.{part}")
    try:
        number = convert(value)
    except ValueError:
        wanted = "an integer" if convert is int else "a number"
        raise UserError(f"--set {word}: {_short(repr(value))} is not {wanted}") from None
    if not 0 <= number <= MOST_PARAMETERS:
        raise UserError(f"--set {word}: give a number from 0 to {MOST_PARAMETERS:.0e}")
    return number


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."

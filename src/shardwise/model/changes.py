"""Changes of a model in words: `layers=2,vocab=1000`, as `--set` has them."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from shardwise.errors import UserError, did_you_mean
from shardwise.model.config import ModelConfig
from shardwise.model.parameters import count
from shardwise.options import kinds

MOST_LAYERS, MOST_PARAMETERS = 10_000, 10**15
"""Of a model; some hundred times what anybody has trained, and few enough for 64-bit counts of bytes."""


def change(model: ModelConfig, text: str) -> ModelConfig:
    """A model with the fields in `text` (`layers=2,vocab=1000`) replaced; derived fields follow unless named.

    Raises `UserError` for a field that a model does not have, and a value that the field cannot have.
    """
    fields = kinds(ModelConfig)
    changes: dict[str, Any] = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        name, equals, value = (part.strip() for part in word.partition("="))
        if name not in fields:
            hint = did_you_mean(name, fields, "fields:")
            raise UserError(f"--set {word}: a model has no field {name!r}; {hint}")
        if not equals or not value:
            raise UserError(f"--set {word}: {name} needs a value, such as {name}={getattr(model, name)}")
        changes[name] = _value(_short(word), fields[name], value)
    if not changes:
        return _counted(model)
    changes.setdefault("published_params", None)
    if model.kv_heads == model.heads and "heads" in changes:
        changes.setdefault("kv_heads", 0)
    if model.q_width == model.hidden and changes.keys() & {"hidden", "heads"}:
        changes.setdefault("head_dim", 0)
    return _counted(model.replace(**changes))


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
    convert = {int: int, float: float, float | None: float}.get(kind)
    if convert is None:
        raise UserError(f"--set {word}: this field has parts of its own; change it in a config.json")
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

"""`read_shapes`: any language model's `config.json` as a model that is counted and planned, and not run."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwise.errors import UserError, brief, nearest
from shardwise.model.config import ModelConfig
from shardwise.model.hub import cache_folder
from shardwise.model.precision import read_precision
from shardwise.model.shapes.interpreting import interpret
from shardwise.model.shapes.reading import Shaped, attributes_of, composites, families, shaped
from shardwise.model.shapes.recording import flat
from shardwise.model.shapes.table import SHAPELESS, SIZES, family_name, prepared

_TEXT = ("text_config", "llm_config", "language_config", "thinker_config", "language_model_config")
"""Keys of a vision-language model's configuration of its language model."""
_POSITIVE = re.compile("hidden_size|vocab_size|d_model|n_(embd|heads?)|num_(hidden_layers|(attention|key_value)_heads)")


def read_shapes(
    data: Mapping[str, Any], name: str, where: str, reason: str, beside: Mapping[str, Any] | None = None
) -> ModelConfig:
    """The model of a `config.json`'s contents. reason: why the strict reader leaves it to this one. beside: contents of
    `hf_quant_config.json`.

    Raises `UserError` in one line for families that are not known, and for what is no language model's configuration.
    """
    model_type = str(data.get("model_type"))
    try:
        model_type, given, notes = language_model(data, where)
        family = families().get(model_type)
        precision = read_precision(data, beside)
        if family is None and "vocab_size" not in json.dumps(data, default=str):
            raise UserError(
                f"model_type {model_type[:60]!r} is not a language model, which has a vocab_size; vision, speech and "
                "embedding models alone are out of scope"
            )
        if family is None:
            attributes, tensors, family = _recorded(data, model_type, where)
        else:
            _check(family, given)
            attributes = attributes_of(family, given)
            tensors = list(shaped(family, attributes))
            notes += _unread(data, model_type, given, family, attributes)
        model = interpret(name, model_type, family, attributes, tensors, reason, notes, precision)
        assert model.counted
        return replace(model, counted=replace(model.counted, source=dict(data)))
    except UserError as error:
        raise UserError(str(error) if str(error).startswith(where) else f"{where}: {error}") from None
    except (TypeError, ValueError, KeyError, ZeroDivisionError, StopIteration, AttributeError) as error:
        raise UserError(f"{where}: {model_type} is damaged: {type(error).__name__} {str(error)[:80]}") from None


def _check(family: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise `UserError` for a value that no class computes with."""
    usual = {**family["others"], **family["defaults"]}
    for name, value in given.items():
        if type(usual.get(name)) is bool and type(value) not in (bool, int, type(None)):
            raise UserError(f"{name} must be true or false, not {str(value)[:40]!r}")
        if type(value) is int and value < 1 and _POSITIVE.fullmatch(name):
            raise UserError(f"{name} must be an integer of at least 1, not {value}")


def _unread(
    data: Mapping[str, Any], model_type: str, given: Mapping[str, Any], family: Mapping[str, Any],
    attributes: Mapping[str, Any],
) -> list[str]:  # fmt: skip
    """A note of the sizes that a class does not read, and that no field that it reads repeats. Raises `UserError` for
    them in a configuration of another class, whose shapes they may change."""
    known = {*family["known"], *family["names"], *family["names"].values(), *family["defaults"]}
    same = {value for name, value in attributes.items() if name in known and type(value) is int}
    sizes = (f"{name}={value}" for name, value in flat(given).items() if name not in known
             and type(value) is int and value > 1 and value not in same
             and SIZES.search(name) and not SHAPELESS.search(name))  # fmt: skip
    unread = ", ".join(sorted(sizes))
    if unread and data["model_type"] not in {*families(), *composites()}:
        raise UserError(f"{unread}: not known for {model_type}, and may change its shapes; delete what does not")
    return [f"{model_type} does not read {unread}"] if unread else []


def language_model(data: Mapping[str, Any], where: str) -> tuple[str, dict[str, Any], list[str]]:
    """(model_type, fields, notes) of the language model in a configuration. Raises `UserError` without a model_type."""
    outer = data.get("model_type")
    if not isinstance(outer, str):
        hint = "".join(f"is it {near!r}? " for near in nearest("model_type", data))
        raise UserError(f"{where}: model_type is missing: {hint}give the config.json of a language model")
    key, kind, tied = composites().get(outer, ("", family_name(outer, data), None))
    key = next((k for k in (key, *_TEXT) if isinstance(data.get(k), dict)), "")
    if not key:
        return kind, prepared(outer, dict(data)), []
    text = dict(data[key])
    kind = str(text.get("model_type") or (kind if kind != outer else f"{outer}_text"))
    tied = next((t for table in (data, text) if (t := table.get("tie_word_embeddings")) is not None), tied)
    text |= {"model_type": kind} | ({} if tied is None else {"tie_word_embeddings": tied})
    inner, fields, notes = language_model(text, where)
    return inner, fields, [f"of {outer} only the language model, {inner}, is counted", *notes]


def _recorded(
    data: Mapping[str, Any], model_type: str, where: str
) -> tuple[dict[str, Any], list[Shaped], dict[str, Any]]:
    """Attributes, tensors and family of a configuration whose class transformers builds here; kept in a cache."""
    import hashlib

    digest = hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:24]
    path = cache_folder() / "models" / f"{digest}.json"
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        saved = _record(data, model_type, where)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(saved), encoding="utf-8")
        except OSError:
            pass
    tensors = [(name, layer, tuple(shape)) for name, layer, shape in saved["tensors"]]
    return saved["attributes"], tensors, saved["family"]


def _record(data: Mapping[str, Any], model_type: str, where: str) -> dict[str, Any]:
    known = f"{len(families())} families are known, such as {', '.join(sorted(families())[::24])}"
    try:
        from shardwise.model.shapes import recording

        made = recording.record(data)
    except ImportError:
        raise UserError(
            f"{where}: model_type {model_type[:60]!r} is not in the data here, and recording it needs torch and "
            f"transformers: pip install torch transformers; {known}"
        ) from None
    except KeyError:
        code = "; its code in its repository (auto_map) is not run" if "auto_map" in data else ""
        raise UserError(
            f"{where}: model_type {model_type[:60]!r} is not known, to transformers neither{code}; {known}"
        ) from None
    except Exception as error:
        raise UserError(
            f"{where}: transformers cannot build {model_type[:60]}: {brief(error)}; correct that field, or give a "
            "config.json of the class"
        ) from None
    tensors = [(name, -1 if layer is None else layer, s) for name, layer, s in recording.layered(made.tensors)[0]]
    family = {"names": made.names, "cuts": dict(made.cuts), "windowed": made.windowed}
    return {"attributes": made.attributes, "tensors": tensors, "family": family}

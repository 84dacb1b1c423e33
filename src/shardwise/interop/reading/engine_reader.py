"""The driver of all readers: a configuration as the rows of an engine's file say it."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from shardwise.errors import UserError
from shardwise.interop.expressions import Names, evaluate, sentence
from shardwise.interop.reading.arguments import dashed
from shardwise.interop.reading.fields import ConfigFields, renamed
from shardwise.interop.reading.settings import SERVED, Reading, ServerSettings
from shardwise.interop.spec import EngineOption, EngineSpec
from shardwise.interop.writing.canonical import DEFAULTS
from shardwise.layout import Layout

_SAID = ("seq", "batch", "optimizer", "model", "described", "recomputed", "narrow_state")


def read_as(
    spec: EngineSpec, data: Mapping[str, Any], ranks: int | None, *, shown: Callable[[str], str] = str, **context: Any
) -> Reading:
    """What a configuration says. shown: how its user wrote a key. context: names for the engine's own functions.

    Raises `UserError` where nothing says how many processes there are, where there are fewer than the degrees need, and
    for values that the engine rejects.
    """
    if spec.needs_ranks and ranks is None:
        raise UserError(spec.needs_ranks)
    data = {spec.plain_name(key): value for key, value in renamed(data, spec.renamed).items()}
    fields = ConfigFields(data, spec.known(), shown=dashed if spec.flags else shown)
    names = values_of(spec, fields, ranks=ranks, **context)
    said = {key: names[key] for key in _SAID if names.get(key)}
    title = names.get("title", spec.title)
    if inner := names.get("inner"):
        return fields.around(inner, title, **said | {"batch": inner.batch})
    layout = Layout(**{key: value for key, value in names.items() if key in DEFAULTS})
    if spec.serves and ranks is not None:
        if layout.ranks > ranks:
            raise UserError(f"tensor x pipeline x data parallel = {layout.ranks} GPUs, but there are {ranks}")
        if layout.ranks < ranks:
            fields.say("notes", f"{layout.ranks} of the {ranks} GPUs {'is' if layout.ranks == 1 else 'are'} used")
    served = ServerSettings(**{key: names[key] for key in SERVED if names.get(key)}) if spec.serves else None
    return fields.reading(title, layout, served=served, **said)


def values_of(spec: EngineSpec, fields: ConfigFields, **context: Any) -> dict[str, Any]:
    """Name -> value of all rows, with the engine's remarks in `fields`. Raises `UserError` as `read_as`."""
    rows = [row for row in spec.options.values() if row.kind or row.read or row.check]
    raw = SimpleNamespace()
    for row in rows:
        if row.option:
            setattr(raw, row.name, _taken(spec, fields, row, Names(raw)))
    names: dict[str, Any] = Names(raw, raw=raw, fields=fields, **spec.functions, **context)
    for row in rows:
        names["usual"] = DEFAULTS.get(row.name)
        value: Any = getattr(raw, row.name) if row.option else evaluate(row.read, names) if row.read else None
        names |= {"value": value, "meaning": row.words.get(value, row.otherwise) if row.words else value}
        if row.check and not evaluate(row.check, names):
            raise UserError(sentence(row.error, names))
        names[row.name] = evaluate(row.read, names) if row.read and row.option else names["meaning"]
        for kind, text in (("facts", row.fact), ("notes", row.note)):
            if value and text:
                fields.say(kind, sentence(text, names))
    for remark in spec.remarks["errors"]:
        if evaluate(remark.when, names):
            raise UserError(sentence(remark.say, names))
    if derive := spec.functions.get("derive"):
        names |= derive(names, fields)
    for kind in fields.said:
        for remark in spec.remarks[kind]:
            if evaluate(remark.when, names):
                fields.say(kind, sentence(remark.say, names))
    return names


def _taken(spec: EngineSpec, fields: ConfigFields, row: EngineOption, raw: Names) -> Any:
    """What an option says, its default where it is left out. raw: options before it."""
    table, key = row.path
    if table in spec.gates and not evaluate(spec.gates[table], raw):
        inner = ConfigFields({})
    else:
        inner = fields.within(table, spec.known) if table else fields
    if row.kind in ("given", "automatic"):
        return getattr(inner, row.kind)(key)
    if row.kind == "raw":
        return inner.value(key) if inner.given(key) else row.default
    if row.kind in ("word", "lower"):
        word = inner.word(key, row.default or "", row.choices)
        return word.lower() if row.kind == "lower" else word
    if row.kind == "integer":
        return inner.integer(key, row.default, row.least)
    return getattr(inner, {"switch": "flag"}.get(row.kind, row.kind))(key, row.default)

"""A value against its JSON Schema, in the subset that bodies of requests are described with, and what is wrong.

The same descriptions are served as OpenAPI, so that what is said and what is checked cannot differ. Known words: type,
anyOf, enum, minimum, exclusiveMinimum, maximum, minLength, minItems, maxItems, items, properties, required,
additionalProperties (false), default.
"""

import json
from typing import Any

from shardwise.serving.http.problems import Problem

Schema = dict[str, Any]

_KINDS: dict[str, tuple[Any, str]] = {
    "null": (type(None), "null"),
    "boolean": (bool, "true or false"),
    "integer": (int, "an integer"),
    "number": ((int, float), "a number"),
    "string": (str, "a string"),
    "array": (list, "an array"),
    "object": (dict, "an object"),
}
_SHOWN = 60
"""Characters of a wrong value that a message repeats."""


def checked(schema: Schema, value: Any, where: str = "") -> Any:
    """`value` with the defaults of absent fields filled in; null where a field has a default counts as absent, and a
    field that is not known asks for nothing where it is null.

    where: the value's place in the body, such as messages[0].role. Raises `Problem` (400), which names the place.
    """
    if "anyOf" in schema:
        return _any_of(schema["anyOf"], value, where)
    if "enum" in schema and not any(
        (value == one and isinstance(value, bool) == isinstance(one, bool)) for one in schema["enum"]
    ):
        allowed = ", ".join(json.dumps(one) for one in schema["enum"])
        why = f" ({schema['description']})" if "description" in schema else ""
        raise _wrong(where, f"must be one of {allowed}, not {_shown(value)}{why}")
    types = _types(schema)
    if types and not any(
        (isinstance(value, _KINDS[name][0]) and (not isinstance(value, bool) or name == "boolean")) for name in types
    ):
        kinds = _either([_KINDS[name][1] for name in types])
        raise _Mismatch(400, f"{where or 'the body'} must be {kinds}, not {_shown(value)}", param=where or None)
    if isinstance(value, str):
        _check_text(schema, value, where)
    elif isinstance(value, list):
        return _array(schema, value, where)
    elif isinstance(value, dict):
        return _object(schema, value, where)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        _check_number(schema, value, where)
    return value


def _types(schema: Schema) -> list[str]:
    types = schema.get("type", [])
    return [types] if isinstance(types, str) else types


def _any_of(choices: list[Schema], value: Any, where: str) -> Any:
    problems = []
    for choice in choices:
        try:
            return checked(choice, value, where)
        except Problem as problem:
            problems.append(problem)
    # The choice that was meant is the one in which most is right: what it says tells more than the others.
    meant = max(problems, key=lambda problem: (*_place(problem), not isinstance(problem, _Mismatch)))
    if meant.param == (where or None) and isinstance(meant, _Mismatch):
        kinds = _either(
            [(choice.get("title") or _either([_KINDS[name][1] for name in _types(choice)])) for choice in choices]
        )
        raise _wrong(where, f"must be {kinds}, not {_shown(value)}")
    raise meant


class _Mismatch(Problem):
    """A value of another type."""


def _place(problem: Problem) -> tuple[int, str]:
    where = problem.param or ""
    return len(where), where


def _check_text(schema: Schema, value: str, where: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _wrong(where, "has half of a surrogate pair in it, which is no character") from None
    if len(value) < schema.get("minLength", 0):
        raise _wrong(where, "must not be empty")


def _check_number(schema: Schema, value: float, where: str) -> None:
    if "minimum" in schema and not value >= schema["minimum"]:
        raise _wrong(where, f"must be at least {schema['minimum']}, not {_shown(value)}")
    if "exclusiveMinimum" in schema and not value > schema["exclusiveMinimum"]:
        raise _wrong(where, f"must be above {schema['exclusiveMinimum']}, not {_shown(value)}")
    if "maximum" in schema and not value <= schema["maximum"]:
        raise _wrong(where, f"must be at most {schema['maximum']}, not {_shown(value)}")


def _array(schema: Schema, value: list[Any], where: str) -> list[Any]:
    if len(value) < schema.get("minItems", 0):
        raise _wrong(where, f"must have at least {schema['minItems']} item(s)")
    if len(value) > schema.get("maxItems", len(value)):
        raise _wrong(where, f"must have at most {schema['maxItems']} items, not {len(value)}")
    items = schema.get("items", {})
    return [checked(items, item, f"{where}[{index}]") for index, item in enumerate(value)]


def _object(schema: Schema, value: dict[str, Any], where: str) -> dict[str, Any]:
    if "properties" not in schema:
        return value
    fields, prefix = schema["properties"], f"{where}." if where else ""
    for name in value:
        if name not in fields and schema.get("additionalProperties") is False and value[name] is not None:
            raise _wrong(prefix + name[:_SHOWN], "is not a field that this server knows")
    for name in schema.get("required", ()):
        if name not in value:
            raise _wrong(prefix + name, "is missing")
    filled = {}
    for name, field in fields.items():
        default = field.get("default")
        given = value.get(name, default)
        absent = name not in value or (given is None and default is not None and _nullable(field))
        filled[name] = default if absent else checked(field, given, prefix + name)
    return filled


def _nullable(schema: Schema) -> bool:
    return "null" in _types(schema) or any("null" in _types(choice) for choice in schema.get("anyOf", ()))


def _wrong(where: str, what: str) -> Problem:
    return Problem(400, f"{where or 'the body'} {what}", param=where or None)


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _either(words: list[str]) -> str:
    return " or ".join(words) if len(words) < 3 else f"{', '.join(words[:-1])} or {words[-1]}"

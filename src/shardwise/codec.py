"""Dataclasses as JSON and back, by the types of their fields. Imports no other room.

A class with `parse` is its text. Other dataclasses are objects, named tuples too.
"""

import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from fractions import Fraction
from functools import cache, partial, reduce
from importlib import import_module
from types import UnionType
from typing import Any, ClassVar, Literal, Self, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from shardwise.errors import UserError

T = TypeVar("T")

EVERY: Collection[str] = ("",)
"""All fields of a class, for `Json.json_omits`."""
_MOST = 1 << 63
"""Largest number that a checked class accepts."""


class Json:
    """Base of dataclasses with `to_json` and `from_json`."""

    __slots__ = ()

    json_name: ClassVar[str] = ""
    """What anything else is not: "a shardwise blueprint"."""
    json_omits: ClassVar[Collection[str]] = ()
    """Fields that are left out where they have their defaults."""
    json_later: ClassVar[Collection[tuple[str, str]]] = ()
    """(type that a field names, the module that has it), which is imported when JSON is read."""
    json_keys: ClassVar[str] = "*"
    """Keys in order, each with an attribute or its path where that has another name: "bytes=held.total low=range.0".

    "*" are all fields. A key in several parts is inside an object; one with "?" is null where its value is empty."""
    json_checked: ClassVar[bool] = False
    """Whether a field of another type than declared is an error, and a number that is negative or above 2^63."""

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary that `from_json` reads back."""
        return _object(self)

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """The inverse of `to_json`. Raises `UserError` for what is not `json_name`; of a class without, `TypeError`,
        `KeyError` and `ValueError`."""
        try:
            return _read_fields(cls, data)
        except (TypeError, KeyError, ValueError) as error:
            if not cls.json_name:
                raise
            raise UserError(f"not {cls.json_name}: {error}") from None


def plain(value: Any) -> Any:
    """A copy of dictionaries, lists, numbers and texts alone."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if hasattr(value, "to_json"):
        return value.to_json()
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if is_dataclass(value):
        return str(value) if hasattr(value, "parse") else _object(value)
    if isinstance(value, Fraction):
        return float(value)
    return value.tolist() if hasattr(value, "tolist") else value  # of numpy


def read(kind: type[T], data: Any) -> T:
    """A value of a type. Raises `TypeError`, `KeyError` or `ValueError` for what is none, and what the type raises."""
    result: T = _reader(cast(Any, kind))(data)
    return result


@cache
def _written(kind: Any) -> list[tuple[str, Callable[[Any], Any], Any]]:
    """(JSON key, attribute, value that is left out) in order."""
    own = {item.name: item for item in fields(kind)}
    omits = getattr(kind, "json_omits", ())
    rows: list[tuple[str, Callable[[Any], Any], Any]] = []
    for key, path in _paths(getattr(kind, "json_keys", "*").replace("*", " ".join(own))):
        omitted = path in own and (omits is EVERY or path in omits)
        rows.append((key, partial(_at, path), _default(own[path]) if omitted else MISSING))
    return rows


@cache
def _paths(keys: str) -> list[tuple[str, str]]:
    """(JSON key, attribute or its path) of `Json.json_keys` without "*"."""
    pairs = (word.partition("=") for word in keys.split())
    return [(key, path or key.removesuffix("?")) for key, _, path in pairs]


def _default(item: Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def keyed(value: Any, keys: str) -> dict[str, Any]:
    """A plain dictionary of attributes of any object. keys: as of `Json.json_keys`, without "*"."""
    return _filled(value, [(key, partial(_at, path), MISSING) for key, path in _paths(keys)])


def _object(value: Any) -> dict[str, Any]:
    return _filled(value, _written(cast(Any, type(value))))


def _filled(value: Any, rows: Iterable[tuple[str, Callable[[Any], Any], Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key, own_of, omitted in rows:
        own = own_of(value)
        if omitted is MISSING or own != omitted:
            *outer, name = key.removesuffix("?").split(".")
            inside = reduce(lambda inside, part: inside.setdefault(part, {}), outer, data)
            inside[name] = None if key.endswith("?") and not own else plain(own)
    return data


def _at(path: str, value: Any) -> Any:
    return reduce(lambda at, part: at[int(part)] if part.isdigit() else getattr(at, part), path.split("."), value)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    later = dict(getattr(kind, "json_later", ()))
    return get_type_hints(kind, localns={name: getattr(import_module(module), name) for name, module in later.items()})


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    origin, items = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return partial(_read_union, [_reader(item) for item in items if item is not type(None)], items)
    if origin is tuple and items[1:] == (...,):
        each = _reader(items[0])
        return lambda data: tuple(map(each, data))
    if origin is tuple:
        readers = [_reader(item) for item in items]
        return lambda data: tuple(reader(item) for reader, item in zip(readers, data, strict=True))
    if origin is list:
        each = _reader(items[0])
        return lambda data: [each(item) for item in data]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        each = _reader(items[1])
        return lambda data: {key: each(item) for key, item in dict(data).items()}
    if is_dataclass(kind):
        return getattr(kind, "parse", None) or getattr(kind, "from_json", None) or partial(_read_fields, kind)
    return lambda data: data


def _read_union(readers: list[Callable[[Any], Any]], items: tuple[Any, ...], data: Any) -> Any:
    """The first class whose fields the data has; without such, the last."""
    if data is None:
        return None
    for kind, reader in zip((item for item in items if item is not type(None)), readers, strict=True):
        if is_dataclass(kind) and isinstance(data, dict) and _suits(kind, data):
            return reader(data)
    return readers[-1](data)


def _suits(kind: Any, data: Mapping[str, Any]) -> bool:
    known = {item.name: item for item in fields(kind)}
    needed = {name for name, item in known.items() if _default(item) is MISSING}
    fixed = {name: declared for name, declared in _hints(kind).items() if get_origin(declared) is Literal}
    return needed <= data.keys() <= known.keys() and all(
        _fits(fixed[name], data[name]) for name in fixed.keys() & data.keys()
    )


def _read_fields(kind: Any, data: Any) -> Any:
    """A dataclass of its fields. What is missing or too much, its constructor says."""
    if not isinstance(data, Mapping):
        raise TypeError(f"{reprlib.repr(data)} is no JSON object")
    declared = _hints(kind)
    if getattr(kind, "json_checked", False):
        _check(kind, data)
    derived = {key for key, *_ in _written(kind)} - declared.keys()
    given = {name: value for name, value in data.items() if name not in derived}
    return kind(**{name: _reader(declared.get(name, Any))(value) for name, value in given.items()})


def _check(kind: Any, data: Any) -> None:
    what = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in kind.__name__).strip()
    for name, declared in _hints(kind).items():
        if name in data and not _fits(declared, data[name]):
            raise TypeError(f"{what}: {name} cannot be {reprlib.repr(data[name])}")


def _fits(kind: Any, value: Any) -> bool:
    """Whether a value of a JSON file can be of a field's type; numbers are from 0 to `_MOST`."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(part, value) for part in parts)
    if origin is Literal:
        return value in parts
    if origin is tuple:
        return isinstance(value, (list, tuple)) and all(_fits(parts[0], item) for item in value)
    if kind is float:
        return type(value) in (int, float) and 0 <= value < _MOST
    if kind is int:
        return type(value) is int and 0 <= value < _MOST
    return isinstance(value, dict if is_dataclass(kind) else origin or kind)

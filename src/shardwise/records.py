"""Dataclasses that cost little to define.

`dataclasses` compiles six methods of every class at import, a quarter of the time of a short command. Here the
constructor is compiled on first use, and all other methods are closures.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, *, frozen=False, eq=True, repr=True, **more):
        """As of `dataclasses`."""

        def wrap(cls):
            if more:
                return dataclasses.dataclass(frozen=frozen, eq=eq, repr=repr, **more)(cls)
            # The standard library wants a subclass of a frozen class to be frozen by itself.
            derived = any(vars(base)["__dataclass_params__"].frozen for base in cls.__mro__[1:] if _is_own(base))
            dataclasses.dataclass(init=False, eq=False, repr=False, frozen=frozen and derived)(cls)
            cls.__dataclass_params__.frozen = frozen
            explicit_hash = vars(cls).get("__hash__") is not None
            for name, method in _methods(cls, frozen, eq, repr).items():
                if name not in vars(cls):
                    setattr(cls, name, method)
            if eq and not explicit_hash:
                cls.__hash__ = _hashing(cls) if frozen else None
            return cls

        return wrap if cls is None else wrap(cls)


def _is_own(cls: type) -> bool:
    return "__dataclass_params__" in vars(cls)


class _Constructor:
    """`__init__` of a class, compiled when it is first looked up."""

    def __init__(self, of: type) -> None:
        self.of = of

    def __get__(self, instance: Any, owner: type) -> Any:
        init: Any = _compiled(self.of)
        self.of.__init__ = init  # type: ignore[misc]
        return init.__get__(instance, owner)


def _compiled(cls: Any) -> Callable[..., None]:
    names: dict[str, Any] = {"_MISSING": MISSING}
    parameters: dict[bool, list[str]] = {False: [], True: []}
    lines = ["_fields = self.__dict__"]
    for each in dataclasses.fields(cls):
        name, default = each.name, f"_default_{each.name}"
        value, given = name, each.default is not MISSING or each.default_factory is not MISSING
        if each.default_factory is not MISSING:
            names[default] = each.default_factory
            value = f"{default}() if {name} is _MISSING else {name}" if each.init else f"{default}()"
        elif given:
            names[default] = each.default
        if each.init:
            start = "_MISSING" if each.default_factory is not MISSING else default
            parameters[each.kw_only is True].append(f"{name}={start}" if given else name)
        if each.init or each.default_factory is not MISSING:
            lines.append(f"_fields[{name!r}] = {value}")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    keyword = ["*", *parameters[True]] if parameters[True] else []
    head = ", ".join(["self", *parameters[False], *keyword])
    exec(f"def __init__({head}):\n  " + "\n  ".join(lines), names)
    init: Callable[..., None] = names["__init__"]
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    init.__annotations__ = {item.name: item.type for item in dataclasses.fields(cls) if item.init} | {"return": None}
    return init


def _methods(cls: Any, frozen: bool, eq: bool, repr: bool) -> dict[str, Any]:
    methods: dict[str, Any] = {"__init__": _Constructor(cls)}
    if repr:
        methods["__repr__"] = _representing(cls)
    if eq:
        values = _values(each for each in dataclasses.fields(cls) if each.compare)
        methods["__eq__"] = lambda self, other: (
            values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented
        )
    if frozen:
        methods["__setattr__"], methods["__delattr__"] = _rejecting(cls, "assign to"), _rejecting(cls, "delete")
    return methods


def _values(of: Any) -> Callable[[Any], tuple[Any, ...]]:
    names = [each.name for each in of]
    if len(names) > 1:
        return attrgetter(*names)
    return lambda self: tuple(getattr(self, name) for name in names)


def _hashing(cls: Any) -> Callable[[Any], int]:
    def hashes(each: Field[Any]) -> bool:
        return each.compare if each.hash is None else each.hash

    values = _values(filter(hashes, dataclasses.fields(cls)))
    return lambda self: hash(values(self))


def _representing(cls: Any) -> Callable[[Any], str]:
    names = [each.name for each in dataclasses.fields(cls) if each.repr]

    @recursive_repr()
    def representation(self: Any) -> str:
        return f"{self.__class__.__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    return representation


def _rejecting(cls: Any, doing: str) -> Callable[..., None]:
    """`__setattr__` or `__delattr__` of a frozen class; a subclass may have attributes of its own."""
    names = {each.name for each in dataclasses.fields(cls)}
    plain = "__setattr__" if doing == "assign to" else "__delattr__"

    def rejected(self: Any, name: str, *value: Any) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot {doing} field {name!r}")
        getattr(super(cls, self), plain)(name, *value)

    return rejected

"""Dataclasses of `shardwise.records` behave as those of the standard library."""

import ast
import copy
import dataclasses
import inspect
import pickle
from dataclasses import FrozenInstanceError, asdict, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

import pytest
from tests.test_imports import COMMAND, ESTIMATE, PACKAGE, PLAN, modules_of

import shardwise.records as records


@records.dataclass(frozen=True)
class Point:
    """One of ours, at a module's level, so that it can be pickled."""

    x: int
    y: int = 2


def made(dataclass: Any) -> dict[str, Any]:
    """Classes that use each option, by one of the two decorators."""

    @dataclass(frozen=True)
    class Base:
        values: int  # a name that the constructor must not use itself
        cls: list[int] = field(default_factory=lambda: [1])
        hidden: int = field(default=3, repr=False, compare=False)
        late: int = field(default=4, kw_only=True)

    @dataclass(frozen=True)
    class Derived(Base):
        more: tuple[int, ...] = ()

        @cached_property
        def total(self) -> int:
            return sum(self.more)

        def __post_init__(self) -> None:
            object.__setattr__(self, "late", self.late + 1)

    @dataclass
    class Mutable:
        a: int = 0
        b: list[int] = field(default_factory=list, init=False)

    @dataclass(frozen=True, eq=False)
    class Identity:
        a: int = 0

    @dataclass(frozen=True, repr=False)
    class Custom:
        a: int

        def __repr__(self) -> str:
            return "custom"

        def __hash__(self) -> int:
            return 7

    @dataclass(frozen=True, order=True)
    class Ordered:
        a: int

    @dataclass(frozen=True, slots=True)
    class Slotted:
        a: int

    return {each.__name__: each for each in (Base, Derived, Mutable, Identity, Custom, Ordered, Slotted)}


CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("Base", (5,), {}),
    ("Base", (5, [2], 9), {"late": 0}),
    ("Base", (), {}),
    ("Base", (1, [2], 3, 4), {}),
    ("Base", (1,), {"unknown": 2}),
    ("Derived", (5, [2]), {"more": (1, 2), "late": 8}),
    ("Mutable", (3,), {}),
    ("Mutable", (3, [1]), {}),
    ("Identity", (), {}),
    ("Custom", (1,), {}),
    ("Ordered", (1,), {}),
    ("Slotted", (1,), {}),
]


def outcome(of: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Values, text and comparisons of one instance; or the error's text."""
    try:
        one, other = of(*arguments, **named), of(*arguments, **named)
    except TypeError as error:
        return str(error)
    hashed = type(one).__hash__ is not None and not _holds_lists(one) and hash(one) == hash(other)
    return repr(one), asdict(one), one == other, one == object(), hashed, of.__match_args__, asdict(copy.copy(one))


def _holds_lists(one: Any) -> bool:
    return any(isinstance(getattr(one, each.name), list) for each in fields(one))


@pytest.mark.parametrize(("name", "arguments", "named"), CALLS)
def test_instances_are_those_of_the_standard_library(name, arguments, named):
    ours, theirs = made(records.dataclass)[name], made(dataclasses.dataclass)[name]
    assert outcome(ours, arguments, named) == outcome(theirs, arguments, named)


@pytest.mark.parametrize("name", ["Base", "Derived", "Mutable", "Custom"])
def test_classes_have_the_standard_library_s_fields_and_parameters(name):
    ours, theirs = made(records.dataclass)[name], made(dataclasses.dataclass)[name]
    assert is_dataclass(ours) and [each.name for each in fields(ours)] == [each.name for each in fields(theirs)]
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


@pytest.mark.parametrize("dataclass", [records.dataclass, dataclasses.dataclass], ids=["ours", "standard"])
def test_frozen_instances_cannot_change(dataclass):
    of = made(dataclass)
    one = of["Derived"](5, more=(1, 2))
    for change in (lambda: setattr(one, "values", 1), lambda: setattr(one, "new", 1), lambda: delattr(one, "values")):
        with pytest.raises(FrozenInstanceError):
            change()
    assert one.total == 3 and replace(one, values=6).values == 6
    plain = type("Plain", (of["Base"],), {})(5)
    plain.new = 1  # an attribute of a subclass that is no dataclass
    del plain.new
    with pytest.raises(FrozenInstanceError):
        plain.values = 2
    of["Mutable"](1).a = 2
    with pytest.raises(TypeError, match="unhashable"):
        hash(of["Mutable"]())


@pytest.mark.parametrize("base", [records.dataclass, dataclasses.dataclass], ids=["ours", "standard"])
@pytest.mark.parametrize("derived", [records.dataclass, dataclasses.dataclass], ids=["ours", "standard"])
def test_classes_inherit_from_each_other(base, derived):
    @base(frozen=True)
    class Above:
        a: int = 1

    @derived(frozen=True)
    class Below(Above):
        b: int = 2

    one = Below(3)
    assert (one.a, one.b, one == Below(3), len({one, Below(3)})) == (3, 2, True, 1)
    with pytest.raises(FrozenInstanceError):
        one.a = 4
    with pytest.raises(TypeError, match="cannot inherit non-frozen"):
        derived(type("Thawed", (Above,), {"__annotations__": {"c": int}}))


def test_instances_are_pickled_and_hashed_by_value():
    assert pickle.loads(pickle.dumps(Point(1))) == Point(1) and len({Point(1), Point(1), Point(1, 3)}) == 2
    assert copy.deepcopy(Point(1)) == Point(1) and Point(1) != Point(2)


def test_nothing_is_compiled_before_it_is_used():
    @records.dataclass(frozen=True)
    class Late:
        a: int = 0

    assert not inspect.isfunction(vars(Late)["__init__"])
    assert Late().a == 0 and inspect.isfunction(vars(Late)["__init__"])


@pytest.mark.parametrize("argv", [ESTIMATE[:-1], PLAN], ids=["estimate", "plan"])
def test_modules_of_short_commands_use_these(argv):
    """The standard library's cost half a millisecond each: a quarter of `estimate`."""
    loaded = (name for name in modules_of(COMMAND.format(argv=argv)) if name.startswith("shardwise."))
    paths = (PACKAGE / f"{name.removeprefix('shardwise.').replace('.', '/')}.py" for name in loaded)
    slow = []
    for path in (path for path in paths if path.is_file() and path.name != "records.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "dataclasses":
                slow += [path.name for each in node.names if each.name == "dataclass"]
    assert not slow

"""Dataclasses as JSON: what is written is read back by type, and says in one line what it is not."""

import json
import re
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise
from harness.cases import from_table
from shardwise.codec import EVERY, Json, plain, read
from shardwise.errors import UserError
from shardwise.layout import Layout


class Span(NamedTuple):
    start: int
    stop: int


@dataclass(frozen=True)
class Circle:
    kind: Literal["circle"]
    radius: float


@dataclass(frozen=True)
class Box:
    kind: Literal["box", "cube"]
    sides: tuple[int, ...]
    label: str = ""


@dataclass(frozen=True)
class Drawing(Json):
    json_name = "a drawing"

    name: str
    shapes: tuple[Circle | Box, ...]
    corner: tuple[int, float] = (0, 0.0)
    by_name: dict[str, Box] = field(default_factory=dict)
    layout: Layout | None = None
    frame: Box | None = None


@dataclass(frozen=True)
class Sparse(Json):
    json_omits = EVERY

    a: int = 0
    b: tuple[int, ...] = ()
    c: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Result(Json):
    json_keys = "title=drawing.name bytes.first=sizes.0 bytes.all=sizes why? where? total"

    drawing: Drawing
    sizes: tuple[int, int]
    why: str = ""
    where: str = "here"

    @property
    def total(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True)
class Bounded(Json):
    json_checked = True

    count: int
    share: float | None = None
    rows: tuple[int, ...] = ()


boxes = st.builds(Box, st.sampled_from(["box", "cube"]), st.lists(st.integers(0, 9)).map(tuple), st.text(max_size=3))
circles = st.builds(Circle, st.just("circle"), st.floats(0, 1))
drawings = st.builds(
    Drawing,
    st.text(max_size=3),
    st.lists(boxes | circles).map(tuple),
    st.tuples(st.integers(), st.floats(0, 1)),
    st.dictionaries(st.text(max_size=2), boxes, max_size=2),
    st.sampled_from([None, Layout(), Layout.parse("tp=2,dp=2,zero=3,sp")]),
    st.none() | boxes,
)


@given(drawings)
def test_what_is_written_is_read_back_with_its_types(drawing):
    text = json.dumps(drawing.to_json(), allow_nan=False)
    assert Drawing.from_json(json.loads(text)) == drawing
    assert read(tuple[Drawing, ...], [json.loads(text)]) == (drawing,)


@from_table
def test_anything_else_is_one_line(data):
    with pytest.raises(UserError, match=r"^not a drawing: [^\n]+$"):
        Drawing.from_json(data)


def test_defaults_may_be_left_out():
    assert Sparse().to_json() == {} and Sparse(b=(1,)).to_json() == {"b": [1]}
    assert Sparse.from_json({"b": [1]}) == Sparse(b=(1,))


def test_keys_are_named_nested_and_derived():
    assert Result(Drawing("d", ()), (1, 2)).to_json() == {
        "title": "d", "bytes": {"first": 1, "all": [1, 2]}, "why": None, "where": "here", "total": 3,
    }  # fmt: skip


def test_numbers_of_other_kinds_are_plain():
    values = {"span": Span(1, 2), "row": np.arange(3), "one": np.int64(4), "part": Fraction(1, 4), "keys": ("a",)}
    assert json.dumps(plain(values)) == (
        '{"span": {"start": 1, "stop": 2}, "row": [0, 1, 2], "one": 4, "part": 0.25, "keys": ["a"]}'
    )


@pytest.mark.parametrize("change", [{"count": -1}, {"count": True}, {"count": 1.0}, {"share": "x"}, {"rows": [1, "x"]},
                                    {"count": 1 << 64}, {"share": float("nan")}])  # fmt: skip
def test_a_checked_class_names_the_field(change):
    (name,) = change
    with pytest.raises(TypeError, match=f"^bounded: {name} cannot be "):
        Bounded.from_json({"count": 1} | change)
    assert Bounded.from_json({"count": 1, "share": 0.5, "rows": [2]}) == Bounded(1, 0.5, (2,))


MOST = 25
"""One of them is a command's result, which is its JSON."""
"""`to_json` and `from_json` that are written by hand: lower it with each that goes."""


def test_few_classes_are_written_by_hand():
    sources = Path(shardwise.__file__).parent.rglob("*.py")
    found = sum(len(re.findall(r"def (?:to|from)_json", path.read_text())) for path in sources if path.stem != "codec")
    assert found <= MOST

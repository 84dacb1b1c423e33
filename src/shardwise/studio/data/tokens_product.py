"""Tokens, a product over two ranks with its numbers: columns of the first matrix, rows of the second, and the sum."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.codec import Json
from shardwise.layout import Layout
from shardwise.model import ModelConfig
from shardwise.report.step_report import DTYPE_BYTES
from shardwise.report.units import format_bytes, format_time
from shardwise.studio.columns import How, Table
from shardwise.studio.data.tokens_layer import LayerStep

X = np.array([1, 2, 0, 1])
FIRST = np.array([[1, 0, 2, 1], [0, 1, -2, 1], [2, 1, 1, 0], [1, -1, 0, 2]])
SECOND = np.array([[1, 2, 0, 1], [0, 1, 1, 0], [3, 0, 1, 2], [1, 1, 0, 1]])
"""A token's vector, and two matrices of a feed-forward part: small whole numbers, which are easily multiplied."""
RANKS = 2


@dataclass(frozen=True)
class WorkedProduct(Json):
    """y = f(x W1) W2 on two ranks, where f keeps positive numbers. columns: of W1, and rows of W2, of each rank."""

    json_keys = "x first h second columns partials y sentences"

    sentences: list[str]

    @property
    def x(self) -> list[int]:
        return _plain(X)

    @property
    def first(self) -> list[list[int]]:
        return _plain(FIRST)

    @property
    def second(self) -> list[list[int]]:
        return _plain(SECOND)

    @property
    def columns(self) -> list[list[int]]:
        return _plain(np.array_split(np.arange(len(X)), RANKS))

    @property
    def h(self) -> list[int]:
        """Each rank's numbers, computed with its columns alone, beside each other."""
        return _plain(np.concatenate([np.maximum(X @ FIRST[:, one], 0) for one in self.columns]))

    @property
    def partials(self) -> list[list[int]]:
        """Each rank's product of its numbers of h with its rows of W2."""
        h = np.array(self.h)
        return _plain([h[one] @ SECOND[one] for one in self.columns])

    @property
    def y(self) -> list[int]:
        """The sum of the partial results, which an all-reduce gives to every rank."""
        return _plain(np.sum(self.partials, axis=0))


def _plain(values: object) -> list:
    return [one.tolist() for one in values] if isinstance(values, list) else np.asarray(values).tolist()


def product(model: ModelConfig, layouts: Sequence[Layout], sides: Sequence[list[LayerStep]]) -> WorkedProduct:
    """The worked product, with a sentence for each step. The last one has the model's own sizes, where a strategy has
    tensor parallelism. sides: each strategy's steps inside a layer."""
    sentences = [
        "Two ranks have the whole vector x. W1 is cut by column: each rank has two of its columns. W2 is cut by row.",
        "By column: each rank multiplies x with its own columns, and has two numbers of h = f(x W1). Nothing is "
        "sent; f makes negative numbers 0, number by number.",
        "By row: the numbers that a rank has of h meet just its rows of W2. The result has all four numbers, but each "
        "is a part of the sum.",
        "An all-reduce adds up the partial results: every rank has y. That is all that is sent.",
    ]
    for layout, steps in zip(layouts, sides, strict=True):
        seconds = next((step.seconds for step in steps if step.act == "sum" and step.seconds), 0.0)
        if layout.tp > 1 and layout.stage < 3 and seconds:
            vector = format_bytes(model.hidden * DTYPE_BYTES[layout.dtype])
            sentences[3] += (
                f" In {model.name}, W1 has {model.hidden:,} rows and {model.ffn:,} columns, of which {layout} gives "
                f"each rank {model.ffn // layout.tp:,}; the sum is {vector} a token, in {format_time(seconds)}."
            )
            break
    return WorkedProduct(sentences)


def product_table(shown: WorkedProduct) -> Table:
    """A row for each rank, and one for their sum."""
    units = dict.fromkeys(("rank", "columns of W1, rows of W2", "numbers of h", "result"), "")
    rows = [
        (str(rank), *(", ".join(map(str, one)) for one in (columns, [shown.h[i] for i in columns], partial)))
        for rank, (columns, partial) in enumerate(zip(shown.columns, shown.partials, strict=True))
    ]
    rows.append(("sum", "", ", ".join(map(str, shown.h)), ", ".join(map(str, shown.y))))
    return Table.of_rows("Columns of W1 are the rows of W2", units, rows)


def how_product(shown: WorkedProduct) -> How:
    """Why there is one sum, and no other."""
    x, h = shown.x, shown.h
    first = " + ".join(f"{given} x {row[0]}" for given, row in zip(x, shown.first, strict=True))
    lines = [
        "y = f(x W1) W2 = the sum over ranks r of f(x W1[:, r]) W2[r, :], as f goes number by number.",
        f"First number of h: {first} = {h[0]}.",
        *(
            f"Rank {rank}, first number of its part: "
            + " + ".join(f"{h[i]} x {shown.second[i][0]}" for i in columns)
            + f" = {shown.partials[rank][0]}."
            for rank, columns in enumerate(shown.columns)
        ),
        f"Their sum: {' + '.join(str(one[0]) for one in shown.partials)} = {shown.y[0]}.",
    ]
    return How(lines, "", "Shoeybi et al. 2019, section 3")

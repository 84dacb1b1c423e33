"""Any partition of a tensor into intervals of boxes against any other, with plain slicing as the oracle."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint.geometry import Piece, copy, full, shared, tiles, volume

SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(1, 40)),
    st.tuples(st.sampled_from([1, 2, 3, 7, 11]), st.sampled_from([1, 2, 5, 13, 16])),
)


def cuts(draw, n: int, most: int) -> list[tuple[int, int]]:
    """[0, n) in at most `most` runs, empty ones among them."""
    marks = sorted(draw(st.lists(st.integers(0, n), max_size=most - 1)))
    return list(zip([0, *marks], [*marks, n], strict=True))


@st.composite
def partitions(draw, shape: tuple[int, ...]) -> list[Piece]:
    boxes = [full(shape)]
    if shape and draw(st.booleans()):
        dim = draw(st.integers(0, len(shape) - 1))
        boxes = []
        for run in cuts(draw, shape[dim], 4):
            box = list(full(shape))
            box[dim] = run
            boxes.append(tuple(box))
    return [Piece(box, a, b) for box in boxes for a, b in cuts(draw, volume(box), 4)]


def elements(values: np.ndarray, piece: Piece) -> np.ndarray:
    return values[tuple(slice(*run) for run in piece.box)].reshape(-1)[piece.first : piece.last].copy()


@given(st.data())
def test_one_partition_becomes_any_other(data):
    shape = data.draw(SHAPES)
    values = np.arange(volume(full(shape))).reshape(shape)
    sources, targets = data.draw(partitions(shape)), data.draw(partitions(shape))
    held = [elements(values, piece) for piece in sources]
    for target in targets:
        out = np.full(target.numel, -1)
        for array, piece in zip(held, sources, strict=True):
            copy(out, target, array, piece)
        assert np.array_equal(out, elements(values, target))


@given(st.data())
def test_rectangles_hold_the_elements_in_order(data):
    shape = data.draw(SHAPES)
    piece = data.draw(st.sampled_from(data.draw(partitions(shape))))
    values = np.arange(volume(full(shape))).reshape(shape)
    rows = values.reshape((1, -1) if len(shape) < 2 else shape)
    found = [rows[a:b, c:d].reshape(-1) for a, b, c, d in piece.rectangles()]
    assert len(found) <= 3 and all(map(len, found))
    assert np.array_equal(np.concatenate([*found, np.empty(0, int)]), elements(values, piece))


@given(st.data())
def test_reach_encloses_what_is_shared(data):
    shape = data.draw(SHAPES)
    a, b = (data.draw(st.sampled_from(data.draw(partitions(shape)))) for _ in range(2))
    values = np.arange(volume(full(shape))).reshape(shape)
    mine = elements(values, a)
    common = np.flatnonzero(np.isin(mine, elements(values, b)))
    start, stop = a.reach(b)
    assert (start, stop) == ((common[0], common[-1] + 1) if len(common) else (0, 0))
    assert bool(shared(a, b)) == bool(len(common))


@given(st.data())
def test_padding_is_left_out_and_left_alone(data):
    """A padded local tensor, part of it, to the same without padding and back."""
    rows, columns, pad = (data.draw(st.integers(1, 9)) for _ in range(3))
    by_rows = data.draw(st.booleans())
    padded = ((2, 2 + rows + pad * by_rows), (3, 3 + columns + pad * (not by_rows)))
    true = ((2, 2 + rows), (3, 3 + columns))
    values = np.arange(volume(padded)).reshape(*(stop - start for start, stop in padded))
    first = data.draw(st.integers(0, values.size))
    local = Piece(padded, first, data.draw(st.integers(first, values.size)))
    stored = local.inside(true)
    own = values.reshape(-1)[local.first : local.last].copy()
    expected = own[np.isin(own, values[:rows, :columns])]
    out = np.full(stored.numel, -1)
    copy(out, stored, own, local)
    assert np.array_equal(out, expected)
    back = np.full(local.numel, -1)
    copy(back, local, out, stored)
    assert np.array_equal(back, np.where(np.isin(own, expected), own, -1))


@given(st.data())
def test_tiles_is_exactly_once(data):
    shape = data.draw(SHAPES)
    pieces = data.draw(partitions(shape))
    assert tiles(shape, pieces)
    # Change, drop or double some: counting every element decides.
    other = data.draw(partitions(shape))
    for _ in range(data.draw(st.integers(1, 3))):
        pieces = [*pieces, data.draw(st.sampled_from(other))]
        pieces.pop(data.draw(st.integers(0, len(pieces) - 1)))
    counts = np.zeros(volume(full(shape)), int)
    index = np.arange(counts.size).reshape(shape)
    for piece in pieces:
        counts[elements(index, piece)] += 1
    assert tiles(shape, pieces) == bool((counts == 1).all())


def test_a_hole_and_a_doubled_element_do_not_cancel():
    assert not tiles((2, 2), [Piece.whole(((0, 1), (0, 2))), Piece.whole(((0, 1), (0, 2)))])
    assert not tiles((4,), [Piece.whole(((0, 2),)), Piece.whole(((1, 3),))])


def test_copying_into_a_strided_array_is_refused():
    whole = Piece.whole(((0, 4),))
    with pytest.raises(AssertionError):
        copy(np.zeros(8)[::2], whole, np.zeros(4), whole)

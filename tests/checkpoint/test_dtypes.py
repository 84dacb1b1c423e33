"""Conversions of stored elements against torch's, and NaNs kept as they are."""

import numpy as np
import pytest

from shardwise.checkpoint.dtypes import CODES, bits, convert, numpy_dtype
from shardwise.errors import UserError

EVERY_BF16 = np.arange(1 << 16, dtype="<u2")


def hard_values() -> np.ndarray:
    """float32 bit patterns near every bfloat16: ties, neighbours of ties, denormals, infinities, NaNs."""
    high = np.arange(1 << 16, dtype="<u4") << 16
    return np.concatenate([high + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).astype("<u4").view("<f4")


def test_bfloat16_as_torch_rounds_it():
    torch = pytest.importorskip("torch")
    values = hard_values()
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16)
    ours = convert(values, "float32", "bfloat16")
    nan = np.isnan(values)
    assert np.array_equal(ours[~nan], expected.view(torch.uint16).numpy()[~nan])
    assert np.isnan(convert(ours[nan], "bfloat16", "float32")).all()
    wide = torch.from_numpy(EVERY_BF16.copy()).view(torch.bfloat16).float().numpy()
    assert np.array_equal(bits(convert(EVERY_BF16, "bfloat16", "float32")), bits(wide))


@pytest.mark.parametrize("wide", ["float32", "float64"])
def test_bfloat16_survives_a_wider_dtype(wide):
    back = convert(convert(EVERY_BF16, "bfloat16", wide), wide, "bfloat16")
    number = ~np.isnan(convert(EVERY_BF16, "bfloat16", "float32"))
    assert np.array_equal(back[number], EVERY_BF16[number])


@pytest.mark.parametrize("dtype", CODES)
def test_the_same_dtype_is_not_touched(dtype):
    values = np.zeros(4, numpy_dtype(dtype))
    assert convert(values, dtype, dtype) is values


def test_narrowing():
    values = np.array([1.0, 1e300, -1e300, 1 + 2**-40])
    assert convert(values, "float64", "float32").tolist() == [1.0, np.inf, -np.inf, 1.0]
    assert convert(values, "float64", "bfloat16").tolist() == [0x3F80, 0x7F80, 0xFF80, 0x3F80]


def test_float64_becomes_bfloat16_in_one_rounding():
    """Values a hair beside the middle of two bfloat16: as float32 they would be the middle itself. Against exact
    arithmetic, since torch rounds twice, too."""
    whole = EVERY_BF16[(EVERY_BF16 & 0x7FFF) < 0x7F00]
    value, above = (convert(bits, "bfloat16", "float64") for bits in (whole, (whole + 1).astype("<u2")))
    middle = (value + above) / 2  # exact: 8 bits and one more
    for beside, expected in ((value, whole), (above, whole + 1)):
        near = np.nextafter(middle, beside)
        assert np.array_equal(convert(near, "float64", "bfloat16"), expected)
    even = np.where(whole & 1, whole + 1, whole)
    assert np.array_equal(convert(middle, "float64", "bfloat16"), even)
    hard = np.array([np.nan, np.inf, -np.inf, 1e-320, -0.0, 3.3961775292304e38, 3.39617752923047e38])
    assert convert(hard, "float64", "bfloat16").tolist() == [0x7FC0, 0x7F80, 0xFF80, 0, 0x8000, 0x7F7F, 0x7F80]


def test_other_types_are_refused():
    with pytest.raises(UserError, match="do not store int8"):
        numpy_dtype("int8")

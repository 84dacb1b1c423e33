"""Rounding in pure Python against torch's and numpy's, for every type that they have."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quoted.rounding import rounded, spacing, surely_lost_below
from shardwise.errors import UserError

# Inside float16's normal numbers: limits of the exponent are not imitated.
NUMBERS = st.floats(1e-4, 6e4) | st.floats(-6e4, -1e-4)


@given(NUMBERS, st.sampled_from(["float16", "float32", "float64"]))
def test_as_numpy_rounds(value, dtype):
    assert rounded(value, dtype) == float(np.dtype(dtype).type(value))


@given(st.floats(1e-30, 1e30))
def test_as_torch_rounds(value):
    assert rounded(value, "bfloat16") == float(torch.tensor(value, dtype=torch.float64).to(torch.bfloat16))


@given(NUMBERS, st.sampled_from(["bfloat16", "float16"]))
def test_spacing_bounds_what_is_lost(value, dtype):
    weight = rounded(value, dtype)
    assert rounded(weight * (1 + 0.99 * surely_lost_below(dtype)), dtype) == weight
    assert rounded(weight * (1 + 1.01 * spacing(dtype)[1]), dtype) != weight


def test_an_unknown_type_is_one_line():
    with pytest.raises(UserError, match="bfloat16, float16"):
        spacing("int8")

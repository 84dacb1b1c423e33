"""Triton's interpreter, which runs kernels on CPUs."""

from importlib.util import find_spec

import numpy
import pytest

_NUMPY = tuple(int(part) for part in numpy.__version__.split(".")[:2])

needs_interpreter = pytest.mark.skipif(
    find_spec("triton") is None or _NUMPY >= (2, 4),
    reason="make check-kernels: needs Triton, which torch brings for CUDA, and numpy below 2.4, whose arrays of one "
    "number its interpreter reads as numbers (Triton 3.6)",
)

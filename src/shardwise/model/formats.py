"""Formats of stored weights: the one table of bits, groups, and bytes of scales and zero points.

A format in words: a form of the table; `-gN` where N numbers of a row share a scale (0: all of a row), `sB` where that
has B bytes and not the form's own, `z` where a zero point as wide as a number is beside it; or `-blockRxC`, with one
fp32 scale per block of R rows and C columns. Examples: fp8, nvfp4-g16, int4-g128z (AWQ and GPTQ), int4-g32s4 (gpt-fast:
scale and zero in 16 bits each).

Formats hold for the matrices of linear maps. Norms, biases, routers and, unless an engine or a file says otherwise,
embedding and head stay in 16 bits.
"""

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from shardwise.errors import UserError, did_you_mean
from shardwise.records import dataclass


class Form(NamedTuple):
    """Kind of number."""

    nbytes: float
    """Of a number."""
    scale: float
    """Bytes of a group's scale."""
    group: int
    """Numbers that share a scale where the words name none; 0: all of a row, or of the matrix."""
    dtype: str
    """torch's name of the type whose kernels compute with it."""
    lossy: bool = True
    """Whether answers differ from those of 16 bits."""


FORMS = {
    "fp32": Form(4.0, 0.0, 0, "float32", lossy=False),
    "bf16": Form(2.0, 0.0, 0, "bfloat16", lossy=False),
    "fp16": Form(2.0, 0.0, 0, "float16", lossy=False),
    "fp8": Form(1.0, 4.0, 0, "float8_e4m3fn"),
    "mxfp8": Form(1.0, 1.0, 32, "float8_e4m3fn"),
    "int8": Form(1.0, 2.0, 0, "int8"),
    "int4": Form(1 / 2, 2.0, 128, "int4"),
    "int3": Form(3 / 8, 2.0, 128, "int4"),
    "int2": Form(2 / 8, 2.0, 128, "int4"),
    "nf4": Form(1 / 2, 1 + 4 / 256, 64, "int4"),
    "fp4": Form(1 / 2, 1 + 4 / 256, 64, "int4"),
    "nvfp4": Form(1 / 2, 1.0, 16, "float4"),
    "mxfp4": Form(1 / 2, 1.0, 32, "int4"),
}
"""NVIDIA's FP8 (one fp32 scale per matrix); OCP Microscaling specification 1.0 (mxfp4, mxfp8: groups of 32 with one
byte); AWQ, GPTQ (int4: a 16-bit scale per group of 128); QLoRA (nf4: 64 with one byte and, after double quantization,
an fp32 scale per 256 of these); NVIDIA's NVFP4 (16 with one byte). Integers of a whole row have one 16-bit scale."""

_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8", "float4": "nvfp4"}
"""torch's name of a type -> the format that it stands for as a type of weights."""
_WORDS = re.compile(
    r"(?P<form>[a-z0-9]+)(-g(?P<group>\d{1,6})(s(?P<scale>\d+(\.\d+)?))?)?(?P<zero>z)?"
    r"(-block(?P<block>[1-9]\d{0,5}x[1-9]\d{0,5}))?"
)


@dataclass(frozen=True)
class WeightFormat:
    """How matrices are stored (`weight_format`)."""

    words: str
    form: str
    each: float
    """Bytes of a number without its scale."""
    dtype: str
    """torch's name of the type whose kernels compute with it."""
    lossy: bool
    group: int = 0
    """Numbers that share a scale; 0: all of a row, or of the matrix."""
    scale: float = 0.0
    """Bytes of a scale with its zero point."""
    block: tuple[int, int] | None = None

    @property
    def width(self) -> float:
        """Bytes of a number with its part of the scales, of a matrix so large that one of a whole row is nothing."""
        if self.block:
            return self.each + self.scale / (self.block[0] * self.block[1])
        return self.each + (self.scale / self.group if self.group else 0.0)

    def nbytes(self, shape: Sequence[int]) -> float:
        """Bytes of a parameter of this shape, its scales included."""
        numel, rows = math.prod(shape), math.prod(shape[:-1])
        if self.block:
            high, wide = self.block
            return numel * self.each + self.scale * math.ceil(rows / high) * math.ceil(shape[-1] / wide)
        if self.group:
            return numel * self.each + numel / self.group * self.scale
        return numel * self.each + self.scale * (rows if self.form.startswith("int") else 1)


@lru_cache(maxsize=256)
def weight_format(words: str) -> WeightFormat:
    """The format of these words, or of torch's name of a type. Raises `UserError` for one that there is not."""
    match = _WORDS.fullmatch(_NAMES.get(words, words))
    form = FORMS.get(match["form"]) if match else None
    if match is None or form is None:
        raise UserError(f"no format of weights {words[:40]!r}; {did_you_mean(words[:40], FORMS, 'formats:')}")
    if match["block"]:
        high, wide = map(int, match["block"].split("x"))
        return WeightFormat(words, match["form"], form.nbytes, form.dtype, form.lossy, 0, 4.0, (high, wide))
    group = int(match["group"] or form.group)
    zero = form.nbytes if match["zero"] else 0.0
    scale = float(match["scale"] or form.scale) + zero
    return WeightFormat(words, match["form"], form.nbytes, form.dtype, form.lossy, group, scale)

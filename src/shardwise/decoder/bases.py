"""Frozen matrices in fewer bits: quantized once, dequantized block by block for every product.

int8: rows are numbers x scale. nf4: as QLoRA and bitsandbytes have it, blocks of 64 weights of a row with their
largest magnitude; these less their mean are in 8 bits ("double quantization"), 256 with one scale in fp32. fp8: e4m3
with a scale per 128 x 128 weights, as in DeepSeek-V3's files. nf4 and fp8 are multiplied in fp32, then rounded.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.model.lora import BASES, FP8, INT8, NESTED, NF4, block_inputs, scale_elements, stored_columns

_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Values of NF4 (Dettmers et al. 2023, appendix E)."""
_LEVELS = [10.0 ** (i - 6) * (0.1 + 0.9 * (j + 0.5) / 2**i) for i in range(7) for j in range(2**i)]
_TREE = sorted((0.0, 1.0, *_LEVELS, *(-level for level in _LEVELS)))
"""Values of 8 bits: the dynamic tree of Dettmers et al. 2022, a power of ten and a fraction."""
_ZEROS = 0x77
"""Both numbers of a byte that are zero in NF4: stored ones are relative to it, so that empty memory is zero."""
_LARGEST = 448.0
"""Largest number of e4m3."""


def row_scales(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales of int8 from the rows' largest magnitudes."""
    return _positive(largest.float() / 127).to(dtype)


def rounded(elements: Tensor, scales: Tensor) -> Tensor:
    """The nearest int8 numbers x scale of some elements, with the scales of their rows."""
    return (elements.float() / scales.float()).round_().clamp_(-127, 127).to(torch.int8)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 [out, in], scales [out] in the weight's dtype): rows of W are numbers x scale, the nearest there are."""
    return _int8(weight, weight.dtype)


def quantized(base: str, rows: Iterable[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(numbers [out, bytes] as int8, scales) of a matrix from its rows, some at a time: as many as share scales, or a
    multiple. dtype: of int8's scales."""
    numbers, scales = map(torch.cat, zip(*(_QUANTIZED[base](some, dtype) for some in rows), strict=True))
    if base == INT8:
        return numbers, scales
    if base == FP8:
        return numbers, scales.flatten().view(torch.int8)
    mean = scales.mean()
    apart = (scales - mean).flatten()
    nested = F.pad(apart, (0, -len(apart) % NESTED)).view(-1, NESTED)
    largest = nested.abs().amax(1)
    codes = _nearest(nested, largest, _TREE).flatten()[: len(apart)].view(*scales.shape, 1)
    beside = torch.cat((mean[None], largest)).view(torch.int8)
    return torch.cat((numbers, codes.view(torch.int8)), 2).flatten(1), beside


def _int8(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scales = row_scales(rows.abs().amax(1), dtype)
    return rounded(rows, scales[:, None]), scales


def _nf4(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    blocks = rows.float().unflatten(1, (-1, BASES[NF4].group))
    largest = blocks.abs().amax(2)
    codes = _nearest(blocks, largest, _NF4)
    return ((codes[..., ::2] << 4 | codes[..., 1::2]) ^ _ZEROS).view(torch.int8), largest


def _fp8(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    high, wide = BASES[FP8].block or (1, 1)
    numbers = rows.float()
    padded = F.pad(numbers, (0, -rows.shape[1] % wide, 0, -len(rows) % high))
    scales = _positive(padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).abs().amax((1, 3)) / _LARGEST)
    spread = scales.repeat_interleave(high, 0)[: len(rows)].repeat_interleave(wide, 1)[:, : rows.shape[1]]
    return (numbers / spread).to(torch.float8_e4m3fn).view(torch.int8), scales


_QUANTIZED: dict[str, Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]] = {INT8: _int8, NF4: _nf4, FP8: _fp8}


def _positive(scales: Tensor) -> Tensor:
    return scales.clamp_(min=torch.finfo(torch.float32).tiny)


def _nearest(blocks: Tensor, largest: Tensor, values: Iterable[float]) -> Tensor:
    """Places, as uint8, of the values nearest to the elements of blocks over their largest magnitudes."""
    table = torch.tensor(list(values), dtype=torch.float32, device=blocks.device)
    scaled = blocks * (1.0 / largest.clamp(min=1e-38))[..., None]
    return torch.bucketize(scaled, (table[1:] + table[:-1]) / 2).to(torch.uint8)


@dataclass(frozen=True)
class FrozenBase:
    """How a matrix is stored, and which part of it is here."""

    name: str
    """Of `BASES`."""
    inputs: int
    """Of the whole matrix."""
    top: int = 0
    """First row of the part."""
    left: int = 0
    """Its first input."""

    @classmethod
    def narrow(cls, module: nn.Module, name: str, dtype: torch.dtype) -> None:
        """Of a map in the layout's precision, which gets room for scales of this dtype."""
        weight = module.get_parameter("weight")
        module.frozen_base = cls(name, weight.shape[1])  # type: ignore[assignment]
        made = torch.ones(scale_elements(name, *weight.shape), dtype=dtype, device=weight.device)
        module.register_parameter("weight_scale", nn.Parameter(made, requires_grad=False))

    def at(self, box: tuple[tuple[int, int], ...]) -> "FrozenBase":
        """The part in this box [rows, bytes]."""
        return replace(self, top=box[0][0], left=self._inputs(box[1][0]))

    def columns(self, numbers: Tensor) -> int:
        """Inputs of the part."""
        return self._inputs(numbers.shape[1])

    def _inputs(self, nbytes: int) -> int:
        block = block_inputs(self.name) or self.inputs
        return nbytes * block // stored_columns(self.name, block)

    def dense(
        self, numbers: Tensor, scales: Tensor, dtype: torch.dtype, start: int = 0, stop: int | None = None
    ) -> Tensor:
        """Rows [start, stop) of the part as they are multiplied with. numbers: [rows, bytes] of all of it."""
        rows = numbers[start:stop]
        if self.name == INT8:
            return rows.to(scales.dtype, copy=True).mul_(scales[start:stop, None])
        wide = scales.clone().view(torch.float32)  # in the unit's buffer they may start at any byte
        first = self.top + start
        at = torch.arange(first, first + len(rows), dtype=torch.int32, device=rows.device)
        return (self._nf4 if self.name == NF4 else self._fp8)(rows, wide, at).to(dtype)

    def _nf4(self, rows: Tensor, scales: Tensor, at: Tensor) -> Tensor:
        # Fake tensors are not kept.
        pairs, tree = _made(rows.device) if type(rows) in (Tensor, nn.Parameter) else _made.__wrapped__(rows.device)
        blocks = rows.unflatten(1, (-1, stored_columns(NF4, BASES[NF4].group))).view(torch.uint8)
        across = torch.arange(blocks.shape[1], dtype=torch.int32, device=rows.device) + self.left // BASES[NF4].group
        nested = (at[:, None] * (self.inputs // BASES[NF4].group) + across).div_(NESTED, rounding_mode="floor")
        largest = F.embedding(blocks[..., -1].int(), tree).mul_(F.embedding(nested, scales[1:, None])).add_(scales[0])
        return F.embedding(blocks[..., :-1].int(), pairs).flatten(2).mul_(largest).flatten(1)

    def _fp8(self, rows: Tensor, scales: Tensor, at: Tensor) -> Tensor:
        high, wide = BASES[FP8].block or (1, 1)
        grid = scales.view(-1, -(-self.inputs // wide))[:, self.left // wide :]
        last = -(-(self.left % wide + rows.shape[1]) // wide)
        # Rows and inputs that fill up a part have no scales, and are zero.
        by_row = F.embedding(at.div_(high, rounding_mode="floor").clamp_(max=len(grid) - 1), grid)[..., None]
        by_row = F.pad(by_row, (0, 0, 0, max(0, last - grid.shape[1])))
        values = rows.view(torch.float8_e4m3fn).float()
        lead = min(-self.left % wide, values.shape[1])  # of a block that begins before the part
        values[:, :lead].mul_(by_row[:, 0])
        rest, by_row = values[:, lead:], by_row[:, int(lead > 0) :]
        whole = rest.shape[1] // wide
        rest[:, : whole * wide].unflatten(1, (whole, wide)).mul_(by_row[:, :whole])
        rest[:, whole * wide :].mul_(by_row[:, whole : whole + 1, 0])
        return values


@cache
def _made(device: torch.device) -> tuple[Tensor, Tensor]:
    """(values of both numbers of a byte [256, 2], those of 8 bits [256, 1])."""
    pairs = [(_NF4[(byte ^ _ZEROS) >> 4], _NF4[(byte ^ _ZEROS) & 15]) for byte in range(256)]
    return torch.tensor(pairs, device=device), torch.tensor(_TREE, device=device)[:, None]

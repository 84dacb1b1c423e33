"""Triton's kernels called with tensors: grids, tiles and flags. `kernels` imports Triton when it is first used."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.ops.blockwise import ScoreRule
from shardwise.ops.paged import DecodeRows

DTYPES = (torch.bfloat16, torch.float32)
"""Precisions that the kernels compute in: sums are in fp32."""
_LANES = 16
"""Fewest rows of a tile that tensor cores multiply."""
_KEYS = 32
"""Keys per step of attention."""
_BLOCK = 1024
"""Numbers of a row that a program has where each is computed alone."""
_FILL = 512
"""Programs of attention that keep a device busy: about four per multiprocessor."""


@cache
def kernels() -> Any:
    return import_module("shardwise.ops.cuda.kernels")


def serve(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels compute in this precision on this device."""
    return device.type == "cuda" and dtype in DTYPES and find_spec("triton") is not None


@cache
def runs_ptx(device: torch.device) -> bool:
    """Whether kernels on this device may have PTX in them: an NVIDIA device, and not Triton's interpreter."""
    return device.type == "cuda" and torch.version.hip is None


@cache
def _may_depend(device: torch.device) -> bool:
    return (
        runs_ptx(device)
        and torch.cuda.get_device_capability(device) >= (9, 0)
        and kernels().gdc_launch_dependents is not None
    )


def dependent_launch(x: Tensor) -> dict[str, bool]:
    """Options of a kernel of a step with rows x: programmatic dependent launch for one, where the device has it."""
    if len(x) > 1 or not _may_depend(x.device):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


def power(number: int) -> int:
    return 1 << (number - 1).bit_length()


class Tile(NamedTuple):
    """Part of a matrix that a program reads per step, and how."""

    rows: int
    columns: int
    """With one row, at least 256 for each warp, so that a thread has eight."""
    warps: int
    stages: int = 1
    """Reads ahead, with several rows."""
    parts: int = 1
    """Programs that share a tile's inputs, with several rows."""


class Stored(NamedTuple):
    """A matrix as it is kept: numbers [outputs, inputs] in the precision of x, or int8 with a scale per row."""

    numbers: Tensor
    scales: Tensor | None
    bias: Tensor | None


class FusedOps(NamedTuple):
    """What a product has before and after it."""

    gain: Tensor | None = None
    """[inputs]: factors of an RMSNorm of x."""
    eps: float = 0.0
    gate: int = 0
    """1, 2: the outputs are [gate | up], and silu(gate) up or gelu(gate) up follows."""
    residual: Tensor | None = None
    """[B, outputs]: what the outputs are added to."""


def gate_of(activation: Callable[..., Tensor]) -> int:
    """The kernels' number of an activation; 0 for another one."""
    if activation is F.silu:
        return 1
    gelu = isinstance(activation, partial) and activation.func is F.gelu
    return 2 if gelu and activation.keywords == {"approximate": "tanh"} else 0  # type: ignore[attr-defined]


def one_row(x: Tensor, matrix: Stored, around: FusedOps, tile: Tile) -> Tensor:
    """A product with x [1, inputs]: [1, outputs], of gated maps half as many."""
    numbers, scales, bias = matrix
    outputs, inputs = numbers.shape
    rows = tile.rows
    if around.gate:
        outputs, rows = outputs // 2, max(1, rows // 2)
    out = x.new_empty(1, outputs)
    even = outputs % rows == 0 and inputs % tile.columns == 0
    kernels().one_row[(-(-outputs // rows),)](
        x, around.gain, numbers, scales, bias, around.residual, out, outputs, inputs, around.eps,
        NORM=around.gain is not None, SCALED=scales is not None, BIASED=bias is not None,
        ADDS=around.residual is not None, GATE=around.gate, EVEN=even, PTX=runs_ptx(x.device), ROWS=rows,
        COLUMNS=tile.columns, num_warps=tile.warps, **dependent_launch(x),
    )  # fmt: skip
    return out


def few_rows(x: Tensor, matrix: Stored, residual: Tensor | None, tile: Tile) -> Tensor:
    """A product with x [B, inputs], added to `residual` [B, outputs]: [B, outputs]."""
    numbers, scales, bias = matrix
    outputs, inputs = numbers.shape
    out, parts = x.new_empty(len(x), outputs), tile.parts
    after = {"SCALED": scales is not None, "BIASED": bias is not None, "ADDS": residual is not None}
    sums = out if parts == 1 else x.new_empty(parts, len(x), outputs, dtype=torch.float32)
    share = -(-inputs // (parts * tile.columns)) * tile.columns
    even = outputs % tile.rows == 0 and inputs % tile.columns == 0
    kernels().few_rows[(-(-outputs // tile.rows), parts)](
        x, numbers, scales, bias, residual, sums, len(x), outputs, inputs, share, EVEN=even,
        BATCH=max(_LANES, power(len(x))), ROWS=tile.rows, COLUMNS=tile.columns, STAGES=tile.stages,
        num_warps=tile.warps, **(after if parts == 1 else dict.fromkeys(after, False)),
    )  # fmt: skip
    if parts > 1:
        kernels().joined[(len(x), -(-outputs // _BLOCK))](
            sums, scales, bias, residual, out, len(x), outputs, PARTS=parts, BLOCK=_BLOCK, num_warps=4, **after
        )
    return out


def normed(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [B, width]."""
    out, width = torch.empty_like(x), x.shape[1]
    kernels().normed[(len(x),)](x, gain, out, width, eps, PADDED=power(width), num_warps=8)
    return out


def gated(x: Tensor, gate: int) -> Tensor:
    """act(gate) up of [gate | up] [B, 2 width]: [B, width]."""
    width = x.shape[1] // 2
    out = x.new_empty(len(x), width)
    kernels().gated[(len(x), -(-width // _BLOCK))](x, out, width, GATE=gate, BLOCK=_BLOCK, num_warps=4)
    return out


class HeadShape(NamedTuple):
    """Heads of one token."""

    heads: int
    kv: int
    width: int


def turn_and_store(
    heads: Tensor,
    shape: HeadShape,
    tables: tuple[Tensor, Tensor] | None,
    gains: tuple[Tensor, Tensor] | None,
    eps: float,
    cache: Tensor,
    size: int,
    rows: DecodeRows,
) -> Tensor:
    """Norm and rotate queries and keys, and keep keys and values. heads: [B, H + 2 K, D]; tables: cosines and sines
    [B, r / 2]; gains: factors of the norms of queries and keys; cache: [2, K, slots, D], in pages of `size`. Returns
    the queries [B, H, D]."""
    cos, sin = tables if tables is not None else (None, None)
    q_gain, k_gain = gains if gains is not None else (None, None)
    queries = heads.new_empty(len(heads), shape.heads, shape.width)
    kernels().turn_and_store[(len(heads), shape.heads + 2 * shape.kv)](
        heads, cos, sin, q_gain, k_gain, queries, cache, rows.slots, cache.shape[2], eps,
        HEADS=shape.heads, KV=shape.kv, WIDTH=shape.width, HALF=0 if cos is None else cos.shape[1],
        PADDED=power(shape.width), NORM=gains is not None, SIZE=size, num_warps=1,
        **dependent_launch(heads),
    )  # fmt: skip
    return queries


def attend(queries: Tensor, shape: HeadShape, cache: Tensor, size: int, rows: DecodeRows, rule: ScoreRule) -> Tensor:
    """Attention of one token per sequence to the keys in its pages. queries: [B, H, D]; returns [B, H D]."""
    batch, (heads, kv, width), early = len(queries), shape, dependent_launch(queries)
    most = rows.table.shape[1] * size
    splits = min(power(max(1, _FILL // (batch * kv))), power(-(-most // _KEYS)))
    partial_sums = queries.new_empty(batch, heads, splits, width, dtype=torch.float32)
    tops, totals = queries.new_empty(2, batch, heads, splits, dtype=torch.float32)
    out = queries.new_empty(batch, heads * width)
    kernels().attend_part[(batch, kv, splits)](
        queries, cache, rows.table, rows.lengths, partial_sums, tops, totals, rule.scale, rule.softcap,
        cache.shape[2], rows.table.shape[1],
        HEADS=heads, KV=kv, WIDTH=width, LANES=max(_LANES, power(heads // kv)), PADDED=max(_LANES, power(width)),
        SIZE=size, WINDOW=rule.window, CAPPED=bool(rule.softcap), SPLITS=splits, KEYS=_KEYS, num_warps=4,
        **early,
    )  # fmt: skip
    kernels().attend_join[(batch * heads,)](
        partial_sums, tops, totals, out, WIDTH=width, PADDED=power(width), SPLITS=splits, num_warps=4, **early
    )
    return out

"""Products of decode steps on CUDA: each matrix with the fastest of several forms, by measurement on the device.

Few rows read a matrix and do little else. For them torch's own products (cuBLAS) reach 75 to 90% of the read bandwidth
with bf16, and a matrix in int8 has no good one (torch 2.11 on an H100: `_weight_int8pack_mm` takes ten times as long as
bf16). So each shape of matrices has candidates: the library's product, of int8 after conversion to the precision of the
rows, and Triton's kernels with several tiles. `Chooser.measure` times them for a number of rows on matrices of the
model, one after another, so that no cache holds them, and with the norm before them and the activation after them:
every program of Triton's kernel computes the norm anew, which is dear where a tile has few rows (on an H100 the tiles
that are best without it gave 142 tokens/s in place of 176). Before that, and for many rows, products are the library's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.ops.cuda import launch
from shardwise.ops.cuda.launch import FusedOps, Stored, Tile
from shardwise.ops.limits import row_int8_bytes
from shardwise.ops.products import Product, quantise, widened

MANY = 64
"""Rows from which on products are the library's."""
ONE_ROW = {
    1: [Tile(4, 1024, 4), Tile(8, 2048, 8), Tile(4, 2048, 8), Tile(8, 1024, 4)],
    2: [Tile(2, 1024, 4), Tile(4, 2048, 8), Tile(8, 2048, 8), Tile(4, 1024, 4)],
    4: [Tile(2, 1024, 4), Tile(4, 1024, 4), Tile(2, 2048, 8)],
}
"""Bytes of a number -> tiles that are tried."""
FEW_ROWS = {
    1: [Tile(32, 128, 4, 5, 2), Tile(64, 256, 4, 3, 2), Tile(32, 256, 4, 4), Tile(64, 128, 4, 5)],
    2: [Tile(64, 128, 4, 5), Tile(128, 128, 8, 4), Tile(16, 256, 2, 5)],
    4: [],
}
_PASSES = 12
"""Products in a row that are timed."""
_SLEEP = 4_000_000
"""Clock cycles for which the device waits, so that launches are queued before the first one runs."""


class Chooser:
    """The forms of all matrices of a rank. kernels: whether Triton's serve."""

    def __init__(self, kernels: bool) -> None:
        self.kernels = kernels
        self.matrices: dict[tuple[int, int, int], list[Matrix]] = {}
        """(outputs, inputs, bytes of a number) -> the matrices of this shape."""
        self._chosen: dict[tuple[tuple[int, int, int], int], Tile | None] = {}
        self.report: list[str] = []
        """A line for each shape and number of rows that was measured."""
        self.failures: list[str] = []
        """What kernels could not do."""

    @staticmethod
    def rows_of(count: int) -> int:
        """The number of rows for which a form is chosen: all counts of a tile have the same."""
        return 1 if count == 1 else max(16, launch.power(count))

    def tile(self, matrix: Matrix, count: int) -> Tile | None:
        """The tile with which so many rows are multiplied; None for the library's product. Unmeasured: of int8 the
        first candidate, which beats a conversion of the whole matrix."""
        key = matrix.shape, self.rows_of(count)
        if not self.kernels or key in self._chosen:
            return self._chosen.get(key) if self.kernels else None
        tiles = self.candidates(*key) if matrix.stored.scales is not None else []
        return tiles[0] if tiles else None

    def candidates(self, shape: tuple[int, int, int], rows: int) -> list[Tile]:
        if not self.kernels or rows > MANY:
            return []
        return (ONE_ROW if rows == 1 else FEW_ROWS)[shape[2]]

    def choose(self, count: int, seconds: Callable[[Callable[[], object]], float]) -> None:
        """Choose forms for so many rows, unless that was done. seconds: that a function takes on the device."""
        if not self.kernels:
            return
        rows = self.rows_of(count)
        for shape, matrices in self.matrices.items():
            if (shape, rows) in self._chosen:
                continue
            x = torch.randn(count, shape[1], device=matrices[0].device).to(matrices[0].dtype)
            tiles = [None, *self.candidates(shape, rows)]
            times: dict[Tile | None, float] = {}
            for tile in tiles if len(tiles) > 1 else ():
                try:
                    times[tile] = seconds(partial(self._pass, matrices, x, tile)) / _PASSES
                except Exception as error:  # Triton has exceptions of many kinds, and another form always serves
                    self.fail(tile, error)
            best = min(times, key=lambda tile: times[tile]) if times else None
            self._chosen[shape, rows] = best
            if times:
                self.report.append(_line(shape, count, best, times))

    def fail(self, tile: Tile | None, error: Exception) -> None:
        self.failures.append(f"{tile}: {type(error).__name__}: {str(error)[:200]}")

    def measure(self, count: int) -> None:
        with torch.inference_mode():
            self.choose(count, _seconds)

    @staticmethod
    def _pass(matrices: list[Matrix], x: Tensor, tile: Tile | None) -> None:
        for index in range(_PASSES):
            matrix = matrices[index % len(matrices)]
            matrix.with_ops(x, matrix.before(), tile)


def _line(shape: tuple[int, int, int], count: int, best: Tile | None, times: dict[Tile | None, float]) -> str:
    name = "library" if best is None else f"tile {best.rows}x{best.columns}"
    rate = shape[0] * shape[1] * shape[2] / times[best] / 1e12
    library = f", library {1e6 * times[None]:.1f} us" if None in times and best is not None else ""
    return (
        f"{count} x {shape[1]} by {shape[0]}, {8 * shape[2]} bits: {name} {1e6 * times[best]:.1f} us, {rate:.2f} TB/s"
        f"{library}"
    )


def _seconds(run: Callable[[], object]) -> float:
    """Seconds of the device, the least of three times after one that compiles."""
    run()
    spans = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_SLEEP)
        start.record()
        run()
        end.record()
        end.synchronize()
        spans.append(start.elapsed_time(end) / 1e3)
    return min(spans)


class Matrix:
    """A product with a matrix that stays, in the form that its chooser has for the number of rows."""

    def __init__(self, stored: Stored, dtype: torch.dtype, chooser: Chooser) -> None:
        self.stored, self.dtype, self.chooser = stored, dtype, chooser
        numbers = stored.numbers
        self.shape = (*numbers.shape, numbers.element_size())
        self.device = numbers.device
        self.before: Callable[[], FusedOps] = FusedOps
        """What a decode step has around this product, without the sum."""
        if chooser.kernels:
            chooser.matrices.setdefault(self.shape, []).append(self)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., inputs] -> [..., outputs]."""
        rows = x.reshape(-1, x.shape[-1])
        tile = self.chooser.tile(self, len(rows))
        try:
            y = self.product(rows, tile)
        except Exception as error:  # of many kinds, where Triton cannot compile here
            if tile is None:
                raise
            self.chooser.fail(tile, error)
            self.chooser.kernels = False
            y = self.product(rows, None)
        return y.view(*x.shape[:-1], -1)

    def product(self, x: Tensor, tile: Tile | None) -> Tensor:
        """x: [B, inputs]. tile: None for the library's."""
        if tile is None:
            return self._library(x, None)
        if len(x) == 1:
            return launch.one_row(x, self.stored, FusedOps(), tile)
        return launch.few_rows(x, self.stored, None, tile)

    def decode(self, x: Tensor, around: FusedOps) -> Tensor:
        """The product of a decode step with what is around it. x: [B, inputs]; `around.residual` may be overwritten."""
        return self.with_ops(x, around, self.chooser.tile(self, len(x)))

    def with_ops(self, x: Tensor, around: FusedOps, tile: Tile | None) -> Tensor:
        """`decode` with this tile; None for the library's product."""
        if tile is not None and len(x) == 1:
            return launch.one_row(x, self.stored, around, tile)
        if around.gain is not None:
            x = launch.normed(x, around.gain, around.eps)
        if tile is not None:
            y = launch.few_rows(x, self.stored, around.residual, tile)
        else:
            y = self._library(x, around.residual)
        return launch.gated(y, around.gate) if around.gate else y

    def _library(self, x: Tensor, residual: Tensor | None) -> Tensor:
        numbers, scales, bias = self.stored
        if scales is None:
            if residual is None or bias is not None:
                y = F.linear(x, numbers, bias)
                return y if residual is None else y.add_(residual)
            return residual.addmm_(x, numbers.t())
        y = widened(x, numbers).mul_(scales)
        if bias is not None:
            y += bias
        return y if residual is None else y.add_(residual)


class CudaProducts:
    """Matrices on a CUDA device: where they were read, or in 8 bits with a scale per row."""

    def __init__(self, chooser: Chooser, dtype: torch.dtype, *, int8: bool) -> None:
        self.chooser, self.dtype, self.copies = chooser, dtype, int8

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Product:
        stored = Stored(*quantise(weight), bias) if self.copies else Stored(weight.detach(), None, bias)
        return Matrix(stored, self.dtype, self.chooser)

    def nbytes(self, weight: Tensor) -> int:
        return row_int8_bytes(*weight.shape, width=weight.element_size()) if self.copies else weight.nbytes

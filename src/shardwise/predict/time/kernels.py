"""Time of one kernel on a device: matrix products, attention, passes over memory.

A matrix product is priced by the tiles that a library cuts it into, waves of them over the device's multiprocessors,
and what a measured grid of shapes says on top of that (`surfaces.npz`). Where nothing was measured for a device, the
tiles and the grid of its relative stand in, with the device's own peak, multiprocessors, and best measured throughput.

Everything here takes numpy arrays as well as numbers for shapes, counts and bytes, and broadcasts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.arrays import Num
from shardwise.errors import UserError
from shardwise.model.formats import FORMS
from shardwise.predict.time.constants import Constants
from shardwise.predict.time.network import rising

if TYPE_CHECKING:
    from numpy.typing import NDArray


SPLITS = (1, 2, 4, 8)
"""Parts that the contracted dimension is cut into where there are too few tiles for the device."""

_NUMBERS = ("fp32", "bf16", "fp16", "fp8", "int8", "nvfp4", "int4")
FEW = 256
"""Rows up to which a product mostly takes as long as its weights are read: between measured numbers of so few, seconds
are interpolated, and none is faster than with fewer."""

WIDTH = {FORMS[name].dtype: FORMS[name].nbytes for name in _NUMBERS}
"""Bytes an element of each data type."""


class Kernels:
    """The kernels of one device, from its constants."""

    def __init__(self, constants: Constants) -> None:
        self.constants = constants
        self._surfaces = {dtype: surface_of(form) for dtype, form in constants.matmul.items()}
        self._numbers = lru_cache(maxsize=1 << 16)(self._of_arrays)
        self._few = lru_cache(maxsize=1 << 12)(self._of_few)
        self._latency = constants.values.get("pass_s", constants.form("bfloat16")["latency_s"])

    def matmul(self, m: Num, n: Num, k: Num, dtype: str = "bfloat16", batch: Num = 1.0, turned: str = "",
               out: Num = 0.0) -> Num:  # fmt: skip
        """Seconds of `batch` products [m, k] x [k, n] in one launch, inputs of `dtype`, output in 16 bits at least.

        turned: what of a linear layer it is, "forward" (x Wᵀ), "input" (dy W) or "weight" (dyᵀ x), where that was
        measured apart. out: bytes moved per element of the output, where that is also read or wider; such a product
        takes as long as its traffic at least.

        Source: tile quantisation as in NVIDIA, Matrix Multiplication Background User's Guide, sections 3 and 4;
        efficiencies and grid fitted on measured products (`Constants.sources`).
        """
        turn = self.constants.form(dtype).get("turns", {}).get(turned, 1.0)
        seconds = turn * self._isolated(m, n, k, dtype, batch) / self.constants.value("sustained")
        # Products in a row heat the device up to its power limit, and no longer run as fast as one alone.
        seconds = np.maximum(seconds, 2.0 * batch * m * n * k / self.constants.ceiling(dtype))
        if not np.any(out):
            return seconds
        moved = batch * (WIDTH[dtype] * (m + n) * k + out * m * n)
        return np.maximum(seconds, moved / (self.constants.bandwidth * self.constants.form(dtype)["bandwidth_share"]))

    def _isolated(self, m: Num, n: Num, k: Num, dtype: str, batch: Num) -> Num:
        """Seconds of a product that runs alone, as it was measured; of numbers, which searches repeat, once."""
        if np.ndim(m) == np.ndim(n) == np.ndim(k) == np.ndim(batch) == 0:
            return self._numbers(float(m), float(n), float(k), dtype, float(batch))
        return self._of_arrays(m, n, k, dtype, batch)

    def _of_arrays(self, m: Num, n: Num, k: Num, dtype: str, batch: Num) -> Num:
        m, n, k, batch = (np.asarray(x, dtype=float) for x in (m, n, k, batch))
        rows = self._surface(dtype).few
        few = (m >= rows[0]) & (m <= rows[-1]) if len(rows) > 1 else np.zeros(m.shape, bool)
        if not few.any():
            return self.tiled(m, n, k, dtype, batch)
        if n.ndim == k.ndim == batch.ndim == 0:
            known = self._few(float(n), float(k), dtype, float(batch))
        else:
            known = self._of_few(n, k, dtype, batch, max(each.ndim for each in (m, n, k, batch)))
        seconds = _between(rows, known, m)
        return seconds if few.all() else np.where(few, seconds, self.tiled(m, n, k, dtype, batch))

    def _of_few(self, n: Num, k: Num, dtype: str, batch: Num, ndim: int = 0) -> NDArray:
        """Seconds at the measured numbers of few rows, along the first axis, before `ndim` others. None is faster than
        with fewer rows: such readings are pooled."""
        rows = self._surface(dtype).few
        seconds = self.tiled(rows.reshape(len(rows), *(1,) * ndim), n, k, dtype, batch)
        return np.exp(rising(np.log(seconds)))

    def _surface(self, dtype: str) -> Surface:
        return self._surfaces.get(dtype) or self._surfaces["bfloat16"]

    def tiled(self, m: Num, n: Num, k: Num, dtype: str = "bfloat16", batch: Num = 1.0) -> Num:
        """Seconds by tiles and what was measured on top of them, at a shape alone."""
        form = self.constants.form(dtype)
        peak = self.constants.peak(dtype) * self.constants.plateau(dtype) * self.constants.value("clock")
        tiled = self._tiles(m, n, k, peak, batch, dtype)
        width = WIDTH[dtype]
        traffic = batch * (width * (m * k + k * n) + max(width, 2.0) * m * n)
        moved = traffic / (self.constants.bandwidth * form["bandwidth_share"])
        seconds = np.maximum(tiled, moved) + form["latency_s"]
        surface = self._surface(dtype)
        return seconds * np.exp(surface.at(m * np.where(batch > 1, np.sqrt(batch), 1.0), n, k))

    def _tiles(self, m: Num, n: Num, k: Num, peak: float, batch: Num, dtype: str = "bfloat16") -> Num:
        sms, form, best = self.constants.sms, self.constants.form(dtype), None
        # Batched products are not split over the sum.
        alone = np.asarray(batch) == 1
        every, splits = alone.all(), SPLITS if alone.any() else (1,)
        depths = {split: k / split + form["prologue_k"] for split in splits}
        sums = {split: split * 8.0 * m * n / self.constants.bandwidth for split in splits}
        down = {rows: batch * np.ceil(m / rows) for rows in {tile[0] for tile in form["tiles"]}}
        across = {columns: np.ceil(n / columns) for columns in {tile[1] for tile in form["tiles"]}}
        least = min(down)
        part = np.minimum(m / least, 1.0)  # beyond one wave, kernels for few rows work on these alone
        for rows, columns, efficiency in form["tiles"]:
            tiles = down[rows] * across[columns]
            one = 2.0 * rows * columns * sms / (peak * efficiency)
            for split in splits:
                waves = np.ceil(tiles * split / sms)
                seconds = (np.maximum(waves * part, 1.0) if rows == least else waves) * one * depths[split]
                if split > 1:
                    seconds = seconds + sums[split] + form["split_latency_s"]
                    seconds = seconds if every else np.where(alone, seconds, np.inf)
                best = seconds if best is None else np.minimum(best, seconds)
        assert best is not None
        return best

    def attention(self, batch: Num, queries: Num, keys: Num, heads: Num, kv_heads: Num, head_dim: Num,
                  causal: bool = True, dtype: str = "bfloat16", window: Num = 0,
                  attended: Num = 1.0) -> Num:  # fmt: skip
        """Seconds of one fused attention forward: FlashAttention's products, its traffic, its start.

        queries, keys: tokens of one sequence. A causal mask leaves the triangle of the square where both are equal and
        no window is narrower. attended: share of any other rectangle of queries and keys that is computed. window: keys
        that a token sees at most, 0 for all. Latency, efficiency and the loss on short sequences are fitted on measured
        kernels (`Constants.sources`); where a form has `lengths`, with what was measured over that at each of them.
        """
        form, dtype = self.constants.attention(head_dim, dtype)
        seen = np.asarray(keys, dtype=float)
        seen = np.minimum(seen, window) if np.any(window) else seen
        square = causal & (np.asarray(queries) == keys) & (seen == keys)
        pairs = queries * np.where(square, (seen + 1) / 2, seen * attended)
        flops = 4.0 * batch * heads * head_dim * pairs
        peak = self.constants.peak(dtype) * form["efficiency"] * self.constants.value("clock")
        compute = flops / peak * (1 + form["short_tokens"] / seen)
        moved = WIDTH[dtype] * 2.0 * batch * head_dim * (heads * queries + kv_heads * keys)
        seconds = compute + moved / (self.constants.bandwidth * form["bandwidth_share"]) + form["latency_s"]
        return seconds * np.exp(_by_length(form, "residual", seen)) if "lengths" in form else seconds

    def attention_ratio(self, head_dim: Num, keys: Num, dtype: str = "bfloat16") -> Num:
        """The fused backward's seconds over the forward's: five products for two, at a lower share of the peak (Dao
        2023, FlashAttention-2, section 3 and figures 5 and 6)."""
        form, _ = self.constants.attention(head_dim, dtype)
        if "lengths" in form:
            return 2.5 * _by_length(form, "backward", keys)
        return 2.5 * (form["backward"] if "backward" in form else self.constants.value("attention_backward"))

    def pass_over(self, nbytes: Num, of: str = "", dtype: str = "bfloat16") -> Num:
        """Seconds of an element-wise or reducing kernel that moves `nbytes` bytes to and from memory.

        of: which operation, whose share of the bandwidth may have been measured apart, for a dtype.
        """
        known = (f"stream_{of}_{dtype}", f"stream_{dtype}")
        share = next((self.constants.values[name] for name in known if name in self.constants.values), None)
        share = share or self.constants.value("stream")
        return nbytes / (self.constants.bandwidth * share) + self._latency


def _by_length(form: Mapping[str, Any], name: str, keys: Num) -> Num:
    """A figure of a form of attention that was measured at several lengths: between them in the logarithm, at the ends
    beyond them."""
    return np.interp(np.log(keys), np.log(form["lengths"]), form[name])


def _between(rows: NDArray, seconds: NDArray, m: NDArray) -> Num:
    """Seconds at m rows from those at `rows`, along the first axis: between them in the logarithms."""
    if seconds.ndim == 1:
        return np.exp(np.interp(np.log(m), np.log(rows), np.log(seconds)))
    shape = np.broadcast_shapes(m.shape, seconds.shape[1:])
    logs, at = np.broadcast_to(np.log(seconds), (len(rows), *shape)), np.broadcast_to(np.log(m), shape)
    below = np.clip(np.searchsorted(np.log(rows), at) - 1, 0, len(rows) - 2)
    share = np.clip((at - np.log(rows)[below]) / np.diff(np.log(rows))[below], 0.0, 1.0)
    low, high = (np.take_along_axis(logs, i[None], 0)[0] for i in (below, below + 1))
    return np.exp(low + share * (high - low))


class Surface:
    """ln(measured / modelled seconds) over a grid of shapes, interpolated in the logarithms, the edge beyond it."""

    def __init__(self, axes: list[NDArray], table: NDArray) -> None:
        self.axes = [np.log(axis) for axis in axes]
        self.few, self.table = axes[0][axes[0] <= FEW], table

    def at(self, *shape: Num) -> Num:
        """The residual at (m, n, k), each a number or an array."""
        below, share = [], []
        for axis, size in zip(self.axes, shape, strict=True):
            at = np.clip(np.log(size), axis[0], axis[-1])
            i = np.clip(np.searchsorted(axis, at) - 1, 0, len(axis) - 2)
            below.append(i)
            share.append((at - axis[i]) / (axis[i + 1] - axis[i]))
        total: Num = 0.0
        for corner in np.ndindex(2, 2, 2):
            weight: Num = 1.0
            for up, part in zip(corner, share, strict=True):
                weight = weight * (part if up else 1 - part)
            total = total + weight * self.table[tuple(i + up for i, up in zip(below, corner, strict=True))]
        return total


def surface_of(form: Mapping[str, Any]) -> Surface:
    """The grid of a tile model: its own axes and table, or one of the package by its name. Raises `UserError` for a
    table that is not of its axes' lengths."""
    if "residual" not in form:
        return _surface(form["surface"])
    try:
        axes, table = [np.array(axis, dtype=float) for axis in form["axes"]], np.array(form["residual"], dtype=float)
    except (KeyError, TypeError, ValueError):
        axes, table = [], np.zeros(())
    if table.shape != tuple(map(len, axes)) or len(axes) != 3 or min(map(len, axes)) < 2:
        raise UserError("a measured grid of products needs axes of three lengths or more, and a table of those lengths")
    return Surface(axes, table)


@lru_cache
def _surface(name: str) -> Surface:
    with np.load(Path(__file__).with_name("surfaces.npz")) as stored:
        axes = [stored[f"{name}.{axis}"].astype(float) for axis in "mnk"]
        return Surface(axes, stored[f"{name}.residual"].astype(np.float32) / 100)

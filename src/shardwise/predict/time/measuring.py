"""A `Device` from what `shardwise calibrate device` measured: the table `time` of its cluster file.

The table has what `constants.py` reads: `family`, `sms`, `values` (shares of the bandwidth by operation and dtype,
seconds of a call), `matmul` (dtype -> tile model, with the grid that was measured), `attention` (dtype -> head width ->
form) and, where ranks measured together, `collectives` (sizes, and seconds by collective and number of ranks).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shardwise.cluster import Device
from shardwise.model import ModelConfig
from shardwise.model.parameters import blueprint
from shardwise.predict.time.block import Shape, tally_part
from shardwise.predict.time.constants import catalog_form, constants
from shardwise.predict.time.kernels import WIDTH, Kernels
from shardwise.predict.time.profiles import engine
from shardwise.predict.time.traffic import ADDING, PACKING

if TYPE_CHECKING:
    from numpy.typing import NDArray

COUNTED = {
    "": 3.0, "norm": 11.0, "activation": 13.0, "rotation": 12.0, "softmax": 32.0, "loss": 4.0,
    "packing": PACKING / WIDTH["float32"], "unpacking": ADDING / WIDTH["float32"],
}  # fmt: skip
"""Elements that `block.py` counts for each element of an operation, forward and backward, as this project's decoder is
counted on a CPU: norm with the residual that it belongs to; packed gradients as `traffic.py` counts them, in fp32."""
PROFILES = {"cpu": "shardwise-cpu", "cuda": "shardwise"}
"""Kind of device -> the profile that counts operations there."""
FAMILIES = {8: "Ampere", 9: "Hopper"}
"""Compute capability's first number -> family; Blackwell for what is newer."""

Told = Mapping[str, Any]
Samples = Sequence[Mapping[str, Any]]


def device_of(
    told: Told, name: str, kind: Literal["cpu", "cuda"], memory: int | None, model: ModelConfig, source: str
) -> Device:
    """The device that samples describe. told: what `runtime.measure.calibration` wrote, {"about", "samples"}.
    memory: bytes. model: the one whose block was timed for what calls take."""
    samples: Samples = told["samples"]
    peaks = _peaks(samples)
    bandwidth = _figure(next(2.0 * s["shape"][0] / s["seconds"] for s in samples if s["what"] == "copy"))
    family = "CPU" if kind == "cpu" else family_of(told["about"]["capability"])
    table: dict[str, Any] = {
        "family": family,
        "sms": 1 if kind == "cpu" else told["about"]["sms"],
        "values": _values(samples, told["about"], bandwidth, kind),
        "matmul": {},
        "attention": {dtype: _attention(samples, dtype, peak, bandwidth) for dtype, peak in peaks.items()},
    }
    if found := _collectives(samples):
        table["collectives"] = found
    if sustained := {s["of"][0]: _rate(s) for s in samples if s["what"] == "sustained"}:
        table["sustained"] = sustained
    tiles = dict(_FLAT if kind == "cpu" else catalog_form(family))
    flat = {**tiles, "axes": [[1, 2]] * 3, "residual": np.zeros((2, 2, 2)).tolist()}
    table["matmul"] = dict.fromkeys(peaks, flat)
    bare = Device(name, kind, memory, bandwidth, peaks, source, table)
    kernels = Kernels(constants(bare))
    table["matmul"] = {dtype: _matmul(samples, dtype, tiles, kernels) for dtype in peaks}
    took = next(s["seconds"] for s in samples if s["what"] == "block")
    (block,) = blueprint(model).of_kind("block")
    small = Shape(1, 8, 1, 8, 8, dtype="float32")
    launches = tally_part(block, model, small, engine(PROFILES[kind]), kernels).launches
    call = _figure(took / (launches["forward"] + launches["backward"]))
    table["values"]["pass_s" if kind == "cpu" else "launch_s"] = call
    return Device(name, kind, memory, bandwidth, peaks, source, table)


def family_of(capability: Sequence[int]) -> str:
    """The architecture that a CUDA device's compute capability stands for; Ampere for what is older."""
    return FAMILIES.get(max(capability[0], 8), "Blackwell")


_FLAT = {"tiles": [[1, 1, 1.0]], "latency_s": 0.0, "split_latency_s": 0.0, "bandwidth_share": 1.0, "prologue_k": 0.0}
"""A device without multiprocessors to fill: FLOPs over the peak, and the measured grid on top."""


def _figure(number: float) -> float:
    """Four digits: no measurement has more."""
    return float(f"{number:.4g}")


def _peaks(samples: Samples) -> dict[str, float]:
    peaks: dict[str, float] = {}
    for sample in samples:
        if sample["what"] == "product":
            dtype = sample["of"][0]
            peaks[dtype] = max(peaks.get(dtype, 0.0), _rate(sample))
    return peaks


def _rate(product: Mapping[str, Any]) -> float:
    """FLOP/s of a matrix product."""
    return _figure(2.0 * np.prod(np.array(product["shape"], float)) / product["seconds"])


def _values(samples: Samples, about: Told, bandwidth: float, kind: str) -> dict[str, float]:
    values = {}
    for sample in samples:
        if sample["what"] == "pass":
            of, dtype = sample["of"]
            moved = float(np.prod(sample["shape"])) * _counted(of, dtype, kind)
            values[_stream(of, dtype)] = _figure(moved / (bandwidth * sample["seconds"]))
        elif sample["what"] == "row":
            dtype, moved = sample["of"][0], float(np.prod(sample["shape"])) * WIDTH[sample["of"][0]]
            values[f"gemv_{dtype}"] = _figure(moved / (bandwidth * sample["seconds"]))
        elif sample["what"] == "taken":
            # More ranks than cores wait for each other in any case.
            shared = min(sample["seconds"], about["ranks"] / about["cores"] - 1) if "cores" in about else 0.0
            values["shared"] = _figure(max(shared, 0.0))
            values["taken"] = _figure(max(sample["seconds"] - values["shared"], 0.0))
    return values


def _counted(of: str, dtype: str, kind: str) -> float:
    """Bytes of an operation for each element."""
    profile = engine(PROFILES[kind])
    if of == "optimizer":
        return profile.optimizer_bytes
    return (sum(profile.loss_passes) if of == "loss" else COUNTED[of]) * WIDTH[dtype]


def _stream(of: str, dtype: str) -> str:
    return "_".join(word for word in ("stream", of, dtype) if word)


def seconds_an_element(device: Device, of: str, dtype: str) -> float:
    """Time of a memory-bound operation on a measured device, forward and backward."""
    assert device.memory_bandwidth
    share: float = device.measured["values"][_stream(of, dtype)]
    return _counted(of, dtype, device.kind) / (device.memory_bandwidth * share)


def _matmul(samples: Samples, dtype: str, form: Mapping[str, Any], kernels: Kernels) -> dict[str, Any]:
    """The grid of ln(measured / tiles), the mean over what a product is in a linear layer; and how these differ."""
    rows = [s for s in samples if s["what"] == "product" and s["of"][0] == dtype]
    axes = [np.unique(lengths).tolist() for lengths in zip(*(row["shape"] for row in rows), strict=True)]
    logs: dict[str, NDArray] = {}
    for row in rows:
        table = logs.setdefault(row["of"][1], np.full([len(axis) for axis in axes], np.nan))
        at = tuple(axis.index(length) for axis, length in zip(axes, row["shape"], strict=True))
        m, n, k = row["shape"]
        table[at] = np.log(row["seconds"] / float(kernels.matmul(m, n, k, dtype)))
    mean = np.mean(list(logs.values()), axis=0)
    turns = {turn: _figure(float(np.exp(np.nanmean(table - mean)))) for turn, table in logs.items()}
    return {**form, "turns": turns, "axes": axes, "residual": np.round(filled(mean), 3).tolist()}


def filled(table: NDArray) -> NDArray:
    """A table of three axes, whose entries that were not measured take the mean of their neighbours that were."""
    while np.isnan(table).any():
        padded = np.pad(table, 1, constant_values=np.nan)
        near = [np.roll(padded, shift, axis)[1:-1, 1:-1, 1:-1] for axis in range(3) for shift in (1, -1)]
        stack = np.stack(near)
        known = ~np.isnan(stack)
        mean = np.where(known.any(0), np.nansum(stack, 0) / np.maximum(known.sum(0), 1), np.nan)
        table = np.where(np.isnan(table), mean, table)
    return table


def _attention(samples: Samples, dtype: str, peak: float, bandwidth: float) -> dict[str, dict[str, Any]]:
    """Head width -> efficiency and loss on short sequences, for `Kernels.attention`; and at each length ln(measured /
    that), and the backward's ratio."""
    ways: dict[str, dict[tuple[int, ...], float]] = {"forward": {}, "both": {}}
    for sample in samples:
        if sample["what"] == "attention" and sample["of"][0] == dtype:
            ways[sample["of"][1]][tuple(sample["shape"])] = sample["seconds"]
    forms = {}
    for width in sorted({shape[3] for shape in ways["forward"]}):
        mine = {shape: seconds for shape, seconds in ways["forward"].items() if shape[3] == width}
        back = [max(ways["both"][shape] / seconds - 1, 0.5) for shape, seconds in mine.items()]
        batch, length, heads, _ = np.array(list(mine), dtype=float).T
        seconds = np.array(list(mine.values()))
        compute = 4.0 * batch * heads * width * length * (length + 1) / 2 / peak
        moving = WIDTH[dtype] * 4.0 * batch * width * heads * length / bandwidth
        rows = np.stack([compute, compute / length], axis=1)
        whole, short = _fitted(rows, np.maximum(seconds - moving, seconds / 5))
        over = np.log(seconds / (rows @ [whole, short] + moving))
        forms[str(width)] = {
            "efficiency": _figure(1 / whole), "short_tokens": _figure(short / whole), "bandwidth_share": 1.0,
            "latency_s": 0.0, "lengths": length.tolist(), "residual": np.round(over, 3).tolist(),
            "backward": [_figure(ratio / 2.5) for ratio in back],
        }  # fmt: skip
    return forms


def _fitted(rows: NDArray, took: NDArray) -> tuple[float, float]:
    """The two factors that explain `took` with the least relative error: the first at least 1, since nothing computes
    faster than the best product, the second not negative."""
    (whole, short), *_ = np.linalg.lstsq(rows / took[:, None], np.ones(len(took)), rcond=None)
    if short < 0:
        return max(1.0, float(np.mean(took / rows[:, 0]))), 0.0
    if whole < 1:
        rest, column = 1 - rows[:, 0] / took, rows[:, 1] / took
        return 1.0, max(0.0, float(rest @ column / (column @ column)))
    return float(whole), float(short)


def _collectives(samples: Samples) -> dict[str, Any]:
    """sizes, collective -> ranks -> seconds, message -> seconds: what `network.py` reads."""
    mine = [s for s in samples if s["what"] == "collective"]
    found: dict[str, Any] = {"sizes": sorted({s["shape"][0] for s in mine})} if mine else {}
    for sample in sorted(mine, key=lambda s: s["shape"][0]):
        op, ranks = sample["of"][0], str(sample["shape"][1])
        row = found.setdefault(op, []) if op == "message" else found.setdefault(op, {}).setdefault(ranks, [])
        row.append(_figure(sample["seconds"]))
    return found

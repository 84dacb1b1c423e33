"""The constants of a device: one set each, every one with its source beside it (`devices.json`, `kernels.json`).

None of them belongs to a model or to a source of measurements. `make fit` computes them again from kernel timings and
published steps; a device without a file of its own takes those of its relative, which `Constants.notes` says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import resources
from typing import Any

from shardwise.cluster import Device
from shardwise.errors import UserError


@dataclass(frozen=True)
class Constants:
    """What the time model knows of one device.

    family: the architecture, whose kernels and collectives stand for it. peaks: torch's dtype -> FLOP/s. bandwidth:
    bytes/s. sms: multiprocessors (or the like). matmul: the tile model. attentions: head width -> form. plateaus: dtype
    -> best measured throughput over peak, relative to what the tiles reach. values: name -> number. sources: name ->
    where it is from. notes: what stands in for measurements that there are none of.
    """

    name: str
    family: str
    peaks: Mapping[str, float]
    bandwidth: float
    sms: float
    matmul: Mapping[str, Any]
    attentions: Mapping[str, Mapping[str, float]]
    plateaus: Mapping[str, float]
    values: Mapping[str, float]
    sources: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def peak(self, dtype: str) -> float:
        """FLOP/s of a dtype, or of the wider one that it is widened to where the device lacks it. Raises `UserError`
        where it has none of them."""
        for name in _FALLBACK.get(dtype, (dtype,)):
            if name in self.peaks:
                return self.peaks[name]
        raise UserError(f"{self.name} computes nothing in {dtype}; known are {', '.join(self.peaks)}")

    def plateau(self, dtype: str) -> float:
        return self.plateaus.get(dtype, 1.0)

    def value(self, name: str) -> float:
        return self.values[name]

    def attention(self, head_dim: Any) -> Mapping[str, float]:
        """The form of the measured head width that is nearest."""
        width = float(head_dim if not hasattr(head_dim, "max") else head_dim.max())
        known = [name for name in self.attentions if name != "source"]
        return self.attentions[min(known, key=lambda name: (abs(int(name) - width), int(name)))]

    def with_values(self, **values: float) -> Constants:
        """A copy with some values changed: what a fit tries."""
        return replace(self, values={**self.values, **values})


_FALLBACK = {
    "bfloat16": ("bfloat16", "float16"),
    "float16": ("float16", "bfloat16"),
    "float8_e4m3fn": ("float8_e4m3fn", "bfloat16", "float16"),
    "int8": ("bfloat16", "float16"),
    "int4": ("bfloat16", "float16"),
    "float4": ("float4", "float8_e4m3fn", "bfloat16"),
    "float32": ("tfloat32", "float32"),
}


@lru_cache
def _file() -> dict[str, Any]:
    home = resources.files("shardwise.predict.time")
    files = (json.loads((home / name).read_text(encoding="utf-8")) for name in ("kernels.json", "devices.json"))
    return {key: value for file in files for key, value in file.items()}


def nccl_table(family: str) -> dict[str, Any]:
    """sizes -> bytes; collective -> ranks -> ln(measured / priced seconds) at those sizes."""
    return _file()["nccl"][_file()["families"][family]["nccl"]]


def uncertainty() -> dict[str, float]:
    """Kind of a part, or "common", "borrowed", "assumed" -> relative standard deviation."""
    return _file()["ranges"]["values"]


def known_devices() -> list[str]:
    """Names of the catalog for which `constants` has figures."""
    return list(_file()["devices"])


@lru_cache
def _entry(name: str) -> dict[str, Any]:
    entry = _file()["devices"].get(name)
    if entry is None:
        raise UserError(
            f"no constants of time for {name}; known are {', '.join(known_devices())} (`make fit`, calibrate)"
        )
    return entry


def constants(device: Device) -> Constants:
    """The constants of a device of the catalog. Raises `UserError` for a device without any, or without bandwidth."""
    entry, family = _entry(device.name), _file()["families"]
    values: dict[str, float] = {}
    sources: dict[str, str] = {}
    for level in (family[entry["family"]]["values"], entry.get("values", {})):
        for name, told in level.items():
            values[name], sources[name] = told["value"], told["source"]
    kernels = family[entry["family"]]
    if device.memory_bandwidth is None:
        raise UserError(f"{device.name}: the memory bandwidth is not known")
    return Constants(
        name=device.name,
        family=entry["family"],
        peaks=dict(device.peak_flops),
        bandwidth=device.memory_bandwidth,
        sms=entry["sms"],
        matmul=_file()["matmul"][kernels["matmul"]],
        attentions=_file()["attention"][kernels["attention"]],
        plateaus={dtype: told["value"] for dtype, told in entry.get("plateaus", {}).items()},
        values=values,
        sources=sources | {"matmul": _file()["matmul"][kernels["matmul"]]["source"]},
        notes=tuple(entry.get("notes", ())),
    )

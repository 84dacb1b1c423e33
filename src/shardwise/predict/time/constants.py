"""The constants of a device: one set each, every one with its source beside it (`devices.json`, `kernels.json`).

None of them belongs to a model or to a source of measurements. `make fit` computes them again from kernel timings and
published steps; a device without a file of its own takes those of its relative, which `Constants.notes` says.

A device that `shardwise calibrate device` has measured brings its own, in its cluster file (`Device.measured`): the
same kinds of figures, with those of its family for what one device alone cannot tell.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from shardwise.cluster import Device
from shardwise.errors import UserError
from shardwise.model.formats import weight_format
from shardwise.records import dataclass


@dataclass(frozen=True)
class Constants:
    """Constants of one device.

    family: the architecture, whose kernels and collectives stand for it. peaks: torch's dtype -> FLOP/s. bandwidth:
    bytes/s. sms: multiprocessors (or the like). matmul: dtype -> the tile model. attentions: dtype -> head width ->
    form. plateaus: dtype -> best measured throughput over peak, relative to what the tiles reach. values: name ->
    number. collectives: what a library takes over the schedules' prices, sizes -> bytes and collective -> ranks ->
    ln(measured / priced seconds) at these, on the device `nccl` of the catalog; `timed`: the same with seconds,
    measured on this device. sources: name -> where it is from. notes: assumptions in place of missing
    measurements.
    """

    name: str
    family: str
    peaks: Mapping[str, float]
    bandwidth: float
    sms: float
    matmul: Mapping[str, Any]
    attentions: Mapping[str, Mapping[str, Mapping[str, float]]]
    plateaus: Mapping[str, float]
    values: Mapping[str, float]
    collectives: Mapping[str, Any] = field(default_factory=dict)
    timed: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    nccl: str = ""
    sustained: Mapping[str, float] = field(default_factory=dict)
    """Measured FLOP/s of matrix products over seconds, under the power limit, by dtype."""
    uncertain: float = 0.0
    """Relative uncertainty of all times of this device, beside what every device has."""
    fitted_on: tuple[str, ...] = ()
    """Sources of published steps on which rates of this device were fitted: no evidence for them."""
    experts: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    """Engine -> format of weights -> constants of a routed layer in one grouped launch (`experts.py`)."""

    def peak(self, dtype: str) -> float:
        """FLOP/s of a dtype, or of the wider one that it is widened to. Raises `UserError` where there is none."""
        return self.peaks[self._computed(dtype)]

    def _computed(self, dtype: str) -> str:
        for name in _FALLBACK.get(dtype, (dtype,)):
            if name in self.peaks:
                return name
        raise UserError(f"{self.name} computes nothing in {dtype}; known are {', '.join(self.peaks)}")

    def ceiling(self, dtype: str) -> float:
        """FLOP/s that products of a dtype reach over seconds at most: as measured on the device, else the share of the
        peak that bf16 or its family reaches."""
        name, usual = self._computed(dtype), self.sustained.get("bfloat16")
        share = min(usual / self.peaks["bfloat16"], 1.0) if usual else self.value("sustained_share")
        return self.sustained.get(name) or self.peaks[name] * share

    def plateau(self, dtype: str) -> float:
        return self.plateaus.get(dtype, self.plateaus.get("bfloat16", 1.0))

    def value(self, name: str) -> float:
        """A figure by its name. Raises `UserError` where nobody knows it of this device."""
        if name not in self.values:
            raise UserError(f"{self.name}: {name} is not known of it, and this needs it")
        return self.values[name]

    def form(self, dtype: str) -> Mapping[str, Any]:
        """The tile model for products of a dtype: its own, or that of 16 bits."""
        return self.matmul.get(dtype) or self.matmul["bfloat16"]

    def attention(self, head_dim: Any, dtype: str = "bfloat16") -> tuple[Mapping[str, float], str]:
        """(the form of the measured head width that is nearest, the dtype whose peak it is relative to)."""
        dtype = dtype if dtype in self.attentions else "bfloat16"
        forms = self.attentions[dtype]
        width = float(head_dim if not hasattr(head_dim, "max") else head_dim.max())
        known = [name for name in forms if name != "source"]
        return forms[min(known, key=lambda name: (abs(int(name) - width), int(name)))], dtype

    def expert_form(self, engine: str, weights: str) -> Mapping[str, float]:
        """Constants of an engine's routed layer: as measured with this format of weights, else with the nearest one
        whose kernels compute in the same type, else in 16 bits. Raises `UserError` where none was measured."""
        forms = self.experts.get(engine) or next(iter(self.experts.values()), None)
        if not forms:
            raise UserError(f"{self.name}: routed layers in one launch were not measured on it, and this needs them")
        dtype, words = weight_format(weights).dtype, weights
        same = [name for name in forms if weight_format(name).dtype == dtype]
        near = [name for name in same if weight_format(name).block == weight_format(words).block]
        return forms[words if words in forms else next(iter([*near, *same]), "bf16")]

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
    home = Path(__file__)
    names = ("kernels.json", "devices.json")
    files = (json.loads(home.with_name(name).read_text(encoding="utf-8")) for name in names)
    return {key: value for file in files for key, value in file.items()}


@lru_cache
def _routed_layers(name: str) -> dict[str, Any]:
    """Constants of routed layers, by engine and format of weights."""
    stored = json.loads(Path(__file__).with_name("experts.json").read_text(encoding="utf-8"))
    return stored.get(name, {})


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
            f"no constants of time for {name}: measure it, `shardwise calibrate device --ranks N --out FILE.toml`, and "
            "give --cluster FILE.toml; `shardwise list devices` has those of known times"
        )
    return entry


def constants(device: Device) -> Constants:
    """The constants of a device of the catalog, or of one that was measured. Raises `UserError` for a device without
    any, or without bandwidth, and where a file's are damaged."""
    if device.measured:
        return _measured(device)
    entry = _entry(device.name)
    known = _values(entry["family"]) | entry.get("values", {})
    kernels = {**_file()["families"][entry["family"]], **entry.get("kernels", {})}
    sources = {name: told["source"] for name, told in known.items()}
    return Constants(
        **_of_family(device, entry["family"], kernels),
        sms=entry["sms"],
        matmul={"bfloat16": _file()["matmul"][kernels["matmul"]]},
        attentions={"bfloat16": _file()["attention"][kernels["attention"]]},
        plateaus={dtype: told["value"] for dtype, told in entry.get("plateaus", {}).items()},
        values={name: told["value"] for name, told in known.items()},
        sources=sources | {"matmul": _file()["matmul"][kernels["matmul"]]["source"]},
        notes=tuple(entry.get("notes", ())),
        sustained={dtype: told["value"] for dtype, told in entry.get("sustained_flops", {}).items()},
        uncertain=entry.get("uncertain", 0.0),
        fitted_on=tuple(entry.get("fitted_on", ())),
    )


def _of_family(device: Device, family: str, kernels: Mapping[str, Any]) -> dict[str, Any]:
    """What a device of the catalog and a measured one have in common. kernels: names of its tables."""
    if device.memory_bandwidth is None:
        raise UserError(f"{device.name}: the memory bandwidth is not known")
    return {
        "name": device.name,
        "family": family,
        "peaks": dict(device.peak_flops),
        "bandwidth": device.memory_bandwidth,
        "collectives": _file()["nccl"][kernels["nccl"]] if kernels["nccl"] else {},
        "nccl": kernels["nccl"] or "",
        "experts": _routed_layers(kernels["matmul"]) if kernels["matmul"] else {},
    }


def _measured(device: Device) -> Constants:
    """Constants of a device in a cluster file, on top of its family's."""
    table, families = device.measured, _file()["families"]
    name = f"{device.name}: its table `time`"
    if table.get("family") not in families:
        raise UserError(f"{name} names the family {table.get('family')!r}; known are {', '.join(families)}")
    common = _of_family(device, table["family"], families[table["family"]])
    known = _values(table["family"])
    values = {name: told["value"] for name, told in known.items()}
    sources = {name: told["source"] for name, told in known.items()}
    values["sustained_share"] = 1.0  # its peak is what its own products reach
    missing = [key for key in ("sms", "values", "matmul", "attention") if key not in table]
    missing += [dtype for dtype in ("matmul.float32", "matmul.bfloat16") if not _at(table, dtype)]
    if missing:
        raise UserError(f"{name} lacks {', '.join(missing)}; measure again: shardwise calibrate device")
    own = {key: _figure(name, key, value) for key, value in table["values"].items()}
    sustained: Mapping[str, Any] = table.get("sustained", {})
    return Constants(
        **common,
        sms=_figure(name, "sms", table["sms"]),
        matmul=table["matmul"],
        attentions=table["attention"],
        plateaus={},
        values=values | own,
        timed=table.get("collectives", {}),
        sources=sources | dict.fromkeys([*own, "matmul", "attention"], device.source),
        sustained={dtype: _figure(name, f"sustained.{dtype}", rate) for dtype, rate in sustained.items()},
    )


def _values(family: str) -> dict[str, Any]:
    """Values of a family: its own, else those that all share, without those that it has not (null)."""
    known = _file()["shared"]["values"] | _file()["families"][family]["values"]
    return {name: told for name, told in known.items() if told is not None}


def _at(table: Mapping[str, Any], path: str) -> Any:
    for key in path.split("."):
        table = table.get(key, {}) if isinstance(table, Mapping) else {}
    return table


def _figure(name: str, key: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise UserError(f"{name}: {key} must be a number and not negative, not {value!r}")
    return float(value)


def catalog_form(family: str) -> dict[str, Any]:
    """The tile model that stands for a family's devices, without the name of its grid."""
    form = _file()["matmul"][_file()["families"][family]["matmul"]]
    return {name: value for name, value in form.items() if name not in ("surface", "source")}

"""Kernels and blocks measured on one device against the time model, leaving one model out at a time.

A file (`validate --blocks FILE`) has `device` and `rows`: blocks of Llama decoders cut for tp (`what: block`), fused
attention (`attention`) and products (`product`), each alone on the device for a short while.

One number is fitted, on the rows of the other models: the rate that products reach in so short a measurement, for which
the power limit leaves more than over hours (`Constants.sustained`). Rows in which the host's launches are not well
hidden by the device are scored apart.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from shardwise.cluster import Cluster, catalog
from shardwise.cluster.catalog import accelerators
from shardwise.errors import UserError, os_errors
from shardwise.model import ModelConfig
from shardwise.model.catalog import get
from shardwise.model.parameters import blueprint
from shardwise.predict.time.block import Shape, tally_part
from shardwise.predict.time.constants import constants
from shardwise.predict.time.kernels import Kernels
from shardwise.predict.time.profiles import engine

ENGINES = {"eager": "fsdp2", "compiled": "fsdp2-compiled"}
"""Mode of a block -> the profile of its software."""

HIDDEN = 2
"""Rows whose device is busy for less than so many times the host's launches are bound by the host."""

CEILINGS = [0.68 + 0.02 * step for step in range(8)]
"""Shares of the peak among which the rate of products is fitted."""

ALIASES = {"llama-3.1-405b": "llama-3-405b"}
"""Names of models in files -> in the catalog."""

SHAPES = {2048: "llama-3.2-1b", 4096: "llama-3-8b", 8192: "llama-3-70b", 16384: "llama-3.1-405b"}
"""Width -> the model whose shape a product has."""


@dataclass(frozen=True)
class MeasuredRow:
    """One measurement: its kind, the model whose shape it has, measured and predicted seconds."""

    kind: str
    model: str
    measured: float
    device: float
    """Predicted seconds of the device."""
    host: float
    """Seconds of the host for the launches."""

    @property
    def host_bound(self) -> bool:
        return self.device < HIDDEN * self.host

    @property
    def error(self) -> float:
        """Predicted over measured, less one: the longer of device and host, each of which waits for the other."""
        return (self.device**4 + self.host**4) ** 0.25 / self.measured - 1


@dataclass(frozen=True)
class BlockScore:
    """Errors of one kind of rows, each predicted with its model left out."""

    kind: str
    rows: int
    mean_abs_error: float
    bias: float
    worst: float
    """The largest mean error of one model's rows."""


def read_blocks(path: Path) -> tuple[Cluster, list[Mapping[str, Any]]]:
    """The device and the rows of a file. Raises `UserError` for a file of another form, and for an unknown device."""
    other = f"{path} must be a JSON object with `device` and `rows`, as h100_blocks.json has"
    with os_errors(f"read {path}", typed=path, damaged=other):
        table = json.loads(path.read_text(encoding="utf-8"))
        name, rows = str(table["device"]), list(table["rows"])
    drivers = {entry.driver_name: device for device, entry in accelerators().devices.items() if entry.driver_name}
    known = [driver for driver in drivers if driver in name]
    if not known:
        raise UserError(f"{path}: device {name!r} is not in the catalog: `shardwise list devices`")
    entry = catalog.lookup(drivers[max(known, key=len)])
    return Cluster(1, 1, entry.device, entry.intra, entry.inter), rows


def block_scores(cluster: Cluster, rows: Sequence[Mapping[str, Any]]) -> list[BlockScore]:
    """A score for each kind of rows, and of those bound by the host. Raises `UserError` where nothing can be scored."""
    known = constants(cluster.device)
    usable = [row for row in rows if row.get("what") in _KINDS]
    if not usable:
        raise UserError(f"no row is one of {', '.join(_KINDS)}")

    @cache
    def measured(share: float) -> list[MeasuredRow]:
        peak = known.peak("bfloat16")
        kernels = Kernels(replace(known, sustained={"bfloat16": share * peak, "float16": share * peak}))
        return [one for row in usable for one in _KINDS[row["what"]](row, kernels)]

    models = sorted({one.model for one in measured(CEILINGS[0])})
    scored: list[MeasuredRow] = []
    for model in models:
        others = [place for place, one in enumerate(measured(CEILINGS[0])) if one.model != model] or [0]
        best = min(CEILINGS, key=lambda share: fmean(_fitting(measured(share)[place]) for place in others))
        scored += [one for one in measured(best) if one.model == model]
    kinds = dict.fromkeys(_kind(one) for one in scored)
    return [_score(kind, [one for one in scored if _kind(one) == kind]) for kind in kinds]


def _fitting(one: MeasuredRow) -> float:
    """Error that the fitted rate is chosen by: of rows that the device alone decides."""
    return 0.0 if one.host_bound else abs(one.error)


def _kind(one: MeasuredRow) -> str:
    return "host-bound" if one.host_bound else one.kind


def _score(kind: str, rows: Sequence[MeasuredRow]) -> BlockScore:
    errors = [one.error for one in rows]
    models = {one.model for one in rows}
    worst = max(fmean(abs(one.error) for one in rows if one.model == model) for model in models)
    return BlockScore(kind, len(rows), fmean(map(abs, errors)), fmean(errors), worst)


def _block(row: Mapping[str, Any], kernels: Kernels) -> list[MeasuredRow]:
    name = ENGINES.get(str(row.get("mode")))
    if name is None:
        raise UserError(f"a block's mode must be one of {', '.join(ENGINES)}, not {row.get('mode')!r}")
    model: ModelConfig = get(ALIASES.get(row["model"], row["model"]))
    tokens = row["micro"] * row["seq"]
    shape = Shape(row["micro"], row["seq"], row["tp"], tokens, row["seq"])
    tally = tally_part(blueprint(model).of_kind("block")[0], model, shape, engine(name), kernels)
    seconds = float(sum(tally.forward.values()) + sum(tally.backward.values()))
    launches = float(tally.launches["forward"] + tally.launches["backward"])
    host = launches * kernels.constants.value("launch_s")
    return [MeasuredRow(f"{row['mode']} blocks", row["model"], row["forward_backward_s"], seconds, host)]


def _attention(row: Mapping[str, Any], kernels: Kernels) -> list[MeasuredRow]:
    width, launch = row["head_dim"], kernels.constants.value("launch_s")
    forward = float(
        kernels.attention(row["batch"], row["queries"], row["keys"], row["heads"], row["kv"], width, row["causal"])
    )
    both = forward * (1 + float(kernels.attention_ratio(width, row["keys"])))
    name = f"{row['heads']} heads of {width}"
    return [
        MeasuredRow("attention forward", name, row["forward_s"], forward, launch),
        MeasuredRow("attention forward and backward", name, row["forward_backward_s"], both, 4 * launch),
    ]


def _product(row: Mapping[str, Any], kernels: Kernels) -> list[MeasuredRow]:
    known = kernels.constants
    seconds = float(kernels.matmul(row["m"], row["n"], row["k"])) + known.value("kernel_launch_s")
    widths = [width for width in SHAPES if row["k"] == width or row["n"] == width]
    model = SHAPES[min(widths)] if widths else f"[{row['n']}, {row['k']}]"
    return [MeasuredRow("products", model, row["s"], seconds, known.value("launch_s"))]


_KINDS = {"block": _block, "attention": _attention, "product": _product}

"""Fit what a routed layer takes in one grouped launch on measured devices, and write it into the package.

    python benchmarks/fit_experts.py FOLDER [--check]

FOLDER is an unpacked wheel aiconfigurator-core 0.12.0 (Apache-2.0): `pip download aiconfigurator-core==0.12.0
--no-deps` and `unzip`. Its tables `moe_perf.parquet` have the seconds of one routed layer (choice of experts, rows laid
out by expert, both products, weighted sum) by device, engine, type of weights, tokens, widths, degrees and routing.
Written: predict/time/experts.json. Shapes of models that the scoreboard and `routed_layers.json` have (`JUDGED`) are
left out of the fit; --check writes nothing and prints the errors of the stored constants on them. Needs pyarrow; two
minutes on one core.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet

import shardwise.predict.time
from shardwise.cluster.catalog import lookup
from shardwise.model.formats import weight_format
from shardwise.predict.time.constants import constants
from shardwise.predict.time.experts import RoutedLayer, grouped_seconds
from shardwise.predict.time.ranges import time_range

FILE = Path(shardwise.predict.time.__file__).with_name("experts.json")
DATA = "aiconfigurator_core/systems/data"
SYSTEMS = {
    "A100": ("a100_sxm", "A100"), "H100": ("h100_sxm", "H100"), "H200": ("h200_sxm", "H200"),
    "B200": ("b200_sxm", "B200"), "GB200": ("gb200", "GB200-NVL72"), "B300": ("b300_sxm", "B300"),
    "GB300": ("gb300", "GB300-NVL72"), "L40S": ("l40s", "L40S"),
    "RTX-PRO-6000": ("rtx_pro_6000_server", "RTX-PRO-6000-Server"),
}  # fmt: skip
"""Name in `kernels.json` -> (folder of the wheel, device of the catalog)."""
VERSIONS = {"tensorrt-llm": ("trtllm", ("1.3.0rc20", "1.0.0")), "vllm": ("vllm", ("0.24.0", "0.14.0"))}
"""Profile -> (folder, versions, the first that is there counts)."""
TYPES = {
    "bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8-block128x128", "nvfp4": "nvfp4-g16", "int4_wo": "int4-g128",
    "w4a16_mxfp4": "mxfp4-g32",
}  # fmt: skip
"""Type in the wheel -> format of the weights (`model/precision.py`)."""
APART = {("vllm", "fp8")}
"""Measured alone with one kernel for files of modelopt, five times slower than in blocks, as published models are."""
JUDGED = {(2048, 768, 128), (4096, 1536, 128), (7168, 2048, 256), (4096, 14336, 8)}
"""(hidden, width of an expert, experts) of Qwen3-30B-A3B, Qwen3-235B-A22B, DeepSeek-V3 and Mixtral-8x7B."""
OTHERS = ("nongated", "min_latency")
"""Words of kernels that are left out: of models without gates; and those that TensorRT-LLM takes where it is asked to
(NVIDIA/TensorRT-LLM 1.2, tensorrt_llm/_torch/model_config.py, resolve_moe_backend: CUTLASS but for gpt-oss)."""
L2_BYTES = {
    "A100": 40e6, "H100": 50e6, "H200": 50e6, "B200": 126e6, "GB200": 126e6, "B300": 126e6, "GB300": 126e6,
    "L40S": 96e6, "RTX-PRO-6000": 128e6,
}  # fmt: skip
"""NVIDIA's architecture whitepapers; of Blackwell with HBM, cudaDeviceProp.l2CacheSize."""
CACHED = 4 / 3
"""Weights of up to as many times a cache's bytes are partly read from it when a measurement repeats one layer: an L40S
then reads up to 2.6 times its memory's bandwidth. In a model they never are, so such rows are no evidence."""
WIDEST = 8
"""Ranks that share an expert at most: more are no layout of serving."""
ROUTINGS = ("balanced", "power_law_1.01")
"""Routings: as even as it can be, and the one that the wheel's own predictions take; rows of the latter are of the
busiest rank."""
START = {
    "launch_s": 2.5e-5, "bandwidth_share": 0.8, "efficiency": 0.6, "padded_rows": 32.0, "row_passes": 4.0,
    "token_passes": 2.0, "expert_s": 1e-8, "uneven": 0.1,
}  # fmt: skip
OTHER_STARTS = ({}, {"padded_rows": 4.0, "row_passes": 20.0}, {"efficiency": 0.2, "token_passes": 20.0})
"""A fit has several minima: the best one of these starts counts."""
MOST = {"bandwidth_share": 1.0, "efficiency": 1.2, "uneven": 0.5}

COLUMNS = (
    "kernel_source", "moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size",
    "moe_ep_size", "distribution", "latency",
)  # fmt: skip

Rows = dict[str, np.ndarray]


def read(folder: Path, engine: str) -> tuple[Rows, str] | None:
    """Rows of a device and an engine, with the version; None where there are none."""
    name, versions = VERSIONS[engine]
    for version in versions:
        path = folder / "moe" / name / version / "moe_perf.parquet"
        if path.exists():
            table = parquet.read_table(path, columns=list(COLUMNS))
            return {name: table[name].to_numpy() for name in COLUMNS}, version
    return None


def chosen(rows: Rows, dtype: str) -> Rows:
    """Of each shape the fastest kernel, with each of `ROUTINGS`: engines choose among kernels."""
    keep = (rows["moe_dtype"] == dtype) & (rows["moe_tp_size"] <= WIDEST) & (rows["latency"] > 0)
    keep &= np.array([not any(word in name for word in OTHERS) for name in rows["kernel_source"]])
    keep &= np.isin(rows["distribution"].astype(str), ROUTINGS)
    rows = {name: column[keep] for name, column in rows.items()}
    order = np.argsort(rows["latency"], kind="stable")
    keys = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
    shapes = np.stack([*(rows[key][order] for key in keys), rows["distribution"][order] == "balanced"])
    _, first = np.unique(shapes, axis=1, return_index=True)
    return {name: column[order][first] for name, column in rows.items()}


def layer_of(rows: Rows) -> RoutedLayer:
    """What `grouped_seconds` takes. Balanced routing spreads rows over as many experts as it can."""
    own = rows["num_experts"] / rows["moe_ep_size"]
    taken = np.maximum(rows["num_tokens"] * rows["topk"] / rows["moe_ep_size"], 1.0)
    balanced = rows["distribution"] == "balanced"
    missed = (1 - rows["topk"] / rows["num_experts"]) ** rows["num_tokens"]
    hit = np.where(balanced, np.minimum(own, taken), np.maximum(own * (1 - missed), 1.0))
    width, hidden = rows["inter_size"] / rows["moe_tp_size"], rows["hidden_size"]
    ranks = np.where(balanced, 1, rows["moe_ep_size"])
    return RoutedLayer(rows["num_tokens"], taken, hit, hidden, ((2 * width, hidden), (hidden, width)), ranks)


def from_memory(rows: Rows, weights: str, name: str) -> np.ndarray:
    """Which rows read more weights than a cache keeps from one repetition to the next."""
    layer = layer_of(rows)
    elements = layer.hit * sum(wide * deep for wide, deep in layer.products)
    return np.asarray(elements * weight_format(weights).width > CACHED * L2_BYTES[name])


def judged(rows: Rows) -> np.ndarray:
    shapes = zip(rows["hidden_size"], rows["inter_size"], rows["num_experts"], strict=True)
    return np.array([tuple(map(int, shape)) in JUDGED for shape in shapes], dtype=bool)


def only(rows: Rows, keep: np.ndarray) -> Rows:
    return {name: column[keep] for name, column in rows.items()}


def least_squares(
    residual: Callable[[np.ndarray], np.ndarray], start: np.ndarray, most: np.ndarray
) -> tuple[float, np.ndarray]:
    """Levenberg-Marquardt over logarithms, residuals beyond 0.2 weighted down (Huber): the loss, and where it is."""
    at, damping = start.copy(), 1e-2

    def loss(values: np.ndarray) -> float:
        off = np.abs(residual(values))
        return float(np.where(off < 0.2, off**2, 0.4 * off - 0.04).mean())

    best = loss(at)
    for _ in range(200):
        here = residual(at)
        weight = np.sqrt(np.minimum(1.0, 0.2 / np.maximum(np.abs(here), 1e-9)))
        columns = [(residual(at + step) - here) / 1e-4 for step in 1e-4 * np.eye(len(at))]
        slope = np.stack(columns, axis=1) * weight[:, None]
        normal = slope.T @ slope
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-6), -slope.T @ (here * weight))
        tried = np.minimum(at + np.clip(step, -0.5, 0.5), most)
        found = loss(tried)
        if found < best:
            at, damping, done = tried, max(damping / 3, 1e-8), best - found < 1e-7 * best
            best = found
            if done:
                break
        else:
            damping *= 4
            if damping > 1e8:
                break
    return best, at


def fitted(rows: Rows, weights: str, device: str) -> dict[str, float]:
    known, layer, names = constants(lookup(device).device), layer_of(rows), list(START)
    measured = np.log(rows["latency"] * 1e-3)

    def residual(values: np.ndarray) -> np.ndarray:
        form = dict(zip(names, np.exp(values), strict=True))
        return np.log(grouped_seconds(layer, weights, form, known)) - measured

    most = np.log([MOST.get(name, np.inf) for name in names])
    starts = (np.log(list((START | other).values())) for other in OTHER_STARTS)
    _, found = min((least_squares(residual, start, most) for start in starts), key=lambda one: one[0])
    values = zip(names, np.exp(found), strict=True)
    return {name: float(f"{value:.4g}") if value > 1e-3 * START[name] else 0.0 for name, value in values}


def errors(rows: Rows, weights: str, device: str, form: Any) -> str:
    if not len(rows["latency"]):
        return "no rows"
    known = constants(lookup(device).device)
    seconds, measured = grouped_seconds(layer_of(rows), weights, form, known), rows["latency"] * 1e-3
    off, around = seconds / measured - 1, time_range({"weights": seconds}, known, routed=True, served=True)
    inside = ((around.low <= measured) & (measured <= around.high)).mean()
    return f"{np.abs(off).mean():.1%} (bias {off.mean():+.1%}, {inside:.0%} in range) of {len(off)} rows"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    stored: dict[str, Any] = {}
    known = json.loads(FILE.read_text(encoding="utf-8")) if args.check else {}
    for name, (folder, device) in SYSTEMS.items():
        for engine in VERSIONS:
            told = read(args.folder / DATA / folder, engine)
            if told is None:
                continue
            for dtype in sorted(set(told[0]["moe_dtype"]) & set(TYPES)):
                rows, weights = chosen(told[0], str(dtype)), TYPES[str(dtype)]
                rows = only(rows, from_memory(rows, weights, name))
                apart = judged(rows)
                if apart.all() or (engine, dtype) in APART:
                    continue
                form = known[name][engine][weights] if args.check else fitted(only(rows, ~apart), weights, device)
                fit, left = (errors(only(rows, keep), weights, device, form) for keep in (~apart, apart))
                print(f"{name} {engine} {weights}: fitted on {fit}; left out {left}", flush=True)
                source = f"aiconfigurator-core 0.12.0 (Apache-2.0), {folder}/moe/{VERSIONS[engine][0]}/{told[1]}"
                stored.setdefault(name, {}).setdefault(engine, {})[weights] = {**form, "source": source}
    if not args.check:
        FILE.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Fit what one kernel and one collective take on measured devices, and write it into the package.

    python benchmarks/fit_kernels.py FOLDER [--held-out]

FOLDER holds {a100,h100,h200,b200,gb200,b300,gb300,l40s,rtx-pro-6000}_{gemm,attn}.parquet and {a100,h100}_nccl.parquet:
kernel timings of ai-dynamo/aiconfigurator (Apache-2.0). Those of A100 and H100 are of commit 095f58a51c4c, the others
of the wheel aiconfigurator-core 0.12.0, in aiconfigurator_core/systems/data/SYSTEM: gemm/vllm/0.24.0/gemm_perf.parquet
(GB200: gemm/trtllm/1.3.0rc20, whose timings scatter less), attention/vllm/0.24.0/context_attention_perf.parquet.
Written: predict/time/kernels.json and predict/time/surfaces.npz. Needs pyarrow; some minutes on one core.

--held-out writes nothing: it fits on half of the timings and prints the errors on the others, beside those of the
constants in the package.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as parquet

import shardwise.predict.time
from shardwise.cluster import Cluster
from shardwise.predict.time.constants import constants
from shardwise.predict.time.kernels import FEW, Kernels, Surface
from shardwise.predict.time.measuring import filled
from shardwise.predict.time.network import rising
from shardwise.schedule.choose import pricer

HOME = Path(shardwise.predict.time.__file__).parent
TILES = [
    (256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64),
    (32, 64), (64, 32), (32, 32), (16, 64),
]  # fmt: skip
MEASURED = {
    "A100": (312e12, 2.039e12, 108), "H100": (989e12, 3.35e12, 132), "H200": (989e12, 4.8e12, 132),
    "B200": (2250e12, 7.7e12, 148), "GB200": (2500e12, 8e12, 152), "B300": (2250e12, 8e12, 148),
    "GB300": (2500e12, 8e12, 152), "L40S": (362e12, 864e9, 142), "RTX-PRO-6000": (480e12, 1.597e12, 188),
}  # fmt: skip
"""Peak in 16 bits, bytes/s, multiprocessors."""
COMMIT = "ai-dynamo/aiconfigurator 095f58a51c4c (Apache-2.0), systems/data/{}: {}"
COLLECTIVES = ("A100", "H100")
"""Devices whose collectives stand for their families."""
WHEEL = "aiconfigurator-core 0.12.0 (Apache-2.0), systems/data/{}: {}"
SYSTEMS = {
    "A100": (COMMIT, "a100_sxm"), "H100": (COMMIT, "h100_sxm"), "H200": (WHEEL, "h200_sxm"),
    "B200": (WHEEL, "b200_sxm"), "GB200": (WHEEL, "gb200"), "B300": (WHEEL, "b300_sxm"),
    "GB300": (WHEEL, "gb300"), "L40S": (WHEEL, "l40s"), "RTX-PRO-6000": (WHEEL, "rtx_pro_6000_server"),
}  # fmt: skip
"""Device -> where its timings are from."""
ROWS = [
    1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384, 32768,
]  # fmt: skip
"""Rows of the left matrix that the grid keeps, of those that were measured."""


def source(device: str, what: str) -> str:
    text, system = SYSTEMS[device]
    return text.format(system, what)


def columns(path: Path) -> dict[str, np.ndarray]:
    return {name: np.array(values) for name, values in parquet.read_table(path).to_pydict().items()}


LONG = 1e-4
"""Seconds from which on errors of kernels are printed."""


def descend(loss: Callable[[np.ndarray], float], start: list[float], cap: int = 0) -> np.ndarray:
    """Coordinate descent over factors; the first `cap` values stay at most 1."""
    best, at, step = loss(np.array(start)), np.array(start), 0.25
    while step > 0.02:
        moved = False
        for i in range(len(at)):
            for factor in (1 + step, 1 / (1 + step)):
                tried = at.copy()
                tried[i] *= factor
                if i < cap:
                    tried[i] = min(tried[i], 1.0)
                found = loss(tried)
                if found < best - 1e-6:
                    best, at, moved = found, tried, True
        step = step if moved else step / 2
    return at


def weighted(seconds: np.ndarray) -> np.ndarray:
    """Kernels of a millisecond count most: they are what a step is made of."""
    return np.sqrt(np.clip(seconds, 0, 1e-3) / 1e-3) + 0.05


def tile_form(device: str, p: np.ndarray) -> dict[str, Any]:
    return {
        "surface": device,
        "tiles": [[*tile, round(float(e), 4)] for tile, e in zip(TILES, p[: len(TILES)], strict=True)],
        "latency_s": float(p[12]),
        "split_latency_s": float(p[13]),
        "bandwidth_share": round(float(p[14]), 4),
        "prologue_k": round(float(p[15]), 1),
        "source": source(device, "gemm_perf.parquet, bfloat16; tiles and grid fitted here"),
    }


def modelled(form: dict[str, Any], device: str, m: np.ndarray, n: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The tile model without its grid: what `Kernels` computes for a product alone, before the residual."""
    peak, bandwidth, sms = MEASURED[device]
    flat = SimpleNamespace(
        form=lambda _: form, bandwidth=bandwidth, sms=sms, peak=lambda _: peak, plateau=lambda _: 1.0,
        value=lambda _: 1.0,
    )  # fmt: skip
    kernels = Kernels.__new__(Kernels)
    kernels.constants = flat  # type: ignore[assignment]
    kernels._surfaces = {"bfloat16": SimpleNamespace(at=lambda *_: 0.0)}  # type: ignore[dict-item]
    return np.asarray(kernels.tiled(m, n, k))


def products(folder: Path, device: str) -> tuple[np.ndarray, ...]:
    data = columns(folder / f"{device.lower()}_gemm.parquet")
    here = (data["gemm_dtype"] == "bfloat16") & np.isin(data["m"], ROWS)
    shape = np.stack([data[name][here] for name in "mnk"], axis=1)
    unique, which = np.unique(shape, axis=0, return_inverse=True)
    seconds = np.zeros(len(unique))
    # Measured more than once: the mean of the logarithms.
    np.add.at(seconds, which.ravel(), np.log(data["latency"][here] * 1e-3))
    seconds = np.exp(seconds / np.bincount(which.ravel()))
    return (*unique.T.astype(float), seconds)


Samples = tuple[np.ndarray, ...]
"""Columns of shapes, and the seconds."""


def fit_matmul(device: str, samples: Samples) -> tuple[dict[str, Any], list[np.ndarray], np.ndarray]:
    """The tile model, and the grid of ln(measured / modelled): its axes and its table."""
    m, n, k, seconds = samples
    start = [1, 1, 0.92, 0.85, 0.85, 0.75, 0.75, 0.6, 0.4, 0.4, 0.3, 0.3, 4e-6, 2e-6, 0.8, 64.0]
    weight = weighted(seconds)

    def loss(p: np.ndarray) -> float:
        off = np.abs(np.log(modelled(tile_form(device, p), device, m, n, k) / seconds))
        return float((weight * off).sum() / weight.sum())

    form = tile_form(device, descend(loss, start, cap=len(TILES)))
    residual = np.log(seconds / modelled(form, device, m, n, k))
    axes = [np.unique(axis) for axis in (m, n, k)]
    table = np.full([len(axis) for axis in axes], np.nan)
    table[tuple(np.searchsorted(axis, at) for axis, at in zip(axes, (m, n, k), strict=True))] = residual
    long = seconds > LONG
    print(f"{device} products: {len(m)}, mean |error| of tiles alone {np.abs(residual[long]).mean():.3f} above 0.1 ms")
    return form, axes, np.clip(np.round(pooled(form, device, axes, filled(table)) * 100), -127, 127)


def pooled(form: dict[str, Any], device: str, axes: list[np.ndarray], table: np.ndarray) -> np.ndarray:
    """The grid in which no product of `FEW` rows or fewer is faster than one of fewer rows (isotonic regression of the
    logarithms of its seconds): one such product takes 184 or 218 us on an H100, whatever its rows are."""
    few = axes[0] <= FEW
    model = np.log(modelled(form, device, *np.meshgrid(axes[0][few], *axes[1:], indexing="ij")))
    return np.concatenate([rising(table[few] + model) - model, table[~few]])


def stored(device: str, axes: list[np.ndarray], table: np.ndarray) -> dict[str, np.ndarray]:
    """The grid as `surfaces.npz` has it."""
    named = {f"{device}.{name}": axis.astype(np.int32) for name, axis in zip("mnk", axes, strict=True)}
    return named | {f"{device}.residual": table.astype(np.int8)}


def attentions(folder: Path, device: str) -> dict[str, Samples]:
    """Head width -> batch, length, heads, key-value heads and seconds of causal attention."""
    data = columns(folder / f"{device.lower()}_attn.parquet")
    here = (data["kv_cache_dtype"] == "bfloat16") & (data["isl"] >= 128)
    if "window_size" in data:
        here &= data["window_size"] == 0
    # Multi-query heads are rare in what is predicted here, and have a kernel of their own.
    here &= (data["num_key_value_heads"] * 16 >= data["num_heads"]) & (data["num_heads"] >= 4)
    names = ("batch_size", "isl", "num_heads", "num_key_value_heads", "latency")
    found: dict[str, Samples] = {}
    for width in np.unique(data["head_dim"]):
        *shape, ms = (data[name][here & (data["head_dim"] == width)].astype(float) for name in names)
        if len(ms):
            found[str(width)] = (*shape, ms * 1e-3)
    return found


def attention_seconds(device: str, width: str, p: np.ndarray, samples: Samples) -> np.ndarray:
    """What `Kernels.attention` computes with efficiency, short_tokens, bandwidth_share and latency_s."""
    peak, bandwidth, _ = MEASURED[device]
    b, s, h, kv, _ = samples
    flops, moved = 4 * b * h * float(width) * s * (s + 1) / 2, 4 * b * s * float(width) * (h + kv)
    return p[3] + flops / (peak * p[0]) * (1 + p[1] / ((s + 1) / 2)) + moved / (bandwidth * p[2])


def fit_attention(device: str, samples: dict[str, Samples]) -> dict[str, np.ndarray]:
    """Head width -> efficiency, short_tokens, bandwidth_share and latency_s."""
    forms: dict[str, np.ndarray] = {}
    for width, mine in samples.items():
        seconds = mine[-1]
        weight = weighted(seconds)

        def loss(p, width=width, mine=mine, seconds=seconds, weight=weight):
            off = np.abs(np.log(attention_seconds(device, width, p, mine) / seconds))
            return float((weight * off).sum() / weight.sum())

        p = forms[width] = descend(loss, [0.6, 200.0, 0.8, 6e-6])
        off = np.abs(np.log(attention_seconds(device, width, p, mine) / seconds))[seconds > LONG].mean()
        print(f"{device} attention, heads of {width}: {len(seconds)} timings, mean |error| {off:.3f} above 0.1 ms")
    return forms


def attention_form(p: np.ndarray) -> dict[str, float]:
    return dict(zip(("efficiency", "short_tokens", "bandwidth_share", "latency_s"), map(float, p), strict=True))


def fit_nccl(folder: Path, device: str) -> dict[str, Any]:
    """ln(measured / price), the price on links of the bandwidth that the largest messages reach."""
    data = columns(folder / f"{device.lower()}_nccl.parquet")
    cluster = Cluster.parse(f"8x{device}")
    share = bus_share(data, cluster)
    cluster = replace(cluster, intra=replace(cluster.intra, bandwidth=cluster.intra.bandwidth * share))
    half = data["nccl_dtype"] == "half"
    sizes = np.unique(data["message_size"][half])
    found: dict[str, Any] = {"sizes": sizes.tolist(), "link_share": round(share, 4)}
    for op, ours in (("all_reduce",) * 2, ("all_gather",) * 2, ("reduce_scatter",) * 2, ("alltoall", "all_to_all")):
        found[ours] = {}
        for ranks in (2, 4, 8):
            here = half & (data["op_name"] == op) & (data["num_gpus"] == ranks)
            took = dict(zip(data["message_size"][here].tolist(), (data["latency"][here] * 1e-3).tolist(), strict=True))
            prices = pricer(ours, ranks, cluster)
            logs = [np.log(took[n] / prices.pick(float(n), "best")[1].seconds) for n in sizes.tolist()]
            found[ours][str(ranks)] = [round(float(x), 3) for x in logs]
    return found | {"source": source(device, "comm/nccl/nccl_perf.parquet, half")}


def bus_share(data: dict[str, np.ndarray], cluster: Cluster) -> float:
    here = (data["nccl_dtype"] == "half") & (data["op_name"] == "all_reduce") & (data["num_gpus"] == 8)
    n = data["message_size"][here].max()
    seconds = float(data["latency"][here & (data["message_size"] == n)][0]) * 1e-3
    assert cluster.intra.bandwidth
    return 2 * 7 / 8 * float(n) / seconds / cluster.intra.bandwidth


TORCH = {"efficiency": 0.498, "backward": 1.045}
TORCH_SOURCE = "; heads of 64: measured 2026-11-23 on one H100, torch 2.11, forward 12% slower, backward as it was"
"""Heads of 64 on an H100 as torch's kernel runs them, 20 timings above 0.2 ms: forward takes 1.12 times as long."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--held-out", action="store_true")
    args = parser.parse_args()
    if args.held_out:
        for device in MEASURED:
            held_out(args.folder, device)
        return
    written: dict[str, Any] = {"matmul": {}, "attention": {}, "nccl": {}}
    grids: dict[str, np.ndarray] = {}
    for device in MEASURED:
        written["matmul"][device], axes, table = fit_matmul(device, products(args.folder, device))
        grids |= stored(device, axes, table)
        forms = fit_attention(device, attentions(args.folder, device))
        written["attention"][device] = {width: attention_form(p) for width, p in forms.items()}
        if device in COLLECTIVES:
            written["nccl"][device] = fit_nccl(args.folder, device)
    _narrow(written["attention"])
    np.savez_compressed(HOME / "surfaces.npz", **grids)
    (HOME / "kernels.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def held_out(folder: Path, device: str) -> None:
    """Print errors on half of the timings, with constants of the other half and with those of the package."""
    package = Kernels(constants(Cluster.parse(f"1x{device}").device))

    def show(what: str, seconds: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
        long = seconds > LONG
        off = [np.log(predicted / seconds)[long] for predicted in (before, after)]
        words = ", ".join(f"{np.abs(error).mean():.1%} (bias {error.mean():+.1%})" for error in off)
        print(f"  {device} {what}, {long.sum()} held out above 0.1 ms: package and fit {words}")

    fitted, rest = halves(products(folder, device))
    form, axes, table = fit_matmul(device, fitted)
    m, n, k, seconds = rest
    after = modelled(form, device, m, n, k) * np.exp(Surface(axes, table / 100).at(m, n, k))
    show("products", seconds, package._isolated(m, n, k, "bfloat16", 1.0), after)
    samples = {width: halves(mine) for width, mine in attentions(folder, device).items()}
    forms = fit_attention(device, {width: mine for width, (mine, _) in samples.items()})
    for width, (_, rest) in samples.items():
        b, s, h, kv, seconds = rest
        before = package.attention(b, s, s, h, kv, int(width))
        show(f"attention, heads of {width}", seconds, before, attention_seconds(device, width, forms[width], rest))


def halves(samples: Samples) -> tuple[Samples, Samples]:
    """Two halves of the timings, drawn at random."""
    order = np.random.default_rng(0).permutation(len(samples[0]))
    return tuple(column[order[::2]] for column in samples), tuple(column[order[1::2]] for column in samples)


def _narrow(forms: dict[str, Any]) -> None:
    """Head widths measured on the H100 alone keep their ratio to its width of 128."""
    wide, known = forms["H100"], forms["A100"]["128"]
    for width, form in wide.items():
        ratio = form["efficiency"] / wide["128"]["efficiency"]
        forms["A100"].setdefault(width, {**known, "efficiency": known["efficiency"] * ratio})
    for device in forms:
        forms[device] = {w: {n: float(f"{v:.4g}") for n, v in f.items()} for w, f in forms[device].items()}
        forms[device]["source"] = source(device, "context_attention_perf.parquet, causal, bfloat16")
    forms["H100"]["64"] |= TORCH
    forms["H100"]["source"] += TORCH_SOURCE


if __name__ == "__main__":
    main()

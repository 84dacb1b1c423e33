"""Training over packed weights and gradients on real text, beside ZeRO-3: validation losses with and without error
feedback.

    python benchmarks/zeropp_train.py [--steps 300] [--seeds 1] [--data stdlib] [--tiny] [--json FILE]

All layouts train one small model on the same samples in the same order, four processes each. Printed for each: the mean
of the seeds' validation losses, in nats per token, and how far it is from plain ZeRO-3's.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import train_step

from shardwise import api
from shardwise.layout import Workload
from shardwise.model import ModelConfig

MODEL = ModelConfig(
    "zeropp", vocab=1024, hidden=128, layers=3, heads=4, kv_heads=2, head_dim=32, ffn=352, max_positions=2048
)
TINY = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "ffn": 24, "vocab": 300}
PLAIN = "dp=4,zero=3,precision=fp32"
LAYOUTS = {
    "ZeRO-3": PLAIN,
    "qwz": f"{PLAIN},qwz",
    "qwz,qgz": f"{PLAIN},qwz,qgz",
    "qwz,qgz,feedback": f"{PLAIN},qwz,qgz,feedback",
    "hpz=2,qwz,qgz": f"{PLAIN},hpz=2,qwz,qgz",
    "hpz=2,qwz,qgz,feedback": f"{PLAIN},hpz=2,qwz,qgz,feedback",
}
SEQ, BATCH, VALIDATION_BATCHES = 64, 4, 64
TEXT_BYTES = 4_000_000
"""UTF-8 bytes of the source that are used."""


def validation_loss(layout: str, seed: int, args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Train under one layout; its losses on held-out text before and after."""
    result = api.train(
        MODEL.replace(**TINY) if args.tiny else MODEL,
        layout,
        Workload(8, 4) if args.tiny else Workload(SEQ, BATCH),
        args.data,
        steps=args.steps,
        seed=seed,
        out=folder,
        validate_batches=2 if args.tiny else VALIDATION_BATCHES,
        max_bytes=TEXT_BYTES,
        tensorboard=False,
        progress=lambda line: None,
    ).summary
    return {key: result[key] for key in ("validation_loss", "first_validation_loss", "median_step_s")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand parameters")
    parser.add_argument("--json", type=Path, help="write losses, machine and date here")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            runs = [validation_loss(layout, seed, args, Path(folder, str(seed))) for seed in range(args.seeds)]
        mean = statistics.mean(run["validation_loss"] for run in runs)
        results[name] = {"layout": layout, "mean_validation_loss": mean, "runs": runs}
        beside = mean / results["ZeRO-3"]["mean_validation_loss"] - 1
        print(f"{name:24} {mean:.4f} ({beside:+.2%})", flush=True)
    if args.json:
        header = train_step.header("zeropp_train", MODEL)
        train_step.write_json(args.json, header | {"steps": args.steps, "results": results})


if __name__ == "__main__":
    main()

"""Training with experts on real text, beside the dense model of the same active size: validation losses.

    python benchmarks/experts_train.py [--steps 500] [--seeds 3] [--data stdlib] [--tiny] [--json FILE]

The models differ in their feed-forward parts alone: eight experts, of which each token has two, or one part of two
experts' width. Both train on the same samples in the same order, four processes each: the experts with
dp=4,ep=4,zero=1, two on each rank. Printed for each: the mean of the seeds' validation losses, in nats per token, each
seed's, and parameters. What is done is in the file already when a later run is interrupted: the command continues it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import train_step

from shardwise import api
from shardwise.layout import Workload
from shardwise.model import ModelConfig
from shardwise.model.config import Experts
from shardwise.model.parameters import count, parameters

EXPERTS = ModelConfig(
    "experts", vocab=2048, hidden=192, layers=4, heads=6, kv_heads=2, head_dim=32, ffn=1024, max_positions=2048,
    experts=Experts(count=8, active=2, ffn=1024, balance_loss=0.02),
)  # fmt: skip
LAYOUTS = {"experts": "dp=4,ep=4,zero=1,precision=fp32", "dense": "dp=4,zero=1,precision=fp32"}
SEQ, BATCH, VALIDATION_BATCHES = 128, 4, 32
TEXT_BYTES = 8_000_000
"""UTF-8 bytes of the source that are used."""
TINY = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "vocab": 300}


def models(tiny: bool) -> dict[str, ModelConfig]:
    """Name -> model, the larger one first."""
    experts = EXPERTS
    assert experts.experts is not None
    if tiny:
        experts = experts.replace(**TINY, experts=Experts(count=8, active=2, ffn=24, balance_loss=0.02))
        assert experts.experts is not None
    wide = experts.experts.active * experts.experts.ffn
    return {"experts": experts, "dense": experts.replace(name="dense", experts=None, ffn=wide)}


def active_parameters(model: ModelConfig) -> int:
    """Parameters that one token meets."""
    e = model.experts
    unused = (e.count - e.active) / e.count if e else 0.0
    return round(sum(p.numel * (1 - unused * (p.cut == "expert")) for p in parameters(model)))


def validation_loss(name: str, model: ModelConfig, seed: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train one model; its losses on held-out text before and after."""
    result = api.train(
        model, LAYOUTS[name], Workload(8 if args.tiny else SEQ, BATCH), args.data, steps=args.steps, seed=seed,
        out=folder / f"{name}-{seed}", validate_batches=2 if args.tiny else VALIDATION_BATCHES, max_bytes=TEXT_BYTES,
        tensorboard=False, progress=lambda line: None,
    ).summary  # fmt: skip
    wanted = ("validation_loss", "first_validation_loss", "unigram_entropy", "median_step_s")
    return {"model": name, "seed": seed, **{key: result[key] for key in wanted}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--tiny", action="store_true", help="models of a few thousand parameters")
    parser.add_argument("--json", type=Path, help="write each run's losses, machine and date here")
    args = parser.parse_args()
    both = models(args.tiny)
    result = train_step.header("experts_train", both["experts"]) | {
        "dense_ffn": both["dense"].ffn,
        "parameters": {name: count(model) for name, model in both.items()},
        "active_parameters": {name: active_parameters(model) for name, model in both.items()},
        "layouts": LAYOUTS, "steps": args.steps, "runs": [],
    }  # fmt: skip
    if args.json and args.json.exists():
        result["runs"] = json.loads(args.json.read_text())["runs"]
    done = {(run["model"], run["seed"]) for run in result["runs"]}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seeds):
            for name, model in both.items():
                if (name, seed) not in done:
                    result["runs"].append(validation_loss(name, model, seed, args, Path(folder)))
                    write(result, args.json)
    for name in both:
        losses = [run["validation_loss"] for run in result["runs"] if run["model"] == name]
        print(
            f"{name:8} {statistics.mean(losses):.4f} ({', '.join(f'{loss:.4f}' for loss in losses)})   "
            f"{result['parameters'][name] / 1e6:.1f} million parameters, "
            f"{result['active_parameters'][name] / 1e6:.1f} active"
        )


def write(result: dict[str, Any], path: Path | None) -> None:
    """Keep the runs so far, and their means."""
    for name in LAYOUTS:
        losses = [run["validation_loss"] for run in result["runs"] if run["model"] == name]
        result.setdefault("mean_validation_loss", {})[name] = statistics.mean(losses) if losses else None
    if path:
        train_step.write_json(path, result)


if __name__ == "__main__":
    main()

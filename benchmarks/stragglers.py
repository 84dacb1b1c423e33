"""Slow workers under each way in which replicas agree: tokens/s, and the loss against time and against tokens.

    python benchmarks/stragglers.py [--emulate 150ms] [--steps 100] [--tiny] [--json FILE] [--svg FILE]

Four workers train a small model on real text: in lockstep (dp, sync=ps), as updates come (async), within two steps of
each other (ssp), and apart for 20 steps (local); without stragglers, with one worker that is always three times slower,
and with every worker three times slower with probability 0.25. Each worker's arithmetic is done, and then lasts
`--emulate` times its factor, so that four of them on few cores run as if each had its own.

Printed: tokens/s of all workers, the ratio to dp under the same condition, both as measured and as predicted with the
exchange of the run without stragglers, the share of its time that the worker which waits most stands still, and the
validation loss at the end. Runs that are in the file already are not repeated. --svg draws what is in the file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import tempfile
from pathlib import Path
from typing import Any

import train_step
from line_plots import Panel, grid

from shardwise import api
from shardwise.layout import Layout, Workload
from shardwise.model import ModelConfig
from shardwise.predict.time.stragglers import straggled_step
from shardwise.schedule.stragglers import Stragglers, emulated_seconds

MODEL = ModelConfig(
    "stragglers", vocab=512, hidden=96, layers=2, heads=4, kv_heads=2, head_dim=24, ffn=256, max_positions=512
)
TINY = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "ffn": 24, "vocab": 300}
WORKERS = 4
SYNCS = {
    "dp": "",
    "ps": ",sync=ps",
    "async": ",sync=async",
    "ssp=2": ",sync=ssp,staleness=2",
    "local H=20": ",sync=local,every=20",
}
CONDITIONS: dict[str, tuple[str, ...]] = {
    "none": (),
    "always": ("rank=1,factor=3",),
    "often": ("rank=all,factor=3,probability=0.25",),
}
TITLES = {
    "none": "no slow worker",
    "always": "one worker always 3x slower",
    "often": "each worker 3x slower with probability 0.25",
}
SEQ, BATCH, VALIDATION_BATCHES = 64, 8, 32
TEXT_BYTES = 4_000_000
"""UTF-8 bytes of the source that are used."""
SMOOTHED, POINTS = 10, 40
"""Steps of a running mean of losses, and points of a curve."""
SEED = 0


def layout_of(sync: str) -> str:
    return f"dp={WORKERS}{SYNCS[sync]},precision=fp32"


def measured(sync: str, condition: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run: tokens/s of all workers over the whole run, shares of waiting, losses."""
    work = Workload(8, WORKERS) if args.tiny else Workload(SEQ, BATCH)
    result = api.train(
        MODEL.replace(**TINY) if args.tiny else MODEL, layout_of(sync), work, args.data, steps=args.steps, seed=SEED,
        out=folder, slow=CONDITIONS[condition], emulate=args.emulate, max_bytes=TEXT_BYTES,
        validate_batches=2 if args.tiny else VALIDATION_BATCHES, tensorboard=False, progress=lambda line: None,
        rank0_stdout=2,
    )  # fmt: skip
    waiting = result.summary["waiting"]
    seconds = waiting[0]["seconds"]
    return {
        "sync": sync, "condition": condition, "seconds": seconds,
        "tokens_per_s": args.steps * work.batch * work.seq / seconds,
        "waiting": [round(row["waiting_share"], 4) for row in waiting],
        "validation_loss": result.summary["validation_loss"],
        "first_validation_loss": result.summary["first_validation_loss"],
        "curve": curve(folder, work.batch * work.seq),
    }  # fmt: skip


def curve(folder: Path, tokens_per_step: int) -> list[list[float]]:
    """[seconds since the run began, tokens of all workers, running mean of rank 0's losses], thinned."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    began = next(event["time"] for event in events if "validation_loss" in event)
    steps = [event for event in events if "loss" in event]
    points = []
    for at, event in enumerate(steps):
        losses = [one["loss"] for one in steps[max(0, at + 1 - SMOOTHED) : at + 1]]
        mean = statistics.fmean(losses)
        points.append([round(event["time"] - began, 3), event["step"] * tokens_per_step, round(mean, 4)])
    every = max(1, len(points) // POINTS)
    return points[SMOOTHED - 1 :: every] or points[-1:]


def predict(runs: list[dict[str, Any]], emulated: float, steps: int, tokens_per_step: int) -> None:
    """Add what is predicted to each run: the exchange is that of the run without stragglers."""
    plain = {run["sync"]: run["seconds"] / steps for run in runs if run["condition"] == "none"}
    dp = {run["condition"]: run for run in runs if run["sync"] == "dp"}
    for run in runs:
        if run["sync"] in plain:
            slow, rest = Stragglers.parse(CONDITIONS[run["condition"]], SEED), plain[run["sync"]] - emulated
            step = straggled_step(MODEL, Layout.parse(layout_of(run["sync"])), slow, emulated, max(0.0, rest), steps)
            run["predicted_tokens_per_s"] = tokens_per_step / step.seconds
    for run in runs:
        if (beside := dp.get(run["condition"])) is not None:
            for name in ("tokens_per_s", "predicted_tokens_per_s"):
                if name in run and name in beside:
                    run[name.replace("tokens_per_s", "of_dp")] = run[name] / beside[name]


def line(run: dict[str, Any]) -> str:
    predicted = ""
    if "predicted_of_dp" in run:
        off = run["predicted_tokens_per_s"] / run["tokens_per_s"] - 1
        predicted = f"  predicted {run['predicted_tokens_per_s']:6.0f} ({off:+.1%}), {run['predicted_of_dp']:.2f} of dp"
    beside = f"{run['of_dp']:.2f} of dp" if "of_dp" in run else ""
    return (
        f"{run['condition']:7} {run['sync']:10} {run['tokens_per_s']:6.0f} tokens/s  {beside}{predicted}"
        f"  waits {max(run['waiting']):.0%}  loss {run['validation_loss']:.3f}"
    )


def drawn(result: dict[str, Any]) -> str:
    """Curves as SVG: a row for each condition, losses against time and against tokens."""
    rows = []
    for condition in (name for name in CONDITIONS if any(run["condition"] == name for run in result["runs"])):
        runs = [run for run in result["runs"] if run["condition"] == condition]
        axes = (("seconds", 0, 1.0), ("thousand tokens", 1, 1e-3))
        rows.append(
            [
                Panel(
                    TITLES[condition], label, "training loss, nats per token",
                    {run["sync"]: [(point[x] * scale, point[2]) for point in run["curve"]] for run in runs},
                )
                for label, x, scale in axes
            ]
        )  # fmt: skip
    return grid(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulate", default="150ms", metavar="TIME", help="arithmetic of a step (150ms)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--syncs", nargs="+", choices=SYNCS, default=list(SYNCS))
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand parameters")
    parser.add_argument("--json", type=Path, help="write each run, machine and date here, or continue what is there")
    parser.add_argument("--svg", type=Path, help="draw the curves here")
    args = parser.parse_args()
    result = train_step.header("stragglers", MODEL) | {"emulate": args.emulate, "steps": args.steps, "runs": []}
    result["command"] = re.sub(r" --svg[ =]\S+", "", result["command"])
    if args.json and args.json.exists():
        result = json.loads(args.json.read_text())
        if (result["emulate"], result["steps"]) != (args.emulate, args.steps):
            raise SystemExit(f"{args.json} has runs with --emulate {result['emulate']} --steps {result['steps']}")
    done = {(run["sync"], run["condition"]) for run in result["runs"]}
    tokens = WORKERS * 8 if args.tiny else SEQ * BATCH
    for condition, sync in itertools.product(args.conditions, args.syncs):
        if (sync, condition) not in done:
            with tempfile.TemporaryDirectory() as folder:
                result["runs"].append(measured(sync, condition, args, Path(folder, "run")))
            predict(result["runs"], emulated_seconds(args.emulate) or 0.0, args.steps, tokens)
            print(line(result["runs"][-1]), flush=True)
            if args.json:
                train_step.write_json(args.json, result)
    if args.svg:
        args.svg.write_text(drawn(result))


if __name__ == "__main__":
    main()

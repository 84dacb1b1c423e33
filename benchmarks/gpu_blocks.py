"""Does `calibrate device` predict blocks? Cut models under `estimate --measure`, beside what the calibration predicts.

    python benchmarks/gpu_blocks.py [--seconds 60] [--json FILE] [--tiny]

The device is calibrated first, and models of few blocks then run on it in bf16, each in a process of its own. Printed
are the seconds of forward, loss and backward, of the optimizer and of the whole step, predicted and measured. About two
minutes on an H200.

Without a CUDA device, or with --tiny, a tiny model runs on a CPU that is calibrated for a few seconds, which shows that
the script works and nothing else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from shardwise.cli.show.measured_table import PREDICTED

CUT = (
    ("llama-3.2-1b", 16, 2, 4096),
    ("llama-3-8b", 4, 1, 8192),
    ("llama-3-70b", 2, 2, 4096),
)
"""(model, blocks, sequences of a step, tokens of each)."""
TINY = (("tiny-llama", 2, 2, 64),)
ARITHMETIC, OPTIMIZER = "forward, loss and backward", "optimizer"


def shardwise(*words: str) -> str:
    """Standard output of a command. What it says on the way goes to standard error."""
    return subprocess.run(
        (sys.executable, "-m", "shardwise", *words), stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def measured(model: str, layers: int, batch: int, seq: int, cluster: str) -> dict[str, Any]:
    """One model's row: part -> [predicted, measured] seconds."""
    found = json.loads(
        shardwise(
            "estimate", model, "--set", f"layers={layers}", "--layout", f"precision=bf16,micro={batch}", "--cluster",
            cluster, "--batch", str(batch), "--seq", str(seq), "--measure", "--json",
        )
    )  # fmt: skip
    predicted, real = found["timing"], found["measured"]
    parts = predicted["parts"]
    return {
        "model": model, "layers": layers, "batch": batch, "seq": seq, "device": real["device"],
        ARITHMETIC: [
            sum(parts[name] for name in PREDICTED[ARITHMETIC]),
            sum(seconds for name, seconds in real["parts"].items() if name != OPTIMIZER),
        ],
        OPTIMIZER: [parts[OPTIMIZER], real["parts"][OPTIMIZER]],
        "step": [predicted["seconds"], real["seconds"]],
    }  # fmt: skip


def show(row: dict[str, Any]) -> None:
    """One line for each part."""
    print(f"{row['model']} with {row['layers']} blocks, {row['batch']} x {row['seq']} tokens, on {row['device']}")
    for name in (ARITHMETIC, OPTIMIZER, "step"):
        expected, real = (1e3 * seconds for seconds in row[name])
        print(f"  {name:28} predicted {expected:8.2f} ms, measured {real:8.2f} ms ({expected / real - 1:+.1%})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of calibration, about (60)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU: does the script work?")
    args = parser.parse_args()
    tiny = args.tiny or not torch.cuda.is_available()
    device, seconds = ("cpu", min(args.seconds, 4.0)) if tiny else ("cuda", args.seconds)
    with tempfile.TemporaryDirectory() as folder:
        cluster, started = str(Path(folder) / "here.toml"), time.perf_counter()
        shardwise("calibrate", "device", "--device", device, "--seconds", f"{seconds:g}", "--out", cluster)
        took = time.perf_counter() - started
        print(f"calibrated in {took:.0f} s", flush=True)
        rows = []
        for model in TINY if tiny else CUT:
            rows.append(measured(*model, cluster))
            show(rows[-1])
    if args.json:
        about = {"torch": torch.__version__, "measures_gpu": not tiny, "calibration_s": took, "rows": rows}
        args.json.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()

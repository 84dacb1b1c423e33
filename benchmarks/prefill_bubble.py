"""The bubble of a long prompt that is streamed through a pipeline's stages in chunks, beside its simulation.

    python benchmarks/prefill_bubble.py [--stages 2] [--chunks 8 16 32] [--emulate 100ms] [--transport auto]
                                        [--json FILE]

The serving engine itself runs, with its processes, messages, scheduler and cache; each stage waits the given time for a
chunk of 256 tokens in place of its arithmetic (`shardwise generate --emulate`). Every prompt is read six times, the
first time uncounted; printed is the median. The simulation is that of the schedule `prefill`, in which a message takes
the time that one between two of the stages was measured to take. Any other load on the machine shows: a stage must get
a core when its wait is over.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CLOSE = 0.05
"""How far a bubble may be from the simulation's."""
CHUNK = 256
SHAPE = {
    "hidden_size": 768, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 12,
    "num_key_value_heads": 4, "vocab_size": 1000,
}  # fmt: skip
_OF_A_MODEL = ("model", "parameters")


def write_model(folder: Path, positions: int) -> None:
    """A Llama with random weights, which nobody reads: its messages are as wide as a small model's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**SHAPE, max_position_embeddings=positions)).bfloat16().save_pretrained(folder)


def measure(folder: Path, stages: int, chunks: int, args: argparse.Namespace) -> dict[str, Any]:
    """What one command found. Ends the program with the command's own words where it fails."""
    command = [sys.executable, "-m", "shardwise", "generate", str(folder), "--json", "--layout", f"pp={stages}"]
    command += ["--chunk", str(CHUNK), "--context", str(chunks * CHUNK + 1)]
    command += ["--emulate", args.pretend, "--transport", args.transport]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def describe(found: dict[str, Any]) -> str:
    from shardwise.report.units import format_share, format_time

    measured, simulated = (found[side]["bubble_over_ideal"] for side in ("measured", "simulated"))
    return (
        f"{found['stages']} stages, {found['chunks']:>3} chunks, a message takes {format_time(found['hop_s'])}: bubble "
        f"{format_share(measured)} measured, {format_share(simulated)} simulated, ratio {found['ratio']:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[2])
    parser.add_argument("--chunks", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--emulate", default="100ms")
    parser.add_argument("--transport", choices=("auto", "shared", "gloo"), default="auto")
    parser.add_argument("--json", type=Path, help="write bubbles, ratios, machine and date here")
    args = parser.parse_args()

    import train_step

    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), max(args.chunks) * CHUNK + 1)
        results = []
        for stages in args.stages:
            for chunks in args.chunks:
                results.append(measure(Path(folder), stages, chunks, args))
                print(describe(results[-1]), flush=True)
    near = sum(abs(each["ratio"] - 1) <= CLOSE for each in results)
    print(f"within {CLOSE:.0%}: {near} of {len(results)}")
    if args.json:
        about = {key: value for key, value in train_step.header("prefill_bubble").items() if key not in _OF_A_MODEL}
        train_step.write_json(args.json, about | {"pretend": args.pretend, "shape": SHAPE, "results": results})


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)

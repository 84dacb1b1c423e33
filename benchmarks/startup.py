"""Start-up and search as multiples of `python -c "import numpy"` on the same machine.

    python benchmarks/startup.py                # estimate, and plan of the README's first command
    python benchmarks/startup.py --large        # and searches over thousands of devices, once each, in seconds
    python benchmarks/startup.py --rounds 15    # more pairs (7)

Each round runs numpy and the command one after the other, in turns, so that both see the same load; a multiple is the
median over the pairs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

NUMPY = [sys.executable, "-c", "import numpy"]
COMMANDS = {
    "estimate, one node": "estimate llama-3-8b --layout dp=8,zero=3 --cluster 8xH100 --seq 8k --batch 8",
    "estimate, a pipeline": "estimate llama-3-70b --layout tp=2,pp=8,cp=4,zero=1 --cluster 8x8xH100 --seq 8192 "
    "--batch 1024",
    "plan, README": "plan llama-3-70b --cluster 8x8xH100 --seq 8192 --batch 1024 --top 3",
}
TARGETS = {"estimate, one node": 3, "estimate, a pipeline": 3, "plan, README": 10}
"""Multiples of `import numpy` that a command should stay below."""
LARGE = {
    "plan, 2,048 devices": "plan deepseek-v3 --cluster 256x8xH800 --seq 4096 --batch 15360 --top 3",
    "plan --find cluster": "plan gpt3-175b --cluster 8xA100 --find cluster --tokens 300B --deadline 30",
    "plan, nothing fits": "plan deepseek-v3 --cluster 8xH100 --seq 4096 --batch 64",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, metavar="N")
    parser.add_argument("--large", action="store_true", help="time large searches, too")
    args = parser.parse_args()
    print(f"{'command':<22}{'seconds':>9}{'numpy':>9}{'multiple':>10}{'target':>8}")
    for name, text in COMMANDS.items():
        command = ours(text)
        seconds(command), seconds(NUMPY)  # from here on both are in the page cache
        pairs = [in_turn(command, first=bool(index % 2)) for index in range(args.rounds)]
        mine, numpy = (statistics.median(column) for column in zip(*pairs, strict=True))
        multiple = statistics.median(a / b for a, b in pairs)
        print(f"{name:<22}{mine:>9.3f}{numpy:>9.3f}{multiple:>10.2f}{TARGETS[name]:>8}", flush=True)
    for name, text in LARGE.items() if args.large else ():
        print(f"{name:<22}{seconds(ours(text)):>9.1f}", flush=True)


def ours(text: str) -> list[str]:
    return [sys.executable, "-m", "shardwise", *text.split()]


def in_turn(command: list[str], first: bool) -> tuple[float, float]:
    """Seconds of a command, and of numpy next to it. first: whether the command runs first."""
    if first:
        return seconds(command), seconds(NUMPY)
    numpy = seconds(NUMPY)
    return seconds(command), numpy


def seconds(command: list[str]) -> float:
    """Wall-clock seconds of a process. Nothing is printed; a plan that rejects its model exits with 2."""
    source = str(Path(__file__).parents[1] / "src")
    started = time.perf_counter()
    done = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": source}
    )
    assert done.returncode in (0, 2), command
    return time.perf_counter() - started


if __name__ == "__main__":
    main()

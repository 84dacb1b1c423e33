"""A parameter server's port against a ring: seconds of a step with one to six workers, beside what is predicted.

    python benchmarks/incast.py [--mbit 100] [--workers 1 2 3 4 5 6] [--steps 6] [--calibrate 30] [--json FILE]

Each worker, and the server, is a host of `shardwise lab` with a link of `--mbit` megabits a second; it needs root and
iproute2. The server's port carries the gradients of all workers in and the weights of all out, so that a step takes
longer with each of them; a ring all-reduce over the same hosts hardly does. A step is measured by `shardwise train`,
the first left out; predicted is `step_seconds` for hosts of these links and this machine's cores, which ranks measure
just before (`--calibrate` seconds, about).
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import train_step
from lab_runs import calibrated, hosts_of, lab

from shardwise.cluster import Device, Link
from shardwise.lab.link import LabLink
from shardwise.lab.network import check_allowed
from shardwise.layout import Layout, Workload
from shardwise.model import ModelConfig
from shardwise.model.catalog import get
from shardwise.model.changes import change
from shardwise.predict.step_seconds import step_seconds

VOCAB, SEQ = 512, 32
MODEL = "tiny-llama"
WORDS = ["--data", "stdlib", "--max-bytes", "300000", "--vocab", str(VOCAB), "--seq", str(SEQ)]


def layouts(workers: int) -> dict[str, str]:
    """Name -> layout of so many workers."""
    served = {"server": f"dp={workers},sync=ps,servers=1:own"}
    return served | ({"ring": f"dp={workers}"} if workers > 1 else {})


def measured(text: str, workers: int, link: LabLink, steps: int) -> list[float]:
    """Seconds of each step but the first."""
    hosts = [link] * max(2, Layout.parse(text).ranks)
    with lab(hosts) as place:
        words = [*WORDS, "--batch", str(workers), "--steps", str(1 + steps)]
        return place.train([MODEL, "--layout", text, *words]).seconds


def compared(workers: list[int], mbit: float, steps: int, device: Device, inside: Link) -> list[dict[str, Any]]:
    """A row for each number of workers and each layout."""
    link, rows = LabLink(mbit * 1e6), []
    model: ModelConfig = change(get(MODEL), f"vocab={VOCAB}")
    for count in workers:
        for name, text in layouts(count).items():
            layout, workload = Layout.parse(text), Workload(seq=SEQ, batch=count)
            cluster = hosts_of(device, inside, [link] * layout.ranks, 1)
            expected = step_seconds(model, layout, workload, cluster)
            seconds = measured(text, count, link, steps)
            median = statistics.median(seconds)
            rows.append({"workers": count, "how": name, "layout": text, "seconds": seconds, "step_s": median,
                         "predicted_s": expected.seconds, "parts": expected.parts})  # fmt: skip
            off = expected.seconds / median - 1
            print(f"  {count} workers  {name:6}  {median:6.2f} s  ({min(seconds):.2f} to {max(seconds):.2f})  "
                  f"predicted {expected.seconds:6.2f} s ({off:+.0%})", flush=True)  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=100.0, help="of each link, each way (100)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6])
    parser.add_argument("--steps", type=int, default=6, help="measured steps (6)")
    parser.add_argument("--calibrate", type=float, default=30.0, metavar="S", help="seconds of calibration (30)")
    parser.add_argument("--json", type=Path, help="write seconds, machine and date here")
    args = parser.parse_args()
    check_allowed()
    told = calibrated(args.calibrate, 2)
    print(f"{args.mbit:g} Mb/s to every host, one worker each; medians of {args.steps} steps")
    rows = compared(args.workers, args.mbit, args.steps, *told)
    if args.json:
        model = change(get(MODEL), f"vocab={VOCAB}")
        train_step.write_json(args.json, train_step.header("incast", model) | {"mbit": args.mbit, "results": rows})


if __name__ == "__main__":
    main()

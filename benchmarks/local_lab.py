"""Training between two hosts of a slow link: an all-reduce every step against an outer step every H steps.

    python benchmarks/local_lab.py [--mbit 100] [--calibrate 30] [--json FILE]

Two hosts of `shardwise lab`, a rank each, with a link of `--mbit` megabits a second between them; it needs root and
iproute2. Printed for each layout: seconds of a step as `shardwise train` measured it (the mean of a round where
replicas train apart from each other), the speed beside data parallelism's, the bytes that left a host in a step, and
the seconds that `step_seconds` predicts for hosts of these links and this machine's cores, which two ranks measure just
before (`--calibrate` seconds, about). Also the share of a step that is communication: what is left of it without the
step of the same ranks on hosts with a fast link.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import train_step
from lab_runs import calibrated, hosts_of, lab

from shardwise.lab.link import LabLink
from shardwise.lab.network import check_allowed
from shardwise.layout import Layout, Workload
from shardwise.model.catalog import get
from shardwise.model.changes import change
from shardwise.predict.step_seconds import step_seconds

NAME, CHANGES = "tiny-llama", "vocab=512,layers=2,hidden=512,heads=8,kv_heads=8,head_dim=64,ffn=1408"
SEQ, BATCH = 32, 2
STEPS = {"dp=2": 8, "dp=2,sync=local,every=10": 41, "dp=2,sync=local,every=50": 151,
         "dp=2,sync=local,every=50,outer=nesterov,outer_bits=8": 151}  # fmt: skip
"""Layout -> steps, the first one not measured."""


def words(text: str, steps: int) -> list[str]:
    """Of `shardwise train`."""
    model = [NAME, "--set", CHANGES, "--layout", text, "--steps", str(steps)]
    return [*model, "--data", "stdlib", "--max-bytes", "300000", "--seq", str(SEQ), "--batch", str(BATCH)]


def row(text: str, link: LabLink, fast: LabLink) -> dict[str, Any]:
    """What one layout takes, on hosts with these links and, for what is not communication, with fast ones."""
    found: dict[str, Any] = {"layout": text}
    for name, each in (("step_s", link), ("step_on_fast_links_s", fast)):
        with lab([each] * 2) as place:
            done = place.train(words(text, STEPS[text]))
        found[name] = done.result["median_step_s"]
        found.setdefault("sent_bytes_a_step", done.sent[0] / STEPS[text])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=100.0, help="of each link, each way (100)")
    parser.add_argument("--calibrate", type=float, default=30.0, metavar="S", help="seconds of calibration (30)")
    parser.add_argument("--json", type=Path, help="write seconds, machine and date here")
    args = parser.parse_args()
    check_allowed()
    device, inside = calibrated(args.calibrate, 2)
    link, fast, model = LabLink(args.mbit * 1e6), LabLink(100e9), change(get(NAME), CHANGES)
    cluster, rows = hosts_of(device, inside, [link] * 2, 1), []
    print(f"{args.mbit:g} Mb/s between two hosts of one rank, {SEQ * BATCH} tokens a step, fp32")
    for text in STEPS:
        timing = step_seconds(model, Layout.parse(text), Workload(seq=SEQ, batch=BATCH), cluster)
        found = row(text, link, fast)
        found |= {"predicted_s": timing.seconds, "parts": timing.parts}
        rows.append(found)
        step = found["step_s"]
        share = 1 - found["step_on_fast_links_s"] / step
        print(f"  {text:52} {step * 1e3:7.0f} ms  {rows[0]['step_s'] / step:5.1f}x  {share:4.0%} communication  "
              f"{found['sent_bytes_a_step'] / 1e6:5.2f} MB from a host  predicted {timing.seconds * 1e3:6.0f} ms "
              f"({timing.seconds / step - 1:+.0%})", flush=True)  # fmt: skip
    if args.json:
        train_step.write_json(args.json, train_step.header("local_lab", model) | {"mbit": args.mbit, "results": rows})


if __name__ == "__main__":
    main()

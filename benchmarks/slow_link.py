"""Training steps over a slow link between two nodes: ZeRO-3 beside each part of ZeRO++, and all of it.

    python benchmarks/slow_link.py [--mbit 100] [--rounds 5] [--json FILE]

Two hosts of `shardwise lab` stand for two nodes, with a link of `--mbit` megabits a second each; it needs root and
iproute2. Each has two ranks: they talk to each other over its own loopback, and to the others over the link, all by
gloo. The layouts take
turns in one set of processes, every second round in the opposite order, after one step each that does not count.

Printed for each layout: seconds of a step (median, from the first rank's start to the last rank's end), tokens/s, and
the speed beside ZeRO-3; the bytes that left both namespaces in a step, as the interfaces counted them; the loss of the
last step; and the seconds that `step_seconds` predicts for two nodes with one NIC of `--mbit` each, their device and
their link inside as four ranks measured them on this machine just before (`--calibrate` seconds, about).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import peers
import torch
import torch.distributed as dist
import train_step
from lab_runs import calibrated, hosts_of
from peers import tokens

from shardwise.cluster import Device, Link
from shardwise.decoder.random import initial_values
from shardwise.lab.link import LabLink
from shardwise.lab.network import INTERFACE, check_allowed, lab_network
from shardwise.layout import Layout, Mesh, Workload, unit_plan
from shardwise.layout.axes import DP
from shardwise.model import ModelConfig
from shardwise.predict.step_seconds import step_seconds
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.job.hosts import VARIABLE, HostFile
from shardwise.runtime.job.launch import supervise
from shardwise.runtime.job.rank import bind, join
from shardwise.runtime.job.setup import local_view, make_comms
from shardwise.runtime.pipeline.step import TrainProgram

MODEL = ModelConfig("slow-link", vocab=2048, hidden=384, layers=6, heads=6, kv_heads=6, ffn=1024, max_positions=256)
WORKLOAD = Workload(seq=16, batch=4)
PER_NODE, NODES = 2, 2
ZERO_3 = "dp=4,zero=3"
LAYOUTS = (ZERO_3, f"{ZERO_3},qwz", f"{ZERO_3},hpz=2", f"{ZERO_3},hpz=2,qwz", f"{ZERO_3},hpz=2,qwz,qgz")


def sent() -> int:
    """Bytes that have left this rank's host over its link."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


class Contender:
    """One layout's program, and a step of it."""

    def __init__(self, text: str, rank: int) -> None:
        layout = Layout.parse(text)
        comms = make_comms(layout, MODEL, rank, timeout=300, transport="gloo")
        self.plan = unit_plan(MODEL, layout, WORKLOAD, rank=rank, backend=comms.backend)
        config = OptimizerConfig(lr=peers.LR)
        self.program = TrainProgram(self.plan, comms, config, lambda p, i: initial_values(p, i, 1), torch.device("cpu"))
        self.share = Mesh.of(layout, MODEL).index(DP, rank)

    def step(self, index: int) -> float:
        setting = peers.Setting(MODEL, WORKLOAD.seq, WORKLOAD.batch, "bf16", dist.get_world_size())
        ids, targets = tokens(setting, index, slice(self.share, self.share + 1))
        return self.program.step([local_view(peers.plain_batch(ids), targets, self.plan)], peers.LR)[0]


def rank_main(job: dict[str, Any]) -> None:
    """What one rank measures; the first one of each node counts the bytes of its link, and rank 0 writes all."""
    bind()
    rank = join(300)
    contenders = {text: Contender(text, rank) for text in LAYOUTS}
    found: dict[str, dict[str, Any]] = {text: {"seconds": [], "bytes": []} for text in LAYOUTS}
    for index in range(1 + job["rounds"]):
        for text in LAYOUTS if index % 2 else reversed(LAYOUTS):
            dist.barrier()
            before, started = sent(), time.perf_counter()
            found[text]["loss"] = contenders[text].step(index)
            ended = time.perf_counter()
            dist.barrier()
            reports = train_step.everywhere((started, ended, sent() - before))
            if index:
                found[text]["seconds"].append(max(end for _, end, _ in reports) - min(start for start, *_ in reports))
                found[text]["bytes"].append(sum(count for *_, count in reports[::PER_NODE]))
    if rank == 0:
        Path(job["out"]).write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def predicted(mbit: float, device: Device, inside: Link) -> dict[str, Any]:
    """Layout -> seconds of a step, and their parts."""
    cluster = hosts_of(device, inside, [LabLink(mbit * 1e6)] * NODES, PER_NODE)
    timings = {text: step_seconds(MODEL, Layout.parse(text), WORKLOAD, cluster) for text in LAYOUTS}
    return {text: {"step_s": timing.seconds, "parts": timing.parts} for text, timing in timings.items()}


def measure(mbit: float, rounds: int) -> dict[str, dict[str, Any]]:
    links = [LabLink(mbit * 1e6)] * NODES
    with lab_network(links) as network, tempfile.TemporaryDirectory() as folder:
        out, hosts = Path(folder, "out.json"), Path(folder, "hosts.json")
        HostFile(network.hosts).write(hosts)
        os.environ[VARIABLE] = str(hosts)
        job = json.dumps({"rounds": rounds, "out": str(out)})
        ending = supervise([sys.executable, __file__, "--job", job], NODES * PER_NODE)
        if failure := ending.error():
            raise failure
        found: dict[str, dict[str, Any]] = json.loads(out.read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=100.0, help="of the link, each way (100)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calibrate", type=float, default=60.0, metavar="S", help="seconds of calibration (60)")
    parser.add_argument("--json", type=Path, help="write seconds, rows, machine and date here")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        rank_main(json.loads(args.job))
    check_allowed()
    expected = predicted(args.mbit, *calibrated(args.calibrate, NODES * PER_NODE))
    found = measure(args.mbit, args.rounds)
    plain = statistics.median(found[ZERO_3]["seconds"])
    per_step = WORKLOAD.batch * WORKLOAD.seq
    print(
        f"{args.mbit:g} Mb/s between two nodes of two ranks, {per_step} tokens a step, bf16, medians of {args.rounds}"
    )
    for text, row in found.items():
        row["step_s"] = statistics.median(row["seconds"])
        ratios = [a / b for a, b in zip(found[ZERO_3]["seconds"], row["seconds"], strict=True)]
        row["predicted"] = expected[text]
        row["speed"] = [plain / row["step_s"], min(ratios), max(ratios)]
        print(
            f"  {text:28} {row['step_s']:6.2f} s  {per_step / row['step_s']:6.0f} tokens/s  "
            f"{row['speed'][0]:.2f}x ({min(ratios):.2f} to {max(ratios):.2f})  "
            f"{statistics.median(row['bytes']) / 1e6:6.1f} MB over the link  loss {row['loss']:.4f}  "
            f"predicted {expected[text]['step_s']:6.2f} s ({expected[text]['step_s'] / row['step_s'] - 1:+.0%})"
        )
    if args.json:
        train_step.write_json(args.json, train_step.header("slow_link", MODEL) | {"mbit": args.mbit, "results": found})


if __name__ == "__main__":
    main()

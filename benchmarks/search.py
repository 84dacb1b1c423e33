"""How fast the planner ranks all ways to train a model on a cluster, and that one at a time it says the same.

    python benchmarks/search.py                 # Megatron-1T on 4,096 A100, all overlaps: candidates a second
    python benchmarks/search.py --check 20000   # and 20,000 of them, sampled, priced one at a time by `price_one`

The space is the one of docs/planner.md: tp, pp, cp, dp, ZeRO stage and shard group, sequence parallelism,
recomputation, micro-batch, schedule and chunks, and every combination of the engine's overlaps that makes a difference.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import numpy as np

from shardwise.cluster import Cluster
from shardwise.layout import Layout, Workload, check
from shardwise.model.catalog import get
from shardwise.planner.exact import ExactMemory
from shardwise.planner.pricing import price_one
from shardwise.planner.ranking import Found, search, words
from shardwise.planner.runnable import widened
from shardwise.planner.shortfall import usable_bytes
from shardwise.planner.space import Space
from shardwise.predict.time import Pricing, engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="megatron-1t")
    parser.add_argument("--cluster", default="512x8xA100")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--engine", default="megatron-lm-2022")
    parser.add_argument("--check", type=int, default=0, metavar="N", help="price N of them one at a time, too")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    cluster, workload = Cluster.parse(args.cluster), Workload(args.seq, args.batch)

    start, began = time.perf_counter(), time.process_time()
    space = Space(get(args.model), cluster, workload, widened(engine(args.engine)))
    pricing = Pricing(cluster)
    found = search(space, pricing, usable=usable_bytes(cluster), overlaps=True)
    seconds, busy = time.perf_counter() - start, time.process_time() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{found.considered:,} legal candidates ({space.size:,} layouts), {found.fitting:,} fit")
    print(f"{seconds:.2f} s, {busy:.2f} s of a processor, {memory / 1e9:.2f} GB of memory")
    print(f"{found.considered / seconds:,.0f} candidates a second")
    for one in found.best[:5]:
        print(f"  {one.seconds:.4f} s  {one.layout}  overlapped: {words(one.engine)}")
    if args.check:
        one_at_a_time(space, pricing, found, args)


def one_at_a_time(space: Space, pricing: Pricing, found: Found, args: argparse.Namespace) -> None:
    """Sampled candidates by `price_one`, against the seconds and the bound of the search."""
    usable, draw = usable_bytes(space.cluster), np.random.default_rng(args.seed)
    share = min(1.0, 1.2 * args.check / found.fitting)
    chosen = []
    for block in found.blocks:
        if block.seconds is not None:
            at = np.flatnonzero(np.isfinite(block.seconds.ravel()) & (block.nbytes.ravel() <= usable))
            chosen += [(block, i) for i in at[draw.random(len(at)) < share].tolist()]
    chosen = random.Random(args.seed).sample(chosen, min(args.check, len(chosen)))
    exact = ExactMemory(space.model, space.workload, space.cluster)
    start, worst, near = time.perf_counter(), 0.0, []
    for block, at in chosen:
        layout = Layout.parse(str(block.place(at).layout))
        check(layout, space.model, space.workload, space.cluster.devices)
        one = price_one(space.model, layout, space.workload, block.engine, pricing, exact)
        worst = max(worst, abs(one.seconds / float(block.seconds.flat[at]) - 1))
        near.append(float(block.nbytes.flat[at]) / one.held.total)
    took = time.perf_counter() - start
    print(f"{len(chosen):,} one at a time: {took:.1f} s, {len(chosen) / took:,.0f} a second")
    print(f"seconds off by {worst:.1e} at most; bound over bytes {min(near):.3f} to {max(near):.6f}")


if __name__ == "__main__":
    main()

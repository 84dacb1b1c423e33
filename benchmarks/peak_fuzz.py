"""How far predicted peaks are from what the dry run observes, over random pairs of a model and a layout.

    python benchmarks/peak_fuzz.py [--seed N] [--pairs N] [--features]

--features draws offloaded state and activations, context and expert parallelism, hpz, qgz and adapters besides. About a
second a pair. Prints each pair that is more than 3% off, or of which a class of memory differs; then the
distribution.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from torch._subclasses.fake_tensor import FakeTensorMode

from harness.pairs import EXACT, pair
from shardwise.predict.memory.step import predict_bytes
from shardwise.runtime import dryrun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="number of the first pair (0)")
    parser.add_argument("--features", action="store_true")
    args = parser.parse_args()
    fake, errors, inexact = FakeTensorMode(), [], 0
    for index in range(args.first, args.first + args.pairs):
        plan, rank = pair(args.seed, index, args.features)
        observed, predicted = dryrun._observe(plan, rank, fake).bytes, predict_bytes(plan)
        different = [name for name in EXACT if getattr(predicted, name) != getattr(observed, name)]
        error = predicted.total / observed.total - 1
        errors.append(abs(error))
        inexact += bool(different)
        if abs(error) > 0.03 or different:
            place = f"{plan.backend}, rank {rank}, seq {plan.workload.seq}, {plan.micro_batches} micro-batches"
            print(f"{index}: {error:+.1%} {plan.model.name} {plan.layout}, {place} {' '.join(different)}", flush=True)
    errors.sort()
    count = len(errors)
    print(
        f"{count} pairs: mean {sum(errors) / count:.2%}, median {errors[count // 2]:.2%}, 95th percentile "
        f"{errors[int(count * 0.95)]:.2%}, most {errors[-1]:.1%}; {sum(e > 0.05 for e in errors)} above 5%, "
        f"{inexact} with a class that differs"
    )


if __name__ == "__main__":
    main()

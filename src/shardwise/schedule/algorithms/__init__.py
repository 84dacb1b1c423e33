"""The algorithms, a file for each family, and the registry that `build` reads.

To add one: write a function of the number of ranks that returns a `Draft`, decorate it with `algorithm`, and run
`shardwise collective verify` on it. `docs/extending.md` has an example.
"""

from shardwise.schedule.algorithms import (  # noqa: F401  (they register their algorithms)
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
)
from shardwise.schedule.algorithms.registry import Algorithm, algorithm, algorithms, build, collective_name, find

__all__ = ["Algorithm", "algorithm", "algorithms", "build", "collective_name", "find"]

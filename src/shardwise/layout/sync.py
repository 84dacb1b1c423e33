"""How replicas of a model agree: in lockstep, through parameter servers, or now and then. Free of torch.

A replica is what trains together: under `sync=local` one of `replicas` equal parts of the data-parallel ranks, each
with the layout's other splits; under `ps`, `async` and `ssp` a worker, with one data-parallel rank. Servers keep the
master weights and the optimizer state of a key range each. Sources: Li et al. 2014 (parameter server), Ho et al. 2013
(SSP), Stich 2019 (local SGD), Douillard et al. 2023 (DiLoCo).
"""

from shardwise.layout.layout import Layout
from shardwise.schedule.staleness import AtOnce, ByStep


def names_of(layout: Layout) -> tuple[str, str]:
    """What computes gradients and what they meet in, in words: ("worker", "server")."""
    if layout.served:
        return "worker", "server"
    return ("replica", "outer step") if layout.local_sgd else ("rank", "all-reduce")


def policy_of(layout: Layout, version: int = 0) -> ByStep | AtOnce:
    """When its replicas' gradients become an update, and when they continue: without servers in lockstep, step by step
    or round by round. version: updates so far."""
    if layout.asynchronous:
        return AtOnce(layout.dp, version)
    workers = layout.independent if layout.sync != "allreduce" else layout.training_ranks
    return ByStep(workers, layout.staleness, layout.backup, version)

"""Names that the layout keys `algorithm=` and `node=` may have."""

from shardwise.errors import LayoutError, UserError, did_you_mean

COLLECTIVES = {"all_reduce": "all-reduce", "all_gather_into": "all-gather", "reduce_scatter": "reduce-scatter"}
"""The ledger's names of the collectives that schedules run -> the registry's."""


def check_algorithm(name: str, node: int) -> None:
    """Raise `LayoutError` for an algorithm that none of the three collectives has, and for a node size that is
    missing or without use."""
    from shardwise.schedule.algorithms import algorithms, find

    if name == "auto":
        raise LayoutError("node=N is for hierarchical algorithms; add algorithm=hierarchical or leave it out")
    found = []
    for collective in COLLECTIVES.values():
        try:
            found.append(find(collective, name))
        except UserError:
            continue
    if not found:
        known = sorted({one.name for collective in COLLECTIVES.values() for one in algorithms(collective)})
        hint = did_you_mean(name, ["auto", *known], "choices:")
        raise LayoutError(f"algorithm={name} is unknown; {hint}")
    if any("node" in algorithm.options for algorithm in found) != (node > 0):
        raise LayoutError(
            f"node={node} is for hierarchical algorithms, and algorithm={name} is none; leave it out"
            if node
            else f"algorithm={name} needs node=N, the ranks of a node, such as node=8"
        )

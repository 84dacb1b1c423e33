"""Warnings where tensor parallelism runs over links that are slow for it: PCIe, and the network between nodes."""

from collections.abc import Iterable, Mapping

from shardwise.cluster import KINDS, Cluster
from shardwise.report.units import format_share


def tensor_warning(cluster: Cluster, tp: int, parts: Mapping[str, float], of: str) -> str | None:
    """One line for tp ranks on slow links, with the share that their communication has of a time; None where the links
    are fast. parts: seconds by part, "tensor" among them, empty where no time is known; of: what they add up to, for
    people."""
    if tp == 1 or cluster.device.kind == "cpu":
        return None
    whole = sum(parts.values())
    share = f"{format_share(parts.get('tensor', 0.0) / whole)} of {of} is its communication" if whole else "slow"
    if tp > cluster.devices_per_node:
        return (
            f"warning: tp={tp} spans nodes of {cluster.devices_per_node}: {share}; keep tp inside a node, and use pp "
            "or dp between nodes"
        )
    seen = cluster.seen_by(tp)
    if not seen.over_pcie:
        return None
    over = KINDS[seen.intra.kind or "host"].words
    joined = [t for t in range(2, tp) if tp % t == 0 and not cluster.seen_by(t).over_pcie]
    other = f"tp={joined[-1]}, which NVLinks join, with pp={tp // joined[-1]}" if joined else f"pp={tp} and smaller tp"
    return f"warning: tp={tp} runs over {over}, not NVLink: {share}; compare {other}"


def tensor_warnings(cluster: Cluster, taken: Iterable[tuple[int, Mapping[str, float]]], of: str) -> tuple[str, ...]:
    """`tensor_warning` once for each tp, of its first split. taken: tp and seconds by part, best first."""
    first: dict[int, Mapping[str, float]] = {}
    for tp, parts in taken:
        first.setdefault(tp, parts)
    lines = (tensor_warning(cluster, tp, parts, of) for tp, parts in first.items())
    return tuple(line for line in lines if line)

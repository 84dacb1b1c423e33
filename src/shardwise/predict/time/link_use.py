"""Communication of one step by axis, and its time on each kind of link: which links an axis can afford.

Bytes and calls are those of the ledger. Times are those of all calls one after another, nothing hidden beside
computation: an upper bound of what the axis adds to a step, and comparable between links.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shardwise.cluster import KINDS, Cluster
from shardwise.codec import Json
from shardwise.layout import Layout
from shardwise.layout.axes import SERVER, named
from shardwise.layout.mesh import Mesh
from shardwise.model.parameters import Model
from shardwise.predict.time.network import Collectives
from shardwise.predict.time.pricing import Pricing
from shardwise.report.step_report import LedgerRow, Role

MESSAGES = ("send", "recv")
"""Operations between two ranks, which a pipeline's stages use."""


@dataclass(frozen=True)
class LinkUse(Json):
    """One axis of one rank role in one step."""

    role: str
    axis: str
    """Name of the axes in the ledger: tp, dp, dp_cp, ..."""
    ranks: int
    link: str
    """Link that the group's slowest messages cross, in words."""
    calls: int
    payload_bytes: int
    """Bytes of the full tensors, summed over the calls."""
    seconds: float
    """All calls where the layout places them."""
    inside: float | None
    """The same with the group inside one node; None for more ranks than a node has."""
    between: float | None
    """The same with every rank on a node of its own; None without a network between nodes."""


def link_uses(model: Model, layout: Layout, cluster: Cluster, roles: Iterable[Role]) -> tuple[LinkUse, ...]:
    """The axes of every rank role, the dearest first. roles: of an estimate. Raises `UserError` for a device without
    constants of time, and for links of unknown bandwidth."""
    mesh = Mesh.of(layout, model)
    # A node for every rank, so that each group can be priced with its ranks on nodes of their own.
    wide = replace(cluster, nodes=max(cluster.nodes, layout.ranks))
    collectives = Pricing(wide, layout=layout).collectives
    found = []
    for role in roles:
        by_axis: dict[str, list[LedgerRow]] = {}
        for row in role.ledger:
            if row.axes != SERVER:
                by_axis.setdefault(row.axes, []).append(row)
        uses = [_use(role, axis, rows, mesh, cluster, collectives) for axis, rows in by_axis.items()]
        found += sorted(uses, key=lambda use: -use.seconds)
    return tuple(found)


def _use(
    role: Role, axis: str, rows: Sequence[LedgerRow], mesh: Mesh, cluster: Cluster, collectives: Collectives
) -> LinkUse:
    group = sorted(mesh.group(named(axis), role.ranks[0]))
    ranks, stride = len(group), group[1] - group[0]
    per_node = cluster.devices_per_node
    apart = len({rank // per_node for rank in group}) > 1
    link = cluster.seen_by(ranks, stride).intra
    usual = KINDS[link.kind].words if link.kind else link.source
    between = KINDS[cluster.inter.kind or "network"].words
    return LinkUse(
        role.role, axis, ranks, between if apart else usual,
        sum(row.count for row in rows), sum(row.payload_bytes for row in rows),
        _seconds(rows, ranks, stride, collectives),
        _seconds(rows, ranks, 1, collectives) if ranks <= per_node else None,
        _seconds(rows, ranks, per_node, collectives) if cluster.inter.bandwidth else None,
    )  # fmt: skip


def _seconds(rows: Sequence[LedgerRow], ranks: int, stride: int, collectives: Collectives) -> float:
    total = 0.0
    for row in rows:
        nbytes = row.payload_bytes / row.count
        if row.op in MESSAGES:
            once = collectives.hop(nbytes, stride)
        else:
            once = collectives.seconds(row.op, nbytes, ranks, stride)
        total += row.count * float(once)
    return total


def link_advice(uses: Sequence[LinkUse], step: float) -> list[str]:
    """One line for each axis that one kind of link affords and the other does not. step: seconds of the whole step."""
    lines = {}
    for use in uses:
        near, far = use.inside, use.between
        if near is None or far is None or use.axis in lines or far < NEGLIGIBLE * step:
            continue
        if near < AFFORDABLE * step <= far:
            lines[use.axis] = (
                f"{use.axis}: keep its {use.ranks} ranks inside a node: {_share(far, step)} of the step between nodes, "
                f"{_share(near, step)} inside"
            )
        elif far < AFFORDABLE * step:
            lines[use.axis] = f"{use.axis}: either link will do: {_share(far, step)} of the step even between nodes"
        else:
            lines[use.axis] = (
                f"{use.axis}: dear on every link: {_share(near, step)} of the step even inside a node, as far as "
                "nothing overlaps it"
            )
    return list(lines.values())


AFFORDABLE = 0.15
"""Share of a step that communication may take, all of it exposed, before a link counts as too slow for an axis."""

NEGLIGIBLE = 0.001
"""Share of a step below which an axis needs no advice."""


def _share(seconds: float, step: float) -> str:
    return f"{100 * seconds / step:.0f}%"

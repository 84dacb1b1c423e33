"""Transport rows and workspace of the schedules that a layout names (`algorithm=`), from the predicted ledger."""

from collections.abc import Sequence

from shardwise.layout.algorithms import COLLECTIVES, Carried
from shardwise.layout.axes import named
from shardwise.layout.transport_buffers import aligned, staging_bytes
from shardwise.layout.units import UnitPlan
from shardwise.predict.traffic.ledger import predict_ledger
from shardwise.report.step_report import DTYPE_BYTES, LedgerRow, Role, TransportRow


def predict_transport(plan: UnitPlan, rank: int) -> tuple[TransportRow, ...]:
    """Algorithm, bytes sent and steps of each row of `rank`'s ledger; none where the layout names no algorithm.

    What runs as under `algorithm=auto` has that name, and no bytes: the transport chooses.
    """
    if not plan.schedules.named:
        return ()
    rows = []
    for index, row in enumerate(predict_ledger(plan)):
        carried = _carried(plan, row)
        if carried is None:
            rows.append(TransportRow(index, "auto", None, None, None, None))
            continue
        place = sorted(plan.schedules.mesh.group(named(row.axes), rank)).index(rank)
        nbytes, steps = carried.moved(place)
        name = carried.schedule.algorithm
        rows.append(TransportRow(index, name, nbytes * row.count, steps * row.count, None, None))
    return tuple(rows)


def as_under_auto(roles: Sequence[Role]) -> str:
    """The collectives of predicted roles that the named algorithm does not run, such as "reduce_scatter over dp"; empty
    where it runs all, or none is named."""
    rows = [(role.ledger[row.row], row.algorithm) for role in roles for row in role.transport]
    kinds = {f"{row.op} over {row.axes}" for row, name in rows if name == "auto" and row.op in COLLECTIVES}
    return ", ".join(sorted(kinds))


def workspace_bytes(plan: UnitPlan) -> int:
    """Bytes of the buffers that a rank's schedules share: the most room for messages, and the largest fp32 copy."""
    carried = [(found, row.dtype) for row in predict_ledger(plan) if (found := _carried(plan, row))]
    room = max((found.room for found, _ in carried), default=0)
    return room + max((found.wide(dtype) for found, dtype in carried), default=0)


def staged_bytes(plan: UnitPlan) -> int:
    """Bytes of host memory through which collectives go where ranks share a GPU: the largest one's."""
    return max((_staged(plan, row) for row in predict_ledger(plan)), default=0) if plan.backend == "staged" else 0


def _staged(plan: UnitPlan, row: LedgerRow) -> int:
    if row.op not in (*COLLECTIVES, "all_to_all"):  # a copy or a message
        return 0
    if (carried := _carried(plan, row)) is not None:
        widest = max((width for _, width in carried.runs), default=0)
        return aligned(widest * carried.pieces * DTYPE_BYTES[carried.dtype])
    item = DTYPE_BYTES[row.dtype]
    return staging_bytes(row.op, row.elements * item, plan.mesh.size(named(row.axes)), item)


def _carried(plan: UnitPlan, row: LedgerRow) -> Carried | None:
    return plan.schedules.carried(row.op, named(row.axes), row.dtype, row.elements)

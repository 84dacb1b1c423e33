"""Realization of a step's collectives, summed for each kind: calls, bytes sent, steps, time, waiting."""

from typing import Any, NamedTuple

from shardwise.report.grouping import group_units
from shardwise.report.step_report import LedgerRow, Role, TransportRow


class TransportLine(NamedTuple):
    """All calls of one kind of collective on one rank in one step. None where the transport did not tell."""

    phase: str
    op: str
    axes: str
    label: str
    algorithm: str
    calls: int
    payload_bytes: int
    bytes_sent: int | None
    steps: int | None
    time_s: float | None
    wait_s: float | None

    @property
    def hidden_s(self) -> float | None:
        """The part of the time in which the rank did something else."""
        if self.time_s is None or self.wait_s is None:
            return None
        return max(0.0, self.time_s - self.wait_s)


def transport_lines(role: Role) -> tuple[TransportLine, ...]:
    """The transport table of a role with identical blocks joined, in ledger order."""
    lines = []
    pairs = [(role.ledger[row.row], row) for row in sorted(role.transport, key=lambda row: row.row)]
    for group in group_units(pairs, lambda pair: pair[0].unit, _alike):
        ledger, rows = [pair[0] for pair in group.rows], [pair[1] for pair in group.rows]
        first = ledger[0]
        line = TransportLine(
            phase=first.phase,
            op=first.op,
            axes=first.axes,
            label=group.label,
            algorithm=rows[0].algorithm,
            calls=sum(row.count for row in ledger),
            payload_bytes=sum(row.payload_bytes for row in ledger),
            bytes_sent=_sum([row.bytes_sent for row in rows]),
            steps=_sum([row.steps for row in rows]),
            time_s=_sum([row.time_s for row in rows]),
            wait_s=_sum([row.wait_s for row in rows]),
        )
        lines.append(line)
    return tuple(lines)


def _alike(pair: tuple[LedgerRow, TransportRow]) -> tuple[object, ...]:
    row, carried = pair
    return row.phase, row.op, row.axes, row.dtype, row.elements, row.count, carried.algorithm


def _sum(values: list[Any]) -> Any:
    return None if None in values else sum(values)

"""`StepReport`: what one training step holds and moves, on every rank role.

Predictions, dry runs and real runs return the same object, so that any two of them can be compared row by row.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Literal

from shardwise.codec import Json
from shardwise.errors import UserError, os_errors
from shardwise.records import dataclass
from shardwise.report.files import write_whole
from shardwise.report.printing import Bar, Printable
from shardwise.report.room import DeviceRoom
from shardwise.report.strict_json import strict
from shardwise.report.terminal import Renderable
from shardwise.report.units import format_ranks

SCHEMA_VERSION = 1

Source = Literal["predicted", "dry-run", "measured"]
Phase = Literal["forward", "backward", "optimizer", "loss", "prefill", "decode"]

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
    "int64": 8, "int32": 4, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True, order=True)
class LedgerRow(Json):
    """One kind of logical collective of one steady training step.

    phase: the phase of the step that consumes the result. op: torch's name without `_tensor` (all_reduce,
    all_gather_into, reduce_scatter, broadcast, ...). axes: the mesh axes it spans, joined by "_" (dp, shard,
    replicate, tp, kv, shard_tp, ...). unit: the unit it serves (blocks.3) or the reason (loss, tokens, grad-norm).
    dtype: torch's name without "torch.". elements: elements of the padded full tensor. count: how often per step.
    """

    json_checked = True

    phase: Phase
    op: str
    axes: str
    unit: str
    dtype: str
    elements: int
    count: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of the full tensor times count: the n of the cost formulas, not what crosses a wire."""
        return self.elements * DTYPE_BYTES[self.dtype] * self.count


@dataclass(frozen=True)
class TransportRow(Json):
    """Realization by a transport of the ledger row with index `row`.

    All figures are sums over the row's count in one step. time_s: from issue to completion, waiting for slower ranks
    included; wait_s: how long the rank stood still for it.
    bytes_sent: by this rank; of a role, by its first. steps: rounds in which it sends or receives. Both are None where
    the transport does not tell.
    """

    json_checked = True

    row: int
    algorithm: str
    bytes_sent: int | None
    steps: int | None
    time_s: float | None
    wait_s: float | None


@dataclass(frozen=True)
class Bytes(Json):
    """Bytes that a rank holds, by class: the most of each class at one time within a step.

    parameters: weights in compute precision. gradients: gradient accumulators. optimizer: master weights and moments.
    saved: tensors saved for backward at the end of a micro-batch's forward pass, each storage once, parameters
    excluded. comm: buffers of the engine that gathers and reductions pass through. other: the rest of the peak
    (transient results, inputs, tables). absent: what of these is not there at the peak, since classes reach their most
    at different times (gradients when backward ends, saved tensors when it begins). cache: room for keys and values,
    which only generation has. total: the peak.
    """

    json_checked = True

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    saved: int = 0
    comm: int = 0
    other: int = 0
    absent: int = 0
    cache: int = 0

    @classmethod
    def of(cls, peak: int, **classes: int) -> Bytes:
        """The classes by name, with `other` or `absent` such that the total is `peak`."""
        rest = peak - sum(classes.values())
        return cls(**classes, other=max(0, rest), absent=max(0, -rest))

    @property
    def total(self) -> int:
        held = self.parameters + self.gradients + self.optimizer + self.saved + self.comm + self.cache + self.other
        return held - self.absent


HOMES = ("host", "disk")
"""Where a rank has bytes beside its device: fields of `Role`."""


@dataclass(frozen=True)
class Role(Json):
    """Ranks whose bytes and ledger are equal. `peak_bytes` is what the classes take together at the worst moment."""

    json_keys = "* peak_bytes"
    json_omits = (*HOMES, "routed")
    json_checked = True

    role: str
    ranks: tuple[int, ...]
    bytes: Bytes
    ledger: tuple[LedgerRow, ...]
    transport: tuple[TransportRow, ...] = ()
    timeline: tuple[dict[str, Any], ...] = ()
    host: Bytes = Bytes()
    """Bytes in the host's memory: offloaded state, gradients for its update, and their buffers (`comm`)."""
    disk: Bytes = Bytes()
    """Bytes of the rank's file."""
    routed: dict[str, list[list[int]]] | None = None
    """Part -> [pairs sent to experts, rows received] of each micro-batch of the step; None without experts."""

    @property
    def peak_bytes(self) -> int:
        return self.bytes.total

    @classmethod
    def from_json(cls, data: Any) -> Role:
        """The inverse of `to_json`. Raises `TypeError` for what no rank can have: a report may come from anywhere."""
        role = super().from_json(data)
        if not role.ranks:
            raise TypeError("role: ranks cannot be []")
        if unknown := {row.dtype for row in role.ledger} - DTYPE_BYTES.keys():
            raise TypeError(f"ledger row: dtype cannot be {reprlib.repr(min(unknown))}")
        if role.transport and max(row.row for row in role.transport) >= len(role.ledger):
            raise TypeError("a transport row is of no ledger row")
        if role.peak_bytes < 0:
            raise TypeError("more bytes are absent than there are")
        return role

    @property
    def payloads(self) -> dict[tuple[str, str], int]:
        """(operation, axes) -> payload bytes of a rank per step."""
        sums: dict[tuple[str, str], int] = {}
        for row in self.ledger:
            sums[row.op, row.axes] = sums.get((row.op, row.axes), 0) + row.payload_bytes
        return sums


@dataclass(frozen=True, repr=False)
class StepReport(Printable, Json):
    """One steady training step (or one token of generation), on all ranks.

    model, layout, workload, cluster: their texts or JSON descriptions. time: seconds of one step, None when nobody
    priced or measured it. timing: what a predicted time is made of: engine (the profile of the software), seconds, low
    and high (the 80% range), parts (name -> seconds). notes: what the figures leave out, a sentence each.
    """

    json_omits = ("balance", "room", "cluster_links")
    json_checked = True

    source: Source
    model: dict[str, Any]
    layout: str
    workload: dict[str, Any]
    cluster: str
    roles: tuple[Role, ...]
    time: float | None = None
    timing: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()
    balance: dict[str, Any] | None = None
    """Attention's work by context-parallel rank (`ContextBalance.to_json`); None without context parallelism."""
    room: dict[str, Any] | None = None
    """A device's room for the highest peak (`DeviceRoom.to_json`); None where it is not known."""
    cluster_links: dict[str, Any] | None = None
    """Links that a predicted step is priced on (`predict.cluster_links.links_json`); None without a cluster."""
    schema_version: int = field(default=SCHEMA_VERSION)

    @property
    def busiest(self) -> Role:
        """The role whose ranks communicate most, by payload."""
        return max(self.roles, key=lambda role: sum(role.payloads.values()))

    def tables(self) -> Iterator[Renderable]:
        """The conclusion, memory, communication and time, as `shardwise estimate` prints them."""
        from shardwise.report.tables import report_tables

        return report_tables(self)

    def bars(self) -> Iterator[Bar]:
        from shardwise.report.tables import memory_bar, time_bar

        if self.timing:
            yield time_bar(self.timing["parts"])
        yield memory_bar(max(self.roles, key=lambda role: role.peak_bytes).bytes)

    def conclusion(self, room: DeviceRoom | None = None) -> str:
        """Memory and time in one sentence. room: of a device."""
        from shardwise.report.tables import report_conclusion

        return report_conclusion(self, room)

    @classmethod
    def from_json(cls, data: Any) -> StepReport:
        """The inverse of `to_json`. Raises `UserError` when the text is not a report of this schema version."""
        if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION:
            version = data.get("schema_version") if isinstance(data, dict) else None
            raise UserError(f"not a StepReport of schema version {SCHEMA_VERSION} (found {version!r})")
        try:
            # size: the model's, which `estimate --json` adds.
            return super().from_json({name: value for name, value in data.items() if name != "size"})
        except (KeyError, TypeError) as error:
            raise UserError(f"damaged StepReport: {error}") from None

    def write(self, path: Path) -> None:
        """Write as JSON, whole or not at all. Raises `UserError` when the file cannot be written."""
        write_whole(path, json.dumps(strict(self.to_json()), indent=1, allow_nan=False) + "\n", "report")

    @classmethod
    def read(cls, path: Path | str) -> StepReport:
        """Read a report file. Raises `UserError` naming the file when it is missing or damaged."""
        path = Path(path)
        with os_errors(f"read report {path}", typed=path, damaged=f"{path} is not valid JSON:"):
            data = json.loads(path.read_text())
        try:
            return cls.from_json(data)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None


def merge_roles(per_rank: dict[int, Role]) -> tuple[Role, ...]:
    """Join ranks with equal bytes, ledger and routing into one role each, keeping the lowest rank's transport and
    timeline.

    per_rank: rank -> its own role. The roles come out in the order of their lowest rank.
    """
    groups: dict[Any, list[int]] = {}
    for rank in sorted(per_rank):
        role = per_rank[rank]
        groups.setdefault((role.bytes, role.host, role.disk, role.ledger, repr(role.routed)), []).append(rank)
    merged = []
    for ranks in groups.values():
        first = per_rank[ranks[0]]
        merged.append(replace(first, ranks=tuple(ranks)))
    if len(merged) == 1:
        return (replace(merged[0], role="all"),)
    return tuple(replace(role, role=format_ranks(role.ranks)) for role in merged)

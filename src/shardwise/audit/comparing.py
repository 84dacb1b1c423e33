"""Recorded calls of a step against what the layout must send, by the sizes of the program's parameters.

A layout's parameter traffic follows from the bytes of every rank: DDP must all-reduce every gradient once per
reduction, FSDP must gather every parameter and scatter every gradient. Activations and messages between stages depend
on the model's shapes and are counted; what belongs to no engine is the program's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from shardwise.audit.axes import DATA, FLOATS, PIPELINE, SHARDS, SMALL, TENSOR
from shardwise.audit.calls import MESSAGES, Call
from shardwise.audit.reading import RankRecording
from shardwise.audit.understanding import Understood, steady_calls
from shardwise.codec import Json
from shardwise.report.step_report import DTYPE_BYTES

_PADDING = 0.02
"""Share by which padded shards may exceed the parameters; small modules have more, by elements."""


@dataclass(frozen=True)
class RecordedRow(Json):
    """Calls of one kind in one step of one rank."""

    what: str
    """gradients, parameters, activations, messages, buffers, or program: calls by no engine."""
    phase: str
    op: str
    axis: str
    """dp, shard, tp, pp, or the number of ranks of another group."""
    dtype: str
    calls: int
    elements: int
    """Of the full tensors: what is gathered, before it is scattered."""
    where: str
    """file:line of the first."""
    due: int | None = None
    """Elements that the layout must send; None where they are not known."""
    note: str = ""
    """What differs, or why it may."""
    wrong: bool = False
    """Whether less or more is sent than must be, without a reason that the engine has."""

    json_keys = "* bytes"

    @property
    def bytes(self) -> int:
        return self.elements * DTYPE_BYTES.get(self.dtype, 1)


def elements_of(call: Call) -> int:
    """Elements of the full tensor of a call."""
    whole = call.outputs if call.op in ("all_gather_into", "all_gather", "recv") else call.inputs
    return whole // DTYPE_BYTES.get(call.dtype, 1)


def _what(call: Call, axis: str) -> str:
    if call.op in MESSAGES:
        return "messages"
    if call.engine in ("ddp", "fsdp", "deepspeed"):
        if call.op in ("all_gather_into", "all_gather"):
            return "parameters"
        return "buffers" if call.op == "broadcast" else "gradients" if call.phase == "backward" else "engine"
    if call.engine == "zero-redundancy":
        return "parameters"
    if axis == TENSOR and call.phase:
        return "activations"
    large = call.dtype in FLOATS and max(call.inputs, call.outputs) > SMALL and call.phase != "forward"
    return "gradients" if axis in (DATA, SHARDS) and large and not call.engine else "program"


def recorded_rows(recording: RankRecording, understood: Understood) -> list[RecordedRow]:
    """The calls of a steady step of one rank by kind."""
    axes = {group: axis for axis, groups in understood.groups.items() for group in groups if axis != PIPELINE}
    kinds: dict[tuple[str, str, str, str, str, str], list[Call]] = defaultdict(list)
    for call in steady_calls(recording):
        axis = PIPELINE if call.op in MESSAGES else axes.get(call.group, f"{len(call.group)} ranks")
        what = _what(call, axis)
        place = call.where if what == "program" else ""
        kinds[what, call.phase, call.op, axis, call.dtype, place].append(call)
    return [
        RecordedRow(what, phase, op, axis, dtype, len(calls), sum(map(elements_of, calls)), calls[0].where)
        for (what, phase, op, axis, dtype, _), calls in sorted(kinds.items())
    ]


def compare_traffic(recordings: Sequence[RankRecording], understood: Understood) -> list[RecordedRow]:
    """Rows of the first rank of which bytes are known, with what is due and a note.

    Empty where no optimizer step was recorded.
    """
    for one in recordings:
        if one.model is not None:
            return list(_judged(one, recorded_rows(one, understood), understood))
    return []


def _judged(one: RankRecording, rows: list[RecordedRow], understood: Understood) -> Iterator[RecordedRow]:
    assert one.model is not None
    trained = {name: prod(shape) for name, shape, _, grad, _ in one.model[3] if grad}
    stored = {row[2] for row in one.model[3]}
    dtype = next(iter(stored)) if len(stored) == 1 else ""
    whole = sum(local for *_, grad, local in one.model[3] if grad)
    shards = understood.axes.get(SHARDS, 1)
    full = whole * shards if understood.layout is not None and understood.layout.zero >= 2 else whole
    reduced = [row.elements for row in rows if row.what == "gradients" and row.axis in (DATA, SHARDS)]
    times = max(1, round(max(reduced, default=0) / full)) if full else 1  # micro-batches whose gradients are reduced
    for row in rows:
        if row.what in ("gradients", "parameters"):
            yield _against(row, full if row.axis != DATA or shards == 1 else whole, times, dtype, trained)
        else:
            yield row


def _against(row: RecordedRow, full: int, times: int, dtype: str, trained: dict[str, int]) -> RecordedRow:
    """A row of parameters or gradients with what is due."""
    due = full if row.what == "parameters" and not row.phase else full * times
    excess, note, wrong = row.elements - due, "", False
    slack = max(_PADDING * due, 64 * row.calls)
    if excess < 0 and row.what == "gradients":
        names = _run_of(trained, -excess // times)
        note = f"{-excess:,} elements are never reduced" + (f" (as many as {names} has)" if names else "")
        wrong = True
    elif excess < -slack and row.what == "parameters":
        note = "the rest is kept from the forward pass" if row.phase == "backward" else "the rest stays gathered"
    elif excess > slack:
        note, wrong = f"{row.elements / due:.2g} times what is due", True
    elif excess > 0:
        note = f"{excess / due:.1%} padding"
    if row.dtype != dtype and dtype and not wrong:
        note = f"{row.dtype} on the wire, {dtype} stored" + (f"; {note}" if note else "")
    return replace(row, due=due, note=note, wrong=wrong)


def _run_of(trained: dict[str, int], elements: int) -> str:
    """Name of the parameter, or of the first and the last in a row, with so many elements; "" for none. Those of one
    module go first."""
    names, sizes, results = list(trained), list(trained.values()), []
    for length in range(1, len(sizes)):
        for first in range(len(sizes) - length + 1):
            if sum(sizes[first : first + length]) == elements:
                run = names[first : first + length]
                results.append((len({name.rpartition(".")[0] for name in run}), length, run))
    _, length, run = min(results, key=lambda one: one[:2], default=(0, 0, [""]))
    return run[0] if length <= 1 else f"{run[0]} to {run[-1]}"

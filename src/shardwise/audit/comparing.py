"""Recorded calls of a step beside the ledger that this project predicts of the layout (`planned.py`), row by row.

Messages between stages depend on the model's shapes and are counted; what belongs to no engine is the program's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

from shardwise.audit.axes import DATA, FLOATS, PIPELINE, SHARDS, SMALL, TENSOR
from shardwise.audit.calls import MESSAGES, Call
from shardwise.audit.planned import Planned, PlannedRow, planned_step
from shardwise.audit.reading import RankRecording
from shardwise.audit.understanding import Understood, steady_calls
from shardwise.codec import Json
from shardwise.layout import Layout
from shardwise.model import ModelConfig
from shardwise.report.step_report import DTYPE_BYTES

_ENGINES = ("ddp", "fsdp", "deepspeed")
"""Those that reduce gradients."""
_PADDING = 0.02
"""Share by which padded shards may exceed the parameters; small modules have more, by elements."""


@dataclass(frozen=True)
class RecordedRow(Json):
    """Calls of one kind in one step of one rank."""

    what: str
    """gradients, parameters, activations, messages, buffers, engine, or program: calls by no engine."""
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
    """Elements that this project's runtime would send of the layout; None where they are not known."""
    due_calls: int | None = None
    """Calls in which it would: one for each block."""
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


def _what(call: Call, axis: str, by_engine: bool, large: bool) -> str:
    """`RecordedRow.what`. by_engine: whether an engine reduces the gradients. large: whether its line sends more than
    scalars."""
    if call.op in MESSAGES:
        return "messages"
    if call.engine in _ENGINES:
        if call.op in ("all_gather_into", "all_gather"):
            return "parameters"
        if call.op == "broadcast":
            return "buffers"
        # DDP also sums which parameters were used, as integers; DeepSpeed reduces what is left after the backward pass.
        late = call.engine == "deepspeed" and max(call.inputs, call.outputs) > SMALL and call.phase != "forward"
        return "gradients" if (call.phase == "backward" or late) and call.dtype in FLOATS else "engine"
    if call.engine == "zero-redundancy":
        return "parameters"
    if axis == TENSOR and call.phase:
        return "activations"
    large = large and call.dtype in FLOATS and call.phase != "forward"
    return "gradients" if axis in (DATA, SHARDS) and large and not (call.engine or by_engine) else "program"


def recorded_rows(recording: RankRecording, understood: Understood) -> list[RecordedRow]:
    """The calls of a steady step of one rank by kind."""
    axes = understood.axes_of
    kinds: dict[tuple[str, str, str, str, str, str], list[Call]] = defaultdict(list)
    calls = steady_calls(recording)
    by_engine = any(call.engine in _ENGINES for call in calls)
    large = {(call.op, call.where) for call in calls if max(call.inputs, call.outputs) > SMALL}
    for call in calls:
        axis = PIPELINE if call.op in MESSAGES else axes.get(call.group, f"{len(call.group)} ranks")
        what = _what(call, axis, by_engine, (call.op, call.where) in large)
        place = call.where if what == "program" else ""
        kinds[what, call.phase, call.op, axis, call.dtype, place].append(call)
    return [
        RecordedRow(what, phase, op, axis, dtype, len(calls), sum(map(elements_of, calls)), calls[0].where)
        for (what, phase, op, axis, dtype, _), calls in sorted(kinds.items())
    ]


def compare_traffic(
    recordings: Sequence[RankRecording], understood: Understood, expect: Layout | None = None,
    model: ModelConfig | None = None,
) -> tuple[list[RecordedRow], Planned | None]:  # fmt: skip
    """(rows of the first rank whose parameters are known, with what is due; the plan that they are compared with).

    expect: the layout of the plan, if it is another than the understood one. model: the program's, where no
    recording has one. No rows where no step was recorded.
    """
    known = (one for one in recordings if one.model is not None)
    one = next(known, next((one for one in recordings if model and one.steps), None))
    layout = expect or understood.layout
    if one is None:
        return [], None
    rows = recorded_rows(one, understood)
    groups = understood.groups.get(TENSOR, ())
    # The first activations that tensor-parallel ranks sum, or gather, have the tokens of a micro-batch as rows.
    shapes = (
        (call.shape, len(call.group) if call.op == "all_gather_into" else 1)
        for call in steady_calls(one)
        if call.group in groups and call.phase == "forward"
    )
    tokens = next((prod(shape[:-1]) * parts for shape, parts in shapes if len(shape) > 1), 0)
    planned = planned_step(one, layout, tokens, model) if layout else None
    return (rows if planned is None else list(_Judge(one, rows, planned, expect).rows())), planned


_PLANNED = {"all_gather": "all_gather_into", "broadcast": "all_gather_into", "all_to_all": "reduce_scatter",
            "reduce": "reduce_scatter"}  # fmt: skip
"""Operation of an engine -> the one that a plan has in its place."""
_ELSEWHERE = {
    ("parameters", "forward"): {"optimizer": "gathered in the forward pass; this runtime does after the update"},
    ("parameters", ""): {
        "optimizer": "",
        "forward": "gathered after the update; this runtime does in the forward pass",
    },
}
"""(what, phase of an engine's call) -> phase in a plan -> why."""


class _Judge:
    """Recorded rows beside a plan's."""

    def __init__(self, one: RankRecording, rows: list[RecordedRow], planned: Planned, expect: Layout | None) -> None:
        self.recorded, self.planned, self.expect, self.repeats = rows, planned, expect, one.repeats_reduction
        stored = {row[2] for row in one.model[3]} if one.model else set()
        self.stored = next(iter(stored)) if len(stored) == 1 else ""
        whole = sum(planned.trained.values())
        # Micro-batches whose gradients are reduced, and micro-batches that pass forward and backward.
        self.reduced = self._times("gradients", "", whole)
        gathers = [self._times("parameters", phase, planned.elements) for phase in ("forward", "backward")]
        self.passes = max(self.reduced, min(gathers))
        forward = planned.rows.get(("activations", "forward", "all_reduce"))
        self.activations = self._times("activations", "forward", forward.elements) if forward else 1

    def _times(self, what: str, phase: str, whole: int) -> int:
        sent = [row.elements for row in self.recorded if row.what == what and phase in ("", row.phase)]
        return max(1, round(max(sent, default=0) / whole)) if whole else 1

    def rows(self) -> Iterator[RecordedRow]:
        for row in self.recorded:
            if row.what in ("gradients", "parameters", "activations"):
                yield self._against(row)
            elif row.what == "program" and row.dtype in FLOATS and row.bytes > SMALL * row.calls:
                yield replace(row, note="in no plan of the layout")
            else:
                yield row
        sent = {row.what for row in self.recorded}
        for (what, phase, op), due in self.planned.rows.items():
            if what not in sent and (what, phase) in (("gradients", "backward"), ("parameters", "forward")):
                note = f"never sent: {due.elements:,} elements in {due.calls} calls are due"
                yield RecordedRow(what, phase, op, "", due.dtype, 0, 0, "", due.elements, due.calls, note, True)

    def _against(self, row: RecordedRow) -> RecordedRow:
        """A row with what the plan has in its place, and why they differ."""
        planned, note = self._due(row)
        if planned is None:
            # Sequence-parallel activations of a program's own modules are in no ledger.
            unknown = row.what == "activations" and not any(what == row.what for what, _, _ in self.planned.rows)
            return row if unknown else replace(row, note="in no plan of the layout")
        times = {"gradients": self.reduced, "activations": self.activations}.get(row.what, self.passes)
        times = times if row.phase or (row.what == "gradients" and self.repeats) else 1
        due = planned.elements * times
        excess, wrong = row.elements - due, False
        slack = max(_PADDING * due, 64 * row.calls) if row.what != "activations" else 0
        if excess < 0 and row.what == "gradients":
            names = _run_of(self.planned.trained, -excess // times)
            note = f"{-excess:,} elements are never reduced" + (f" (as many as {names} has)" if names else "")
            wrong = True
        elif excess < -slack and row.what == "parameters":
            note = "the rest is kept from the forward pass" if row.phase == "backward" else "the rest stays gathered"
        elif excess < 0 and row.what == "activations":
            note = f"{-excess:,} elements less: a first input that needs no gradient"
        elif row.what == "parameters" and row.phase == "backward" and excess > 0:
            note = f"{excess:,} elements are gathered again that this runtime keeps"
            if row.elements > self.planned.elements * times + slack:
                note, wrong = f"{row.elements / self.planned.elements / times:.2g} times all parameters", True
        elif excess > slack:
            # Activations may be redistributed by the program itself.
            times_due = f"{row.elements / due:.2g} times what is due" if due else "nothing is due"
            note, wrong = times_due, row.what != "activations"
        elif excess > 0 and due:
            note = _joined(f"{excess / due:.1%} padding", note)
        row = replace(row, due=due, due_calls=planned.calls * times, note=note, wrong=wrong)
        return self._typed(row, planned.dtype)

    def _due(self, row: RecordedRow) -> tuple[PlannedRow | None, str]:
        """(what a plan has in a row's place, why it is another call)."""
        rows, op = self.planned.rows, _PLANNED.get(row.op, row.op)
        if (row.what, row.phase, op) in rows:
            return rows[row.what, row.phase, op], ""
        if row.what == "gradients" and ("gradients", "backward", "reduce_scatter") in rows and op == "all_reduce":
            return rows["gradients", "backward", "reduce_scatter"], "a reduce_scatter would send half the bytes"
        if row.what == "gradients" and ("gradients", "backward", op) in rows:  # after the backward pass
            return rows["gradients", "backward", op], ""
        kept = rows.get(("parameters", "forward", op))  # of a plan that keeps all to backward
        if row.what == "parameters" and row.phase == "backward" and kept:
            return kept._replace(elements=0), ""
        elsewhere = _ELSEWHERE.get((row.what, row.phase), {})
        known = ((rows[row.what, at, op], why) for at, why in elsewhere.items() if (row.what, at, op) in rows)
        return next(known, (None, ""))

    def _typed(self, row: RecordedRow, planned: str) -> RecordedRow:
        """A row with a note where its type on the wire is another one than is expected, or stored."""
        if self.expect is not None and row.dtype != planned:
            times = DTYPE_BYTES.get(row.dtype, 1) / DTYPE_BYTES.get(planned, 1)
            note = f"{row.dtype} on the wire, {planned} expected: {times:.2g} times the bytes"
            return replace(row, note=_joined(note, row.note), wrong=True)
        if self.stored and row.dtype != self.stored and not row.wrong and row.what != "activations":
            return replace(row, note=_joined(f"{row.dtype} on the wire, {self.stored} stored", row.note))
        return row


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def _run_of(trained: dict[str, int], elements: int) -> str:
    """Name of the parameter, or of the first and the last in a row, with so many elements; "" for none. Those of one
    module go first."""
    names, results = list(trained), []
    ends = [0, *accumulate(trained.values())]
    starts = {end: at for at, end in enumerate(ends)}
    for stop in range(1, len(ends)):
        first = starts.get(ends[stop] - elements)
        if first is not None and first < stop and stop - first < len(names):
            run = names[first:stop]
            results.append((len({name.rpartition(".")[0] for name in run}), len(run), run))
    _, length, run = min(results, key=lambda one: one[:2], default=(0, 0, [""]))
    return run[0] if length <= 1 else f"{run[0]} to {run[-1]}"

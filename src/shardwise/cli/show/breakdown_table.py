"""Output of `estimate --breakdown`: the terms behind each total."""

from collections.abc import Iterator, Sequence

from shardwise.layout.optimizers import MODEL
from shardwise.predict.breakdown import ARRAYS, Breakdown
from shardwise.predict.recompute_modes import RecomputeMode
from shardwise.report.table import Column, FittedTable
from shardwise.report.terminal import Renderable
from shardwise.report.units import format_bytes, format_count, format_ranks, format_share, format_time

SHORT = {"bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}


def breakdown_tables(terms: Breakdown, modes: Sequence[RecomputeMode]) -> Iterator[Renderable]:
    """All that is printed for a breakdown. modes: recompute modes of the same layout."""
    total = sum(terms.parameters.values())
    columns = (Column("parameters", left=True), Column("number"), Column("share"))
    table = FittedTable(columns, title="parameters of the model")
    for group, number in terms.parameters.items():
        table.add_row(group, f"{number:,}", format_share(number / total))
    table.add_row("all", f"{total:,}", "")
    yield table
    yield f"\nThe tables below are for the fullest rank ({format_ranks(terms.ranks)}).\n"
    yield _states(terms)
    yield from _bytes_per_parameter(terms)
    yield _saved(terms)
    yield ""
    yield _flops(terms)
    if len(modes) > 1:
        yield ""
        yield _modes(modes)


def _states(terms: Breakdown) -> FittedTable:
    stages = (
        Column(f"ZeRO {one.stage}{' (this)' if one is terms.own else ''}", drop=0 if one is terms.own else 1)
        for one in terms.states
    )
    table = FittedTable((Column("array", left=True), *stages), title="state per rank, and bytes sent for it")
    for key in ARRAYS:
        if any(key in one.nbytes for one in terms.states):
            cells = (format_bytes(one.nbytes[key]) if key in one.nbytes else "" for one in terms.states)
            table.add_row(ARRAYS[key], *cells)
    table.add_row("all", *(format_bytes(one.total) for one in terms.states), end_section=True)
    table.add_row("sent per step", *(format_bytes(one.sent) for one in terms.states))
    if plain := next((one.sent for one in terms.states if one.stage == 0), 0):
        extra = (format_share(one.sent / plain - 1, signed=True) if one.stage else "" for one in terms.states)
        table.add_row("over ZeRO 0", *extra)
    return table


def _bytes_per_parameter(terms: Breakdown) -> Iterator[str]:
    """Bytes per parameter of the rank's part of the model, without ZeRO and under this layout."""
    own = terms.own
    for one in dict.fromkeys((terms.states[0], own)):
        parts = (
            f"{nbytes / terms.here:.3g} {ARRAYS[key]}{_dtype(one.dtypes.get(key, ''))}"
            for key, nbytes in one.nbytes.items()
            if nbytes
        )
        yield f"ZeRO {one.stage}: {one.total / terms.here:.4g} bytes per parameter = {' + '.join(parts)}"
    if own.stage == 3 and MODEL not in own.nbytes and "first" in own.nbytes:
        yield "ZeRO 3 has one copy of the weights, which are the master weights."
    if own.dtypes["gradients"] == "float32" and own.layout.precision == "bf16":
        yield "Gradients are summed in fp32. The 16 bytes of the ZeRO paper count bf16 gradients, 2 bytes less."
    yield ""


def _dtype(name: str) -> str:
    return f" ({SHORT[name]})" if name else ""


def _saved(terms: Breakdown) -> FittedTable:
    columns = (Column("part", left=True), Column("tensor", left=True, wraps=True), Column("count", drop=1),
               Column("bytes"), Column("share"))  # fmt: skip
    total = sum(term.nbytes for term in terms.saved)
    table, part = FittedTable(columns, title="activations saved for backward, when they are the most"), ""
    for term in terms.saved:
        name, part = ("" if term.part == part else term.part), term.part
        table.add_row(name, term.name, f"{term.count:,}", format_bytes(term.nbytes), format_share(term.nbytes / total))
    table.add_row("all", "", "", format_bytes(total), "")
    return table


def _flops(terms: Breakdown) -> FittedTable:
    flops = terms.flops
    total = flops.matrices + flops.attention
    columns = (Column("FLOPs", left=True, wraps=True), Column("number"), Column("share"))
    table = FittedTable(columns, title=f"FLOPs of a step, {flops.tokens:,} tokens, all ranks")
    matrices = f"matrices: 6 x {format_count(flops.matrix_elements)} x tokens"
    if not flops.matrix_elements:
        matrices = "all but attention, as traced"
    elif flops.matrices != 6 * flops.matrix_elements * flops.tokens:
        matrices = "matrices: 6 per trained element and token, 4 per frozen one"
    table.add_row(matrices, format_count(flops.matrices), format_share(flops.matrices / total))
    table.add_row("attention, causal", format_count(flops.attention), format_share(flops.attention / total))
    table.add_row("model FLOPs (MFU)", format_count(total), "")
    table.add_row("recomputation", format_count(flops.recompute), format_share(flops.recompute / total))
    return table


def _modes(modes: Sequence[RecomputeMode]) -> FittedTable:
    columns = (Column("recompute", left=True), Column("saved activations"), Column("peak"), Column("step"),
               Column("FLOPs over the model's"))  # fmt: skip
    table = FittedTable(columns, title="recompute modes, on the rank with the largest peak")
    for mode in modes:
        seconds = format_time(mode.seconds) if mode.seconds is not None else "not priced"
        added = format_share(mode.added, signed=True) if mode.added else "0%"
        table.add_row(mode.name, format_bytes(mode.saved), format_bytes(mode.peak), seconds, added)
    return table

"""Hypothesis strategies for step reports, shared by this folder's tests."""

from hypothesis import strategies as st

from shardwise.report import Bytes, LedgerRow, Role, StepReport, TransportRow
from shardwise.report.step_report import DTYPE_BYTES

names = st.text(max_size=12)
sizes = st.integers(min_value=0, max_value=10**15)
seconds = st.none() | st.floats(min_value=0, max_value=1e6, allow_nan=False)

held = st.builds(Bytes, *([sizes] * 6))

ledger_rows = st.builds(
    LedgerRow,
    phase=st.sampled_from(["forward", "backward", "optimizer", "loss"]),
    op=st.sampled_from(["all_reduce", "all_gather_into", "reduce_scatter"]),
    axes=st.sampled_from(["dp", "tp", "shard", "dp_cp"]),
    unit=st.sampled_from(["embedding", "blocks.0", "blocks.1", "blocks.7", "head"]) | names,
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    elements=sizes,
    count=st.integers(min_value=0, max_value=10**6),
)

timeline_events = st.fixed_dictionaries(
    {
        "name": names,
        "stream": st.sampled_from(["compute", "communication"]),
        "start_s": st.floats(min_value=0, max_value=1e4),
        "duration_s": st.floats(min_value=0, max_value=1e4),
    },
    optional={"args": st.dictionaries(names, st.integers() | names)},
)


@st.composite
def roles(draw: st.DrawFn, ranks: tuple[int, ...]) -> Role:
    ledger = tuple(draw(st.lists(ledger_rows, max_size=6)))
    rows = st.integers(min_value=0, max_value=max(0, len(ledger) - 1))
    carried = st.builds(TransportRow, rows, names, st.none() | sizes, st.none() | sizes, seconds, seconds)
    return Role(
        role=draw(names),
        ranks=ranks,
        bytes=draw(held),
        ledger=ledger,
        transport=tuple(draw(st.lists(carried, max_size=3))) if ledger else (),
        timeline=tuple(draw(st.lists(timeline_events, max_size=3))),
    )


@st.composite
def reports(draw: st.DrawFn, world: int | None = None) -> StepReport:
    """A report over ranks 0 to world - 1, split into roles at random."""
    world = draw(st.integers(1, 8)) if world is None else world
    role_of = draw(st.lists(st.integers(0, 2), min_size=world, max_size=world))
    groups = [tuple(r for r in range(world) if role_of[r] == i) for i in sorted(set(role_of))]
    settings = st.dictionaries(names, st.integers() | names | st.booleans() | st.none(), max_size=4)
    return StepReport(
        source=draw(st.sampled_from(["predicted", "dry-run", "measured"])),
        model=draw(settings),
        layout=draw(names),
        workload=draw(settings),
        cluster=draw(names),
        roles=tuple(draw(roles(ranks)) for ranks in groups),
        time=draw(seconds),
        notes=tuple(draw(st.lists(names, max_size=2))),
    )

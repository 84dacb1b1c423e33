"""Bytes that parameter servers and their workers hold beside a step's own."""

from dataclasses import replace

from shardwise.layout.key_ranges import elements, key_ranges, server_of
from shardwise.layout.units import UnitPlan
from shardwise.report.step_report import DTYPE_BYTES, Bytes


def server_bytes(plan: UnitPlan, server: int) -> Bytes:
    """Of one server: master weights and moments of its range; the sum of gradients; and for each rank of a worker what
    it may push before the first of it is in an update, and the weights on their way to it. Under tensor parallelism
    each rank of a worker has a range of the same size."""
    layout, count = plan.layout, elements(key_ranges(plan)[server])
    wide = DTYPE_BYTES[plan.dtypes.master]
    kept = count * layout.tp * len(plan.workload.states) * wide
    each = (layout.staleness + 1) * DTYPE_BYTES[plan.dtypes.gradients] + DTYPE_BYTES[layout.dtype]
    comm = count * (wide + layout.training_ranks * each)
    return Bytes.of(kept + comm, optimizer=kept, comm=comm)


def with_servers(plan: UnitPlan, rank: int, held: Bytes) -> Bytes:
    """Bytes of a rank, its buffers and the server in its process included. held: those of its step alone."""
    server = server_of(plan, rank)
    if rank >= plan.layout.training_ranks:
        assert server is not None
        return server_bytes(plan, server)
    own = Bytes() if server is None else server_bytes(plan, server)
    # All gradients as they leave, and all weights as they arrive.
    each = DTYPE_BYTES[plan.dtypes.gradients] + DTYPE_BYTES[plan.layout.dtype]
    comm = held.comm + own.comm + each * sum(unit.padded for unit in plan.units)
    return replace(held, optimizer=held.optimizer + own.optimizer, comm=comm)

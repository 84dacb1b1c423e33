"""An independent witness: what really passes through torch's process groups, seen where torch dispatches it.

It knows nothing of `Comms`. Every collective of every caller, autograd's backward included, reaches `torch.ops.c10d`.
"""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.jobs import build, micro_batches
from harness.reference import Case
from shardwise.layout import Layout, Mesh
from shardwise.layout.axes import named
from shardwise.report.step_report import LedgerRow

Seen = Counter[tuple[str, tuple[int, ...], int, str]]
"""(c10d operation, ranks, elements of the full tensor, dtype) -> how often."""

REALISED_AS = {"all_reduce": "allreduce_", "all_gather_into": "_allgather_base_", "reduce_scatter": "alltoall_base_"}
"""How gloo realises each row of a ledger: a reduce-scatter is an all-to-all and a local sum
(`runtime/transport/comms.py`)."""


class Witness(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Seen = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        if namespace == "c10d":
            largest = max((x for x in tree_leaves(args) if isinstance(x, Tensor)), key=Tensor.numel)
            dtype = str(largest.dtype).removeprefix("torch.")
            self.seen[name.partition(".")[0], _ranks(args), largest.numel(), dtype] += 1
        return func(*args, **(kwargs or {}))


def _ranks(args: Any) -> tuple[int, ...]:
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
    raise AssertionError(f"a collective without a group: {args}")


def watch(rank: int, payload: tuple[Case, Layout, bool]) -> tuple[tuple[LedgerRow, ...], Seen]:
    """The runtime's own ledger of the second step, and what the witness saw. With `smuggle`, one collective more."""
    case, layout, smuggle = payload
    program = build(case, layout, rank, transport="gloo")
    program.step(micro_batches(case, layout, rank, 0), 1e-3)
    finish = program.engine.finish_step

    def finish_and_smuggle() -> None:
        finish()
        dist.all_reduce(torch.zeros(7))

    if smuggle:
        program.engine.finish_step = finish_and_smuggle  # type: ignore[method-assign]
    batches = micro_batches(case, layout, rank, 1)
    program.comms.start_recording()
    with Witness() as witness:
        program.step(batches, 1e-3)
    program.comms.stop_recording()
    return program.comms.ledger(), witness.seen


def realised(case: Case, layout: Layout, rank: int, ledger: tuple[LedgerRow, ...]) -> Seen:
    """What a witness must see if `ledger` is complete and true."""
    mesh = Mesh.of(layout, case.model)
    seen: Seen = Counter()
    for row in ledger:
        seen[REALISED_AS[row.op], tuple(sorted(mesh.group(named(row.axes), rank))), row.elements, row.dtype] += (
            row.count
        )
    return seen

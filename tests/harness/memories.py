"""A schedule's memory on one rank: made from what a user of the collective holds, and what he gets out of it.

In terms of a full tensor of n elements, cut as `CommSchedule.bounds` says (chunks differ by an element where n does not
divide):

    broadcast, scatter       the root holds n elements, the others none   -> n elements; the rank's own piece
    reduce, all-reduce       every rank holds n elements                  -> n elements, of a reduce on the root only
    gather, all-gather       every rank holds its own piece               -> n elements, of a gather on the root only
    reduce-scatter           every rank holds n elements                  -> the rank's own piece
    all-to-all               every rank holds n elements                  -> p blocks of ceil(n / p), padded with zeros
"""

import torch
from torch import Tensor

from shardwise.runtime.transport.sends import elements_of
from shardwise.schedule import CommSchedule
from shardwise.schedule.comm import Region, inputs


def held(schedule: CommSchedule, rank: int, elements: int) -> tuple[int, int]:
    """[start, stop) of the full tensor of `elements` elements that a rank must bring."""
    chunks = inputs(schedule)[rank].nonzero()[0]
    if not len(chunks):
        return 0, 0
    bounds = schedule.bounds(elements)
    return min(int(bounds[chunks[0]]), elements), min(int(bounds[chunks[-1] + 1]), elements)


def lay_out(schedule: CommSchedule, rank: int, given: Tensor, elements: int) -> Tensor:
    """A memory, shape (bounds(elements)[-1],), for a full tensor of `elements` elements, of the dtype and device given.

    given: what the rank holds of it, see `held`, shape (stop - start,); of a rank that holds nothing any tensor, for
    its dtype and device. What is no input is left undefined.
    """
    start, stop = held(schedule, rank, elements)
    memory = torch.empty(int(schedule.bounds(elements)[-1]), dtype=given.dtype, device=given.device)
    if schedule.collective == "all-to-all":
        memory[elements : schedule.data_elements(elements)] = 0
    if stop > start:
        memory[start:stop] = given.reshape(-1)
    return memory


def region(schedule: CommSchedule, memory: Tensor, name: Region) -> Tensor:
    elements = elements_of(schedule, memory)
    first = schedule.regions.index(name) * elements
    return memory[first : first + elements]


def result(schedule: CommSchedule, rank: int, memory: Tensor) -> Tensor | None:
    """What the rank must hold in the end, as a view of its memory; None of a rank that gets nothing."""
    full = region(schedule, memory, schedule.result)
    if schedule.collective in ("reduce", "gather"):
        return full if rank == schedule.root else None
    if schedule.collective in ("scatter", "reduce-scatter"):
        bounds = schedule.bounds(full.numel())
        return full[int(bounds[rank]) : int(bounds[rank + 1])]
    return full

"""Questions the other way round: from what is wanted to what it takes.

Each asks the search again for other clusters, models or sequences; all answers are exact for the steps that they try.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Workload
from shardwise.layout.usual_workload import odd_part
from shardwise.model import ModelConfig
from shardwise.model.catalog import catalog
from shardwise.model.parameters import count
from shardwise.planner.pricing import Priced
from shardwise.planner.ranking import bound_of, search
from shardwise.planner.shortfall import SmallestCandidate, fits, why_no_layout
from shardwise.planner.space import LayoutColumns, Space, powers, why_not_fixed
from shardwise.predict.supported import MOST_DEVICES, why_not_planned
from shardwise.predict.time.pricing import Pricing

Progress = Callable[[str], object]
"""Gets a line about what is searched now."""

DAY, HOUR = 86400.0, 3600.0
"""Seconds."""


PUE = 1.1
"""Power of a data centre over that of its computers, where none is given: Google, Environmental Report 2024 (its fleet
in 2023); a machine room without their cooling is nearer to 1.5."""


class Power(NamedTuple):
    """Power besides the devices' boards. pue: power usage effectiveness of the data center; host_watts: a device's
    share of processors, memory, fans and network."""

    pue: float = PUE
    host_watts: float = 0.0


@dataclass(frozen=True)
class Run:
    """A whole training run. seconds: of all its steps; cost: device-hours times the price, None without one. energy:
    kWh with every board at its full power, so at most, and `power` beside it; None where that is not known."""

    one: Priced
    cluster: Cluster
    steps: int
    seconds: float
    device_hours: float
    cost: float | None
    energy: float | None
    power: Power


def run_of(
    one: Priced, cluster: Cluster, workload: Workload, tokens: float, price: float | None, power: Power | None = None
) -> Run:
    """Time, energy and cost of `tokens` tokens with one layout. price: per device and hour. Raises `UserError` for
    amounts that are not positive."""
    if not 0 < tokens < float("inf") or (price is not None and not 0 <= price < float("inf")):
        raise UserError("--tokens must be positive, and --price not negative")
    power = power or Power()
    if not (1 <= power.pue < float("inf") and 0 <= power.host_watts < float("inf")):
        raise UserError("--pue must be 1 or more, and --host-watts not negative")
    steps = -(-int(tokens) // (workload.batch * workload.seq))
    seconds = steps * one.seconds
    hours = seconds / HOUR * one.layout.ranks
    board = cluster.device.watts
    energy = None if board is None else hours * (board + power.host_watts) * power.pue / 1000
    return Run(one, cluster, steps, seconds, hours, None if price is None else hours * price, energy, power)


class Size(NamedTuple):
    """A cluster of a scaling curve."""

    cluster: Cluster
    best: Priced | None
    """The fastest layout that fits; None where nothing does."""
    tokens_per_second: float
    """Summed over all devices."""
    efficiency: float
    """Tokens per second and device, over the ideal's; 0 where nothing fits."""


class Scaling(NamedTuple):
    """The best layouts on clusters of several sizes."""

    sizes: tuple[Size, ...]
    ideal: float
    """Tokens per second and device of the fastest layout on any of the clusters if memory were no limit."""
    cluster: Cluster
    """The cluster of that layout."""


def scaling(space: Space, usable: float, progress: Progress = lambda line: None) -> Scaling:
    """The best layout on 1, 2, 4, ... and all nodes, each with the same batch."""
    tokens = space.workload.batch * space.workload.seq
    fastest: list[tuple[Cluster, Priced | None]] = []
    ideal, on = 0.0, space.cluster
    bound = bound_of(space)
    for part in map(space.on_nodes, powers(space.cluster.nodes)):
        progress(_searched(part))
        found = search(part, Pricing(part.cluster), top=1, usable=usable, unlimited=True, bound=bound)
        fastest.append((part.cluster, found.best[0] if found.best else None))
        limit = min((float(block.seconds.min()) for block in found.blocks), default=float("inf"))
        if (rate := tokens / limit / part.cluster.devices) > ideal:
            ideal, on = rate, part.cluster
    sizes = (
        Size(cluster, best, tokens / best.seconds, tokens / best.seconds / cluster.devices / ideal)
        if best
        else Size(cluster, None, 0.0, 0.0)
        for cluster, best in fastest
    )
    return Scaling(tuple(sizes), ideal, on)


def cheapest_cluster(
    space: Space, usable: float, tokens: float, deadline: float, price: float | None, power: Power | None = None,
    progress: Progress = lambda line: None,
) -> Run:  # fmt: skip
    """The run of least cost that ends within `deadline` seconds, over clusters of 1, 2, 3, 4, 6, 8, 12, ... nodes,
    until one is in time but costs a fifth more than another.

    Raises `UserError` where none does, with the fastest.
    """
    runs: list[Run] = []
    bound = bound_of(space)
    most = max(1, MOST_DEVICES // space.cluster.devices_per_node)
    counts = sorted({n for k in range(most.bit_length()) for n in (1 << k, 3 << k >> 1) if n <= most})
    for part in map(space.on_nodes, counts):
        # More devices than 64 a sequence have too little to do.
        if part.cluster.devices > space.workload.batch * 64:
            break
        progress(_searched(part))
        if best := search(part, Pricing(part.cluster), top=1, usable=usable, bound=bound).best:
            runs.append(run_of(best[0], part.cluster, space.workload, tokens, price, power))
            cheapest = min(run.device_hours for run in runs)
            if runs[-1].seconds <= deadline and runs[-1].device_hours > 1.2 * cheapest:
                break
    within = [run for run in runs if run.seconds <= deadline]
    if not within:
        fastest = min(runs, key=lambda run: run.seconds, default=None)
        told = f"the fastest takes {fastest.seconds / DAY:.1f} days on {fastest.cluster}" if fastest else "none fits"
        raise UserError(f"no cluster of {space.cluster.device.name} is done in {deadline / DAY:g} days: {told}")
    return min(within, key=lambda run: run.device_hours)


def largest_model(space: Space, usable: float) -> ModelConfig:
    """The largest model of the same family (the catalog's names up to the last part) that fits. Raises `UserError`
    where none does."""
    family = space.model.name.rsplit("-", 1)[0]
    members = [model for name, model in catalog().items() if name.rsplit("-", 1)[0] == family]
    for model in sorted(members, key=count, reverse=True):
        if why_not_planned(model) or why_not_fixed(model, space.fixed):
            continue
        if fits(replace(space, model=model.replace(lora=space.model.lora)), usable):
            return model
    raise UserError(f"no model of the family {family} fits {space.cluster}")


def _none(space: Space, words: str) -> UserError:
    """`words`, that nothing fits; unless there is no layout, which no memory would mend."""
    return UserError(words) if space.frames else why_no_layout(space)


def longest_sequence(space: Space, usable: float) -> tuple[int, SmallestCandidate]:
    """The longest sequence that fits, to an eighth, and the layout that does. Raises `UserError` where none does.

    Sequences are tried that every cp divides, from 1024 times the odd part of the number of devices on; from 1024 on
    where that is too long.
    """
    if space.model.trace:
        raise UserError(f"{space.model.name} was traced with rows of one length; --find sequence needs a configuration")
    positions = space.model.max_positions
    learned = space.model.positions == "learned"

    def of(seq: int) -> Space:
        return replace(space, workload=replace(space.workload, seq=seq))

    @cache
    def fitting(seq: int) -> SmallestCandidate | None:
        return None if learned and seq > positions else fits(of(seq), usable)

    shortest = min(1024, positions) if learned else 1024
    odd = odd_part(space.cluster.devices)
    seq = next(filter(fitting, dict.fromkeys((shortest * odd, shortest))), 0)
    if not seq:
        seq = shortest if learned or of(shortest).frames else shortest * odd
        raise _none(of(seq), f"{space.model.name} does not fit {space.cluster} even with sequences of {seq} tokens")
    while fitting(2 * seq) and seq < 1 << 24:
        seq *= 2
    step = seq // 8
    while step and seq % 128 == 0 and fitting(seq + step):
        seq += step
    found = fitting(seq)
    assert found
    return seq, found


def largest_batch(space: Space, usable: float) -> tuple[int, SmallestCandidate]:
    """The most sequences that fit without accumulating gradients, to an eighth, and the layout that does: one
    micro-batch of each replica, or as many as a pipeline has stages. Raises `UserError` where none does.

    Batches are tried that every number of replicas divides, from the odd part of the number of devices on.
    """

    @cache
    def fitting(batch: int) -> SmallestCandidate | None:
        on = replace(space, workload=replace(space.workload, batch=batch))
        return fits(on, usable, filter(None, map(at_once, on.frames)))

    devices = space.cluster.devices
    odd = odd_part(devices)
    # Fewer sequences than replicas may have too few ranks to shard over: what does not fit may do so twice as large.
    sizes = [odd << k for k in range(25) if k == 0 or odd << k <= 1 << 24]
    batch = 0
    for size in sizes:
        if fitting(size):
            batch = size
        elif batch or size > devices:
            break
    if not batch:
        sequences = f"sequences of {space.workload.seq:,} tokens"
        raise _none(space, f"{space.model.name} does not fit {space.cluster} with {sequences} in any batch")
    step = batch // 8
    while step and step % odd == 0 and fitting(batch + step):
        batch += step
    found = fitting(batch)
    assert found
    return batch, found


def at_once(frame: LayoutColumns) -> LayoutColumns | None:
    """The candidates that accumulate nothing beyond what fills their pipeline; None where there is none."""
    rows = tuple(row for row, count in zip(frame.rows, frame.counts, strict=True) if count <= frame.pp)
    return replace(frame, rows=rows) if rows else None


def largest_micro(space: Space, usable: float) -> SmallestCandidate | None:
    """The candidate with the largest micro-batch that fits, the leanest of those; None where nothing fits."""
    sizes = sorted({row.micro for frame in space.frames for row in frame.rows}, reverse=True)
    found = (fits(replace(space, fixed={**space.fixed, "micro": micro}), usable) for micro in sizes)
    return next(filter(None, found), None)


def _searched(space: Space) -> str:
    return f"{space.cluster}: {space.size:,} layouts"

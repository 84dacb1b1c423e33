"""The time of steps that replicas do not make in lockstep: outer steps of `sync=local`, and parameter servers.

An outer step is, unit by unit, the sum over the replicas, and the update that follows it. Nothing hides it: all ranks
wait for it, and a step of a round has a share of it.
"""

from shardwise.errors import UserError
from shardwise.layout import Layout
from shardwise.layout.optimizers import states_of
from shardwise.layout.wire import BLOCK, SCALE
from shardwise.model.parameters import Model
from shardwise.predict.time.pricing import Pricing
from shardwise.predict.time.profiles import EngineProfile
from shardwise.predict.time.split import StepShape
from shardwise.predict.time.traffic import ADDING, FEEDING, PACKING, UNPACKING, held_parameters, table_parameters
from shardwise.report.step_report import DTYPE_BYTES

MOMENT = 6
"""The same of one moment's mean."""
PASSES = {"average": 9, "base": 11, "nesterov": 19}
"""Elements that move to and from memory for each one of an outer step (runtime/sync/outer_step.py, operation after
operation): a mean of weights, the same with a base, Nesterov momentum."""


def outer_seconds(model: Model, layout: Layout, split: StepShape, engine: EngineProfile, pricing: Pricing) -> float:
    """Seconds of one outer step of the busiest rank."""
    dense, routed = (float(count) for count in held_parameters(model, split, engine))
    tables, blocks = float(table_parameters(model, split, engine)), float(model.layers / split.pp)
    shards = float(split.shard) if split.zero else 1.0
    # (how many, elements of a rank's interval): units are exchanged one after the other.
    ends = 1.0 if model.tied or layout.pp > 1 else 2.0
    units = [(blocks, (dense - tables) / blocks / shards), (ends, tables / ends / shards)]
    if model.experts:
        units.append((blocks, routed / blocks / float(split.expert_shard)))
    averages = layout.moments == "average" and layout.independent > 1
    moments = len(states_of(split.optimizer)) - 1 if averages else 0
    return sum(count * _unit(elements, layout, moments, pricing) for count, elements in units if elements)


def _unit(elements: float, layout: Layout, moments: int, pricing: Pricing) -> float:
    """Seconds of one unit. moments: that are averaged, too."""
    replicas, apart = layout.independent, layout.training_ranks // layout.independent
    price, wide = pricing.collectives.seconds, 8 if layout.precision == "fp64" else 4
    bits = layout.outer_bits if replicas > 1 else 0
    kind = "base" if bits and layout.outer == "average" else layout.outer
    passes = PASSES[kind] + moments * MOMENT
    seconds = pricing.kernels.pass_over(elements * wide * passes, dtype="float32")
    if layout.offload_home != "none":
        crossing = elements * (1 + moments * layout.offload_fraction)
        seconds += 2 * crossing * wide / pricing.host.link
    seconds += (moments + (not bits)) * price("all_reduce", elements * wide, replicas, apart)
    if not bits:
        return float(seconds)
    packed, piece = elements * (bits / 8 + SCALE / BLOCK), elements / replicas
    for op in ("all_to_all", "all_gather_into"):
        seconds += price(op, packed, replicas, apart)
    seconds += pricing.kernels.pass_over((elements + piece) * PACKING, "packing", "float32")
    unpacked = elements * (ADDING + UNPACKING) + (elements + piece) * FEEDING
    return float(seconds + pricing.kernels.pass_over(unpacked, "unpacking", "float32"))


def served_parts(
    parts: dict[str, float], model: Model, layout: Layout, split: StepShape, engine: EngineProfile,
    pricing: Pricing, cuda: bool,
) -> dict[str, float]:  # fmt: skip
    """Parts of a step with parameter servers, which make the update: each that of its range. parts: of the step
    without; workers are equally fast. Raises `UserError` on GPUs, where servers are on the host's cores.

    Every server takes a gradient from each worker and gives weights to each: its port carries as many times the bytes
    of a worker's as there are workers, which is why an all-reduce wins as they become more (incast). Source: Li et al.
    2014.
    """
    if cuda:
        raise UserError(f"the time of sync={layout.sync} is not modelled on GPUs, whose hosts' cores serve")
    servers = layout.parameter_servers.count
    elements = sum(float(count) for count in held_parameters(model, split, engine))
    weight = DTYPE_BYTES[layout.dtype]
    gradient = weight if weight > 2 else int(split.gradient_width)
    far = layout.ranks - 1
    own = layout.training_ranks - (0 if layout.parameter_servers.own else 1)
    hop = pricing.collectives.hop

    def port(width: int) -> float:
        return float(hop(own * elements * width / servers, far))

    update = parts.pop("optimizer", 0.0) * layout.tp / servers
    busy = port(gradient) + port(weight) + update * (layout.dp if layout.asynchronous else 1)
    if layout.sync == "ps" or not (layout.staleness or layout.asynchronous):
        return {**parts, "servers": busy - update, "optimizer": update}
    # A worker waits for its own exchange alone, unless the servers are busy for longer than a step.
    compute, alone = sum(parts.values()), float(hop(elements * gradient, far) + hop(elements * weight, far)) + update
    return {**parts, "servers": max(alone, busy - compute)}

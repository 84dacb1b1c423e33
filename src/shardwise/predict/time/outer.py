"""The time of an outer step of `sync=local`: unit by unit, the sum over the replicas, and the update that follows it.

Nothing hides it: all ranks wait for it, and a step of a round has a share of it.
"""

from shardwise.layout import Layout
from shardwise.layout.optimizers import states_of
from shardwise.layout.wire import BLOCK, SCALE
from shardwise.model.parameters import Model
from shardwise.predict.time.pricing import Pricing
from shardwise.predict.time.profiles import EngineProfile
from shardwise.predict.time.split import StepShape
from shardwise.predict.time.traffic import ADDING, FEEDING, PACKING, UNPACKING, held_parameters, table_parameters

MOMENT = 6
"""The same of one moment's mean."""
PASSES = {"average": 9, "base": 11, "nesterov": 19}
"""Elements that move to and from memory for each one of an outer step (runtime/sync/outer_step.py, operation after
operation): a mean of weights, the same with a base, Nesterov momentum."""


def outer_seconds(model: Model, layout: Layout, split: StepShape, engine: EngineProfile, pricing: Pricing) -> float:
    """Seconds of one outer step of the busiest rank."""
    dense, routed = (float(count) for count in held_parameters(model, split, engine))
    tables, blocks = float(table_parameters(model, split, engine)), model.layers / split.pp
    shards = split.shard if split.zero else 1
    # (how many, elements of a rank's interval): units are exchanged one after the other.
    units = [(blocks, (dense - tables) / blocks / shards), (1.0 if model.tied else 2.0, tables / shards)]
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

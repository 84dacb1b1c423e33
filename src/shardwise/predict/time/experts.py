"""Time of a routed layer in one grouped launch: the experts that have rows are read and multiplied together.

Serving engines compute all experts of a layer in one launch for each product (TensorRT-LLM's grouped CUTLASS products,
vLLM's fused_moe), with rows laid out by expert before and summed by token after. The seconds are

    launch + sum over both products of max(weights of the experts hit, products of padded rows)
    + passes over rows and tokens + experts hit x a little each

whose constants were fitted on measured layers (`experts.json`, `benchmarks/fit_experts.py`), for each device, engine
and format of weights. Tokens choose experts unevenly: of r ranks with different experts the busiest has r to the power
of `uneven` times as many rows as the mean.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from shardwise.arrays import Num
from shardwise.model.config import Experts
from shardwise.model.formats import weight_format
from shardwise.predict.time.constants import Constants
from shardwise.predict.time.pricing import Pricing
from shardwise.predict.time.profiles import EngineProfile

BLEND = 4.0
"""Exponent of the sum that stands for the larger of two times, of which neither hides the other completely."""


class RoutedLayer(NamedTuple):
    """The routed experts of one layer on one rank."""

    tokens: Num
    """Tokens whose experts are looked up: of all ranks among which the experts are spread."""
    rows: Num
    """Pairs of a token and one of the rank's experts."""
    hit: Num
    """Experts of the rank that have rows."""
    hidden: Num
    """Elements of a token."""
    products: tuple[tuple[Num, Num], ...]
    """(outputs, inputs) of each matrix of an expert on the rank."""
    ranks: Num = 1
    """Ranks that have different experts, of which the busiest is waited for."""


def experts_hit(local: Num, chance: float, tokens: Num) -> Num:
    """The expected number of `local` experts that `tokens` tokens choose, each with this chance, at random."""
    return local * (1 - (1 - chance) ** np.maximum(tokens, 1.0))


def grouped_seconds(layer: RoutedLayer, weights: str, form: Mapping[str, float], known: Constants) -> Num:
    """Seconds of a routed layer. weights: format of the experts' matrices (`weight_format`)."""
    stored = weight_format(weights)
    read = stored.width / (known.bandwidth * form["bandwidth_share"])
    computed = 2.0 / (known.peak(stored.dtype) * form["efficiency"])
    busiest = layer.rows * layer.ranks ** form["uneven"]
    rows = busiest + layer.hit * form["padded_rows"]
    seconds: Num = form["launch_s"] + layer.hit * form["expert_s"]
    for wide, deep in layer.products:
        elements = 1.0 * wide * deep
        larger = (layer.hit * elements * read) ** BLEND + (rows * elements * computed) ** BLEND
        seconds = seconds + larger ** (1 / BLEND)
    passes = busiest * form["row_passes"] + layer.tokens * form["token_passes"]
    return seconds + passes * layer.hidden * 2.0 / known.bandwidth


# Tokens on their way to their experts and back, from one rank of expert parallelism, in three ways
# (`EngineProfile.exchange`). "rows": every row of a token and one of its experts travels, as an all-to-all of a library
# does it. "tokens": a token travels once to each node and is fanned out there once to each rank, as the kernels of
# DeepEP and HybridEP do it. "gather": all ranks gather all tokens, and scatter the sums of what their experts return.
# Routing is taken as balanced, a token's experts as drawn at random.

ELEMENT = 2.0
"""Bytes of an element on the way, with narrow products, too: NVIDIA/Megatron-LM core 0.15, fused_a2a.py,
"Currently, we do not support fp8 dispatch"."""


def places_of(experts: Experts, places: Num) -> Num:
    """Of `places` equal parts of the experts, how many a token's experts are on, on average."""
    places = np.asarray(places, dtype=float)
    missed = np.ones_like(places)
    for chosen in range(experts.active):
        left = experts.count - chosen
        missed = missed * np.maximum(left - experts.count / places, 0.0) / left
    return places * (1 - missed)


def exchange_seconds(
    experts: Experts, tokens: Num, hidden: int, ep: Num, engine: EngineProfile, pricing: Pricing
) -> Num:
    """Seconds of one way. tokens: of the rank; hidden: elements of a token."""
    nodes = np.maximum(np.asarray(ep) / pricing.collectives.per_node, 1.0)
    near = np.minimum(ep, pricing.collectives.per_node)
    token = np.asarray(tokens * hidden * ELEMENT, dtype=float)
    if engine.exchange == "tokens":
        inside = token * places_of(experts, ep) * (near > 1)
        across = token * places_of(experts, nodes) * (1 - 1 / nodes)
        fanned = pricing.collectives.streamed(inside, "link", near)
    else:
        rows = token * experts.active
        across = rows * (1 - 1 / nodes)
        fanned = pricing.collectives.seconds("all_to_all", rows / nodes, near)
    sent = pricing.collectives.streamed(across, "network")
    # Both links work at the same time: what has arrived from other nodes is fanned out while more is on its way.
    return np.maximum(fanned, sent)


def served_exchange_seconds(
    experts: Experts, nbytes: Num, across: Num, places: Num, tp: Num, engine: EngineProfile, pricing: Pricing
) -> Num:
    """Seconds of a served layer's tokens on their way there and back. nbytes: of the tokens of a rank; across: ranks
    with tokens of their own, `tp` apart from each other; places: ranks that have different experts and the same tokens.
    """
    price = pricing.collectives.seconds
    if engine.exchange == "gather":
        full = nbytes * across
        return price("all_gather_into", full, across, tp) + price("reduce_scatter", full, across, tp)
    ep = np.asarray(across) * places
    fullest = np.ceil(experts.count / ep) * ep / experts.count  # rows of a rank that has an expert more than others
    rows = nbytes * experts.active * fullest / places
    counts = price("all_to_all", 8 * experts.count / places, across, tp)
    return counts + 2 * price("all_to_all", rows, across, tp)

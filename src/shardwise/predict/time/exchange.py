"""Time of tokens on their way to their experts and back, from one rank of expert parallelism.

Three ways (`EngineProfile.exchange`). "rows": every row of a token and one of its experts travels, as an all-to-all of
a library does it. "tokens": a token travels once to each node and is fanned out there once to each rank, as the kernels
of DeepEP and HybridEP do it. "gather": all ranks gather all tokens, and scatter the sums of what their experts return.
Routing is taken as balanced, a token's experts as drawn at random.
"""

import numpy as np

from shardwise.model.config import Experts
from shardwise.predict.time.pricing import Pricing
from shardwise.predict.time.profiles import EngineProfile
from shardwise.predict.time.split import Num

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

"""Time of tokens on their way to their experts and back, from one rank of expert parallelism.

Two ways (`EngineProfile.exchange`). "rows": every row of a token and one of its experts travels, as an all-to-all of a
library does it. "tokens": a token travels once to each node and is fanned out there once to each rank, as the kernels
of DeepEP and HybridEP do it. Routing is taken as balanced, a token's experts as drawn at random.
"""

from __future__ import annotations

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
        fanned = pricing.collectives.streamed(inside, "link")
    else:
        rows = token * experts.active
        across = rows * (1 - 1 / nodes)
        fanned = pricing.collectives.seconds("all_to_all", rows / nodes, near)
    sent = pricing.collectives.streamed(across, "network")
    # Both links work at the same time: what has arrived from other nodes is fanned out while more is on its way.
    return np.maximum(fanned, sent)

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
from typing import Any, NamedTuple

import numpy as np

from shardwise.model.formats import weight_format
from shardwise.predict.time.constants import Constants

Num = Any

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

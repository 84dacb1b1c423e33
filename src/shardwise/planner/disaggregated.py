"""Prefill and decoding on devices of their own: how many instances of which layout for each, and what goes between.

An instance for prefill reads one prompt after the other. The cache of each goes to an instance that decodes, where
`batch` sequences get their tokens together. With n and m instances, an answer of o tokens takes

    answer = wait + prompt + transfer + (o - 1) token(batch)

and the requests per second are the least of m batch / ((o - 1) token(batch)), min(n, m) / transfer and clients /
answer. busy: seconds that the busiest stage works on a prompt; wait: for those before it, of arrivals at random at n
instances that are busy a share r of the time, r busy / (2 - 2 r); transfer: seconds in which the ranks of one instance
send a prompt's cache side by side. As in DistServe (Zhong et al. 2024), whose placement this searches.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import NamedTuple

import numpy as np

from shardwise.arrays import Num
from shardwise.cluster import Cluster
from shardwise.codec import Json
from shardwise.layout import Layout, Workload
from shardwise.layout.context import PAGE
from shardwise.layout.placement import cache_shape
from shardwise.model import ModelConfig
from shardwise.model.formats import weight_format
from shardwise.planner.space import powers
from shardwise.planner.strategies import CHUNK
from shardwise.predict.time.generation import DecodeStrategy, pricing_for
from shardwise.predict.time.profiles import EngineProfile
from shardwise.report.step_report import DTYPE_BYTES

MOST_COUNTS = 64
"""Numbers of instances for prefill that are tried, spread evenly over their orders of magnitude."""
MOST_BUSY = 0.8
"""Share of the time for which instances read prompts of a given rate at most: at random, these wait for twice the time
that one of them takes."""
HALVINGS = 30
"""Of an interval of rates: to a billionth."""


@dataclass(frozen=True)
class Disaggregated(Json):
    """Instances for prefill and instances that decode."""

    json_keys = (
        "prefill decode weights devices sequences_of_an_instance=batch first_token_seconds=first_token "
        "token_seconds=token transfer_seconds=transfer cache_bytes tokens_per_second"
    )

    prefill: Layout
    """Of all its instances, which are dp replicas."""
    decode: Layout
    weights: str
    """Of the blocks' matrices, torch's name."""
    batch: int
    """Sequences at a time of one instance that decodes."""
    first_token: float
    """Seconds from a request to its first token, waiting included."""
    token: float
    """Seconds from one token to the next; the cache's way adds `transfer` to the second one."""
    transfer: float
    """Seconds in which the cache of one prompt goes over."""
    cache_bytes: int
    tokens_per_second: float

    @property
    def devices(self) -> int:
        return self.prefill.ranks + self.decode.ranks


class Instance(NamedTuple):
    """One instance of a deployment, with what it may hold."""

    layout: Layout
    cache_tokens: int


class _Decoding(NamedTuple):
    layout: Layout
    batch: int
    token: float


def instances(deployed: Iterable[tuple[Layout, int]]) -> list[Instance]:
    """The instances of deployments, given as layouts with the tokens of a replica's cache: their replicas, which share
    nothing; as many together as hold all experts where these are spread over replicas."""
    found = {}
    for layout, tokens in deployed:
        found[replace(layout, dp=max(1, layout.ep // layout.tp))] = tokens
    return [Instance(*each) for each in found.items()]


def best_apart(
    model: ModelConfig, cluster: Cluster, workload: Workload, engine: EngineProfile, weights: str,
    reading: Sequence[Instance], writing: Sequence[Instance], cache: str = "bfloat16",
) -> Disaggregated | None:  # fmt: skip
    """The pair of most tokens per second, one of `reading` and one of `writing`, on at most all devices; equals: with
    the shortest answer. cache: torch's name of the type of keys and values. None where no two instances fit beside each
    other, or answers have one token. Raises `UserError` for links that are not known."""
    following = workload.output - 1
    if not following or cluster.devices < 2:
        return None
    strategy_of = partial(DecodeStrategy, model, engine=engine, cluster=cluster, weights=weights, cache=cache)
    decoding = [row for one in writing for row in _decoding(strategy_of(one.layout), one.cache_tokens, workload)]
    nbytes, best = cache_bytes(model, workload.prompt, cache), None
    for layout in (one.layout for one in reading):
        prompt, busy = _reading(strategy_of(layout), workload)
        pairs = _Pairs(layout, decoding, cluster, workload)
        transfer = np.asarray(_transfer(cluster, nbytes / np.minimum(pairs.ranks, layout.ranks)))
        answer = np.asarray(prompt + transfer + following * pairs.token)
        most = np.minimum(
            pairs.others * pairs.batch / (following * pairs.token), np.minimum(pairs.count, pairs.others) / transfer
        )
        rate = np.where(
            pairs.others > 0, np.minimum(most, _answered(workload.concurrency, answer, busy, pairs.count)), 0.0
        )
        order = np.lexsort((np.broadcast_to(answer, rate.shape).ravel(), -rate.ravel()))
        row, at = np.unravel_index(int(order[0]), rate.shape)
        requests = float(rate[row, at])
        key = -requests, float(answer[at])
        if requests and (best is None or key < best[0]):
            first = workload.concurrency / requests - float(answer[at]) + prompt
            one = decoding[at]
            best = key, Disaggregated(
                replace(layout, dp=layout.dp * int(pairs.count[row, 0])),
                replace(one.layout, dp=one.layout.dp * int(pairs.others[row, at])), weights, one.batch, first,
                one.token, float(transfer[at]), nbytes, requests * workload.output,
            )  # fmt: skip
    return best and best[1]


def fewest_apart(
    model: ModelConfig, cluster: Cluster, workload: Workload, engine: EngineProfile, weights: str,
    reading: Sequence[Instance], writing: Sequence[Instance], rate: float, cache: str = "bfloat16",
) -> Disaggregated | None:  # fmt: skip
    """The pair that answers `rate` requests per second on the fewest devices; equals: with the shortest answer. Its
    tokens per second are the most that it makes. None where none does. Raises `UserError` as `best_apart` does."""
    following = workload.output - 1
    if not following or cluster.devices < 2:
        return None
    strategy_of = partial(DecodeStrategy, model, engine=engine, cluster=cluster, weights=weights, cache=cache)
    nbytes, best = cache_bytes(model, workload.prompt, cache), None
    decoding = [row for one in writing for row in _decoding(strategy_of(one.layout), one.cache_tokens, workload)]
    for layout in (one.layout for one in reading):
        prompt, busy = _reading(strategy_of(layout), workload)
        for one in decoding:
            transfer = float(_transfer(cluster, nbytes / min(one.layout.ranks, layout.ranks)))
            lanes, batch = rate * transfer, one.layout.dp * one.batch
            count = ceil(max(rate * busy / MOST_BUSY, lanes))
            others = ceil(max(rate * following * one.token / batch, lanes))
            devices, load = count * layout.ranks + others * one.layout.ranks, rate * busy / count
            first = prompt + load * busy / (2 - 2 * load)
            key = devices, first + transfer + following * one.token
            if devices <= cluster.devices and (best is None or key < best[0]):
                most = min(others * batch / (following * one.token), min(count, others) / transfer, count / busy)
                best = key, Disaggregated(
                    replace(layout, dp=layout.dp * count), replace(one.layout, dp=one.layout.dp * others), weights,
                    one.batch, first, one.token, transfer, nbytes, most * workload.output,
                )  # fmt: skip
    return best and best[1]


def _reading(strategy: DecodeStrategy, workload: Workload) -> tuple[float, float]:
    """Seconds in which an instance reads a prompt, and by which each further one keeps its busiest stage."""
    prompt = strategy.prompt(workload.prompt, CHUNK, strategy.layout.dp)
    return prompt.seconds, (prompt.seconds - prompt.parts.get("bubble", 0.0)) / strategy.layout.dp


class _Pairs:
    """Numbers of instances for prefill (rows) beside those that decode (columns), on all devices."""

    def __init__(self, layout: Layout, decoding: Sequence[_Decoding], cluster: Cluster, workload: Workload) -> None:
        self.ranks = np.array([one.layout.ranks for one in decoding])
        self.batch = np.array([one.layout.dp * one.batch for one in decoding])
        self.token = np.array([one.token for one in decoding])
        most = max(1, (cluster.devices - 1) // layout.ranks)
        self.count = np.unique(np.geomspace(1, most, MOST_COUNTS).round().astype(int))[:, None]
        self.others = np.maximum((cluster.devices - self.count * layout.ranks) // self.ranks, 0)


def _answered(clients: int, answer: Num, busy: float, count: Num) -> Num:
    """Requests per second of so many clients, of which each sends another one when it is answered: `answer` seconds and
    the wait for one of `count` instances later."""
    low, high = np.zeros(np.broadcast_shapes(np.shape(answer), np.shape(count))), count / busy + 0.0 * answer
    for _ in range(HALVINGS):
        rate = (low + high) / 2
        load = rate * busy / count
        fewer = rate * (answer + load * busy / (2 - 2 * load)) < clients
        low, high = np.where(fewer, rate, low), np.where(fewer, high, rate)
    return low


def cache_bytes(model: ModelConfig, tokens: int, cache: str = "bfloat16") -> int:
    """Bytes of the cache of a prompt, whole pages. cache: torch's name of the type of keys and values."""
    width = DTYPE_BYTES["bfloat16"]
    if counted := model.counted:  # the mean of its blocks
        block = ceil(counted.cache_bytes(max(tokens, 1), 1, width=width) / max(tokens, 1) * PAGE / model.layers)
    else:
        block = cache_shape(model, 1).numbers * PAGE * width
    return ceil(ceil(tokens / PAGE) * model.layers * block * weight_format(cache).each / weight_format("bfloat16").each)


def _decoding(strategy: DecodeStrategy, cache_tokens: int, workload: Workload) -> Iterator[_Decoding]:
    length = ceil((workload.prompt + workload.output) / PAGE) * PAGE
    most = min(cache_tokens // length, strategy.engine.most_sequences, workload.concurrency)
    for batch in powers(most):
        seconds = strategy.token(batch * strategy.layout.dp, workload.prompt + workload.output / 2).seconds
        streamed = batch * strategy.engine.stream_s  # a front end's tokens go one by one
        yield _Decoding(strategy.layout, batch, max(seconds, streamed))


def _transfer(cluster: Cluster, nbytes: Num) -> Num:
    """Seconds of a message of each rank to another instance: in another node where there are several."""
    stride = cluster.devices_per_node if cluster.nodes > 1 else 1
    return pricing_for(cluster).collectives.hop(nbytes, stride)

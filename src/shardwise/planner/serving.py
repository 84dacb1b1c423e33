"""The best ways to serve a model on a cluster: tensor parallelism, pipeline stages, replicas, types of weights, and
batch size.

The workload is `concurrency` clients that each send a new request as soon as their last one is answered. They are
distributed evenly over the replicas; in a replica without room for all of its clients' sequences, the others wait. The
prompt's own pass yields the first token. While the n - 1 following tokens are generated, each of the other c - 1
sequences of the replica reads a prompt once:

    time per token = token(c) + (c - 1) / (n - 1) x prompt
    tokens/s of a replica = c n / ((n - 1) token(c) + c prompt)

where token(c) and prompt are `timing`'s seconds. Where clients outnumber sequences, they wait for the others' answers,
so that by Little's law clients x n = tokens/s x seconds of an answer, waiting included.

With a fixed number of clients, more tokens/s mean faster answers. The batch size trades one for the other
(`ServingPlan.curve`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shardwise.cluster import Cluster
from shardwise.cluster.prices import DevicePrice, price_of
from shardwise.errors import UserError
from shardwise.layout import Layout, UnitPlan, Workload
from shardwise.layout.context import PageCut
from shardwise.layout.legality import valid_tp
from shardwise.layout.placement import Placed
from shardwise.model import ModelConfig
from shardwise.model.formats import computing_type, stored_bytes
from shardwise.planner.answer import Answer
from shardwise.planner.disaggregated import Disaggregated, best_apart, instances
from shardwise.planner.space import powers
from shardwise.planner.strategies import CHUNK, ENGINE, crossover, serving_engine
from shardwise.predict.arguments import as_cluster, as_config
from shardwise.predict.memory.capacity import usable_bytes
from shardwise.predict.memory.serving import (
    PAGE,
    ServingSetup,
    has_fewer_bits,
    page_bytes_of_block,
    parameter_int8_bytes,
    passing_bytes,
)
from shardwise.predict.serving_layout import check_generation, check_length, plan_of
from shardwise.predict.step_seconds import usual_engine
from shardwise.predict.supported import check_size
from shardwise.predict.time.generation import FEW, DecodeStrategy, pricing_for
from shardwise.predict.time.kernels import WIDTH
from shardwise.predict.time.pricing import Pricing
from shardwise.predict.time.profiles import EngineProfile
from shardwise.predict.time.serving import ServingLayout, decode_pass, decode_products, prefill_pass
from shardwise.predict.traffic.slow_links import tensor_warnings
from shardwise.report.printing import Printable
from shardwise.report.units import format_bytes

if TYPE_CHECKING:
    from shardwise.report.terminal import Renderable

Num = Any
By = Literal["throughput", "cost", "pareto"]

TYPES = {"bfloat16": "bf16", "float8_e4m3fn": "fp8", "int8": "int8", "int4": "int4"}
"""Types in which the blocks' matrices may be stored: torch's name -> usual name."""


@dataclass(frozen=True)
class Deployment:
    """One way to serve. weights: of the blocks, torch's name. batch: sequences at a time in one replica, the one with
    most clients. first_token: seconds from a request to its first token there, waiting included; token: from one token
    to the next. tokens_per_second: of all replicas together. held: bytes of the fullest rank, the cache filled;
    cache_tokens: that a replica's cache has room for."""

    layout: Layout
    weights: str
    batch: int
    first_token: float
    token: float
    tokens_per_second: float
    held: float
    cache_tokens: int

    @property
    def devices(self) -> int:
        return self.layout.ranks

    @property
    def rate(self) -> float:
        """Tokens/s of one device."""
        return self.tokens_per_second / self.devices

    def to_json(self) -> dict[str, Any]:
        return {
            "layout": str(self.layout),
            "weights": TYPES[self.weights],
            "devices": self.devices,
            "sequences_of_a_replica": self.batch,
            "first_token_seconds": self.first_token,
            "token_seconds": self.token,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_device": self.rate,
            "bytes": self.held,
            "cache_tokens": self.cache_tokens,
        }


@dataclass(frozen=True, repr=False)
class ServingPlan(Answer[Deployment], Printable):
    """The best deployments. curve: the Pareto front over time per token and tokens/s, with as many clients as the
    batch size, from one on; fastest tokens first. quantised: the best in fewer bits on at most half of the
    devices that the best in 16 bits takes, and that one; None where there is no such pair. gathering: the best of those
    that gather weights, None where none fits. crossover: ranks, and the tokens of one pass from which on gathering is
    faster there than tensor parallelism; None where tp cannot be split so."""

    model: ModelConfig
    curve: tuple[Deployment, ...]
    quantised: tuple[Deployment, Deployment] | None
    gathering: Deployment | None
    crossover: tuple[int, int | None] | None
    price: DevicePrice | None = None
    """Of one device; None where it has no list price and none was given."""
    apart: Disaggregated | None = None
    """The best instances for prefill and for decoding, weights as the winner's; None where none fit."""
    rate: float | None = None
    """Requests per second that each of `ranked` answers; None where the number of clients is given."""

    def tables(self) -> Iterator[Renderable]:
        """What `shardwise plan --serve` prints."""
        from shardwise.planner.serving_tables import serving_tables

        return serving_tables(self)

    def conclusion(self) -> str:
        """The best deployment in one sentence."""
        from shardwise.planner.serving_tables import serving_conclusion

        return serving_conclusion(self)

    def usd(self, one: Deployment) -> float | None:
        """US dollars per million tokens; of the tokens that are asked for, where a rate is given."""
        return self.price and self.price.per_million_tokens(one.devices, self.paid(one))

    def paid(self, one: Deployment) -> float:
        """Tokens/s that share a deployment's price."""
        return one.tokens_per_second if self.rate is None else self.rate * self.workload.output

    def _row(self, one: Deployment) -> dict[str, Any]:
        return one.to_json() | {"usd_per_million_tokens": self.usd(one)}

    @property
    def warnings(self) -> tuple[str, ...]:
        """Deployments shown whose tensor parallelism runs over slow links, a line for each tp."""
        context = self.workload.prompt + self.workload.output / 2
        taken = (
            (one.layout.tp, self.strategy(one).token(one.layout.dp * one.batch, context).parts) for one in self.ranked
        )
        return tensor_warnings(self.cluster, taken, "the time of a token")

    def strategy(self, one: Deployment) -> DecodeStrategy:
        """The decode strategy that prices a deployment."""
        return DecodeStrategy(self.model, one.layout, serving_engine(self.engine), self.cluster, one.weights)

    def to_json(self) -> dict[str, Any]:
        """Plain data: what `plan --serve --json` prints."""
        return self.asked_json() | {
            "ranked": [self._row(one) for one in self.ranked],
            "curve": [self._row(one) for one in self.curve],
            "price": self.price and self.price.to_json(),
            "quantised_on_fewer": self.quantised and self.quantised[0].to_json(),
            "split_on_more": self.quantised and self.quantised[1].to_json(),
            "gathering": self.gathering and self.gathering.to_json(),
            "crossover": self.crossover and {"ranks": self.crossover[0], "tokens": self.crossover[1]},
            "disaggregated": self.apart and self.apart.to_json(),
            "requests_per_second": self.rate,
            "warnings": list(self.warnings),
        }


def plan_serving(
    model: ModelConfig | str,
    cluster: Cluster | str,
    workload: Workload,
    *,
    engine: str | None = None,
    by: By = "throughput",
    top: int = 10,
    price: float | None = None,
    rate: float | None = None,
) -> ServingPlan:
    """The best `top` deployments for `workload.concurrency` clients of `prompt` and `output` tokens: every legal degree
    of tp, pp and replicas, cp and ep by doubling, each type of weights that the device computes with, 1, 2, 4, ...
    sequences at a time.

    model, cluster: objects, or their names. engine: a profile of `predict.time.ENGINES`; None for the usual one. by:
    "throughput", "cost" (tokens/s of a device) or "pareto" (the curve of tokens/s against time per token). price: US
    dollars per device-hour; None for the lowest list price. rate: requests per second, in place of the workload's
    clients, whose number is then that of the smallest deployment that answers as many (Little's law); ranked are those
    that do, on the fewest devices first.
    Raises `UserError` where nothing fits, with what is missing; for devices without constants or memory, for workloads
    without requests or longer than the model's positions, and for models that do not run.
    """
    model, cluster = as_config(model), as_cluster(cluster)
    engine = engine or usual_engine(cluster, ENGINE)
    room = usable_bytes(cluster)
    if rate is not None:
        workload = replace(workload, concurrency=1)
        _check(model, cluster, workload, top)
        clients = _clients_at(rate, _Space(model, cluster, workload, serving_engine(engine), room))
        workload = replace(workload, concurrency=clients)
    _check(model, cluster, workload, top)
    space = _Space(model, cluster, workload, serving_engine(engine), room, queues=rate is None)
    found, unhurried = [], []
    for weights in space.types:
        asked, free = space.split(weights)
        found += asked
        unhurried += free
    gathered = list(space.gathered())
    cut = (space.context_parallel, space.expert_parallel)
    everything = found + gathered + [one for weights in space.types for split in cut for one in split(weights)]
    if not everything:
        raise space.nothing()
    ranked = sorted(everything, key=lambda one: _order(one, by))
    if rate is not None:
        ranked = [one for one in everything if one.tokens_per_second >= rate * workload.output]
        ranked.sort(key=lambda one: (one.devices, one.token))
    curve = _curve(unhurried)
    return ServingPlan(
        model, cluster, workload, engine, by, room,
        tuple(curve if by == "pareto" else ranked)[:top], space.considered, len(everything), tuple(curve),
        _quantised_on_fewer(found), min(gathered, key=lambda one: _order(one, by), default=None), space.crossover(),
        price_of(cluster.device, price), None if rate else _apart(space, everything, ranked[0].weights), rate,
    )  # fmt: skip


def _apart(space: _Space, everything: Sequence[Deployment], weights: str) -> Disaggregated | None:
    plain = (one for one in everything if one.weights == weights and not one.layout.zero and one.layout.cp == 1)
    among = instances((one.layout, one.cache_tokens) for one in plain)
    return best_apart(space.model, space.cluster, space.workload, space.engine, weights, among, among)


def _clients_at(rate: float, space: _Space) -> int:
    """Clients under way where the smallest deployment that answers `rate` requests per second does. Raises `UserError`
    where none does."""
    if not 0 < rate < float("inf"):
        raise UserError(f"--rate must be a positive number of requests per second, not {rate:g}")
    output = space.workload.output
    free = [one for weights in space.types for one in space.split(weights)[1]]
    if not free:
        raise space.nothing()
    enough = [one for one in free if one.tokens_per_second >= rate * output]
    if not enough:
        most = max(one.tokens_per_second for one in free) / output
        raise UserError(
            f"no deployment of {space.model.name} on {space.cluster} answers {rate:g} requests a second: at most "
            f"{most:.3g}; give it more devices"
        )
    return min((one.devices, one.layout.dp * one.batch) for one in enough)[1]


def fastest_deployment(
    model: ModelConfig, cluster: Cluster, workload: Workload, engine: str | None = None
) -> Deployment | None:
    """The deployment of most tokens/s without context or expert parallelism, with any type of weights; None where
    nothing fits. Raises `UserError` as `plan_serving` does."""
    _check(model, cluster, workload, 1)
    profile = serving_engine(engine or usual_engine(cluster, ENGINE))
    space = _Space(model, cluster, workload, profile, usable_bytes(cluster))
    result = [one for weights in space.types for one in space.split(weights, curve=False)[0]]
    return min(result, key=lambda one: _order(one, "throughput"), default=None)


def least_bytes(model: ModelConfig, tokens: int, weights: str) -> float:
    """Bytes of one GPU that holds the whole model, its blocks in one of `TYPES`, and the cache of one sequence."""
    plan = plan_of(model, Layout())
    each = sum(_stored(plan, placed, weights, cpu=False) for unit in plan.units for placed in unit.placed)
    served = ServingSetup(tokens, 1, int8=weights == "int8")
    page = model.layers * page_bytes_of_block(model, 1, "bfloat16", PAGE, tokens)
    return each + passing_bytes(plan, served) + served.pages * page


def _check(model: ModelConfig, cluster: Cluster, workload: Workload, top: int) -> None:
    check_size(cluster)
    if min(workload.prompt, workload.output, workload.concurrency) < 1:
        raise UserError("serving needs --prompt, --output and --concurrency, each a positive number")
    check_length(model, workload.prompt, workload.output)
    if top < 1:
        raise UserError(f"--top must be a positive integer, not {top}")
    check_generation(Layout(), model)


def _order(one: Deployment, by: By) -> tuple[float, ...]:
    """Smaller is better; ties go to fewer devices."""
    return -one.rate if by == "cost" else -one.tokens_per_second, one.devices, one.token, one.held


def _curve(found: Sequence[Deployment]) -> list[Deployment]:
    """The Pareto front: deployments that no other one beats in both time per token and tokens/s."""
    best, kept = 0.0, []
    for one in sorted(found, key=lambda one: (one.token, -one.tokens_per_second, one.devices)):
        if one.tokens_per_second > best:
            best = one.tokens_per_second
            kept.append(one)
    return kept


def _quantised_on_fewer(found: Sequence[Deployment]) -> tuple[Deployment, Deployment] | None:
    def best(some: Sequence[Deployment]) -> Deployment | None:
        return min(some, key=lambda one: _order(one, "throughput"), default=None)

    split = best([one for one in found if one.weights == "bfloat16"])
    if split is None:
        return None
    fewer = best([one for one in found if one.weights != "bfloat16" and one.devices <= split.devices / 2])
    return None if fewer is None else (fewer, split)


@dataclass(frozen=True)
class _Sizes:
    """Bytes of one rank's share under tp, of one type of the blocks' matrices: of a block, of embedding and head."""

    block: float
    """Of the largest block."""
    blocks: float
    """Of all blocks."""
    first: float
    last: float
    alone: float

    def stage(self, layers: int, pp: int) -> float:
        """The fullest stage: the first of a pipeline has most layers and the embedding, the last one the head."""
        if pp == 1:
            return self.blocks + self.alone
        return max(ceil(layers / pp) * self.block + self.first, layers // pp * self.block + self.last)


class _Space:
    """All candidates of one question."""

    def __init__(
        self, model: ModelConfig, cluster: Cluster, workload: Workload, engine: EngineProfile, room: float,
        queues: bool = True,
    ) -> None:  # fmt: skip
        """queues: whether there are as many clients as there are, though a deployment may run fewer sequences."""
        self.model, self.cluster, self.workload, self.engine, self.room = model, cluster, workload, engine, room
        self.queues = queues
        self.cpu = cluster.device.kind != "cuda"
        self.considered = 0
        self.least: tuple[float, str] = (np.inf, "")
        self.length = workload.prompt + workload.output
        self.tps = [tp for tp in valid_tp(model) if tp <= cluster.devices]

    @cached_property
    def types(self) -> list[str]:
        """16 bits, and whatever else the engine has constants for on the device; 8 bits of floating point only where
        the device multiplies them."""
        pricing = pricing_for(self.cluster, True)

        def known(name: str) -> bool:
            if name == "float8_e4m3fn" and not self.cluster.device.peak(name):
                return False
            try:
                decode_products(self.model, ServingLayout(name), 1.0, self.engine, pricing)
            except UserError:
                return False
            return True

        if self.model.counted and (stored := self.model.counted.stored):  # the files say which
            name = computing_type(stored)
            return [name if known(name) else "bfloat16"]
        return [name for name in TYPES if name == "bfloat16" or known(name)]

    def split(self, weights: str, curve: bool = True) -> tuple[list[Deployment], list[Deployment]]:
        """Deployments that fit with one type of weights, none of which gathers: for the clients that there are, as many
        sequences at a time as they need or memory allows; and for as many clients as sequences, 1, 2, 4, ..., if
        `curve`."""
        rows = [row for tp in self.tps for row in self._rows(tp, weights) if curve or row[-1]]
        if not rows:
            return [], []
        tp, pp, dp, batch, cache, held, most = (np.array(column) for column in zip(*rows, strict=True))
        clients = np.where(most & self.queues, self.workload.concurrency, dp * batch)
        most_clients, fewest = -(-clients // dp), np.maximum(clients // dp, 1)
        slower = faster = self._answered_by(weights, tp, pp, dp, batch, most_clients)
        if (most_clients != fewest).any():
            faster = self._answered_by(weights, tp, pp, dp, batch, fewest)
        rates = self._rate(clients, dp, slower[2], faster[2])
        asked: list[Deployment] = []
        free: list[Deployment] = []
        for i, times in enumerate(zip(*slower[:2], rates, strict=True)):
            layout = Layout(dp=int(dp[i]), tp=int(tp[i]), pp=int(pp[i]))
            first, each, rate = map(float, times)
            one = Deployment(layout, weights, int(batch[i]), first, each, rate, float(held[i]), int(cache[i]))
            (asked if most[i] else free).append(one)
        return asked, free

    def _answered_by(self, weights: str, tp: Num, pp: Num, dp: Num, batch: Num, clients: Num) -> tuple[Num, Num, Num]:
        return self._answered(*self._seconds(weights, tp, pp, dp, np.minimum(batch, clients)), batch, clients)

    def _rows(self, tp: int, weights: str) -> Iterator[tuple[float, ...]]:
        """(tp, pp, replicas, sequences of a replica, tokens of its cache, bytes, whether it is for the clients that
        there are) of what fits."""
        plan = plan_of(self.model, Layout(tp=tp))
        sizes = self._sizes(plan, weights)
        for pp in range(1, min(self.model.layers, self.cluster.devices // tp) + 1):
            weight, page = sizes.stage(self.model.layers, pp), self._page_bytes(tp, pp)
            name = f"tp={tp},pp={pp} in {TYPES[weights]}"
            int8 = weights == "int8"
            pages, most = self._capacity(plan, weight, page, name, int8)
            for dp in powers(self.cluster.devices // (tp * pp)):
                # More replicas than clients are for the curve alone: nobody asks them anything.
                wanted = [(batch, False) for batch in powers(most)]
                if dp <= self.workload.concurrency:
                    self.considered += 1
                    wanted += [(min(most, ceil(self.workload.concurrency / dp)), True)] if most else []
                for batch, asked in wanted:
                    yield tp, pp, dp, batch, pages * PAGE, self._held(plan, weight, page, batch, int8), asked

    def _capacity(self, plan: UnitPlan, weight: float, page: float, name: str, int8: bool = False) -> tuple[int, int]:
        """(pages of the cache, sequences that run at a time) beside `weight` bytes. The least that is needed at all is
        remembered for `nothing`."""
        self.least = min(self.least, (self._held(plan, weight, page, 1, int8), name))
        counts = range(1, self.engine.most_sequences + 1)
        most = bisect_right(counts, self.room, key=lambda batch: self._held(plan, weight, page, batch, int8))
        passing = passing_bytes(plan, ServingSetup(self.length, max(most, 1), int8=int8))
        return max(0, int((self.room - weight - passing) // page)), most

    def _held(self, plan: UnitPlan, weight: float, page: float, batch: int, int8: bool = False) -> float:
        """Bytes of a rank with the cache of `batch` whole sequences."""
        served = ServingSetup(self.length, batch, int8=int8)
        return weight + passing_bytes(plan, served) + served.pages * page

    def _sizes(self, plan: UnitPlan, weights: str) -> _Sizes:
        """plan: of a rank that has all parts."""
        each = {unit.name: sum(_stored(plan, p, weights, cpu=self.cpu) for p in unit.placed) for unit in plan.units}
        tied = each.get("tied", 0.0)
        first, last = each.get("embedding", 0.0) + tied, each.get("head", 0.0) + tied
        blocks = [sum(each[unit.name] for unit in plan.units_of(part)) for part in plan.of_kind("block")]
        return _Sizes(max(blocks), sum(blocks), first, last, first + last - tied)

    def _page_bytes(self, tp: int, pp: int, cp: int = 1) -> int:
        slots = PageCut(PAGE, cp).slots
        return ceil(self.model.layers / pp) * page_bytes_of_block(self.model, tp, "bfloat16", slots, self.length)

    def _seconds(self, weights: str, tp: Num, pp: Num, dp: Num, batch: Num) -> tuple[Num, Num, Num]:
        """(token(c), prompt, of it the busiest stage's) of arrays of candidates."""
        serving = ServingLayout(weights, "bfloat16", tp)
        few = np.asarray(batch) <= FEW
        priced = []
        for kind in np.unique(few).tolist():
            pricing = pricing_for(self.cluster, kind)
            priced.append((self._token(serving, pp, dp, batch, pricing), *self._prompt(serving, pp, dp, pricing)))
        token, read, busy = (np.where(few, each[-1], each[0]) for each in zip(*priced, strict=True))
        return token, read, busy

    def _token(self, serving: ServingLayout, pp: Num, dp: Num, batch: Num, pricing: Pricing) -> Num:
        """Seconds of a token, half-way through the answers: through all stages, or as long as the slowest one takes for
        all groups of sequences (`timing` has the same for one layout)."""
        layers, group = self.model.layers, np.ceil(batch / pp)
        through = decode_pass(
            self.model, serving, group, self.workload.prompt + self.workload.output / 2, self.engine, pricing
        )
        block, ends = sum(through.block.values()), through.head + through.host
        hop = np.where(pp > 1, pricing.collectives.hop(group * self.model.hidden * 2.0, serving.tp * dp), 0.0)
        slowest = np.maximum(np.ceil(layers / pp) * block, layers // pp * block + ends) + hop
        once = layers * block + ends + pp * hop
        return np.maximum(once, np.minimum(batch, pp) * slowest)

    def _prompt(self, serving: ServingLayout, pp: Num, dp: Num, pricing: Pricing) -> tuple[Num, Num]:
        """Seconds in which a prompt is read, in chunks that follow each other through the stages, and those that the
        busiest stage works on it (`timing` has the same for one layout)."""
        layers, prompt = self.model.layers, self.workload.prompt
        pieces = ceil(prompt / CHUNK)
        one, whole = (
            prefill_pass(self.model, serving, 1.0, tokens, self.engine, pricing) for tokens in (prompt / pieces, prompt)
        )
        block = sum({**one.block, "attention": whole.block["attention"] / pieces}.values())
        ends = one.head + one.host
        nbytes = ceil(prompt / pieces) * self.model.hidden * 2.0
        hop = np.where(pp > 1, pricing.collectives.hop(nbytes, serving.tp * dp), 0.0)
        slowest = np.maximum(np.ceil(layers / pp) * block, layers // pp * block + ends) + hop
        return layers * block + ends + (pp - 1) * hop + (pieces - 1) * slowest, pieces * slowest

    def _answered(self, token: Num, read: Num, busy: Num, batch: Num, clients: Num) -> tuple[Num, Num, Num]:
        """Seconds of (first token, each token, a whole answer) for at most `batch` sequences at a time of `clients` in
        one replica. busy: of a prompt, those of the busiest stage; the others work on other prompts meanwhile."""
        running, following = np.minimum(batch, clients), self.workload.output - 1
        answer = read + following * token + (running - 1) * busy
        waiting = (clients / running - 1) * answer
        return waiting + read, token + (running - 1) * busy / max(following, 1), waiting + answer

    def _rate(self, clients: Num, dp: Num, slower: Num, faster: Num) -> Num:
        """Tokens/s of `clients` in `dp` replicas together. slower, faster: seconds of an answer in replicas with
        one client more than the others, and in those."""
        fewer, more = clients // dp, clients % dp
        return self.workload.output * (more * (fewer + 1) / slower + (dp - more) * fewer / faster)

    def gathered(self) -> Iterator[Deployment]:
        """Deployments whose data ranks gather weights, in 16 bits; each tp with as many data ranks as there are."""
        stored = self.model.counted.stored if self.model.counted else ""
        for tp in () if stored else self.tps:  # quantized weights are not gathered
            if (dp := self.cluster.devices // tp) > 1:
                layout = Layout(dp=dp, tp=tp, zero=3)
                plan = plan_of(self.model, layout)
                weight = 2.0 * (sum(unit.shard_numel for unit in plan.units) + sum(plan.slots.values()))
                yield from self._deployed(layout, "bfloat16", weight)

    def context_parallel(self, weights: str) -> Iterator[Deployment]:
        """Deployments whose cache is cut over cp, with one type of weights; degrees of cp, pp and dp by doubling."""
        devices, layers = self.cluster.devices, self.model.layers
        for tp in self.tps:
            sizes = self._sizes(plan_of(self.model, Layout(tp=tp)), weights)
            for cp in (cp for cp in range(2, devices // tp + 1) if PAGE % cp == 0):
                for pp in powers(min(layers, devices // (tp * cp))):
                    for dp in powers(min(self.workload.concurrency, devices // (tp * cp * pp))):
                        layout = Layout(dp=dp, tp=tp, cp=cp, pp=pp)
                        yield from self._deployed(layout, weights, sizes.stage(layers, pp))

    def expert_parallel(self, weights: str) -> Iterator[Deployment]:
        """Deployments whose experts are spread whole, over the ranks of tp or over replicas as well, with one type of
        weights; pp and replicas by doubling."""
        e, devices, layers = self.model.experts, self.cluster.devices, self.model.layers
        for tp in self.tps if e is not None else ():
            for dp in powers(min(self.workload.concurrency, devices // tp)):
                for ep in (tp * across for across in powers(dp) if tp * across > 1):
                    if e is None or e.count % ep:
                        continue
                    sizes = self._sizes(plan_of(self.model, Layout(tp=tp, dp=dp, ep=ep)), weights)
                    for pp in powers(min(layers, devices // (tp * dp))):
                        yield from self._deployed(Layout(dp=dp, tp=tp, pp=pp, ep=ep), weights, sizes.stage(layers, pp))

    def _deployed(self, layout: Layout, weights: str, weight: float) -> Iterator[Deployment]:
        """A layout for the clients that there are, where it fits. weight: bytes of weights on the fullest rank."""
        dp, int8 = layout.dp, weights == "int8"
        strategy = DecodeStrategy(self.model, layout, self.engine, self.cluster, weights)
        plan, page = plan_of(self.model, layout), self._page_bytes(layout.tp, layout.pp, layout.cp)
        pages, most = self._capacity(plan, weight, page, str(layout), int8)
        self.considered += 1
        if not most:
            return
        clients = self.workload.concurrency if self.queues else min(self.workload.concurrency, dp * most)
        busiest = ceil(clients / dp)
        batch = min(most, busiest)
        token = strategy.token(batch * dp, self.workload.prompt + self.workload.output / 2).seconds
        prompt = strategy.prompt(self.workload.prompt, CHUNK)
        # Without a pipeline, and without bubbles in it, a rank is busy all the time.
        busy = prompt.seconds - prompt.parts.get("bubble", 0.0)
        first, each, answer = map(float, self._answered(token, prompt.seconds, busy, batch, busiest))
        # No replica counts as faster than the busiest one: ranks that gather do so in step.
        rate = float(self._rate(clients, dp, answer, answer))
        held = self._held(plan, weight, page, batch, int8)
        yield Deployment(layout, weights, batch, first, each, rate, held, pages * PAGE)

    def crossover(self) -> tuple[int, int | None] | None:
        """Ranks of one node, and the tokens of a pass from which on gathering is faster there."""
        ranks = max((tp for tp in self.tps if tp <= self.cluster.devices_per_node), default=1)
        if ranks < 2:
            return None
        pair = (Layout(dp=ranks, zero=3), Layout(tp=ranks))
        return ranks, crossover(*(DecodeStrategy(self.model, each, self.engine, self.cluster) for each in pair))

    def nothing(self) -> UserError:
        """One line: what is missing."""
        held, where = self.least
        missing = format_bytes(held - self.room)
        return UserError(
            f"{self.model.name} with {self.length:,} tokens a sequence does not fit {self.cluster}: the leanest "
            f"({where}) needs {format_bytes(held)} a device, {missing} more than its {format_bytes(self.room)}"
        )


def _stored(plan: UnitPlan, placed: Placed, weights: str, *, cpu: bool) -> float:
    """Bytes of a parameter: matrices in their type with its scales, the rest in 16 bits."""
    if plan.model.counted and plan.model.counted.stored:
        stored = placed.parameter.stored
        return stored_bytes(stored, placed.shape) if stored else placed.numel * 2.0
    if weights == "bfloat16" or not has_fewer_bits(plan, placed, weights):
        return placed.numel * 2.0
    if weights == "int8":
        return parameter_int8_bytes(placed, width=2, tiled=cpu)
    return stored_bytes(weights, placed.shape)

"""The best ways to serve a model on a cluster: tensor parallelism, pipeline stages, replicas, types of weights, and
batch size.

The workload is `concurrency` clients that each send a new request as soon as their last one is answered. They are
distributed evenly over the replicas; in a replica without room for all of its clients' sequences, the others wait.
`predict.time.requests` has the mean client's first token, time per token and answer; with c sequences of n tokens

    tokens/s of a replica = c n / ((n - 1) token(c) + c prompt)

where token(c) and prompt are `timing`'s seconds.

With a fixed number of clients, more tokens/s mean faster answers. The batch size trades one for the other
(`ServingPlan.curve`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import ceil
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shardwise.arrays import Num
from shardwise.cluster import Cluster
from shardwise.cluster.catalog import DevicePrice, price_of
from shardwise.codec import Json, keyed
from shardwise.errors import UserError, did_you_mean
from shardwise.layout import Layout, Workload
from shardwise.layout.context import PAGE
from shardwise.layout.experts import ExpertSpread, expert_spread, experts_across
from shardwise.layout.keys import divisors
from shardwise.layout.legality import valid_tp
from shardwise.layout.serving import check_generation, check_length, plan_of
from shardwise.layout.usual_workload import usual_serving
from shardwise.model import ModelConfig
from shardwise.model.catalog import stored_as
from shardwise.model.formats import weight_format
from shardwise.planner.answer import SHOWN, Answer, numbers_of
from shardwise.planner.disaggregated import Disaggregated, best_apart, fewest_apart, instances
from shardwise.planner.shortfall import more_devices
from shardwise.planner.space import powers
from shardwise.planner.strategies import CHUNK, crossover, serving_engine, usual_server
from shardwise.predict.arguments import Length, as_cluster, as_config, as_length
from shardwise.predict.memory.capacity import usable_bytes
from shardwise.predict.memory.engine_bytes import OWN
from shardwise.predict.memory.engine_workspace import engine_room, engine_workspace, expert_padding
from shardwise.predict.memory.serving import ServedStage, ServingSetup, held_by, page_bytes, passing_bytes, stage_bytes
from shardwise.predict.supported import check_size
from shardwise.predict.time.generation import DecodeStrategy, pricing_for
from shardwise.predict.time.pricing import Pricing
from shardwise.predict.time.profiles import EngineProfile
from shardwise.predict.time.ranges import time_range
from shardwise.predict.time.requests import RequestSeconds, closed_loop
from shardwise.predict.time.serving import PassSeconds, ServedModel, ServingLayout
from shardwise.predict.traffic.slow_links import tensor_warnings
from shardwise.report.printing import Printable
from shardwise.report.units import format_bytes, format_time

if TYPE_CHECKING:
    from shardwise.report.terminal import Renderable

By = Literal["throughput", "cost", "pareto"]

KV_CACHES = ("auto", "bf16", "fp8")
"""Types of keys and values; auto: as a quantized model's files name them, else as the engine has them."""
TYPES = {"bfloat16": "bf16", "float8_e4m3fn": "fp8", "int8": "int8", "int4": "int4"}
"""Types in which the blocks' matrices may be stored: torch's name -> usual name."""


def type_name(weights: str, model: ModelConfig | None = None) -> str:
    """The usual name of a type or format of weights; of a model's own files theirs: mxfp4, whose type is int4."""
    stored = model.counted.stored if model and model.counted else ""
    own = stored and weight_format(stored).dtype == weights
    return stored.partition("-")[0] if own else TYPES.get(weights, weights)


@dataclass(frozen=True)
class Deployment(Json):
    """One way to serve. weights: of the blocks, torch's name or a format. batch: sequences at a time in one replica,
    the one with most clients. first_token: seconds from a request to its first token there, waiting included, the mean
    of its clients; token: from one token to the next, also the mean. tokens_per_second: of all replicas together. held:
    bytes of the fullest rank, the cache filled; cache_tokens: that a replica's cache has room for."""

    json_keys = (
        "layout weights=weights_name devices sequences_of_a_replica=batch first_token_seconds=first_token "
        "token_seconds=token tokens_per_second tokens_per_second_per_device=rate bytes=held weight_bytes "
        "workspace_bytes=workspace cache_bytes_per_token=token_bytes kv_cache=cache_name lossy cache_tokens"
    )

    layout: Layout
    weights: str
    batch: int
    first_token: float
    token: float
    tokens_per_second: float
    held: float
    weight_bytes: float
    """Of `held`."""
    workspace: float
    """Of `held`: what passes through memory in a pass, with an engine's context where it counts that."""
    token_bytes: float
    """Of the cache on that rank, for a token of a sequence of the usual length."""
    cache_tokens: int
    cache: str = "bfloat16"
    """torch's name of the type of keys and values."""
    lossy: bool = False
    """Whether the weights have fewer bits than the model's own."""

    @property
    def devices(self) -> int:
        return self.layout.ranks

    @property
    def rate(self) -> float:
        """Tokens/s of one device."""
        return self.tokens_per_second / self.devices

    @property
    def weights_name(self) -> str:
        return type_name(self.weights)

    @property
    def cache_name(self) -> str:
        return type_name(self.cache)


@dataclass(frozen=True)
class Bound(Json):
    """A longest mean time: of the first token (--ttft), or of those after it (--tpot)."""

    json_keys = "name seconds"

    name: Literal["ttft", "tpot"]
    seconds: float
    best: Deployment | None = None
    """The deployment of most tokens/s that keeps this bound alone, with as many clients as its sequences."""

    def time(self, one: Deployment) -> float:
        """The bounded time of a deployment, in seconds."""
        return one.first_token if self.name == "ttft" else one.token

    def checked(self) -> Bound:
        """The bound. Raises `UserError` for one that no time keeps."""
        if not 0 < self.seconds < float("inf"):
            raise UserError(f"--{self.name} must be a positive number of seconds, not {self.seconds:g}")
        return self

    def keeps(self, one: Deployment) -> bool:
        return self.time(one) <= self.seconds

    def __str__(self) -> str:
        return f"--{self.name} {format_time(self.seconds)}"


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
    space: _Space = field(repr=False, compare=False)
    """Prices of deployments."""
    price: DevicePrice | None = None
    """Of one device; None where it has no list price and none was given."""
    lossless: Deployment | None = None
    """The best whose weights keep the model's own bits; None where none fits."""
    apart: Disaggregated | None = None
    """The best instances for prefill and for decoding, weights as the winner's, or the fewest that answer a rate; None
    where none fit."""
    rate: float | None = None
    """Requests per second that each of `ranked` answers; None where the number of clients is given."""
    bounds: tuple[Bound, ...] = ()
    """Bounds that all of `ranked` keep."""
    shown: int = SHOWN
    """Deployments of `tables`."""
    assumed: tuple[str, ...] = ()
    """Numbers of the workload that were not given."""

    def tables(self) -> Iterator[Renderable]:
        from shardwise.planner.serving_tables import serving_tables

        return serving_tables(self)

    def why(self) -> Iterator[Renderable]:
        """Tokens/s against time per token, and what was weighed, as texts and tables."""
        from shardwise.planner.serving_tables import why_tables

        return why_tables(self)

    def conclusion(self) -> str:
        from shardwise.planner.serving_tables import serving_conclusion

        return serving_conclusion(self)

    def records(self) -> list[dict[str, Any]]:
        """The ranked deployments, as --json has them."""
        return [self._row(one) for one in self.ranked]

    def usd(self, one: Deployment) -> float | None:
        """US dollars per million tokens; of the tokens that are asked for, where a rate is given."""
        return self.price and self.price.per_million_tokens(one.devices, self.paid(one))

    def paid(self, one: Deployment) -> float:
        """Tokens/s that share a deployment's price."""
        asked = float("inf") if self.rate is None else self.rate * self.workload.output
        return min(one.tokens_per_second, asked)

    def not_runnable(self, one: Deployment) -> str | None:
        """Why this project's `generate` and `serve` reject a layout; None where they run it."""
        try:
            check_generation(one.layout, self.model)
        except UserError as error:
            return str(error)
        return None

    def spread(self, one: Deployment) -> ExpertSpread | None:
        """Experts over the ranks of a layout; None where all ranks share all of them."""
        return expert_spread(one.layout, self.model.experts.count) if self.model.experts and one.layout.ep > 1 else None

    def _row(self, one: Deployment) -> dict[str, Any]:
        times = {"first_token_seconds": one.first_token, "token_seconds": one.token}
        rates = {"tokens_per_second": one.tokens_per_second}
        factor, spread = self.factor(one), self.spread(one)
        ranges = {f"{name}_range": [value / factor, value * factor] for name, value in (times | rates).items()}
        experts = spread and {
            "most_of_a_rank": spread.most, "ranks_with_most": spread.full, "ranks": spread.ranks,
            "redundant_to_even": spread.redundant, "attention_replicas": experts_across(one.layout),
        }  # fmt: skip
        more = {"experts": experts, "not_runnable": self.not_runnable(one)}
        more |= {"weights": type_name(one.weights, self.model)}
        return one.to_json() | ranges | more | {"usd_per_million_tokens": self.usd(one)}

    def factor(self, one: Deployment) -> float:
        """The 80% range of a deployment's times and rates: from 1 / factor to factor times what is predicted."""
        strategy, work = self.strategy(one), self.workload
        token = strategy.token(one.layout.dp * one.batch, work.prompt + work.output / 2).parts
        read = strategy.prompt(work.prompt, CHUNK).parts
        parts = {f"decode {name}": (work.output - 1) * part for name, part in token.items()}
        parts |= {f"prefill {name}": one.batch * part for name, part in read.items()}
        pricing = pricing_for(self.cluster)
        around = time_range(parts, pricing.constants, routed=bool(self.model.experts), served=True)
        return float(np.sqrt(around.high / around.low))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Deployments shown whose tensor parallelism runs over slow links, a line for each tp."""
        context = self.workload.prompt + self.workload.output / 2
        taken = (
            (one.layout.tp, self.strategy(one).token(one.layout.dp * one.batch, context).parts)
            for one in self.ranked[: self.shown]
        )
        return tensor_warnings(self.cluster, taken, "the time of a token")

    def words(self, weights: str) -> str:
        """The format of a type of weights, as the engine stores it."""
        return self.space.words(weights)

    @property
    def share(self) -> float:
        """Share of a device's memory that a server may fill."""
        return self.space.engine.cache_share

    def strategy(self, one: Deployment) -> DecodeStrategy:
        return self.space.strategy(one.layout, one.weights)

    def to_json(self) -> dict[str, Any]:
        return self.asked_json() | {
            "ranked": [self._row(one) for one in self.ranked],
            "curve": [self._row(one) for one in self.curve],
            "price": self.price and self.price.to_json(),
            "quantised_on_fewer": self.quantised and self.quantised[0].to_json(),
            "split_on_more": self.quantised and self.quantised[1].to_json(),
            **keyed(self, "lossless gathering"),
            "crossover": self.crossover and {"ranks": self.crossover[0], "tokens": self.crossover[1]},
            **keyed(self, "disaggregated=apart requests_per_second=rate"),
            "bounds": [one.to_json() | {"best": one.best and self._row(one.best)} for one in self.bounds],
            **keyed(self, "assumed warnings"),
        }


def plan_serving(
    model: ModelConfig | str, cluster: Cluster | str, workload: Workload | None = None, *,
    prompt: Length = None, output: Length = None, concurrency: Length = None, engine: str | None = None,
    by: By = "throughput", top: int | None = None, price: float | None = None, weights: Sequence[str] = (),
    kv_cache: str = "auto", rate: float | None = None, ttft: float | None = None, tpot: float | None = None,
) -> ServingPlan:  # fmt: skip
    """The best `top` deployments (10; 3 are printed) for `workload.concurrency` clients of `prompt` and
    `output` tokens: every legal degree of tp, pp and replicas, cp and ep by doubling, each type of weights that the
    device computes with, 1, 2, 4, ... sequences at a time.

    model, cluster: objects, or their names. prompt, output, concurrency: in place of a workload; usual ones where they
    are left out. ttft, tpot: longest mean seconds to the first token, and per token after it; where the clients are not
    counted, these are as many as the bounds allow. engine: a profile of `predict.time.ENGINES`; None for the usual one.
    by: "throughput", "cost" (tokens/s of a device) or "pareto" (the curve of tokens/s against time per token). price:
    US dollars per device-hour; None for the lowest list price. rate: requests per second, in place of the workload's
    clients, whose number is then that of the smallest deployment that answers as many (Little's law); ranked are those
    that do, on the fewest devices first. weights: formats of the blocks' matrices (`model.formats`) in place of all
    that the engine has; kv_cache: "bf16", "fp8", or "auto" for that of a quantized model's files, else the engine's.
    Raises `UserError` where nothing fits, with what is missing; for devices without constants or memory, for workloads
    without requests or longer than the model's positions, and for models that do not run.
    """
    model, cluster = as_config(model, stored=True), as_cluster(cluster)
    first = () if ttft is None else (Bound("ttft", ttft).checked(),)
    bounds = first if tpot is None else (*first, Bound("tpot", tpot).checked())
    counted = rate is None and (workload is not None or concurrency is not None or not bounds)
    numbers = {"prompt": prompt, "output": output, "concurrency": concurrency}
    lengths = {name: as_length(name, value) for name, value in numbers.items()}
    workload, assumed = (workload, ()) if workload else usual_serving(model, **lengths, clients=counted)
    workload = workload if rate is None else replace(workload, concurrency=1)
    shown, top = numbers_of(top, by)
    _check(model, cluster, workload, top)
    engine = engine or usual_server(cluster)
    profile = serving_engine(engine)
    room = _room(cluster, profile)
    if kv_cache not in KV_CACHES:
        hint = did_you_mean(kv_cache, KV_CACHES, "must be one of")
        raise UserError(f"--kv-cache {kv_cache[:40]!r}: {hint}")
    space_for = partial(_Space, model, cluster, engine=profile, room=room, asked=_formats(model, weights),
                        kv_cache=kv_cache)  # fmt: skip
    if rate is not None:
        workload = replace(workload, concurrency=_clients_at(rate, space_for(workload=workload)))
    elif not counted:
        workload = replace(workload, concurrency=_clients_within(bounds, space_for(workload=workload)))
    space = space_for(workload=workload, queues=rate is None)
    split, unhurried, gathered, others = space.everything()
    everything = split + gathered + others
    ranked = _ranked(everything, workload, by, rate, bounds)
    bounds = tuple(replace(one, best=_most_within([one], unhurried)) for one in bounds)
    curve = _curve(unhurried)
    lossless = next((one for one in ranked if not one.lossy), None)
    if lossless is None and not counted:  # with as many clients as the bounds allow it
        lossless = _most_within(bounds, [one for one in unhurried if not one.lossy])
    return ServingPlan(
        model, cluster, workload, engine, by, room,
        tuple(curve if by == "pareto" else ranked)[:top], space.considered, len(everything), tuple(curve),
        _quantised_on_fewer(split), min(gathered, key=lambda one: _order(one, by), default=None), space.crossover(),
        space, price_of(cluster.device, price), lossless,
        _apart(space, everything, ranked[0].weights, rate), rate, bounds, shown, assumed,
    )  # fmt: skip


def _ranked(
    everything: Sequence[Deployment], workload: Workload, by: By, rate: float | None, bounds: Sequence[Bound]
) -> list[Deployment]:
    """Deployments that answer the rate and keep the bounds, the best first. Raises `UserError` where none does."""
    ranked = sorted(everything, key=lambda one: _order(one, by))
    if rate is not None:
        ranked = [one for one in everything if one.tokens_per_second >= rate * workload.output]
        ranked.sort(key=lambda one: (one.devices, one.token))
    kept = [one for one in ranked if all(bound.keeps(one) for bound in bounds)]
    if not kept:
        if rate is not None:
            raise _beyond(bounds, ranked, "--rate", f"at {rate:g} requests a second ")
        raise _beyond(bounds, ranked, "--concurrency", f"with {workload.concurrency:,} clients ")
    return kept


def _room(cluster: Cluster, engine: EngineProfile) -> float:
    """Bytes of a device for weights, cache and workspace. Raises `UserError` as `usable_bytes` does."""
    usable = usable_bytes(cluster)
    return usable if engine.name in OWN else engine_room(cluster, engine) or usable


def _formats(model: ModelConfig, weights: Sequence[str]) -> list[str]:
    """The formats of `weights` by the names that the search has for them. Raises `UserError` for others, and for a
    model whose files say theirs."""
    names = {usual: name for name, usual in TYPES.items()}
    weights = weights.split(",") if isinstance(weights, str) else weights
    for words in weights:
        if weight_format(words).each > 2:
            raise UserError(f"--weights {words}: plans of serving store weights in 16 bits or fewer")
    if weights and model.counted and (stored := model.counted.stored):
        raise UserError(f"--weights does nothing here: the files of {model.name} are in {stored}")
    return [names.get(words, words) for words in dict.fromkeys(weights)]


def _apart(space: _Space, everything: Sequence[Deployment], weights: str, rate: float | None) -> Disaggregated | None:
    plain = (one for one in everything if one.weights == weights and not one.layout.zero and one.layout.cp == 1)
    among = instances((one.layout, one.cache_tokens) for one in plain)
    asked = space.model, space.cluster, space.workload, space.engine, weights, among, among
    cache = space.cache_of(weights)
    return best_apart(*asked, cache) if rate is None else fewest_apart(*asked, rate, cache)


def _clients_at(rate: float, space: _Space) -> int:
    """Clients under way where the smallest deployment that answers `rate` requests per second does. Raises `UserError`
    where none does."""
    if not 0 < rate < float("inf"):
        raise UserError(f"--rate must be a positive number of requests per second, not {rate:g}")
    output = space.workload.output
    if not (free := space.unhurried()):
        raise space.nothing()
    enough = [one for one in free if one.tokens_per_second >= rate * output]
    if not enough:
        most = max(one.tokens_per_second for one in free) / output
        raise UserError(
            f"no deployment of {space.model.name} on {space.cluster} answers {rate:g} requests a second: at most "
            f"{most:.3g}; give it more devices"
        )
    return min((one.devices, one.layout.dp * one.batch) for one in enough)[1]


def _most_within(bounds: Sequence[Bound], among: Sequence[Deployment]) -> Deployment | None:
    """The deployment of most tokens/s that keeps these bounds; None where none does."""
    kept = (one for one in among if all(bound.keeps(one) for bound in bounds))
    return max(kept, key=lambda one: one.tokens_per_second, default=None)


def _clients_within(bounds: Sequence[Bound], space: _Space) -> int:
    """Clients of the deployment of most tokens/s that keeps these bounds. Raises `UserError` where none does."""
    if not (free := space.unhurried()):
        raise space.nothing()
    if best := _most_within(bounds, free):
        return best.layout.dp * best.batch
    raise _beyond(bounds, free)


def _beyond(bounds: Sequence[Bound], among: Sequence[Deployment], flag: str = "", load: str = "") -> UserError:
    """One line where no deployment keeps the bounds: what can be kept. flag: that gave the load."""
    shortest = ((bound, min(among, key=bound.time)) for bound in bounds)
    least = "; ".join(f"the shortest for --{bound.name} is {format_time(bound.time(one))}, {one.layout} in "
                      f"{one.weights_name}" for bound, one in shortest)  # fmt: skip
    fewer = f"; leave out {flag} for as many clients as the bounds allow" if flag else ""
    return UserError(f"{load}no deployment keeps {' and '.join(map(str, bounds))}: {least}{fewer}")


def fastest_deployment(
    model: ModelConfig, cluster: Cluster, workload: Workload, engine: str | None = None
) -> Deployment | None:
    """The deployment of most tokens/s without context or expert parallelism, with any type of weights; None where
    nothing fits. Raises `UserError` as `plan_serving` does."""
    _check(model, cluster, workload, 1)
    profile = serving_engine(engine or usual_server(cluster))
    space = _Space(model, cluster, workload, profile, _room(cluster, profile))
    result = [one for weights in space.types for one in space.split(weights, curve=False)[0]]
    return min(result, key=lambda one: _order(one, "throughput"), default=None)


def least_bytes(model: ModelConfig, tokens: int, weights: str) -> float:
    """Bytes of one GPU that holds the whole model, its blocks in one of `TYPES`, and the cache of one sequence."""
    return float(held_by(plan_of(model, Layout()), ServingSetup(tokens, 1, weights=weights)).total)


def _check(model: ModelConfig, cluster: Cluster, workload: Workload, top: int) -> None:
    check_size(cluster)
    if min(workload.prompt, workload.output, workload.concurrency) < 1:
        raise UserError("serving needs --prompt, --output and --concurrency, each a positive number")
    check_length(model, workload.prompt, workload.output)
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


class _RankMemory:
    """Memory of a rank of one layout and format of weights, stage by stage."""

    def __init__(self, space: _Space, layout: Layout, weights: str) -> None:
        self.space, self.layout, self.weights = space, layout, weights
        self.plan = plan_of(space.model, replace(layout, pp=1))
        if layout.stage == 3:
            served = space.setup(weights, 1)
            one = held_by(self.plan, served)
            page = page_bytes(self.plan, PAGE, space.length, served.cache_type, served.engine)
            self.stages = {ServedStage(one.all_weights, page, True)}
        else:
            self.stages = set(stage_bytes(space.model, layout, space.setup(weights, 1)))

    def workspace(self, batch: int, head: bool) -> float:
        served = self.space.setup(self.weights, batch)
        if served.engine is None:
            return passing_bytes(self.plan, served, head)
        tokens = served.engine.most_tokens
        return engine_workspace(self.space.model, self.layout, head, served.engine, tokens, batch)

    def fullest(self, batch: int) -> tuple[float, ServedStage]:
        """(bytes, stage) of the fullest rank with the cache of `batch` whole sequences."""
        pages = self.space.setup(self.weights, batch).pages
        each = ((one.weights + self.workspace(batch, one.head) + pages * one.page, one) for one in self.stages)
        return max(each)

    def capacity(self) -> tuple[int, int]:
        """(pages of the cache, sequences that run at a time). The least that is needed at all is remembered for
        `_Space.nothing`."""
        space = self.space
        name = f"{self.layout} in {type_name(self.weights, space.model)}"
        space.least = min(space.least, (self.fullest(1)[0], name))
        most = bisect_right(range(1, space.engine.most_sequences + 1), space.room, key=lambda n: self.fullest(n)[0])
        left = ((space.room - one.weights - self.workspace(max(most, 1), one.head), one.page) for one in self.stages)
        return min(max(0, int(free // page)) if page else MOST_PAGES for free, page in left), most

    def row(self, batch: int) -> tuple[float, float, float, float]:
        """(bytes, of them weights, workspace; of the cache per token) of the fullest rank."""
        held, one = self.fullest(batch)
        return held, one.weights, self.workspace(batch, one.head), one.page / PAGE


RANK_BYTES = ("held", "weight_bytes", "workspace", "token_bytes")
"""Fields of `Deployment` that `_RankMemory.row` returns."""
MOST_PAGES = 1 << 40
"""Pages of a stage without blocks."""


class _Space:
    def __init__(
        self, model: ModelConfig, cluster: Cluster, workload: Workload, engine: EngineProfile, room: float,
        asked: Sequence[str] = (), kv_cache: str = "auto", queues: bool = True,
    ) -> None:  # fmt: skip
        """queues: whether there are as many clients as there are, though a deployment may run fewer sequences."""
        self.model, self.cluster, self.workload, self.engine, self.room = model, cluster, workload, engine, room
        self.asked, self.kv_cache, self.queues = asked, kv_cache, queues
        self.cpu = cluster.device.kind != "cuda"
        self.own = engine.name in OWN
        self.considered = 0
        self.least: tuple[float, str] = (np.inf, "")
        self.length = workload.prompt + workload.output
        self.tps = [tp for tp in valid_tp(model) if tp <= cluster.devices]

    @cached_property
    def types(self) -> list[str]:
        """16 bits, and whatever else the engine has constants for on the device; 8 bits of floating point only where
        the device multiplies them."""
        pricing = pricing_for(self.cluster)

        def known(name: str) -> bool:
            if weight_format(name).dtype == "float8_e4m3fn" and not self.cluster.device.peak("float8_e4m3fn"):
                return False
            try:
                ServedModel(self.model, ServingLayout(self.words(name)), self.engine, pricing).decode_products(1.0)
            except UserError:
                return False
            return True

        if self.model.counted and (stored := self.model.counted.stored):  # the files say which
            name = weight_format(stored).dtype
            return [name if known(name) else "bfloat16"]
        all_known = [name for name in TYPES if name == "bfloat16" or known(name)]
        if not self.asked:
            return all_known
        if not (found := [name for name in self.asked if known(name)]):
            asked, others = (", ".join(map(type_name, names)) for names in (self.asked, all_known))
            raise UserError(
                f"{self.engine.name} on {self.cluster.device.name} has no {asked} weights; known are {others}"
            )
        return found

    def everything(self) -> tuple[list[Deployment], list[Deployment], list[Deployment], list[Deployment]]:
        """Deployments that fit: the two lists of `split`, those that gather weights, and those that cut the cache or
        spread experts. Raises `UserError` where none does."""
        both = [self.split(kind) for kind in self.types]
        counted, free = ([one for pair in both for one in pair[i]] for i in (0, 1))
        spread = self.spread()
        free += [one for one, given in spread if not given]
        gathered, others = list(self.gathered()), [one for kind in self.types for one in self.context_parallel(kind)]
        others += [one for one, given in spread if given]
        if not (counted or gathered or others):
            raise self.nothing()
        return counted, free, gathered, others

    def unhurried(self) -> list[Deployment]:
        """Deployments that fit, for as many clients as sequences."""
        split = [one for kind in self.types for one in self.split(kind)[1]]
        return split + [one for one, given in self.spread() if not given]

    def spread(self) -> list[tuple[Deployment, bool]]:
        return [pair for kind in self.types for pair in self.expert_parallel(kind)]

    def words(self, weights: str) -> str:
        return self.engine.int4 if weights == "int4" else weights

    def cache_of(self, weights: str) -> str:
        """torch's name of the type of keys and values beside weights in a format."""
        if self.kv_cache != "auto":
            return weight_format(self.kv_cache).dtype
        if self.model.counted and self.model.counted.stored:  # engines follow a quantized model's files
            return self.model.counted.cache_type or "bfloat16"
        narrow = self.engine.narrow_cache and weight_format(weights).dtype in ("float8_e4m3fn", "float4")
        return "float8_e4m3fn" if narrow else "bfloat16"

    def lossy(self, weights: str) -> bool:
        stored = self.model.counted.stored if self.model.counted else stored_as(self.model.name)
        form = weight_format(weights)
        return form.lossy and not (stored and weight_format(stored).dtype == form.dtype)

    def setup(self, weights: str, batch: int) -> ServingSetup:
        return ServingSetup(
            self.length, batch, cpu=self.cpu, weights=self.words(weights), cache_type=self.cache_of(weights),
            padded=expert_padding(self.engine, self.cluster.device), engine=None if self.own else self.engine,
        )  # fmt: skip

    def split(self, weights: str, curve: bool = True) -> tuple[list[Deployment], list[Deployment]]:
        """Deployments that fit with one type of weights, none of which gathers: for the clients that there are, as many
        sequences at a time as they need or memory allows; and for as many clients as sequences, 1, 2, 4, ..., if
        `curve`."""
        rows = [row for tp in self.tps for row in self._rows(tp, weights) if curve or row[-1]]
        if not rows:
            return [], []
        columns = [np.array(column) for column in zip(*rows, strict=True)]
        (tp, pp, dp, batch, cache), held, most = columns[:5], np.stack(columns[5:9], axis=1), columns[9]
        clients = np.where(most & self.queues, self.workload.concurrency, dp * batch)
        most_clients, fewest = -(-clients // dp), np.maximum(clients // dp, 1)
        slower = faster = self._answered_by(weights, tp, pp, dp, batch, most_clients)
        if (most_clients != fewest).any():
            faster = self._answered_by(weights, tp, pp, dp, batch, fewest)
        rates = self._rate(clients, dp, slower[2], faster[2])
        asked: list[Deployment] = []
        free: list[Deployment] = []
        for i, times in enumerate(zip(*map(np.asarray, (*slower[:2], rates)), strict=True)):
            layout = Layout(dp=int(dp[i]), tp=int(tp[i]), pp=int(pp[i]))
            first, each, rate = map(float, times)
            bytes_of_rank = dict(zip(RANK_BYTES, held[i].tolist(), strict=True))
            one = Deployment(
                layout, weights, int(batch[i]), first, each, rate, **bytes_of_rank, cache_tokens=int(cache[i]),
                cache=self.cache_of(weights), lossy=self.lossy(weights),
            )  # fmt: skip
            (asked if most[i] else free).append(one)
        return asked, free

    def _answered_by(self, weights: str, tp: Num, pp: Num, dp: Num, batch: Num, clients: Num) -> RequestSeconds[Num]:
        serving = ServingLayout(self.words(weights), self.cache_of(weights), tp, pp)
        served = ServedModel(self.model, serving, self.engine, pricing_for(self.cluster))
        token = self._token(served, pp, dp, np.minimum(batch, clients))
        return self._answered(token, *self._prompt(served, pp, dp), batch, clients)

    def _rows(self, tp: int, weights: str) -> Iterator[tuple[float, ...]]:
        """(tp, pp, replicas, sequences of a replica, tokens of its cache, bytes, of them weights, workspace, of the
        cache per token, whether it is for the clients that there are) of what fits."""
        for pp in range(1, min(self.model.layers, self.cluster.devices // tp) + 1):
            memory = _RankMemory(self, Layout(tp=tp, pp=pp), weights)
            pages, most = memory.capacity()
            for dp in powers(self.cluster.devices // (tp * pp)):
                # More replicas than clients are for the curve alone: nobody asks them anything.
                wanted = [(batch, False) for batch in powers(most)]
                if dp <= self.workload.concurrency:
                    self.considered += 1
                    wanted += [(min(most, ceil(self.workload.concurrency / dp)), True)] if most else []
                for batch, asked in wanted:
                    yield tp, pp, dp, batch, pages * PAGE, *memory.row(batch), asked

    def _token(self, served: ServedModel, pp: Num, dp: Num, batch: Num) -> Num:
        """Seconds of a token, half-way through the answers: through all stages, or as long as the slowest one takes for
        all groups of sequences (`timing` has the same for one layout)."""
        layers, group = self.model.layers, np.ceil(batch / pp)
        through = served.decode_pass(group, self.workload.prompt + self.workload.output / 2)
        block = sum(through.block.values())
        hop = _hop(served.pricing, pp, group * self.model.hidden * 2.0, served.layout.tp * dp)
        slowest = _slowest(through, layers, pp, block) + hop
        once = layers * block + through.head + through.host + pp * hop
        return np.maximum(once, np.minimum(batch, pp) * slowest)

    def _prompt(self, served: ServedModel, pp: Num, dp: Num) -> tuple[Num, Num]:
        """Seconds in which a prompt is read, in chunks that follow each other through the stages, and those that the
        busiest stage works on it (`timing` has the same for one layout)."""
        layers, prompt = self.model.layers, self.workload.prompt
        pieces = ceil(prompt / CHUNK)
        one, whole = (served.prefill_pass(1.0, tokens) for tokens in (prompt / pieces, prompt))
        block = sum({**one.block, "attention": whole.block["attention"] / pieces}.values())
        hop = _hop(served.pricing, pp, ceil(prompt / pieces) * self.model.hidden * 2.0, served.layout.tp * dp)
        slowest = _slowest(one, layers, pp, block) + hop
        return layers * block + one.head + one.host + (pp - 1) * hop + (pieces - 1) * slowest, pieces * slowest

    def _answered(self, token: Num, read: Num, busy: Num, batch: Num, clients: Num) -> RequestSeconds[Num]:
        """Means over `clients` in one replica, at most `batch` sequences at a time. busy: of a prompt, seconds of the
        busiest stage; the others work on other prompts meanwhile."""
        together = self.engine.most_tokens / self.workload.prompt
        loop = np.minimum(batch, clients), clients, self.workload.output, together, self.engine.stream_s
        return closed_loop(token, read, busy, *loop)

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
                yield from (one for one, _ in self._deployed(Layout(dp=dp, tp=tp, zero=3), "bfloat16"))

    def context_parallel(self, weights: str) -> Iterator[Deployment]:
        """Deployments whose cache is cut over cp, with one type of weights; degrees of cp, pp and dp by doubling."""
        devices, layers = self.cluster.devices, self.model.layers
        for tp in self.tps:
            for cp in (cp for cp in range(2, devices // tp + 1) if PAGE % cp == 0):
                for pp in powers(min(layers, devices // (tp * cp))):
                    for dp in powers(min(self.workload.concurrency, devices // (tp * cp * pp))):
                        layout = Layout(dp=dp, tp=tp, cp=cp, pp=pp)
                        yield from (one for one, _ in self._deployed(layout, weights))

    def expert_parallel(self, weights: str) -> Iterator[tuple[Deployment, bool]]:
        """Deployments whose experts are spread whole, over the ranks of tp or over replicas as well (attention is then
        data-parallel), with one type of weights; pp and replicas by doubling. Where ep does not divide the experts,
        some ranks have one more, by which all are priced; this project's runtime has no such layout. The
        second: as of `_deployed`."""
        e, devices, layers = self.model.experts, self.cluster.devices, self.model.layers
        for tp in self.tps if e is not None else ():
            for dp in sorted({*powers(devices // tp), *powers(min(self.workload.concurrency, devices // tp))}):
                for ep in (tp * across for across in divisors(dp) if tp * across > 1):
                    if e is None or ep > e.count or (self.own and e.count % ep):
                        continue
                    for pp in powers(min(layers, devices // (tp * dp))):
                        yield from self._deployed(Layout(dp=dp, tp=tp, pp=pp, ep=ep), weights, curve=True)

    def _deployed(self, layout: Layout, weights: str, curve: bool = False) -> Iterator[tuple[Deployment, bool]]:
        """A layout with one type of weights, if it fits: for the clients that there are (True), where each replica has
        one; and if `curve` for as many as sequences, 1, 2, 4, ... per replica (False)."""
        memory, dp = _RankMemory(self, layout, weights), layout.dp
        pages, most = memory.capacity()
        self.considered += dp <= self.workload.concurrency or not curve
        if not most:
            return
        strategy = self.strategy(layout, weights)
        prompt = strategy.prompt(self.workload.prompt, CHUNK)
        # Without a pipeline, and without bubbles in it, a rank is busy all the time.
        busy = prompt.seconds - prompt.parts.get("bubble", 0.0)
        there = self.workload.concurrency if self.queues else min(self.workload.concurrency, dp * most)
        numbers = [(there, True)] * (dp <= there or not curve) + [(dp * batch, False) for batch in powers(most)] * curve
        for clients, given in numbers:
            busiest = ceil(clients / dp)
            batch = min(most, busiest)
            token = strategy.token(batch * dp, self.workload.prompt + self.workload.output / 2).seconds
            first, each, answer = map(float, self._answered(token, prompt.seconds, busy, batch, busiest))
            # No replica counts as faster than the busiest one: ranks that gather do so in step.
            rate = float(self._rate(clients, dp, answer, answer))
            yield Deployment(
                layout, weights, batch, first, each, rate, **dict(zip(RANK_BYTES, memory.row(batch), strict=True)),
                cache_tokens=pages * PAGE, cache=self.cache_of(weights), lossy=self.lossy(weights),
            ), given  # fmt: skip

    def strategy(self, layout: Layout, weights: str) -> DecodeStrategy:
        """The decode strategy that prices a layout and a type of weights."""
        words, cache = self.words(weights), self.cache_of(weights)
        return DecodeStrategy(self.model, layout, self.engine, self.cluster, words, cache)

    def crossover(self) -> tuple[int, int | None] | None:
        """Ranks of one node, and the tokens of a pass from which on gathering is faster there."""
        ranks = max((tp for tp in self.tps if tp <= self.cluster.devices_per_node), default=1)
        if ranks < 2:
            return None
        pair = (Layout(dp=ranks, zero=3), Layout(tp=ranks))
        return ranks, crossover(*(DecodeStrategy(self.model, each, self.engine, self.cluster) for each in pair))

    def nothing(self) -> UserError:
        held, where = self.least
        missing = format_bytes(held - self.room)
        return UserError(
            f"{self.model.name} with {self.length:,} tokens a sequence does not fit {self.cluster}: the leanest "
            f"({where}) needs {format_bytes(held)} a device, {missing} more than its {format_bytes(self.room)}"
            f"{' or '.join(self._ways())}"
        )

    def _ways(self) -> Iterator[str]:
        """Single changes that would make it fit: other formats of the weights, or more devices."""
        before = "; "
        if self.asked and (types := [kind for kind in self._with(asked=()).types if self._with(asked=[kind]).fits]):
            yield f"{before}allow {' or '.join(type_name(kind, self.model) for kind in types)} weights"
            before = ""
        larger = more_devices(self.cluster, lambda cluster: self._with(cluster=cluster).fits)
        if larger is not None:
            yield f"{before}take {larger}"

    def _with(self, cluster: Cluster | None = None, asked: Sequence[str] | None = None) -> _Space:
        names = self.asked if asked is None else asked
        clients = replace(self.workload, concurrency=1)
        return _Space(self.model, cluster or self.cluster, clients, self.engine, self.room, names, self.kv_cache)

    @property
    def fits(self) -> bool:
        """Whether a deployment fits with one of its types of weights, and can be priced."""
        try:
            return any(self.split(kind, curve=False)[0] for kind in self.types)
        except UserError:  # links between nodes that are not known
            return False


def _slowest(through: PassSeconds, layers: int, pp: Num, block: Num) -> Num:
    """Seconds of the slowest stage (`DecodeStrategy` has the same for one layout). block: seconds of a block."""
    return np.maximum(np.ceil(layers / pp) * block, layers // pp * block + through.head) + through.host / pp


def _hop(pricing: Pricing, pp: Num, nbytes: Num, stride: Num) -> Num:
    """Seconds of a message between stages, 0 without any: one device has no links."""
    return np.where(pp > 1, pricing.collectives.hop(nbytes, stride), 0.0) if np.any(np.asarray(pp) > 1) else 0.0

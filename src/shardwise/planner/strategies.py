"""Strategies side by side for one prompt: what a token moves, what it takes, and where the time goes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import isqrt

from shardwise.cluster import Cluster
from shardwise.cluster.catalog import accelerators
from shardwise.codec import Json
from shardwise.errors import UserError
from shardwise.layout import Layout, UnitPlan
from shardwise.layout.experts import experts_across
from shardwise.layout.serving import check_generation, check_length, plan_of, replicas_in_step, rows_here, sequences_of
from shardwise.model import ModelConfig
from shardwise.predict.memory.engine_bytes import OWN
from shardwise.predict.memory.serving import MemoryFit, ServingSetup, fit_on_cluster
from shardwise.predict.step_seconds import own_engine
from shardwise.predict.supported import check_size
from shardwise.predict.time.generation import DecodeStrategy, DecodeTime, pricing_for
from shardwise.predict.time.profiles import ENGINES, EngineProfile
from shardwise.predict.time.profiles import engine as engine_of
from shardwise.predict.time.strategy_training import TrainStepTime, trained
from shardwise.predict.traffic.ring_volume import Volume, payload, ring_volume
from shardwise.predict.traffic.serving import ForwardPass, balanced, steady_gathers, turn_ledger
from shardwise.predict.traffic.slow_links import tensor_warnings
from shardwise.report.step_report import LedgerRow

ENGINE, ELSEWHERE = "tensorrt-llm", "vllm"
"""Profiles of the software that is assumed for generation on NVIDIA's devices, and on others that are no CPUs."""
HOST = "shardwise-cpu"
"""This project's own on CPUs, which serves and trains."""

CHUNK = 2048
"""Tokens of a prompt in one pass on a cluster."""

SEQ = 8192
"""Tokens of a sequence of the training step."""


@dataclass(frozen=True)
class Asked:
    """The workload of generation. batch: concurrent sequences, over all ranks of a layout. seq: tokens of the
    sequences of the training step beside it. int8: matrices are kept in 8 bits, but for tables."""

    prompt: int
    output: int
    batch: int = 1
    chunk: int = CHUNK
    seq: int = SEQ
    int8: bool = False

    def __post_init__(self) -> None:
        for name in ("prompt", "output", "batch", "chunk", "seq"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be a positive number, not {getattr(self, name)}")


@dataclass(frozen=True)
class DecodeStep(Json):
    """Cost of one more token of every sequence in steady decoding. ledger: of its largest turn, on the rank that
    sends most; volume, payload: of all its turns there. made: tokens that come of the turns a rank takes part in."""

    json_keys = "tokens=made ring_bytes=volume payload_bytes=payload"

    ledger: tuple[LedgerRow, ...]
    volume: Volume
    payload: dict[str, int]
    made: int

    @property
    def volume_of_token(self) -> Volume:
        """Bytes sent by one rank per token."""
        return self.volume.over(self.made)


def decode_round(model: ModelConfig, layout: Layout, sequences: int = 1) -> DecodeStep:
    """One more token for each of `sequences` on all ranks together. A pipeline of p stages takes p turns for it, some
    of them empty where there are fewer sequences than stages; every other strategy takes one. One sequence alone is
    every rank's under weight gathering; several are shared out."""
    each, own = sequences_of(layout, sequences), sequences > 1 or layout.stage < 3
    groups = [each // layout.pp + (turn < each % layout.pp) for turn in range(layout.pp)]
    made = min(sequences, each * replicas_in_step(layout))
    # Of the replicas that have experts for each other's tokens, some may have no sequence.
    others = experts_across(layout) * made / each / replicas_in_step(layout)

    def ledger(plan: UnitPlan, group: int) -> tuple[LedgerRow, ...]:
        here = rows_here(layout, group)
        return turn_ledger(
            plan, ForwardPass.decode(group), steady_gathers(plan), own, balanced(plan, here, here * others)
        )

    found = []
    for stage in range(layout.pp):
        plan = plan_of(model, layout, stage)
        ledgers = [ledger(plan, group) for group in groups]
        rows = tuple(row for ledger in ledgers for row in ledger)
        found.append(DecodeStep(ledgers[0], ring_volume(rows, plan), payload(rows), made))
    return max(found, key=lambda one: one.volume.total)


@dataclass(frozen=True)
class Generated(Json):
    """One strategy. sequences: of the busiest data rank. round: what a token moves. fit, cache_bytes: at the end of the
    answer; after the prompt and at the end. prompt, first, middle, last: seconds of the prompt, of the answer's first
    token after it, of one half-way, and of the last. range: of the middle one."""

    json_keys = (
        "layout sequences_of_a_rank=sequences ring_bytes_of_a_token=round.volume_of_token round "
        "bytes.weights=fit.held.all_weights bytes.gathered_buffers=fit.held.slots "
        "bytes.cache_after_prompt=cache_bytes.0 bytes.cache_at_end=cache_bytes.1 bytes.fits=fit.fits "
        "prompt token.first=first token.middle=middle token.middle.low=range.0 token.middle.high=range.1 "
        "token.last=last token.growth=growth training=trained"
    )

    layout: Layout
    sequences: int
    round: DecodeStep
    fit: MemoryFit
    cache_bytes: tuple[int, int]
    prompt: DecodeTime
    first: DecodeTime
    middle: DecodeTime
    last: DecodeTime
    range: tuple[float, float]
    model: ModelConfig
    cluster: Cluster
    seq: int

    @cached_property
    def trained(self) -> TrainStepTime:
        """A training step on these devices."""
        return trained(self.model, self.layout, self.seq, self.cluster)

    def tokens_per_second(self, batch: int) -> float:
        """Tokens per second of `batch` sequences over all ranks, half-way through their answers."""
        return batch / self.middle.seconds

    @property
    def growth(self) -> float:
        """By how much the last token takes longer than the first, as a share."""
        return self.last.seconds / self.first.seconds - 1


@dataclass(frozen=True)
class Ratio(Json):
    """Weight gathering over tensor parallelism on as many ranks. blocks, total: in ring volume of a token;
    seconds: of a token. tokens: of one pass over all ranks together, from which on gathering sends less; and from which
    on it is faster, None where that is beyond `MOST_TOKENS`."""

    json_keys = "gathering tensor blocks total seconds fewer_bytes_from_tokens=tokens faster_from_tokens=faster"

    gathering: Layout
    tensor: Layout
    blocks: float
    total: float
    seconds: float
    tokens: float
    faster: int | None


@dataclass(frozen=True)
class ExpertRatio(Json):
    """Experts that ranks have whole over tensor parallelism of all of them, on as many ranks. blocks, total: in ring
    volume of a token; seconds: of a token."""

    spread: Layout
    tensor: Layout
    blocks: float
    total: float
    seconds: float


@dataclass(frozen=True)
class StrategyComparison(Json):
    """All strategies of one prompt on one cluster."""

    json_keys = (
        "model=model.name cluster engine prompt_tokens=asked.prompt max_tokens=asked.output batch=asked.batch "
        "strategies ratios expert_ratios warnings"
    )

    model: ModelConfig
    cluster: Cluster
    asked: Asked
    engine: str
    strategies: tuple[Generated, ...]

    @cached_property
    def ratios(self) -> tuple[Ratio, ...]:
        """Each strategy that gathers weights, against tensor parallelism on as many ranks in the same precision, where
        both are here."""
        return tuple(
            self._ratio(one, other)
            for one, other in product(self.strategies, repeat=2)
            if one.layout.stage == 3 and one.layout.tp == 1 and one.layout.dtype == other.layout.dtype
            if other.layout.tp == other.layout.ranks == one.layout.shard_ranks and other.layout.ep == 1
        )

    @property
    def expert_ratios(self) -> tuple[ExpertRatio, ...]:
        """Each strategy with ep, against tensor parallelism on as many ranks in the same precision, where both are
        here."""
        return tuple(
            ExpertRatio(*_over(one, other))
            for one, other in product(self.strategies, repeat=2)
            if one.layout.ep > 1 and other.layout.ep == 1 and one.layout.dtype == other.layout.dtype
            if other.layout.tp == other.layout.ranks == one.layout.ranks
        )

    def _ratio(self, one: Generated, other: Generated) -> Ratio:
        gathering, tensor = (
            DecodeStrategy(self.model, each.layout, engine_of(self.engine), self.cluster) for each in (one, other)
        )
        plan = plan_of(self.model, one.layout)
        blocks = sum(unit.numel for block in plan.of_kind("block") for unit in plan.units_of(block))
        return Ratio(
            *_over(one, other),
            traffic_ratio(blocks, self.model),
            crossover(gathering, tensor),
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Strategies whose tensor parallelism runs over slow links, a line for each tp."""
        taken = ((one.layout.tp, one.middle.parts) for one in self.strategies)
        return tensor_warnings(self.cluster, taken, "the time of a token")


def _over(one: Generated, other: Generated) -> tuple[Layout, Layout, float, float, float]:
    """Both layouts, and the first one's ring volume of a token in blocks and in total, and its seconds, over the
    other's."""
    mine, others = one.round.volume_of_token, other.round.volume_of_token
    seconds = one.middle.seconds / other.middle.seconds
    return one.layout, other.layout, float(mine.blocks / others.blocks), float(mine.total / others.total), seconds


def usual_server(cluster: Cluster) -> str:
    """The profile that is assumed for generation where none is named: on CPUs, which no other prices, this project's
    own."""
    if cluster.device.kind == "cpu":
        return own_engine(cluster)
    known = accelerators().devices.get(cluster.device.name)
    return ENGINE if known is None or known.ports else ELSEWHERE


def serving_engine(name: str) -> EngineProfile:
    """The profile of that name. Raises `UserError` for one that there is not, and for one that only trains."""
    found = engine_of(name)
    serving = [e.name for e in ENGINES.values() if not e.facts["decode_kernels"].startswith("not used")] + [HOST]
    if name not in serving:
        raise UserError(f"{name} does not serve; profiles that do are {', '.join(serving)}")
    return found


def usual_layouts(model: ModelConfig, cluster: Cluster) -> list[Layout]:
    """The pure strategies on all devices, as far as the model allows. Raises `UserError` for models that do not run."""
    check_generation(Layout(), model)
    found = []
    n = cluster.devices
    texts = [f"tp={n}", f"dp={n},zero=3", f"pp={n}"] + [f"tp={n},ep={n}", f"dp={n},ep={n}"] * bool(model.experts)
    for text in texts:
        try:
            layout = Layout.parse(text)
            check_generation(layout, model)
        except UserError:
            continue
        if layout not in found:
            found.append(layout)
    return found


def check_different(layouts: Sequence[Layout]) -> None:
    """Raise `UserError` where a layout is there twice, however it is written."""
    if len(set(layouts)) < len(layouts):
        raise UserError("--compare names a layout twice: give different ones")


def compare(
    model: ModelConfig, layouts: Sequence[Layout], cluster: Cluster, asked: Asked, engine: str | None = None
) -> StrategyComparison:
    """Predict each layout. engine: a profile of `predict.time.ENGINES`; None for the usual one of such devices.

    Raises `LayoutError` for a layout that does not suit the model or the cluster, `UserError` for what is not known
    (devices without constants, engines), and for a prompt and answer that exceed the model's positions.
    """
    check_size(cluster)
    check_length(model, asked.prompt, asked.output)
    check_different(layouts)
    engine = serving_engine(engine or usual_server(cluster)).name
    return StrategyComparison(
        model, cluster, asked, engine, tuple(_generated(model, each, cluster, asked, engine) for each in layouts)
    )


def _generated(model: ModelConfig, layout: Layout, cluster: Cluster, asked: Asked, engine: str) -> Generated:
    check_generation(layout, model, cluster.devices)
    each = sequences_of(layout, asked.batch)
    weights = "int8" if asked.int8 else ""
    strategy = DecodeStrategy(model, layout, engine_of(engine), cluster, weights or None)
    middle = strategy.token(asked.batch, asked.prompt + asked.output / 2)
    around = middle.range(pricing_for(cluster), routed=bool(model.experts))
    other = None if engine in OWN else engine_of(engine)
    caches = [
        fit_on_cluster(
            model, layout, ServingSetup(length, each, chunk=asked.chunk, weights=weights, engine=other), cluster
        )
        for length in (asked.prompt, asked.prompt + asked.output)
    ]
    return Generated(
        layout, each, decode_round(model, layout, asked.batch), caches[1],
        (caches[0].held.cache, caches[1].held.cache),
        strategy.prompt(asked.prompt, asked.chunk),
        strategy.token(asked.batch, asked.prompt + 1), middle, strategy.token(asked.batch, asked.prompt + asked.output),
        (float(around.low), float(around.high)), model, cluster, asked.seq,
    )  # fmt: skip


MOST_TOKENS = 1 << 22
"""Tokens of one pass beyond which no crossover is looked for."""


def crossover(gathering: DecodeStrategy, tensor: DecodeStrategy) -> int | None:
    """Tokens of one pass over all ranks together from which on gathering weights is faster than tensor parallelism,
    within a hundredth; None beyond `MOST_TOKENS`."""
    ranks = gathering.layout.dp

    def faster(tokens: int) -> bool:
        return gathering.one_pass(tokens / ranks).seconds <= tensor.one_pass(tokens).seconds

    low, high = ranks, MOST_TOKENS
    if not faster(high):
        return None
    while high > low * 1.01 + 1:
        between = max(low + 1, isqrt(low * high))
        low, high = (low, between) if faster(between) else (between, high)
    return high


def traffic_ratio(params: float, model: ModelConfig) -> float:
    """Bytes on the wire of gathering `params` weights over those of tensor parallelism, for one token.

    Both in one type, with two all-reduces per block (Shoeybi et al. 2019): (p-1)/p P against 2 (p-1)/p 2 L d, so
    P / (4 L d) for any number of ranks. From that many tokens per step on, gathering moves less, too.
    """
    return params / (4 * model.layers * model.hidden)

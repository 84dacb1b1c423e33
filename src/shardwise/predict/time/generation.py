"""Time of a prompt and of a token under every strategy, by part.

What one pass through the blocks takes is `predict.time.serving`'s; here it is put together as each strategy runs it:
sums over tp inside the blocks; a gather of block i + 1 beside the arithmetic of block i (ZeRO-3); stages one after the
other, with as many groups of sequences under way as there are stages (pipelines).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from shardwise.cluster import Cluster
from shardwise.codec import Json
from shardwise.layout import Layout, UnitPlan
from shardwise.layout.axes import EDP
from shardwise.layout.pipeline import stages
from shardwise.layout.placement import cache_shape
from shardwise.layout.serving import plan_of, rows_here, sequences_of
from shardwise.model import ModelConfig
from shardwise.predict.time.constants import constants
from shardwise.predict.time.kernels import WIDTH
from shardwise.predict.time.pricing import Pricing
from shardwise.predict.time.profiles import EngineProfile
from shardwise.predict.time.ranges import Range, time_range
from shardwise.predict.time.serving import PassSeconds, ServedModel, ServingLayout
from shardwise.predict.traffic.serving import steady_gathers

SHORT = 2048
"""Tokens of the prompts that fill one pass (`DecodeStrategy.one_pass`)."""


@dataclass(frozen=True)
class DecodeTime(Json):
    """Seconds, and where they go; `parts` adds up to `seconds`. weights, attention, memory: arithmetic and reading;
    tensor: collectives inside blocks, over tp and cp; experts: rows to experts of other replicas and back; data:
    gathers that arithmetic does not hide, and what they slow; pipeline: messages between stages; bubble: waiting for
    the other groups' turns, or for stages to fill; host.

    gathers: seconds of all gathers, hidden ones included.
    """

    seconds: float
    parts: Mapping[str, float]
    gathers: float = 0.0

    def range(self, pricing: Pricing, routed: bool = False) -> Range:
        """The 80% range. routed: the model has experts."""
        return time_range(self.parts, pricing.constants, routed=routed, served=True)


class Gathered(NamedTuple):
    """The gather of one part's units under weight gathering. exposed: of its seconds, those in which nothing is
    computed; hidden: those beside the arithmetic of the part before, which they slow."""

    part: str
    seconds: float
    exposed: float
    hidden: float


Coming = tuple[str, float, bool]
"""(part, seconds of its gather, whether a second slot is free while the block before computes)."""


@lru_cache(maxsize=16)
def pricing_for(cluster: Cluster) -> Pricing:
    """Pricing of passes. Raises `UserError` for a device without constants."""
    return Pricing(cluster, constants(cluster.device))


@dataclass(frozen=True)
class DecodeStrategy:
    """One way to generate: a model split by a layout, on priced devices.

    weights: format of the blocks' matrices (`weight_format`), or torch's name of a type; None for the layout's
    precision. cache: torch's name of the type of keys and values; None for the layout's precision.
    """

    model: ModelConfig
    layout: Layout
    engine: EngineProfile
    cluster: Cluster
    weights: str | None = None
    cache: str | None = None

    @cached_property
    def served(self) -> ServedModel:
        """The model on a stage's ranks."""
        layout, dtype = self.layout, self.layout.dtype
        serving = ServingLayout(
            self.weights or dtype, self.cache or dtype, layout.tp, layout.pp, dtype, layout.ep, layout.expert_tp
        )
        return ServedModel(self.model, serving, self.engine, self.pricing)

    @cached_property
    def pricing(self) -> Pricing:
        return pricing_for(self.cluster)

    def token(self, sequences: int, context: float) -> DecodeTime:
        """Seconds from one token of a sequence to its next one, with `sequences` under way in all ranks together, of
        `context` tokens on average."""
        return self._decoded(sequences, *self.decoding(sequences, context))

    def tokens(self, sequences: int, contexts: Sequence[int]) -> list[DecodeTime]:
        """`token` for each of `contexts`; what does not depend on the context is priced once."""
        through, group = self.decoding(sequences, np.array(contexts, float))
        coming = _coming(self.model, self.layout, self.pricing) if self.layout.stage == 3 else []
        varying = np.broadcast_arrays(through.block["attention"], through.host, through.idle)
        passes = (
            replace(through, block={**through.block, "attention": seconds}, host=host, idle=idle)
            for seconds, host, idle in zip(*(each.tolist() for each in varying), strict=True)
        )
        return [self._decoded(sequences, one, group, coming) for one in passes]

    def _decoded(self, sequences: int, through: PassSeconds, group: int, coming: Sequence[Coming] = ()) -> DecodeTime:
        if self.layout.stage == 3:
            return self._gathering(through, coming)
        return self._staged(through, group, min(sequences_of(self.layout, sequences), self.layout.pp))

    def decoding(self, sequences: int, context: Any) -> tuple[PassSeconds, int]:
        """One pass of `token`, for one context or an array of them: its seconds, and the sequences of which it makes
        one token each."""
        group = -(-sequences_of(self.layout, sequences) // self.layout.pp)
        through = self.served.decode_pass(rows_here(self.layout, group), context)
        if self.layout.cp > 1:  # all rows attend to the keys of each rank
            keys = self.served.decode_pass(group, context / self.layout.cp)
            through = self._over_context(through, keys.block["attention"], group, group)
        return through, group

    def prompt(self, tokens: int, chunk: int, sequences: int = 1) -> DecodeTime:
        """Seconds to read a prompt of `tokens` tokens in chunks on each of `sequences`, up to its first new token."""
        each = sequences_of(self.layout, sequences)
        pieces = -(-tokens // min(chunk, tokens))
        through = self._chunk(tokens, pieces, each)
        if self.layout.stage == 3:
            one = self._gathering(through)
            parts = {name: pieces * seconds for name, seconds in one.parts.items()}
            return DecodeTime(pieces * one.seconds, parts, pieces * one.gathers)
        return self._filled(through, each * -(-tokens // pieces), pieces)

    def one_pass(self, tokens: float) -> DecodeTime:
        """Seconds of a single pass of `tokens` tokens of prompts on each data rank, all of them `SHORT` tokens long."""
        prompts, each = max(1.0, tokens / SHORT), min(tokens, SHORT)
        through = self._chunk(each, 1, prompts)
        return self._gathering(through) if self.layout.stage == 3 else self._filled(through, 0, 1)

    def _chunk(self, tokens: float, pieces: int, each: float) -> PassSeconds:
        """One chunk's pass. Its attention is an equal part of the whole prompt's."""
        whole, cp = self.served.prefill_pass(each, tokens), self.layout.cp
        if pieces * cp == 1:
            return whole
        one = self.served.prefill_pass(each, tokens / pieces / cp)
        return self._over_context(one, whole.block["attention"] / pieces / cp, each * tokens / pieces, each)

    def _over_context(self, through: PassSeconds, attention: Any, tokens: float, sequences: float) -> PassSeconds:
        """A pass with these seconds of attention in each block, and with the collectives over cp for its `tokens`
        tokens. sequences: number of rows of logits."""
        model, tp, cp = self.model, self.layout.tp, self.layout.cp
        if cp == 1:
            return replace(through, block={**through.block, "attention": attention})
        heads, width = model.heads / tp, WIDTH[self.layout.dtype]
        shape = cache_shape(model, tp)
        gathered = tokens * (heads + shape.rows) * shape.width * width
        returned = tokens * heads * (shape.values + 1) * max(width, WIDTH["float32"])
        price = self.pricing.collectives.seconds
        exchanges = price("all_gather_into", gathered, cp, tp) + price("all_to_all", returned, cp, tp)
        head = price("all_reduce", sequences * model.hidden * width, cp, tp)
        block = {**through.block, "attention": attention, "tensor": through.block["tensor"] + exchanges}
        return replace(through, block=block, head=through.head + head)

    # -- how the strategies put it together

    def _gathering(self, through: PassSeconds, coming: Sequence[Coming] = ()) -> DecodeTime:
        """While a part computes, the next one is gathered, where another slot is free for it: embedding and head share
        one, and so do the last two blocks where their number is even."""
        found = self.gathers(float(sum(through.block.values())), coming)
        exposed, hidden = sum(one.exposed for one in found), sum(one.hidden for one in found)
        parts = {name: float(seconds) for name, seconds in through.whole(self.model.layers).parts.items()}
        parts["data"] = exposed + self.pricing.constants.value("contention") * hidden
        parts["host"] -= min(float(through.idle), parts["data"])
        return DecodeTime(sum(parts.values()), parts, exposed + hidden)

    def gathers(self, block: float, coming: Sequence[Coming] = ()) -> list[Gathered]:
        """Gathers of a pass of `block` seconds a block, part by part. coming: priced already."""
        found = []
        for part, seconds, free in coming or _coming(self.model, self.layout, self.pricing):
            hidden = min(seconds, block) if free else 0.0
            found.append(Gathered(part, seconds, max(seconds - block, 0.0) if free else seconds, hidden))
        return found

    def _staged(self, through: PassSeconds, group: int, lanes: int) -> DecodeTime:
        """A token goes through all stages; with several groups under way it waits for their turns, too, where the
        slowest stage takes longer for all of them than one takes for all stages."""
        parts = {name: float(seconds) for name, seconds in through.whole(self.model.layers).parts.items()}
        if self.layout.pp == 1:
            return DecodeTime(sum(parts.values()), parts)
        hop = self.hop(group)
        parts["pipeline"] = self.layout.pp * hop
        slowest = max(self._stage_seconds(through)) + hop
        parts["bubble"] = max(0.0, lanes * slowest - sum(parts.values()))
        return DecodeTime(sum(parts.values()), parts)

    def _filled(self, through: PassSeconds, tokens: int, pieces: int) -> DecodeTime:
        """Chunks one after the other; through stages, each follows on the one before. Time goes where the slowest stage
        spends it, which waits for the first chunk to come and for the last one to go on."""
        whole = {name: float(seconds) for name, seconds in through.whole(self.model.layers).parts.items()}
        if self.layout.pp == 1:
            parts = {name: pieces * seconds for name, seconds in whole.items()}
            return DecodeTime(sum(parts.values()), parts)
        hop, slowest, once = self.hop(tokens), max(self._stage_seconds(through)), sum(whole.values())
        seconds = once + (self.layout.pp - 1) * hop + (pieces - 1) * (slowest + hop)
        parts = {name: pieces * part * slowest / once for name, part in whole.items()}
        parts["pipeline"] = (self.layout.pp + pieces - 2) * hop
        parts["bubble"] = max(0.0, seconds - sum(parts.values()))
        return DecodeTime(sum(parts.values()), parts)

    def _stage_seconds(self, through: PassSeconds) -> list[float]:
        """Seconds of each stage, its host's included."""
        one, host = float(sum(through.block.values())), float(through.host) / self.layout.pp
        seconds = [count * one + host for count in stages(self.model, self.layout).layers]
        seconds[-1] += float(through.head)
        return seconds

    def hop(self, tokens: int) -> float:
        """A message between stages; the last one's, a token id a sequence, is counted as if it were as long."""
        nbytes = tokens * self.model.hidden * WIDTH[self.layout.dtype]
        return float(self.pricing.collectives.hop(nbytes, self.layout.tp * self.layout.cp * self.layout.dp))


def _coming(model: ModelConfig, layout: Layout, pricing: Pricing) -> list[Coming]:
    """The gather of every part, in order."""
    plan = plan_of(model, layout)
    gathers, found = _gather_seconds(plan, pricing), []
    for before, part in zip(["", *plan.parts], plan.parts, strict=False):
        coming = [unit for unit in plan.units_of(part) if unit.name in gathers]
        in_use = {unit.slot for unit in plan.units_of(before)} if before else set()
        free = bool(before) and plan.blueprint.kind(before) == "block" and not in_use & {unit.slot for unit in coming}
        found.append((part, sum(gathers[unit.name] for unit in coming), free))
    return found


def _gather_seconds(plan: UnitPlan, pricing: Pricing) -> dict[str, float]:
    """Unit -> seconds of its gather in a steady turn; equal sizes are priced once. Those that stay are not there."""
    layout, width = plan.layout, WIDTH[plan.layout.dtype]
    sizes = {
        gather.unit: (
            plan.by_name[gather.unit].padded * width,
            plan.mesh.size(gather.axes),
            layout.expert_tp if gather.axes == EDP else layout.tp,
        )
        for gather in steady_gathers(plan)
    }
    price = {size: float(pricing.collectives.seconds("all_gather_into", *size)) for size in set(sizes.values())}
    return {name: price[size] for name, size in sizes.items()}

"""The time of serving: one decode step, one prefill, and the rate of a deployment that is never short of requests.

`ServedModel` takes numbers or numpy arrays for the batch, the context and the degree `tp` (they broadcast). Weights
and the cache may be narrower than 16 bits: `ServingLayout` names their types.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from shardwise.arrays import Num
from shardwise.errors import UserError
from shardwise.layout import Layout
from shardwise.model import ModelConfig
from shardwise.model.formats import weight_format
from shardwise.model.operations import LinearOp
from shardwise.model.parameters import blueprint
from shardwise.predict.memory.engine_workspace import engine_workspace, usual_sequences
from shardwise.predict.memory.serving import PAGE, ServedStage, ServingSetup, stage_bytes
from shardwise.predict.time.block import attention_of, on_rank
from shardwise.predict.time.experts import RoutedLayer, experts_hit, grouped_seconds, served_exchange_seconds
from shardwise.predict.time.kernels import WIDTH
from shardwise.predict.time.pricing import Pricing
from shardwise.predict.time.profiles import EngineProfile
from shardwise.predict.time.requests import RequestSeconds, closed_loop

Parts = Mapping[str, Num]


@dataclass(frozen=True)
class ServingLayout:
    """Split and data types of a served model. weights: the format of the blocks' matrices (`weight_format`), or torch's
    name of a type; cache: torch's name of the type of keys and values; tp: ranks that share a block; pp: stages;
    stream: the type of activations, as they are summed over tp and go from stage to stage; ep: ranks that have
    different experts; etp: ranks that share an expert, 0 for tp."""

    weights: str = "bfloat16"
    cache: str = "bfloat16"
    tp: Num = 1
    pp: Num = 1
    stream: str = "bfloat16"
    ep: Num = 1
    etp: Num = 0

    @property
    def expert_tp(self) -> Num:
        """Ranks that share an expert."""
        return self.tp if np.all(np.asarray(self.etp) == 0) else self.etp

    @property
    def across(self) -> Num:
        """Ranks with tokens of their own between which experts are spread."""
        return np.maximum(np.asarray(self.ep) * self.expert_tp // np.asarray(self.tp), 1)


@dataclass(frozen=True)
class ServedSeconds:
    """Seconds, and where they go. `parts` adds up to `seconds`."""

    seconds: Num
    parts: Parts


@dataclass(frozen=True)
class PassSeconds:
    """Parts of a pass through the model. block: seconds by kind of one block (the mean); head: of the output
    head; host: what the host takes for the pass as a whole; idle: those of them that more work for the device hides."""

    block: Parts
    head: Num
    host: Num
    idle: Num = 0.0

    def whole(self, layers: int) -> ServedSeconds:
        """All blocks and the rest, one after the other."""
        parts = {name: layers * seconds for name, seconds in self.block.items()}
        parts["weights"] = parts["weights"] + self.head
        parts["host"] = self.host
        return ServedSeconds(sum(parts.values()), parts)


class _Products(NamedTuple):
    """Linear layers of one shape in a block on one rank."""

    wide: Num
    """Outputs."""
    deep: Num
    """Inputs."""
    copies: Num
    """How many are read: of experts, those that have rows."""
    rows: Num
    """Of each."""
    weights: str
    """Their format."""
    routing: Num | None = None
    """Of experts, tokens whose experts are looked up; None for others."""


@dataclass(frozen=True)
class ServedModel:
    """A model as an engine serves it, on priced devices. Batches, contexts and prompts are numbers or arrays."""

    model: ModelConfig
    layout: ServingLayout
    engine: EngineProfile
    pricing: Pricing

    def decode_step(self, batch: Num, context: Num) -> ServedSeconds:
        """Seconds until each of `batch` sequences, of `context` tokens on average, has one more token."""
        return self.decode_pass(batch, context).whole(self.model.layers)

    def prefill(self, batch: Num, prompt: Num) -> ServedSeconds:
        """Seconds to read `batch` prompts of `prompt` tokens, up to their first new token."""
        return self.prefill_pass(batch, prompt).whole(self.model.layers)

    def decode_pass(self, batch: Num, context: Num) -> PassSeconds:
        """`decode_step`, part by part."""
        model, serving, engine, known = self.model, self.layout, self.engine, self.pricing.constants
        rows = captured(batch, engine)
        block: dict[str, Num] = {"weights": sum(self.decode_products(rows))}
        heads = model.vocab / (1 if engine.head_replicated else serving.tp)
        quantised = engine.head_quantised or weight_format(serving.weights).each > 2
        head = self._product(rows, heads, model.hidden, serving.weights if quantised else "bf16")
        seen = sum(share * np.minimum(window or np.inf, context) for window, share in _windows(model))
        cache = cache_bytes_per_token(model, serving) * np.maximum(seen, 1.0) * batch / model.layers
        block["attention"] = cache / (known.bandwidth * known.value("decode_attention")) + known.value("kernel_gap_s")
        block["memory"] = self._elementwise(rows)
        block |= self._between_ranks(rows)
        host, idle = (0.0, 0.0) if engine.compiled else self._host(sum(block.values()) * model.layers)
        # Hosts go through the requests of a group for a pass of it: each of p hosts through p groups.
        walks = np.asarray(serving.pp) ** 2 if engine.stages_see_all else 1
        return PassSeconds(block, head, host + walks * batch * engine.request_s, idle)

    def prefill_pass(self, batch: Num, prompt: Num) -> PassSeconds:
        """`prefill`, part by part. The head's product with one row a prompt is left out."""
        model, pricing, tokens = self.model, self.pricing, batch * prompt
        block: dict[str, Num] = {"weights": 0.0}
        for share, *halves in self._products(tokens):
            seconds, others = self._grouped(list(chain(*halves)))
            for wide, deep, copies, rows, weights, _ in others:
                seconds = seconds + copies * pricing.kernels.matmul(rows, wide, deep, weight_format(weights).dtype)
            block["weights"] = block["weights"] + share * seconds
        heads, kv = model.heads / self.layout.tp, np.maximum(model.kv_heads / self.layout.tp, 1)
        block["attention"] = sum(
            share * _prompt_attention(batch, prompt, heads, kv, model.head_dim, window, pricing)
            for window, share in _windows(model)
        )
        block["memory"] = self._elementwise(tokens)
        block |= self._between_ranks(tokens)
        return PassSeconds(block, 0.0, *self._host(sum(block.values()) * model.layers))

    def decode_products(self, batch: Num) -> tuple[Num, Num]:
        """Seconds of a block's linear layers in `decode_pass`, the mean of all blocks: those of attention, and those of
        the feed-forward part."""

        def seconds(products: Sequence[_Products]) -> Num:
            total, others = self._grouped(products)
            for wide, deep, copies, rows, weights, _ in others:
                # A compiled engine reads all experts of a product in one kernel.
                at_once, times = (wide * copies, 1.0) if self.engine.compiled else (wide, copies)
                total = total + times * self._product(rows, at_once, deep, weights)
            return total

        blocks = self._products(batch)
        attention = sum(share * seconds(half) for share, half, _ in blocks)
        return attention, sum(share * seconds(half) for share, _, half in blocks)

    def capacity(self, length: int) -> int:
        """Sequences of `length` tokens whose cache fits beside the weights of every stage. Raises `UserError` where not
        even one does."""
        model, engine, serving, device = self.model, self.engine, self.layout, self.pricing.cluster.device
        memory = device.memory_bytes
        assert memory
        layout, most = Layout(tp=int(serving.tp), pp=int(serving.pp)), usual_sequences(engine, device)
        fitting = most
        for one in _stages(model, serving, length, engine):
            taken = one.weights + engine_workspace(model, layout, one.head, engine, engine.most_tokens, most)
            free = memory * engine.cache_share - taken if engine.cache_of_all else (memory - taken) * engine.cache_share
            pages = -(-length // PAGE)
            fitting = min(fitting, int(free // (one.page * pages))) if one.page else fitting
        if fitting < 1:
            raise UserError(
                f"{model.name} with {length} tokens does not fit {self.pricing.cluster}: weights and one sequence"
            )
        return fitting

    def throughput(self, prompt: int, output: int, requests: int) -> ServedSeconds:
        """Seconds to serve `requests` equal requests that all wait at the start; output tokens/s are requests x output
        over that.

        As many as fit run at a time; equal lengths make them finish together, so they go in waves, of which the last is
        smaller. A wave reads its prompts, then makes its tokens.
        """
        fitting = self.capacity(prompt + output)
        waves, rest = divmod(requests, fitting)
        parts: dict[str, float] = {}
        for size, times in ((fitting, waves), (rest, 1)):
            if size and times:
                for name, seconds in self._wave(size, prompt, output).items():
                    parts[name] = parts.get(name, 0.0) + times * float(seconds)
        return ServedSeconds(sum(parts.values()), parts)

    def requested(self, prompt: int, output: int, clients: float) -> RequestSeconds[ServedSeconds]:
        """Means over `clients` of one replica (`closed_loop`), each a `ServedSeconds`: by part, what is computed for
        the prompts ("prefill ...") and for the tokens after them ("decode ..."), and what the host takes beside
        these."""
        engine, serving, stages = self.engine, self.layout, int(self.layout.pp)
        running = min(float(clients), float(self.capacity(prompt + output)))
        group = max(1.0, running / stages)
        together = min(group, max(1.0, engine.most_tokens / prompt))
        alone, read = (self.prefill(size, prompt).parts for size in (1.0, together))
        made = self.decode_step(group, prompt + output / 2).parts
        busy = sum(map(float, read.values())) / together / stages
        token, first = sum(map(float, made.values())), sum(map(float, alone.values()))
        # An idle server has no pass beside which the host could prepare the prompt's.
        waits = engine.host_overlap and running <= 1 and stages == 1
        idle = self.pricing.constants.value("iteration_s") if waits else 0.0
        loop = busy, running, clients, output, together
        computed, whole = (
            closed_loop(token, first, *loop), closed_loop(token, first + idle, *loop, engine.stream_s * serving.across)
        )  # fmt: skip
        # By part: the sequence's own tokens, and prompts, in the shares that each takes of both.
        made_share, read_share = ({n: float(x) / sum(p.values()) for n, x in p.items()} for p in (made, read))
        decoding = (0.0, token, (output - 1) * token)
        return RequestSeconds(*(
            ServedSeconds(
                seconds,
                {f"decode {n}": share * min(own, device) for n, share in made_share.items()}
                | {f"prefill {n}": share * max(0.0, device - own) for n, share in read_share.items()}
                | {"host": seconds - device},
            )
            for seconds, device, own in zip(map(float, whole), map(float, computed), decoding, strict=True)
        ))  # fmt: skip

    def _wave(self, size: int, prompt: int, output: int) -> Parts:
        """Seconds of one wave by part. Stages of a pipeline work on a pp-th of it each, at the same time."""
        group = max(1.0, size / int(self.layout.pp))
        chunk = min(group, max(1.0, self.engine.most_tokens / prompt))
        read, made = self.prefill(chunk, prompt), self.decode_step(group, prompt + output / 2)
        parts = {f"prefill {name}": seconds * group / chunk for name, seconds in read.parts.items()}
        return parts | {f"decode {name}": seconds * output for name, seconds in made.parts.items()}

    def _host(self, device: Num) -> tuple[Num, Num]:
        """Seconds for which a pass waits for the host, and those in which the device could do more. Each stage has a
        host of its own, which prepares a pass after the stage before it has sent. device: seconds of the pass there."""
        once, stages = self.pricing.constants.value("iteration_s"), np.asarray(self.layout.pp)
        if not self.engine.host_overlap:
            return once * stages + 0.0 * device, 0.0
        idle = np.where(stages == 1, np.maximum(once - device, 0.0), 0.0)
        return np.where(stages == 1, idle, once * stages), idle

    def _between_ranks(self, tokens: Num) -> dict[str, Num]:
        """Seconds of a block's collectives on a pass of `tokens` tokens: two sums over tp, and those of norms over all
        heads; and, where experts are spread over ranks with other tokens, the exchange with these, the mean of all
        blocks."""
        model, serving, engine = self.model, self.layout, self.engine
        statistics = blueprint(model).of_kind("block")[0].statistics
        nbytes = tokens * model.hidden * WIDTH[serving.stream]

        def price(nbytes: Num) -> Num:
            return self.pricing.collectives.seconds("all_reduce", nbytes, serving.tp, reads_peers=engine.reads_peers)

        parts = {"tensor": (2 * price(nbytes) + sum((price(4.0 * n * tokens) for n in statistics), 0.0))}
        if model.experts is None or np.all(serving.across == 1):
            return parts
        places = np.where(np.asarray(serving.expert_tp) > 1, 1, np.gcd(serving.ep, serving.tp))
        sizes = nbytes, serving.across, places, serving.tp
        one = served_exchange_seconds(model.experts, *sizes, engine, self.pricing)
        return parts | {"experts": max(0, model.layers - model.experts.dense_layers) / model.layers * one}

    def _grouped(self, products: Sequence[_Products]) -> tuple[Num, Sequence[_Products]]:
        """Seconds of routed experts in one launch, where the engine has one, and the other products."""
        mine = [o for o in products if o.routing is not None]
        known, weights = self.pricing.constants, self.layout.weights
        if not mine or not self.engine.grouped_experts:
            return 0.0, products
        form = known.expert_form(self.engine.grouped_experts, weights)
        first, sizes = mine[0], tuple((one.wide, one.deep) for one in mine)
        assert first.routing is not None
        rows = first.copies * first.rows
        layer = RoutedLayer(first.routing, rows, first.copies, self.model.hidden, sizes, self.layout.ep)
        return grouped_seconds(layer, weights, form, known), [one for one in products if one.routing is None]

    def _products(self, tokens: Num) -> list[tuple[float, list[_Products], list[_Products]]]:
        """(share of the blocks, attention's, the feed-forward part's) of the linear layers of each kind of block.
        Routers are left out where the engine launches experts one by one."""
        found = []
        taken = ("linear", "router") if self.engine.grouped_experts else ("linear",)
        for part, count in blueprint(self.model).distinct_blocks:
            kinds = [operation.kind for operation in part.operations]
            core = kinds.index("attention")
            last = core + kinds[core:].index("linear")
            attention, feed_forward = (
                [_on_rank(op, self.layout, tokens) for op in half if isinstance(op, LinearOp) and op.kind in taken]
                for half in (part.operations[: last + 1], part.operations[last + 1 :])
            )
            found.append((count / self.model.layers, attention, feed_forward))
        return found

    def _product(self, batch: Num, wide: Num, deep: Num, weights: str) -> Num:
        """Seconds of a linear layer on few tokens: reading its weights, or the product where that takes longer."""
        known, stored = self.pricing.constants, weight_format(weights)
        if not self.engine.compiled:
            return self.pricing.kernels.matmul(batch, wide, deep, stored.dtype)
        share = known.value(f"gemv_{stored.dtype}")
        launches = 2 if stored.dtype == "int8" and self.engine.scales_apart else 1
        return wide * deep * stored.width / (known.bandwidth * share) + launches * known.value("kernel_gap_s")

    def _elementwise(self, tokens: Num) -> Num:
        """Norms, rotation, cache update, activation of one block: bytes and kernels."""
        model, known, engine = self.model, self.pricing.constants, self.engine
        opened = _opened(model, bool(engine.grouped_experts))
        moved = tokens * 2.0 * (8 * model.hidden + (3 * opened + 4 * model.q_width) / self.layout.tp)
        return moved / (known.bandwidth * known.value("stream")) + engine.decode_kernels * known.value("kernel_gap_s")


def captured(batch: Num, engine: EngineProfile) -> Num:
    """The number of sequences that a graph for `batch` of them computes: the next of `graph_sizes`, beyond the largest
    none more."""
    sizes = np.array([*engine.graph_sizes, np.inf])
    padded = sizes[np.searchsorted(sizes, batch)]
    return np.where(np.isinf(padded), batch, padded)


def _windows(model: ModelConfig) -> list[tuple[int, float]]:
    """(window, share of the blocks) of attention; window 0 attends to all tokens."""
    blocks = blueprint(model).distinct_blocks
    return [(attention_of(part).window, count / model.layers) for part, count in blocks]


def _prompt_attention(batch: Num, prompt: Num, heads: Num, kv: Num, width: int, window: int, pricing: Pricing) -> Num:
    local = window * (window < np.asarray(prompt))
    attended = 1 - np.minimum(window or prompt, prompt) / (2 * np.asarray(prompt))
    return pricing.kernels.attention(batch, prompt, prompt, heads, kv, width, window=local, attended=attended)


def cache_bytes_per_token(model: ModelConfig, serving: ServingLayout) -> Num:
    """Bytes of keys and values that a rank of one stage keeps for a token, all layers of the model together."""
    if counted := model.counted:  # windows are in what is read of it
        tps, width = np.unique(np.asarray(serving.tp)).tolist(), WIDTH[serving.cache]
        caches = [replace(cache, window=0, state=0) for cache in counted.caches]
        each = {tp: width * sum(cache.numbers_of(1, int(tp), width) for cache in caches) for tp in tps}
        return np.vectorize(each.get, otypes=[float])(serving.tp)
    latent = model.latent_attention
    kv = latent.cached if latent else 2 * np.maximum(model.kv_width / serving.tp, model.head_dim)
    return 1.0 * model.layers * kv * WIDTH[serving.cache]


def weight_bytes(model: ModelConfig, serving: ServingLayout) -> float:
    """Bytes of weights of the fullest rank: blocks in their format with its scales, embedding and head in 16 bits; or
    as the files of a quantized model have them."""
    return max(one.weights for one in _stages(model, serving, 1, None))


def _stages(model: ModelConfig, serving: ServingLayout, length: int, engine: EngineProfile | None) -> list[ServedStage]:
    across = int(serving.across)
    layout = Layout(dp=across, tp=int(serving.tp), pp=int(serving.pp), ep=int(serving.ep), etp=int(serving.etp))
    setup = ServingSetup(length, 1, weights=serving.weights, cache_type=serving.cache, engine=engine)
    return stage_bytes(model, layout, setup)


def _on_rank(operation: LinearOp, serving: ServingLayout, tokens: Num) -> _Products:
    """The products of an operation. Experts are read by the tokens of all ranks across which they are."""
    tp: Num = serving.tp
    copies: Num = 1.0
    rows = tokens
    routing = None
    weights = "bf16" if operation.kind == "router" else serving.weights
    if operation.rows == "routed":
        tp, ep = serving.expert_tp, serving.ep
        routing = tokens * ep * tp / serving.tp
        here = np.ceil(operation.count / np.asarray(ep))  # of uneven experts, those of the fullest rank
        copies = experts_hit(here, operation.active / operation.count, routing)
        rows = np.maximum(routing * operation.active * here / operation.count / copies, 1.0)
    wide = sum(on_rank(width, tp) for width in operation.outputs)
    return _Products(wide, on_rank(operation.inputs, tp), copies, rows, weights, routing)


def _opened(model: ModelConfig, grouped: bool) -> float:
    """Elements between the two maps of a feed-forward part, for a token, the mean of all blocks; of routed experts only
    where these are not `grouped` in one launch, which has them."""
    if not (e := model.experts):
        return model.ffn
    dense, active = min(e.dense_layers, model.layers), e.shared + (0 if grouped else e.active)
    return (dense * model.ffn + (model.layers - dense) * active * e.ffn) / model.layers

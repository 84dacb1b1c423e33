"""The time of one training step, in closed form.

`training_step` takes numbers or numpy arrays for every degree and count of a `StepShape` (they broadcast: one call
prices many candidates), and for `zero`, `sp` and `recompute`; `schedule` and `dtype` are one for a call. Independent of
the split, and worth keeping between calls: a `Pricing` for a cluster.

A step is made of three parts that depend on less than the whole split, so that whoever prices millions of candidates
need compute each of them a few times only: the `Pieces` of a micro-batch (`pieces.py`), the `Traffic` of the data ranks
and the pipeline (`traffic.py`), and what follows from both with a few dozen operations on arrays (`PricedStep`).
"""

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any

import numpy as np

from shardwise.arrays import Num
from shardwise.errors import UserError
from shardwise.layout.optimizers import DEFAULT, update_bytes
from shardwise.model.parameters import Model
from shardwise.predict.fixing import SCHEDULES
from shardwise.predict.time.gradients import added_seconds
from shardwise.predict.time.offload import OffloadSeconds, Sharded, offload_seconds, offloads
from shardwise.predict.time.pieces import Parts, Pieces, pieces, recomputed, total
from shardwise.predict.time.pricing import Pricing
from shardwise.predict.time.profiles import EngineProfile
from shardwise.predict.time.split import StepShape
from shardwise.predict.time.traffic import (
    Traffic,
    block_parameters,
    core_wait,
    held_parameters,
    leaves_node,
    table_held,
    table_parameters,
    traffic,
)
from shardwise.records import dataclass
from shardwise.schedule.pipeline.closed_forms import FORMS, PipelineShape
from shardwise.schedule.pipeline.completion import gathers_of_a_stage


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step, and where they go: `parts` adds up to `seconds`.

    matmul, attention, memory: of the busiest stage, all micro-batches, recomputation included. host: waiting for
    launches; on a CPU, for cores that others have. tensor, experts, pipeline, data: exposed collectives and sends.
    gradients: adding up those of several micro-batches, where products do not. bubble: idle in the pipeline.
    optimizer: the update on the device. offload: copies, updates and disk that nothing
    hides.
    """

    seconds: Num
    parts: Mapping[str, Num]
    busy: Mapping[str, Num] = field(default_factory=dict)
    """Seconds of the device and of each of `offload.BOUNDS`, hidden or not; empty without offloading."""


def training_step(model: Model, split: StepShape, engine: EngineProfile, pricing: Pricing) -> StepSeconds:
    """Seconds of one steady training step. Sources: docs/prediction.md names the formulas of each part. Raises
    `UserError` for a schedule that is none of `SCHEDULES`."""
    found = pieces(model, split, engine, pricing)
    share = bubble_share(split.schedule, split.virtual, found)
    step = PricedStep(model, split, engine, pricing, found, traffic(model, split, engine, pricing), share)
    away = step.offload(parts := step.on_device())
    device = sum(parts.values())
    if away is None:
        return StepSeconds(device, parts)
    return StepSeconds(device + away.exposed, parts | {"offload": away.exposed}, {"device": device, **away.busy})


LINKS = ("tensor", "experts", "data", "pipeline")
"""Parts of a step that are collectives and messages."""


def link_seconds(model: Model, split: StepShape, engine: EngineProfile, pricing: Pricing) -> Parts:
    """Seconds of all collectives and messages of a step by part, one after another: hidden ones, too, without
    the passes over memory beside them. Arguments as of `training_step`."""
    bare = replace(
        engine, tensor_overlap=False, tensor_pipelined=False, exchange_overlap=False, grad_overlap=False,
        gather_overlap=False, pipeline_overlap=False, ring_bytes=(0.0, 0.0),
        gather_copies=(0.0, 0.0), reduce_copies=0.0,
    )  # fmt: skip
    alone = pricing.unhidden()
    found, sent = pieces(model, split, bare, alone), traffic(model, split, bare, alone)
    parts = PricedStep(model, split, bare, alone, found, sent, 1.0).on_device()
    return {name: parts[name] for name in LINKS}


@dataclass(frozen=True)
class PricedStep:
    """A step in closed form, from what `pieces`, `traffic` and `bubble_share` found for the same split. `found` may
    come with its kinds of computation added up (`Pieces.joined`); then so are the parts."""

    model: Model
    split: StepShape
    engine: EngineProfile
    pricing: Pricing
    found: Pieces
    sent: Traffic
    share: Num
    """Result of `bubble_share`."""

    def parts(self) -> Parts:
        """Seconds by part."""
        parts = self.on_device()
        away = self.offload(parts)
        return parts if away is None else parts | {"offload": away.exposed}

    def on_device(self) -> Parts:
        """All parts but offloading."""
        split, engine, sent = self.split, self.engine, self.sent
        micro, fill = self._stages()
        parts = {name: seconds * split.micro_batches for name, seconds in micro.items()}
        parts["bubble"] = fill
        layers, _ = split.layers_held(self.model.layers)
        forward, weights = layers * self.found.forward, layers * self.found.weights
        near = split.stage_ranks < self.pricing.collectives.per_node
        hops = 2 * sent.hop * (split.micro_batches * split.virtual + split.pp - 1)
        if engine.pipeline_overlap:
            hops = exposed_messages(split, sent.hop, total(micro), forward, weights, near)
        parts["pipeline"] = np.where(np.asarray(split.pp) > 1, hops, 0.0)
        # Under interleaving a chunk's last backward pass has those of other chunks behind it, a round of pp
        # micro-batches.
        rounds = np.where(np.asarray(split.virtual) > 1, np.minimum(split.pp, split.micro_batches), 1)
        window = total(micro, "experts") * 2 / 3 * rounds
        parts["data"] = parts["data"] + self._reduced(window)
        wide = split.dtype if split.dtype == "float32" else "bfloat16"
        numel = self._updated() * (1 - np.where(np.asarray(split.offload) == "none", 0.0, split.offloaded))
        saved = update_bytes(DEFAULT) - update_bytes(split.optimizer)
        update = self.pricing.kernels.pass_over(numel * (engine.optimizer_bytes - saved), "optimizer", wide)
        parts["optimizer"] = update + self.pricing.constants.value("step_s")
        return parts

    def offload(self, parts: Parts) -> OffloadSeconds | None:
        """What is offloaded, beside the blocks' parts of the step; None where nothing is."""
        split = self.split
        if not offloads(split):
            return None
        inside = ("matmul", "attention", "memory", "host", "tensor", "experts")
        micro = sum(parts[name] for name in inside if name in parts) / split.micro_batches
        shards = np.where(np.asarray(split.zero) > 0, split.shard, 1)
        tables = table_parameters(self.model, split, self.engine) / shards
        elements, count = Sharded(self._updated() - tables, tables), self._gathers()
        gathers, layers = Sharded(count, np.minimum(count, 1.0)), self.model.layers / np.asarray(split.pp)
        return offload_seconds(split, self.pricing.host, elements, gathers, layers, micro)

    def _stages(self) -> tuple[Parts, Num]:
        """One micro-batch on the stage that takes longest, by part; and the seconds in which it has nothing to do."""
        model, split, found = self.model, self.split, self.found
        most, with_head = map(narrow, split.layers_held(model.layers))
        per_block = found.block | {"data": self._sharded(total(found.block, "host"))}
        per_block["gradients"], of_table = self._added()
        summed = "tensor" if "tensor" in per_block else "matmul"  # where kinds are joined
        sums = np.where((np.asarray(split.zero) >= 2) & self.engine.by_unit, 1, 1 / np.asarray(split.micro_batches))
        per_block[summed] = per_block[summed] + self.sent.partial * sums
        one, loss = total(per_block, "host"), total(found.last, "host") + of_table
        alone = np.asarray(split.pp) == 1

        def stage(blocks: Num, ends: Num, calls: Num) -> Num:
            busy = blocks * one + ends
            return busy + self._host(blocks * per_block["host"] + calls, busy, blocks * per_block["data"])

        tail = (stage(with_head, loss, found.last.get("host", 0.0)) >= stage(most, 0.0, 0.0)) | alone
        layers = np.where(tail, with_head, most)
        busiest: dict[str, Num] = {
            name: layers * per_block[name]
            + np.where(tail, found.last.get(name, 0.0), 0.0)
            + np.where(alone, found.first.get(name, 0.0), 0.0)
            for name in per_block
        }
        busiest["host"] = self._host(busiest.pop("host"), total(busiest), busiest["data"])
        tables = np.where(alone, 1 + (not model.tied), 1.0 * tail)
        busiest["gradients"] = busiest["gradients"] + of_table * tables
        # All stages, one after another, are as long as their launches at least; what sends is launched in the wait.
        calls = found.last.get("host", 0.0) + found.first.get("host", 0.0)
        through = stage(model.layers, loss + total(found.first, "host") + of_table, calls)
        fill = np.maximum(through - total(busiest), 0.0) * self.share
        table = self._table()
        if self.engine.gather_overlap and self.engine.grad_overlap:
            # Beside what the blocks' traffic leaves of their computation, the head's, and waiting for the host.
            gathers, reduce = self._of_block()
            beside = total(found.block, "host")
            left = layers * np.maximum(beside - gathers - reduce, 0.0) + tail * total(found.last, "host")
            left = left + busiest["host"]
            busiest["data"] = busiest["data"] + np.maximum(table * np.where(alone, tables, 1.0) - left, 0.0)
            return busiest, np.where(alone, 0.0, fill)
        busiest["data"] = busiest["data"] + table * tables
        # Of both ends' tables, the fill waits for those that are not on the busiest stage.
        return busiest, np.where(alone, 0.0, fill + table * (2.0 - tail))

    def _gathers(self) -> Num:
        """Gathers of a block at stage 3 per micro-batch: for each of its passes, or once in a step."""
        split, engine = self.split, self.engine
        alone = np.asarray(split.pp) == 1
        once = engine.gathers_by_stage & ~alone
        kept = 1.0 * (engine.keeps_last & alone)  # one block of all is still there for its backward pass
        if engine.tied_apart:  # and what the first blocks read when the last micro-batch left them: one, or two slots
            kept = kept + alone * (1 + self.model.tied) * (1 - 1 / np.asarray(split.micro_batches))
        times: Num = 1.0
        if engine.resident_stages:
            rounds = split.micro_batches / np.asarray(split.pp)
            times = gathers_of_a_stage(np.asarray(split.virtual), rounds, engine.resident_stages)
        again = np.maximum(recomputed(self.model, split)[0], 1.0)
        return np.where(once, times / np.asarray(split.micro_batches), 1.0 + again - kept / self.model.layers)

    def _table(self) -> Num:
        """Stage 3 gathers and reduces tables, too. One is gathered once a micro-batch: the embedding's is used in one
        pass, and that of the head in one right after the other."""
        sent, gathers, once = self.sent, np.minimum(self._gathers(), 1.0), 1 / np.asarray(self.split.micro_batches)
        if self.engine.tied_apart and self.model.tied:
            gathers = np.where(np.asarray(self.split.pp) == 1, once, gathers)
        nearer = (sent.table_gather - sent.table_again) * (gathers - once)
        return sent.table_gather * gathers - nearer + sent.table_reduce

    def _host(self, called: Num, busy: Num, data: Num) -> Num:
        """Seconds for which the device waits for the host in a micro-batch: launches that take longer than what they
        start, a stage of a pipeline receiving and sending both ways; and, of a CPU, what others take of its core.
        called: seconds of the host for the launches. busy: of the device, with data among them."""
        split, engine, pricing = self.split, self.engine, self.pricing
        if engine.graphs and ("experts" in engine.captured or not self.model.experts):
            return 0.0 * busy
        hops = np.where(np.asarray(split.pp) > 1, engine.pipeline_launches, 0)
        waiting = _meeting(called + hops * pricing.constants.value("launch_s"), busy) - busy
        return waiting + core_wait(split, pricing) * (busy - np.where(leaves_node(split, pricing), data, 0.0))

    def _reduced(self, window: Num) -> Num:
        """Exposed seconds of gradients' reduction and parameters' gathering over the data ranks, but for stage 3's
        blocks (`_sharded`). window: the seconds of a micro-batch's backward pass."""
        split, engine, sent = self.split, self.engine, self.sent
        beside = 1 - self.pricing.constants.value("contention")
        after_first, window = beside * (1 - 1 / np.maximum(self.model.layers / split.pp, 1)), beside * window

        def exposed(seconds: Num, window: Num, overlap: bool) -> Num:
            return seconds - np.minimum(seconds * after_first, window) if overlap else seconds

        last = exposed(sent.reduce + sent.replicas, window, engine.grad_overlap)
        last = last + exposed(sent.gather, window / 2, engine.gather_overlap and not engine.gathers_at_end) + sent.tied
        # Stage 2 keeps shards of gradients alone: it reduces those of every micro-batch.
        earlier = np.where(np.asarray(split.zero) == 2, split.micro_batches - 1, 0)
        return last + earlier * exposed(sent.reduce, window, engine.grad_overlap) if np.any(earlier) else last

    def _added(self) -> tuple[Num, Num]:
        """Seconds of adding up gradients in a micro-batch, (of a block, of a vocabulary's table)."""
        model, split, layers = self.model, self.split, self.model.layers
        blocks, routed = block_parameters(model, split)
        shards = np.where(np.asarray(split.zero) > 0, split.shard, 1)
        of_shard = blocks / shards + routed / split.expert_shard
        table = table_held(model, split, self.engine, trained=True)
        known = split, self.engine, self.pricing
        of_block = added_seconds((blocks + routed) / layers, of_shard / layers, *known)
        return of_block, added_seconds(table, table / shards, *known)

    def _sharded(self, busy: Num) -> Num:
        """ZeRO-3, one block of one micro-batch: its gathers and a reduce-scatter beside `busy` seconds of computation.

        The first unit's gather and the last one's scatter have nothing beside them: an n-th of the blocks each.
        """
        engine, sent = self.engine, self.sent
        if not np.any(np.asarray(self.split.zero) == 3):
            return 0.0 * busy
        count, (gathers, reduce) = self._gathers(), self._of_block()
        beside = gathers * engine.gather_overlap + reduce * engine.grad_overlap
        alone = gathers * (not engine.gather_overlap) + reduce * (not engine.grad_overlap)
        ends = (gathers / 2 * engine.gather_overlap + reduce * engine.grad_overlap) / self.model.layers
        copies = count * sent.unit_copies[0] + sent.unit_copies[1]
        hidden = np.minimum(beside - ends, busy)
        return copies + alone + beside - (1 - self.pricing.constants.value("contention")) * hidden

    def _of_block(self) -> tuple[Num, Num]:
        """Seconds of a block's gathers in one micro-batch, and of its reduction, at stage 3."""
        # Under hpz all gathers but the first one of a step are among few ranks.
        sent, count = self.sent, self._gathers()
        nearer = (sent.unit_gather - sent.unit_again) * (count - 1 / np.asarray(self.split.micro_batches))
        return count * sent.unit_gather - nearer, sent.unit_reduce

    def _updated(self) -> Num:
        """Parameters of the busiest rank that its optimizer updates: of its shard."""
        dense, routed = held_parameters(self.model, self.split, self.engine)
        numel = dense / np.where(np.asarray(self.split.zero) > 0, self.split.shard, 1)
        return numel + routed / self.split.expert_shard


def exposed_messages(split: StepShape, hop: Num, busy: Num, forward: Num, weights: Num, near: Any) -> Num:
    """Seconds of a step for which a stage waits for messages that go on beside computation, filling included.

    A rank sends no faster than its link does: forward and backward, once per chunk. Under 1F1B the stage that is i
    before the last has i + 1 micro-batches under way, whose round trip has 2i messages in it: p micro-batches of the
    first stage wait for 2 (p - 1), or less where gradients of weights are computed meanwhile (zb-h1). Chunks hide that
    but for the first round and the last: messages of all chunks, and later what outlasts the shorter pass of a chunk.

    hop: of one message. busy: of a micro-batch on the busiest stage; forward, weights: its forward pass, and its
    gradients of weights. near: whether one of a rank's two neighbors is in its node.
    """
    # Terms without `busy`, the only large array, come first.
    p, m, virtual, schedule = map(np.asarray, (split.pp, split.micro_batches, split.virtual, split.schedule))
    backward, gpipe, fill = busy - forward, schedule == "gpipe", 2 * hop * (p - 1)
    # Two ranks alone have one neighbor, and no message around the end of a chunk.
    sends = np.where((p > 2) & near, virtual, 2 * virtual - (p == 2))
    least = fill + (m - 1) * sends * hop - (m - 1) * busy
    spare, trips = np.where(schedule == "zb-h1", weights, 0.0), (p - 1) * m / p - p
    waits = 2 * fill + trips * np.where(trips > 0, np.maximum(2 * hop - spare, 0.0), 2 * hop)
    waits = np.where(virtual > 1, 2 * hop * (p * virtual - 1), waits)
    if np.any(virtual > 1):
        rounds = (virtual - 1) * np.maximum(m - p, 0)
        waits = np.maximum(waits + rounds * hop - rounds / virtual * np.minimum(forward, backward), waits)
    seconds = np.maximum(least, waits)
    if not np.any(gpipe):
        return seconds
    # All forward messages, and then all backward ones.
    apart = np.maximum(hop - forward, 0.0) + np.maximum(hop - backward, 0.0)
    return np.where(gpipe, fill + (m - 1) * apart, seconds)


def bubble_share(schedule: str, virtual: Num, found: Pieces) -> Num:
    """The bubble of a schedule over that of 1F1B with stages that take as long, from the closed forms of both.

    Raises `UserError` for a schedule that is none of `SCHEDULES`.
    """
    if schedule not in SCHEDULES:
        raise UserError(f"the time of schedule={schedule} has no closed form; there is one for {', '.join(SCHEDULES)}")
    # With one chunk a rank, interleaved is 1F1B; published rows say 1F1B for both.
    form = FORMS["interleaved" if schedule == "1f1b" else schedule]
    rest = total(found.block, "host") - found.forward - found.weights
    # Each pass is as long as its launches at least; closed forms take arrays as they take numbers.
    passes = (np.maximum(each, found.block["host"] / 3) for each in (found.forward, rest, found.weights))
    arrays: Any = virtual, *passes
    case = PipelineShape(2, 2, *arrays)
    return form.bubble(case) / FORMS["1f1b"].bubble(case)


def narrow(array: Num) -> Num:
    """One number where all are equal: what is computed from it need not be as large."""
    array = np.asarray(array)
    return array.flat[0] if array.size and (array == array.flat[0]).all() else array


def _meeting(host: Num, device: Num) -> Num:
    """The longer of two, and a fifth more where both take as long: each waits for the other at times. How sharply the
    longer one decides, (a^4 + b^4)^(1/4), was fitted on eager runs near that point (docs/prediction.md)."""
    return np.sqrt(np.sqrt((host * host) ** 2 + (device * device) ** 2))

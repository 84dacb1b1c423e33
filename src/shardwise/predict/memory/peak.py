"""The most bytes alive at one time beyond what is held all through a step.

Walks the moments of a micro-batch at which something large is transient or a buffer comes in, and takes the largest:
the forward pass, the loss, the head's backward, the backward of each block (after its recomputation where there is
one), the embedding's backward, the end of each reduction, the optimizer. A block's tensors are in `block_tensors.py`,
the engine's buffers in `buffers.py`.
"""

from collections.abc import Iterator
from typing import Any

from shardwise.layout.gradients import trained_units
from shardwise.layout.homes import on_device
from shardwise.layout.units import UnitPlan
from shardwise.ops.limits import ATTENTION_ROWS, loss_chunk, loss_rows, optimizer_chunk
from shardwise.predict.memory.activations import mask_bytes, saved_bytes, saved_items, saved_mask, stored_bytes
from shardwise.predict.memory.buffers import MemoryByClass, When, held_through_step
from shardwise.predict.memory.latent_tensors import block_tensors
from shardwise.predict.memory.outer import outer_transient
from shardwise.predict.memory.sizes import Sizes, core_sizes, cuts_attention, uses_batched_attention
from shardwise.predict.memory.traced import trace_of, traced_moments
from shardwise.predict.memory.transients import dropout, gather, norm_backward, norm_forward, scatter, weight_gradient


def moments(plan: UnitPlan) -> Iterator[tuple[MemoryByClass, int]]:
    """(the engine's buffers, bytes of activations, inputs and transients) at every moment of a step without a pipeline
    at which they grow."""
    if traced := trace_of(plan):
        yield from traced_moments(plan, *traced, optimizer(plan))
        return
    if plan.routing.uneven:
        # The most bytes that any micro-batch has beside the engine's buffers, which are the same in each.
        steps = (moments(plan.as_micro_batch(micro)) for micro in range(plan.micro_batches))
        for same in zip(*steps, strict=True):
            yield same[0][0], max(beside for _, beside in same)
        return
    s = Sizes.of(plan)
    known = sum(saved_inputs(plan, s, part) for part in plan.parts)
    while_forward = saved_mask(plan, s) + known + forward(plan, s, plan.parts)
    beside: dict[tuple[When, str], int] = {
        ("loss", ""): max(saved_bytes(plan) + loss(plan, s), while_forward),
        ("landing", ""): 0,
        ("optimizer", ""): optimizer(plan),
        ("outer", ""): outer_transient(plan),
    }
    beside |= backwards(plan, s, plan.parts)
    again = beside if plan.cuda else beside | backwards(plan, s, plan.parts, adds=True)
    always = inputs(plan, s) - known + tables(plan, s)
    for held in held_through_step(plan):
        yield held, always + (again if held.adds else beside)[held.when, held.part]


def forward(plan: UnitPlan, s: Sizes, parts: list[str]) -> int:
    """The most bytes in the forward pass of a stage beyond what there is before it; its input is there."""
    worst = before = 0
    saves = plan.layout.recompute in ("none", "selective")
    block = {key: block_tensors(plan, s, part).forward(saves) for key, part in _distinct(plan, parts).items()}
    for part in parts:
        if plan.blueprint.kind(part) == "embedding":
            then = embedding_forward(plan, s)
        elif plan.blueprint.kind(part) == "head":
            items, norm = saved_items(plan, s, "head"), s.stream * s.hidden * s.element
            gathered = (gather(plan, s), s.tokens * s.hidden * s.element) if plan.layout.sp else (0, 0)
            then = norm + max(norm_forward(plan, s, s.stream * s.hidden), gathered[0], gathered[1] + items["logits"])
        else:
            then = block[plan.routing.memory_key(part)]
        worst = max(worst, before + then)
        before += sum(saved_items(plan, s, part).values()) - saved_inputs(plan, s, part)
        if plan.blueprint.kind(part) == "embedding":
            before += s.stream * s.hidden * s.element
    return worst


def backwards(
    plan: UnitPlan, s: Sizes, parts: list[str], apart: bool = False, adds: bool = False
) -> dict[tuple[When, str], int]:
    """Activations in each part's backward, and after it: then activations of earlier parts, and one gradient.

    parts: those of one stage. apart: the gradients of weights come later, so that a block keeps what its feed-forward
    part needs for them while it goes on with attention. adds: they are added to an earlier micro-batch's.
    """
    recompute = plan.layout.recompute in ("full", "input")
    stream = s.stream * s.hidden * s.element
    scaled = stream if plan.model.scaled_embedding else 0
    ends = [part for part in parts if plan.blueprint.kind(part) == "block"]
    saved = saved_mask(plan, s) if ends else 0
    # The gradient of a stage's output is a message, which stays until its backward is over.
    block = {
        (key, keeps): block_tensors(plan, s, part, apart, adds).backward(keeps)
        for key, part in _distinct(plan, parts).items()
        for keeps in {part == parts[-1] for part in ends}
    }
    moments: dict[tuple[When, str], int] = {}
    # Of blocks whose saved tensors are in the host's memory, those of the one in its backward and of the one before it
    # are here.
    before = {part: ends[index - 1] if index else None for index, part in enumerate(ends)}
    for part in parts:
        coming = stored_bytes(plan, s, before.get(part))
        moments["reduction", part] = saved + coming + stream * (3 if recompute and part in ends else 1)
        saved += sum(saved_items(plan, s, part).values())
        here = stored_bytes(plan, s, part)
        moments["begin", part] = saved + stream + (here if part in ends and part != ends[-1] else 0)
        if plan.blueprint.kind(part) == "embedding" and not plan.blueprint.trains_in(part):
            moments["backward", part] = stream
        elif plan.blueprint.kind(part) == "embedding":
            # The gradient of learned positions is of the whole table, before it is added to where it stays.
            positions = plan.model.max_positions * s.hidden * s.element if plan.model.positions == "learned" else 0
            moments["backward", part] = stream + max(stream_dropout(plan, s), positions, scaled)
            if not apart:
                # A message stays beside what was scaled of it.
                message = scaled if part == parts[-1] else 0
                moments["backward", part] = max(moments["backward", part], message + _looked_up(plan, s))
        elif plan.blueprint.kind(part) == "head":
            moments["backward", part] = saved + max(_projection_backward(plan, s, adds), _final_norm_backward(plan, s))
        else:
            moments["backward", part] = (
                saved
                + here
                + coming
                + block[plan.routing.memory_key(part), part == parts[-1]]
                + _returned_gradients(plan, s, part)
                + _recomputed_from_input(plan, s, part, parts, apart)
            )
    return moments


def _distinct(plan: UnitPlan, parts: list[str]) -> dict[Any, str]:
    """One of each sort of blocks that differ in memory."""
    return {plan.routing.memory_key(part): part for part in parts if plan.blueprint.kind(part) == "block"}


def inputs(plan: UnitPlan, s: Sizes) -> int:
    """Inputs of the rank: int64 vectors of every micro-batch of the step."""
    model, seen, stream = plan.model, plan.tokens * 8, s.stream * 8
    embeds, blocks = bool(plan.of_kind("embedding")), bool(plan.local.first_blocks)
    vectors = seen * (1 + embeds)  # targets, which every rank counts; ids
    if model.positions == "learned":
        vectors += stream * embeds
    else:
        vectors += seen * blocks
    if (model.dropout and (embeds or blocks)) or (model.attention_dropout and blocks):
        vectors += stream
        vectors += seen if plan.layout.sp and model.attention_dropout and blocks else 0
    if plan.workload.isolate_documents:
        vectors += seen * blocks
    return vectors * plan.micro_batches


def saved_inputs(plan: UnitPlan, s: Sizes, part: str) -> int:
    """Inputs that `part` saves."""
    if plan.blueprint.kind(part) == "head":
        return s.tokens * 8
    if plan.blueprint.kind(part) == "embedding":
        if not plan.blueprint.trains_in(part):
            return 0
        ids = 0 if plan.layout.tp > 1 else s.tokens * 8
        return ids + (s.stream * 8 if plan.model.positions == "learned" else 0)
    return 0


def tables(plan: UnitPlan, s: Sizes) -> int:
    """Shared tensors of the blocks of one micro-batch that are not saved: rotary tables, masks."""
    model = plan.model
    shared = 2 * s.tokens * model.rotated * s.element + mask_bytes(plan, s) - saved_mask(plan, s)
    core = core_sizes(plan, s)
    seq = core.seq
    if plan.layout.attention == "math" and not cuts_attention(plan):
        mask = (core.tokens if plan.workload.isolate_documents else seq) * seq * s.element
        shared += mask * len([window for window in plan.local.windows if 0 < window < seq])
        shared += 0 if plan.workload.isolate_documents else mask
    if plan.layout.attention == "sdpa" and uses_batched_attention(plan):
        shared += 4 * min(seq, ATTENTION_ROWS) ** 2
    return shared


def loss(plan: UnitPlan, s: Sizes) -> int:
    """Log-probabilities of a chunk; bf16 logits are first converted. Where logits are capped also, in backward, the
    slopes of their cap. On CUDA without a cap nothing, and of fp64 one chunk (`ops/cuda/cross_entropy.py`)."""
    if plan.cuda and not plan.model.logit_softcap:
        wide = s.statistic
        return loss_rows(s.tokens, s.vocab, wide) * s.vocab * wide if s.element == 8 else 0
    rows = max(1, min(s.tokens, loss_chunk(s.tokens * s.vocab) // s.vocab))
    capped = 2 if plan.model.logit_softcap else 1
    return rows * s.vocab * (2 * 4 if s.element == 2 else capped * s.element)


def _projection_backward(plan: UnitPlan, s: Sizes, adds: bool) -> int:
    """The gradient of the projection's input; under sp it is scattered first, and the input gathered again for the
    weight's."""
    trains = plan.blueprint.trains_in("head")
    full, piece = s.tokens * s.hidden * s.element, weight_gradient(plan, s, s.vocab, s.hidden) if adds and trains else 0
    if not plan.layout.sp:
        return full + piece
    if not trains:
        return scatter(plan, s)
    return max(scatter(plan, s), s.stream * s.hidden * s.element + max(gather(plan, s), full + piece))


def _final_norm_backward(plan: UnitPlan, s: Sizes) -> int:
    """When what the projection and the loss have saved is gone."""
    items = saved_items(plan, s, "head")
    gone = items["logits"] + items.get("final norm output", 0) + items["log-sum-exp of the loss"]
    return s.stream * s.hidden * s.element + norm_backward(plan, s, s.stream * s.hidden) - gone


def _returned_gradients(plan: UnitPlan, s: Sizes, part: str) -> int:
    """Gradients of a compiled block's weights, which its backward returns all together."""
    if plan.layout.compile != "block" or plan.layout.tp > 1:  # maps that communicate write theirs
        return 0
    return sum(unit.padded for unit in trained_units(plan, part)) * s.element


def _recomputed_from_input(plan: UnitPlan, s: Sizes, part: str, parts: list[str], apart: bool) -> int:
    """Computing all blocks again from the first one's input: a later block's input is not a saved tensor, and the
    gradient of the last one's output, if it is neither a message nor kept for the weights, stays until the first one's
    backward is over."""
    if plan.layout.recompute != "input":
        return 0
    blocks = [name for name in parts if plan.blueprint.kind(name) == "block"]
    kept = apart and not (plan.layout.sp or plan.model.dropout)
    stays = part != blocks[-1] and blocks[-1] != parts[-1] and not kept
    return ((part != blocks[0]) + stays) * s.stream * s.hidden * s.element


def _looked_up(plan: UnitPlan, s: Sizes) -> int:
    """The gradient of the rows looked up. Where other ranks hold some of the ids: their mask, the other ids, and a copy
    of the gradient without them, which under sp is gathered first."""
    rows, stream = s.tokens * s.hidden * s.element, s.stream * s.hidden * s.element
    if plan.layout.tp == 1:
        return rows
    return 2 * rows + s.tokens * 9 + (stream if plan.layout.sp else 0)


def of_weights(plan: UnitPlan, s: Sizes, part: str, adds: bool = False) -> int:
    """Bytes of the gradients of `part`'s weights beyond what was kept for them."""
    if plan.blueprint.kind(part) == "embedding":
        return _looked_up(plan, s) - s.stream * s.hidden * s.element
    return 0 if plan.blueprint.kind(part) == "head" else block_tensors(plan, s, part, adds=adds).of_weights()


def embedding_forward(plan: UnitPlan, s: Sizes) -> int:
    """Looked-up rows, zeros for other ranks' ids included, until they are summed; learned positions; dropout."""
    stream = s.stream * s.hidden * s.element
    summed = stream * (3 if plan.model.positions == "learned" else 1)
    dropped = stream + stream_dropout(plan, s)
    if plan.layout.tp == 1:
        return max(summed, dropped)
    return max(s.tokens * (9 + s.hidden * s.element), scatter(plan, s) if plan.layout.sp else 0, summed, dropped)


def stream_dropout(plan: UnitPlan, s: Sizes) -> int:
    """Dropout of the residual stream, forward or backward: its result, and the hash of its mask."""
    if not plan.model.dropout:
        return 0
    return s.stream * s.hidden * s.element + dropout(s.stream * s.hidden, s.stream)


def optimizer(plan: UnitPlan) -> int:
    """bf16 gradients become fp32 one chunk at a time; on CUDA, where a launch costs more than a pass, one unit.
    Those of offloaded state do so in a lasting buffer of the host."""
    if plan.dtypes.gradients != "bfloat16":
        return 0
    largest = max(on_device(plan, unit) for unit in plan.units)
    return 4 * (largest if plan.cuda else min(largest, optimizer_chunk(largest)))

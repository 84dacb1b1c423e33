"""The most bytes alive at one time beyond what is held all through a step.

Walks the moments of a micro-batch at which something large is transient or a buffer comes in, and takes the largest:
the loss, the head's backward, the backward of each block (after its recomputation where there is one), the embedding's
backward, the end of each reduction, the optimizer. What each moment holds follows from the order in which autograd
makes and frees tensors in the decoder, and the engine its buffers.
"""

from __future__ import annotations

from shardwise.layout.units import UnitPlan
from shardwise.model.chunking import ATTENTION_ROWS, dropout_chunk, loss_chunk, optimizer_chunk
from shardwise.predict.activations import (
    Sizes,
    block_items,
    feed_forward_kept,
    kept_items,
    mask_bytes,
    saved_bytes,
    saved_items,
    saved_mask,
    takes_products,
)
from shardwise.predict.buffers import When, held_through_step, wide_chunk


def peak_beyond_lasting(plan: UnitPlan) -> int:
    """Saved activations, inputs, transients, gradients and their buffers at the worst moment of a step, in bytes."""
    s = Sizes.of(plan)
    beside: dict[tuple[When, str], int] = {
        ("loss", ""): saved_bytes(plan) + loss(s),
        ("optimizer", ""): optimizer(plan),
    }
    beside |= backwards(plan, s, plan.parts)
    return max(held.total + beside[held.when, held.part] for held in held_through_step(plan)) + (
        inputs(plan, s) - sum(saved_inputs(plan, s, part) for part in plan.parts) + tables(plan, s)
    )


def backwards(plan: UnitPlan, s: Sizes, parts: list[str], apart: bool = False) -> dict[tuple[When, str], int]:
    """Activations in each part's backward, and after it: then those that earlier parts saved, and one's gradient.

    parts: those of one stage. apart: the gradients of weights come later, so that a block keeps what its feed-forward
    part needs for them while it goes on with attention.
    """
    recompute = plan.layout.recompute in ("full", "input")
    stream = s.stream * s.hidden * s.element
    ends = [part for part in parts if part.startswith("blocks.")]
    blocks, saved = _block_backward(plan, s, apart), saved_mask(plan, s) if ends else 0
    moments: dict[tuple[When, str], int] = {}
    for part in parts:
        moments["reduction", part] = saved + stream * (3 if recompute and part.startswith("blocks.") else 1)
        saved += sum(saved_items(plan, s, part).values())
        moments["begin", part] = saved + stream
        if part == "embedding":
            moments["backward", part] = stream + max(stream_dropout(plan, s), _positions(plan, s))
            if not apart:
                moments["backward", part] = max(moments["backward", part], _looked_up(plan, s))
        elif part == "head":
            moments["backward", part] = saved + max(_column_backward(plan, s), _final_norm_backward(plan, s))
        else:
            moments["backward", part] = saved + blocks + _recomputed_from_input(plan, s, part, ends)
    return moments


def inputs(plan: UnitPlan, s: Sizes) -> int:
    """What the rank reads of the batch: int64 vectors of every micro-batch of the step."""
    model, seen, stream = plan.model, plan.tokens * 8, s.stream * 8
    embeds, blocks = "embedding" in plan.parts, bool(plan.first_blocks)
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
    """What of the inputs `part` saves."""
    if part == "head":
        return s.tokens * 8
    if part == "embedding":
        ids = 0 if plan.layout.tp > 1 else s.tokens * 8
        return ids + (s.stream * 8 if plan.model.positions == "learned" else 0)
    return 0


def tables(plan: UnitPlan, s: Sizes) -> int:
    """What the blocks of one micro-batch share and do not save: rotary tables, masks."""
    model = plan.model
    rotated = int(model.head_dim * model.rotary_fraction) if model.positions == "rope" else 0
    shared = 2 * s.tokens * rotated * s.element + mask_bytes(plan, s) - saved_mask(plan, s)
    if plan.layout.attention == "math" and not plan.workload.isolate_documents:
        shared += s.seq * s.seq * s.element
    if plan.layout.attention == "sdpa" and takes_products(plan):
        shared += 4 * min(s.seq, ATTENTION_ROWS) ** 2
    return shared


def loss(s: Sizes) -> int:
    """Log-probabilities of a chunk; bf16 logits are first converted."""
    rows = max(1, min(s.tokens, loss_chunk(s.tokens * s.vocab) // s.vocab))
    return rows * s.vocab * (2 * 4 if s.element == 2 else s.element)


def _final_norm_backward(plan: UnitPlan, s: Sizes) -> int:
    """When what the projection and the loss have saved is gone."""
    items = saved_items(plan, s, "head")
    gone = items["logits"] + items["final norm output"] + items["log-sum-exp of the loss"]
    return s.stream * s.hidden * s.element + _norm_backward(s, s.stream * s.hidden, plan) - gone


def _positions(plan: UnitPlan, s: Sizes) -> int:
    """The gradient of learned positions: of the whole table, before it is added to where it stays."""
    return plan.model.max_positions * s.hidden * s.element if plan.model.positions == "learned" else 0


def _column_backward(plan: UnitPlan, s: Sizes) -> int:
    """A column-parallel backward: the gradient of its input; those of its weights are added where they stay.

    Under sp the input's gradient is scattered first, and the input gathered again for the weights'.
    """
    full = s.tokens * s.hidden * s.element
    return max(_scatter(plan, s), full + s.stream * s.hidden * s.element) if plan.layout.sp else full


def _scatter(plan: UnitPlan, s: Sizes) -> int:
    """A reduce-scatter of activations: partial sums, the same in pieces, on gloo the peers' pieces; the result, and for
    bf16 a chunk of its sum in fp32."""
    full = s.tokens * s.hidden * s.element
    copies = (1 if plan.layout.micro == 1 else 2) + (plan.backend == "gloo")
    result = s.stream * s.hidden
    return copies * full + result * s.element + wide_chunk(result, plan.layout.dtype, plan.layout.tp)


def _dropout(plan: UnitPlan, elements: int) -> int:
    """The hash of a chunk of a mask: counters and two copies of 8 bytes each."""
    return 3 * 8 * min(elements, dropout_chunk(elements))


def _block_backward(plan: UnitPlan, s: Sizes, apart: bool) -> int:
    """A block's backward beside what is saved: what it has computed again, its output's gradient, and transients."""
    stream = s.stream * s.hidden * s.element
    recomputed = again = 0
    if plan.layout.recompute in ("full", "input"):
        # its output, too; but its input is saved already
        recomputed = sum(block_items(plan, s).values())
        # The feed-forward's output, and the sum that a parallel residual adds it to, go when the block's is there.
        again = stream * (2 if plan.model.parallel_residual else 1)
    kept = feed_forward_kept(plan, s) if apart else 0
    return recomputed + stream + max(
        again,
        _mlp_backward(plan, s, apart),
        kept + stream + _norm_backward(s, s.stream * s.hidden, plan) - _mlp_items(plan, s),
        kept + _core_backward(plan, s),
        kept + _head_norms_backward(plan, s),
        _projections_backward(plan, s) if apart else 0,
    )  # fmt: skip


def _recomputed_from_input(plan: UnitPlan, s: Sizes, part: str, blocks: list[str]) -> int:
    """Computing all blocks again from the first one's input: a later block's input is nobody's saved tensor, and the
    gradient of the last one's output stays until the first one's backward is over."""
    if plan.layout.recompute != "input":
        return 0
    return ((part != blocks[0]) + (part != blocks[-1])) * s.stream * s.hidden * s.element


def _mlp_items(plan: UnitPlan, s: Sizes) -> int:
    """What the feed-forward part has saved, and its backward has freed."""
    names = ("gate", "up", "silu", "product") if plan.model.gated else ("up", "gelu")
    return len(names) * s.tokens * s.ffn * s.element + s.stream * s.hidden * s.element


def _norm_backward(s: Sizes, elements: int, plan: UnitPlan) -> int:
    """RMSNorm's backward: normed input, its product with the gradient; for bf16 in fp32, with a copy of that."""
    if plan.model.norm != "rmsnorm":
        return elements * s.element
    return elements * (3 * 4 + 2 if s.element == 2 else 2 * s.element)


def _mlp_backward(plan: UnitPlan, s: Sizes, apart: bool) -> int:
    """The product's and the activation's backward, or the projections' that follow, when what they saved is gone: but
    for the product, where gradients of weights come later."""
    inner = s.tokens * s.ffn * s.element
    stream = s.stream * s.hidden * s.element
    gathered = s.tokens * s.hidden * s.element if plan.layout.sp else 0
    branches = 2 if plan.model.gated else 1
    transients = [
        (branches + apart) * inner + gathered,
        _column_backward(plan, s) - (branches - apart) * inner,
        _scatter(plan, s) if plan.layout.sp else 0,
    ]
    if plan.model.dropout:
        transients.append(stream + _dropout(plan, s.stream * s.hidden))
    return max(transients)


def _core_backward(plan: UnitPlan, s: Sizes) -> int:
    """Explicit attention: the gradients of probabilities and scores, when the feed-forward's tensors are gone."""
    if plan.layout.attention == "sdpa":
        return _short_backward(plan, s) if takes_products(plan) else _fused_backward(plan, s)
    square = s.tokens * s.heads * s.seq * s.element
    dropped = bool(plan.model.attention_dropout)
    selective = plan.layout.recompute == "selective"
    copies = 3 if selective else (1 if dropped else 2)
    # Recomputed alone, the core lays out its inputs and output anew beside those that were saved.
    again = 2 * s.tokens * (s.q + s.kv) * s.element if selective else 0
    hashed = _dropout(plan, s.tokens * s.heads * s.seq) + 2 * 8 * s.tokens * s.heads if dropped else 0
    return copies * square + again + hashed - _gone_before_attention(plan, s)


def _fused_backward(plan: UnitPlan, s: Sizes) -> int:
    """The gradients of the output, and of queries, keys and values."""
    again = s.tokens * s.q * s.element if plan.layout.recompute == "selective" else 0
    return again + 2 * s.tokens * (s.q + s.kv) * s.element - _gone_before_attention(plan, s)


def _short_backward(plan: UnitPlan, s: Sizes) -> int:
    """Probabilities, their gradients and a product of both for some queries of a sequence, in fp32; the gradients of
    its keys and values in fp32; those of queries, keys and values of all. The feed-forward's tensors are gone."""
    square, copies = s.heads * min(s.seq, ATTENTION_ROWS) * s.seq, 2 * s.seq * s.q * 4
    if s.seq <= ATTENTION_ROWS:
        # All queries at once: those of values and of the output's gradient are copied in their place, and the scores'
        # gradients in bf16 come when these copies are gone.
        squares = max(2 * square * 4 + copies, square * (2 * 4 + s.element) if s.element == 2 else 0)
    else:
        squares = 3 * square * 4 + copies
    repeated = 2 * s.seq * s.q * s.element if s.heads > s.kv_heads else 0
    grads = s.tokens * (s.q + 2 * s.kv) * s.element + repeated
    return squares + grads - _gone_before_attention(plan, s)


def _gone_before_attention(plan: UnitPlan, s: Sizes) -> int:
    """Bytes that the feed-forward part's backward has freed, with the residual that it started from. Zero for a
    parallel residual: its gradient waits for attention's, while the gradient of the block's output is kept."""
    stream = s.stream * s.hidden * s.element
    return _mlp_items(plan, s) + (-stream if plan.model.parallel_residual else stream)


def _projections_backward(plan: UnitPlan, s: Sizes) -> int:
    """The gradient of attention's input, beside all that a block keeps for the gradients of its weights: of what it has
    saved there are its input and the statistics of the first norm besides."""
    stream, norm = s.stream * s.hidden * s.element, "attention norm statistics"
    kept, items = kept_items(plan, s, "blocks"), block_items(plan, s)
    return sum(kept.values()) + stream + items[norm] + _column_backward(plan, s) - sum(items.values())


def _head_norms_backward(plan: UnitPlan, s: Sizes) -> int:
    """The norms of queries and keys, when feed-forward and attention core are gone."""
    if not plan.model.qk_norm:
        return 0
    grads = s.tokens * (s.q + 2 * s.kv) * s.element
    gone = _mlp_items(plan, s) + s.tokens * (2 * s.q + 2 * s.kv) * s.element
    return grads + _norm_backward(s, s.tokens * s.q, plan) - gone


def _looked_up(plan: UnitPlan, s: Sizes) -> int:
    """The gradient of the rows looked up. Where other ranks hold some of the ids: their mask, the other ids, and a copy
    of the gradient without them, which under sp is gathered first."""
    rows, stream = s.tokens * s.hidden * s.element, s.stream * s.hidden * s.element
    if plan.layout.tp == 1:
        return rows
    return 2 * rows + s.tokens * 9 + (stream if plan.layout.sp else 0)


def of_weights(plan: UnitPlan, s: Sizes, part: str) -> int:
    """What the gradients of `part`'s weights take beyond what was kept for them."""
    stream = s.stream * s.hidden * s.element
    if part == "embedding":
        return _looked_up(plan, s) - stream
    if part == "head":
        return 0
    return (1 if plan.layout.micro == 1 else 2) * s.tokens * s.hidden * s.element if plan.layout.sp else 0


def embedding_forward(plan: UnitPlan, s: Sizes) -> int:
    """Looking up rows: of those that other ranks hold, too, until they are summed; then dropout."""
    dropped = s.stream * s.hidden * s.element + stream_dropout(plan, s)
    if plan.layout.tp == 1:
        return dropped
    return max(s.tokens * (9 + s.hidden * s.element), _scatter(plan, s) if plan.layout.sp else 0, dropped)


def stream_dropout(plan: UnitPlan, s: Sizes) -> int:
    """Dropout of the residual stream, forward or backward: its result, and the hash of its mask."""
    if not plan.model.dropout:
        return 0
    return s.stream * s.hidden * s.element + _dropout(plan, s.stream * s.hidden)


def optimizer(plan: UnitPlan) -> int:
    """bf16 gradients become fp32 one chunk at a time; on CUDA, where a launch costs more than a pass, one unit."""
    if plan.grad_dtype != "bfloat16":
        return 0
    largest = max(unit.shard_numel for unit in plan.units)
    return 4 * (largest if plan.backend == "nccl" else min(largest, optimizer_chunk(largest)))

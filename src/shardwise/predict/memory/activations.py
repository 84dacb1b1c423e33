"""Tensors that autograd saves for backward, in bytes, which a measured step must equal.

Those that a part makes are recorded (`recorded.py`). Korthikanti et al. 2022 count the same for an unfused GPT layer in
fp16 (34 sbh + 5 a s^2 b); here attention is fused unless `attention=math`.
"""

from itertools import compress

from shardwise.layout.units import UnitPlan
from shardwise.predict.memory.expert_tensors import MixtureTensors
from shardwise.predict.memory.recorded import recorded_items
from shardwise.predict.memory.sizes import (
    Sizes,
    core_sizes,
    cuts_attention,
    recomputes_activation,
    recomputes_output,
    shared_width,
    uses_batched_attention,
    uses_blocked_attention,
)
from shardwise.predict.memory.traced import trace_of, traced_saved, traced_stored

Items = dict[str, int]


def saved_items(plan: UnitPlan, s: Sizes, part: str) -> Items:
    """Tensors of `part` that are saved on the device at the end of the forward pass."""
    offloads = plan.layout.offloads_activations and plan.blueprint.kind(part) == "block"
    return {} if offloads else made_items(plan, s, part)


def stored_bytes(plan: UnitPlan, s: Sizes, part: str | None) -> int:
    """Bytes that a part saves in the host's memory; 0 for no part."""
    if part is None or not plan.layout.offloads_activations or plan.blueprint.kind(part) != "block":
        return 0
    return sum(made_items(plan, s, part).values())


def made_items(plan: UnitPlan, s: Sizes, part: str) -> Items:
    """Tensors of `part` that its forward pass saves, wherever they go. Not to be changed: kept with the plan."""
    made: dict[str, Items] = vars(plan).setdefault("made_items", {})
    if part not in made:
        made[part] = items = recorded_items(plan, s, part)
        if plan.model.embedding_norm and "token ids" in items:
            items["norm"] = (s.hidden + 2) * s.stream * s.element
        if plan.layout.compile == "block":
            again = recomputes_activation(plan, plan.blueprint.routes_in(part)), recomputes_output(plan)
            for name in compress(("activation", "attention output"), again):
                items.pop(name, None)
    return made[part]


def mask_bytes(plan: UnitPlan, s: Sizes) -> int:
    """The masks that all blocks share: the additive one that keeps packed documents apart, [micro, 1, S, S]. Of cut
    sequences, the pairs of this rank's queries with the keys of each rank, a byte each, for each window."""
    if cuts_attention(plan):
        near = {window for window in plan.local.windows if 0 < window < plan.workload.seq}
        some_attend_to_all = not plan.local.windows or len(near) < len(plan.local.windows)
        everywhere = plan.workload.isolate_documents and some_attend_to_all
        return s.tokens * s.seq * (plan.layout.cp + 1) // 2 * (len(near) + everywhere)
    if not plan.workload.isolate_documents or uses_blocked_attention(plan):
        return 0
    core = core_sizes(plan, s)
    return core.tokens * core.seq * core.element


def saved_mask(plan: UnitPlan, s: Sizes) -> int:
    """The mask is saved once, when the fused kernel saves its inputs. Beside offloaded activations it stays, as blocks'
    shared tables do."""
    if plan.layout.offloads_activations:
        return 0
    saves = plan.layout.attention == "sdpa" and plan.layout.recompute == "none" and not cuts_attention(plan)
    return mask_bytes(plan, s) if saves else 0


def kept_items(plan: UnitPlan, s: Sizes, part: str) -> Items:
    """Tensors that `part` keeps from the gradient of its input until that of its weights, where a pipeline computes the
    two apart: the inputs of its linear maps, and the gradients of their outputs. The head computes both at once."""
    stream, gradient = s.stream * s.hidden * s.element, _kept_gradient(plan, s, s.hidden)
    if plan.blueprint.kind(part) == "embedding":
        return {"token ids": s.tokens * 8, "gradient of the rows": stream}
    if plan.blueprint.kind(part) == "head":
        return {}
    # Attention and feed-forward of a parallel residual get the same gradient, but for what dropout makes of it.
    once = plan.model.parallel_residual and not plan.layout.sp and not plan.model.dropout
    once = once and not plan.layout.gathers_outputs
    return {
        "attention norm output": stream,
        **_projections_kept(plan, s),
        "attention output": s.tokens * s.attended * s.element,
        "gradient of the attention's output": 0 if once else gradient,
        "feed-forward": feed_forward_kept(plan, s, part),
    }


def _projections_kept(plan: UnitPlan, s: Sizes) -> Items:
    """Kept for the maps before attention's core, but for their common input."""
    latent = plan.model.latent_attention
    if not latent:
        grads = sum(_kept_gradient(plan, s, width) for width in (s.q, s.k, s.v))
        return {
            "gradients of queries, keys and values": grads,
            "gradients of rotated queries and keys": _kept_with_values(plan, s),
        }
    up = s.heads * (latent.nope_head_dim + latent.v_head_dim)
    low = latent.q_rank + latent.kv_rank
    return {
        "gradients of queries, keys and values": _kept_gradient(plan, s, s.q) + _kept_gradient(plan, s, up),
        "normed low ranks": s.stream * low * s.element,
        "gradients of low ranks": s.stream * (low + latent.rope_head_dim) * s.element,
    }


def _kept_with_values(plan: UnitPlan, s: Sizes) -> int:
    """Short attention makes the gradients of queries, keys and values as one tensor. If a rotary backward copies the
    first two, the values' gradient keeps the whole tensor allocated."""
    if cuts_attention(plan):  # gradients of keys and values come as one tensor
        return s.tokens * s.k * s.element if plan.model.positions == "rope" and not plan.fused else 0
    short = plan.layout.attention == "sdpa" and plan.layout.recompute != "selective" and uses_batched_attention(plan)
    apart = short and plan.layout.cp == 1 and plan.model.positions == "rope" and not plan.fused
    return s.tokens * (s.q + s.k) * s.element if apart else 0


def feed_forward_kept(plan: UnitPlan, s: Sizes, part: str) -> int:
    """Tensors that a block keeps for the weights of its feed-forward part: the norm's output and the product, and the
    gradients of gate, up and the block's output; those of experts besides."""
    stream, gradient = s.stream * s.hidden * s.element, _kept_gradient(plan, s, s.hidden)
    width, routed = s.ffn, 0
    if plan.blueprint.routes_in(part):
        width, routed = shared_width(plan), sum(MixtureTensors.of(plan, s, part).kept().values())
        if not width:
            return routed
    inner = s.tokens * width * s.element + (2 if plan.model.gated else 1) * _kept_gradient(plan, s, width)
    return stream + gradient + inner + routed


def _kept_gradient(plan: UnitPlan, s: Sizes, width: int) -> int:
    """Bytes of the gradient of a map's output; of a rank's own outputs where these are gathered."""
    pieces = plan.layout.tp // plan.layout.inner_ranks
    return s.tokens * -(-width // pieces) * s.element


def stored_activations(plan: UnitPlan) -> int:
    """Bytes saved in the host's memory at the end of one micro-batch's forward pass, without a pipeline."""
    if plan.routing.uneven:
        return max(stored_activations(plan.as_micro_batch(micro)) for micro in range(plan.micro_batches))
    return sum(stored_by_part(plan).values())


def stored_by_part(plan: UnitPlan) -> dict[str, int]:
    """Part -> bytes that a micro-batch saves in the host's memory."""
    if traced := trace_of(plan):
        return traced_stored(plan, *traced)
    s = Sizes.of(plan)
    return {part: stored_bytes(plan, s, part) for part in plan.parts}


def saved_bytes(plan: UnitPlan) -> int:
    """Bytes saved for backward at the end of one micro-batch's forward pass."""
    if plan.routing.uneven:
        return max(saved_bytes(plan.as_micro_batch(micro)) for micro in range(plan.micro_batches))
    if traced := trace_of(plan):
        return traced_saved(plan, *traced)
    s = Sizes.of(plan)
    return sum(sum(saved_items(plan, s, part).values()) for part in plan.parts) + saved_mask(plan, s)

"""Tensors that autograd saves for backward, in bytes: the closed form that a measured step must equal.

T tokens a micro-batch on this rank, T' of them in the residual stream (T / tp under sequence parallelism), e bytes an
element, a = max(e, 4) bytes of a statistic. Widths are this rank's share. Korthikanti et al. 2022 count the same for an
unfused GPT layer in fp16 (34 sbh + 5 a s^2 b); here attention is fused unless `attention=math`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from shardwise.layout.placement import kv_heads_held, width_held
from shardwise.layout.units import UnitPlan
from shardwise.ops.limits import LONGEST_SHORT, SHORTEST
from shardwise.predict.memory.expert_tensors import MixtureTensors
from shardwise.predict.memory.traced import trace_of, traced_saved
from shardwise.records import dataclass
from shardwise.report.step_report import DTYPE_BYTES


@dataclass(frozen=True)
class Sizes:
    """The numbers from which every activation of a rank follows: token counts, local widths, bytes an element."""

    tokens: int
    stream: int
    seq: int
    hidden: int
    q: int
    k: int
    v: int
    attended: int
    """Width of attention's output, of all heads here."""
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    element: int

    @property
    def statistic(self) -> int:
        return max(self.element, 4)

    @classmethod
    def of(cls, plan: UnitPlan) -> Sizes:
        model, tp = plan.model, plan.layout.inner_ranks
        kv_heads = kv_heads_held(model, tp)
        return cls(
            tokens=plan.tokens,
            stream=plan.stream_tokens,
            seq=plan.sequence.local,
            hidden=model.hidden,
            q=model.q_width // tp,
            k=kv_heads * model.head_dim,
            v=kv_heads * model.value_dim,
            attended=model.heads // tp * model.value_dim,
            heads=model.heads // tp,
            kv_heads=kv_heads,
            ffn=width_held(model.ffn, tp),
            vocab=width_held(model.vocab, plan.layout.tp),
            element=DTYPE_BYTES[plan.layout.dtype],
        )


def core_sizes(plan: UnitPlan, s: Sizes) -> Sizes:
    """Sizes as the core of attention has them: under Ulysses all tokens, without padding, and some heads."""
    if plan.layout.cp == 1 or not plan.layout.ulysses:
        return s
    seq, ranks = plan.workload.seq, plan.layout.cp
    kv_heads = max(1, s.kv_heads // ranks)
    return replace(
        s, tokens=plan.layout.micro * seq, seq=seq, q=s.q // ranks, k=kv_heads * plan.model.head_dim,
        v=kv_heads * plan.model.value_dim, attended=s.attended // ranks, heads=s.heads // ranks, kv_heads=kv_heads,
    )  # fmt: skip


def cuts_attention(plan: UnitPlan) -> bool:
    """Whether attention goes block by block over a cut sequence (`runtime/context/cores.py`)."""
    return plan.layout.cp > 1 and not plan.layout.ulysses


Items = dict[str, int]


class MapInputs(NamedTuple):
    """The maps of a block that save their input, since gradients of their weights are computed."""

    attention: bool
    """Queries, keys and values."""
    output: bool
    """The map of attention's output."""
    feed_forward: bool
    """The first maps of the feed-forward part."""
    down: bool
    """Its last one."""

    @classmethod
    def of(cls, plan: UnitPlan, part: str) -> MapInputs:
        if not plan.blueprint.freezes:
            return cls(True, True, True, True)
        first = "mlp.gate_up" if plan.model.gated else "mlp.up"
        return cls(*(plan.trains_in(part, name) for name in ("attention.qkv", "attention.out", first, "mlp.down")))


def core_saves_output(plan: UnitPlan) -> bool:
    """Whether attention's core itself saves its output."""
    return (plan.layout.attention == "sdpa" and plan.layout.recompute != "selective") or cuts_attention(plan)


def recomputes_activation(plan: UnitPlan, routed: bool) -> bool:
    """Whether backward computes silu(gate) again: torch.compile saves what a matrix product reads (normed inputs,
    attention's output, silu(gate) * up) or has made (gate, up), and recomputes what elementwise kernels alone read
    (`ban_recompute_materialized_backward` of its partitioner)."""
    return plan.layout.compile == "block" and plan.model.gated and not routed


def recomputes_output(plan: UnitPlan) -> bool:
    """Whether backward computes attention's output again, for the map that reads it, too: recompute=selective in the
    same compiled graph as the map (`ops/compiled.py`)."""
    layout = plan.layout
    apart = layout.tp > 1 or layout.cp > 1 or plan.model.attention_dropout or uses_blocked_attention(plan)
    return layout.compile == "block" and layout.recompute == "selective" and not apart


def block_items(plan: UnitPlan, s: Sizes, part: str) -> Items:
    """Everything that one block saves without recomputing the whole block, its input included: name -> bytes."""
    reads, pre = MapInputs.of(plan, part), plan.model.norm_placement != "post"
    items = {"input": s.stream * s.hidden * s.element} if pre or reads.attention else {}
    items |= _branch_input(plan, s, "attention", reads.attention)
    if plan.model.qk_norm:
        items["queries and keys before their norm"] = s.tokens * (s.q + s.k) * s.element
        items["statistics of query and key norms"] = sum(rows for rows, _ in query_norms(plan, s)) * s.statistic
    items |= _low_ranks(plan, s)
    core = s if plan.layout.recompute == "selective" else core_sizes(plan, s)
    items["queries"] = core.tokens * core.q * s.element
    items["keys and values"] = core.tokens * (core.k + core.v) * s.element
    items |= _attention_core(plan, core)
    if core is not s and plan.layout.attention == "sdpa":
        items["output of some heads"] = core.tokens * core.attended * s.element
    if (reads.output and not recomputes_output(plan)) or (core is s and core_saves_output(plan)):
        items["attention output"] = s.tokens * s.attended * s.element
    items |= _branch_output(plan, s, "attention")
    if not plan.model.parallel_residual and (pre or reads.feed_forward):
        items["residual"] = s.stream * s.hidden * s.element
    items |= _branch_input(plan, s, "feed-forward", reads.feed_forward)
    inner = s.tokens * s.ffn * s.element
    names = ["gate", "up", "activation", "product"] if plan.model.gated else ["up", "activation"]
    if not reads.down:
        names.pop()
    if recomputes_activation(plan, plan.routes_in(part)):
        names.remove("activation")
    if plan.routes_in(part):
        items |= MixtureTensors.of(plan, s, part).saved()
        inner = s.tokens * shared_width(plan) * s.element
    return items | dict.fromkeys(names, inner) | _branch_output(plan, s, "feed-forward")


def _low_ranks(plan: UnitPlan, s: Sizes) -> Items:
    """Low ranks of latent attention before and after their norms; beside keys and values, the keys' shared part."""
    latent = plan.model.latent_attention
    if not latent:
        return {}
    norms = 2 if latent.q_rank else 1
    return {
        "low ranks": s.stream * (latent.q_rank + latent.kv_rank + latent.rope_head_dim) * s.element,
        "normed low ranks": s.stream * (latent.q_rank + latent.kv_rank) * s.element,
        "statistics of low ranks": norms * s.stream * s.statistic,
    }


def shared_width(plan: UnitPlan) -> int:
    """Width of the shared experts on a rank; 0 where there are none."""
    experts = plan.model.experts
    return width_held(experts.shared * experts.ffn, plan.layout.inner_ranks) if experts else 0


def query_norms(plan: UnitPlan, s: Sizes) -> tuple[tuple[int, int], ...]:
    """(rows, width) of the norms of queries and of keys: of each head, or of all heads of a token."""
    if plan.model.qk_norm_scope != "head":
        return (s.tokens, s.q), (s.tokens, s.k)
    return (s.tokens * s.heads, plan.model.head_dim), (s.tokens * s.kv_heads, plan.model.head_dim)


def _branch_input(plan: UnitPlan, s: Sizes, branch: str, read: bool) -> Items:
    """The norm before a branch. read: whether its output is saved, too."""
    return {} if plan.model.norm_placement == "post" else _norm(plan, s, f"{branch} norm", read)


def _branch_output(plan: UnitPlan, s: Sizes, branch: str) -> Items:
    """The output of a branch with a norm after it."""
    if plan.model.norm_placement == "pre":
        return {}
    rows = {f"{branch} before its norm": s.stream * s.hidden * s.element}
    return rows | {f"{branch} post norm statistics": s.stream * s.statistic}


def _norm(plan: UnitPlan, s: Sizes, name: str, read: bool = True) -> Items:
    # RMSNorm keeps one number a token in fp32; LayerNorm keeps two, in the precision of its weights.
    statistics = s.statistic if plan.model.norm == "rmsnorm" else 2 * s.element
    output = s.stream * s.hidden * s.element if read else 0
    return {f"{name} statistics": s.stream * statistics, f"{name} output": output}


def _attention_core(plan: UnitPlan, s: Sizes) -> Items:
    if plan.layout.recompute == "selective":
        return {}
    if plan.layout.attention == "sdpa" or cuts_attention(plan):
        computed_again = uses_batched_attention(plan) or uses_blocked_attention(plan)
        return {} if computed_again else {"log-sum-exp": s.tokens * s.heads * s.statistic}
    square = s.tokens * s.heads * s.seq * s.element
    copies = {"probabilities": square} | ({"tanh of scores": square} if plan.model.score_softcap else {})
    return copies | ({"dropped probabilities": square} if plan.model.attention_dropout else {})


def uses_batched_attention(plan: UnitPlan) -> bool:
    """Whether fused attention runs as batched products (`ops/cpu/attention.py`): on CPUs, where sequences are
    short."""
    layout, longest = plan.layout, LONGEST_SHORT.get(plan.layout.dtype, 0)
    if cuts_attention(plan):
        return False
    short = SHORTEST <= plan.workload.seq <= longest and not plan.cuda
    plain = plan.model.plain_attention and not plan.model.narrow_values and not plan.workload.isolate_documents
    return short and layout.compile != "block" and plain


def uses_blocked_attention(plan: UnitPlan) -> bool:
    """Whether attention goes through a sequence block by block (`ops/attention.py`): no fused kernel has the
    model's."""
    fused = plan.model.plain_attention and not (plan.model.narrow_values and not plan.cuda)
    return plan.layout.attention == "sdpa" and not fused and not cuts_attention(plan)


def saved_items(plan: UnitPlan, s: Sizes, part: str) -> Items:
    """Tensors of `part` that are saved on the device at the end of the forward pass."""
    offloads = plan.layout.offloads_activations and plan.kind(part) == "block"
    return {} if offloads else made_items(plan, s, part)


def stored_bytes(plan: UnitPlan, s: Sizes, part: str | None) -> int:
    """Bytes that a part saves in the host's memory; 0 for no part."""
    if part is None or not plan.layout.offloads_activations or plan.kind(part) != "block":
        return 0
    return sum(made_items(plan, s, part).values())


def made_items(plan: UnitPlan, s: Sizes, part: str) -> Items:
    """Tensors of `part` that its forward pass saves, wherever they go."""
    if plan.kind(part) == "embedding":
        if not plan.trains_in(part):
            return {}
        positions = {"position ids": s.stream * 8} if plan.model.positions == "learned" else {}
        norm = {"norm": (s.hidden + 2) * s.stream * s.element} if plan.model.embedding_norm else {}
        return {"token ids": s.tokens * 8} | positions | norm
    if plan.kind(part) == "head":
        return {
            "input": s.stream * s.hidden * s.element,
            **_norm(plan, s, "final norm", plan.trains_in(part)),
            "logits": s.tokens * s.vocab * s.element,
            # of the columns at hand, too, where others have the rest
            "log-sum-exp of the loss": s.tokens * s.statistic * (2 if plan.layout.tp > 1 else 1),
            "targets": s.tokens * 8,
        }
    if plan.layout.recompute == "full":
        return {"input": s.stream * s.hidden * s.element}
    if plan.layout.recompute == "input":
        return {"input": s.stream * s.hidden * s.element} if part in plan.first_blocks else {}
    return block_items(plan, s, part)


def mask_bytes(plan: UnitPlan, s: Sizes) -> int:
    """The masks that all blocks share: the additive one that keeps packed documents apart, [micro, 1, S, S]. Of cut
    sequences, the pairs of this rank's queries with the keys of each rank, a byte each, for each window."""
    if cuts_attention(plan):
        near = {window for window in plan.windows if 0 < window < plan.workload.seq}
        everywhere = plan.workload.isolate_documents and (not plan.windows or len(near) < len(set(plan.windows)))
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
    if plan.kind(part) == "embedding":
        return {"token ids": s.tokens * 8, "gradient of the rows": stream}
    if plan.kind(part) == "head":
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
        return s.tokens * s.k * s.element if plan.model.positions == "rope" and not plan.fuses_blocks else 0
    short = plan.layout.attention == "sdpa" and plan.layout.recompute != "selective" and uses_batched_attention(plan)
    apart = short and plan.layout.cp == 1 and plan.model.positions == "rope" and not plan.fuses_blocks
    return s.tokens * (s.q + s.k) * s.element if apart else 0


def feed_forward_kept(plan: UnitPlan, s: Sizes, part: str) -> int:
    """Tensors that a block keeps for the weights of its feed-forward part: the norm's output and the product, and the
    gradients of gate, up and the block's output; those of experts besides."""
    stream, gradient = s.stream * s.hidden * s.element, _kept_gradient(plan, s, s.hidden)
    width, routed = s.ffn, 0
    if plan.routes_in(part):
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
    if plan.uneven:
        return max(stored_activations(plan.as_micro_batch(micro)) for micro in range(plan.micro_batches))
    s = Sizes.of(plan)
    return sum(stored_bytes(plan, s, part) for part in plan.parts)


def saved_bytes(plan: UnitPlan) -> int:
    """Bytes saved for backward at the end of one micro-batch's forward pass."""
    if traced := trace_of(plan):
        return traced_saved(plan, *traced)
    if plan.uneven:
        return max(saved_bytes(plan.as_micro_batch(micro)) for micro in range(plan.micro_batches))
    s = Sizes.of(plan)
    return sum(sum(saved_items(plan, s, part).values()) for part in plan.parts) + saved_mask(plan, s)

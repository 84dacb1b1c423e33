"""The numbers from which activations of a rank follow, and the forms of a block on which they depend.

T tokens a micro-batch on this rank, T' of them in the residual stream (T / tp under sequence parallelism), e bytes an
element, a = max(e, 4) bytes of a statistic. Widths are this rank's share.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from shardwise.layout.placement import kv_heads_held, width_held
from shardwise.layout.units import UnitPlan
from shardwise.ops.limits import LONGEST_SHORT, SHORTEST
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
        names = "attention.qkv", "attention.out", first, "mlp.down"
        return cls(*(plan.blueprint.trains_in(part, name) for name in names))


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
    if plan.layout.attention != "sdpa" or cuts_attention(plan):
        return False
    return not plan.model.plain_attention or (plan.model.narrow_values and not plan.cuda)


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


def query_norms(plan: UnitPlan, s: Sizes) -> tuple[tuple[int, int], ...]:
    """(rows, width) of the norms of queries and of keys: of each head, or of all heads of a token."""
    if plan.model.qk_norm_scope != "head":
        return (s.tokens, s.q), (s.tokens, s.k)
    return (s.tokens * s.heads, plan.model.head_dim), (s.tokens * s.kv_heads, plan.model.head_dim)


def shared_width(plan: UnitPlan) -> int:
    """Width of the shared experts on a rank; 0 where there are none."""
    experts = plan.model.experts
    return width_held(experts.shared * experts.ffn, plan.layout.inner_ranks) if experts else 0

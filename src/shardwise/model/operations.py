"""Operations of a part by kind and size, and the FLOPs that follow from these.

A multiply-add counts as two FLOPs. Counted are matrix products and the two products of attention; norms, activations,
softmax, biases, rotary positions and lookups are left out, as in the papers that the numbers are compared with.
How many bytes an elementwise operation moves depends on the form that computes it: `predict/time/block.py` has each
form's passes over the operation's widths.

Widths are the whole model's; `Width` says which of them tensor parallelism divides.
"""

from typing import Literal

from shardwise.errors import UserError
from shardwise.records import dataclass

Rows = Literal["tokens", "stream", "routed"]
"""Which tokens an operation sees on a rank. tokens: all of its sequences; stream: its shard of the residual stream,
with weights that tensor parallelism does not cut; routed: those of the stream that chose the rank's experts."""


@dataclass(frozen=True)
class Width:
    """Elements along one dim."""

    size: int
    cut: bool = False
    """Whether tensor parallelism divides it."""
    least: int = 0
    """Elements that each rank has at least: those of one key/value head."""


@dataclass(frozen=True)
class LinearOp:
    """Linear maps of one input, computed in one product. logits: and the loss over them."""

    kind: Literal["linear", "router", "logits"]
    inputs: Width
    outputs: tuple[Width, ...]
    rows: Rows = "tokens"
    count: int = 1
    """Such products, each with matrices of its own: experts."""
    active: int = 1
    """Those of them that a token goes through."""
    frozen: bool = False
    """Whether no gradients of the matrices are computed."""
    adapters: tuple[int, ...] = ()
    """Rank of the adapter beside each output, 0 for none; empty where there are none."""
    base: str = ""
    """dtype of its frozen matrices where that is not the layout's: they are converted for each product."""

    @property
    def trains(self) -> bool:
        """Whether gradients of any of its weights are computed, for which its input is needed again."""
        return not self.frozen or any(self.adapters)

    @property
    def adapter_elements(self) -> int:
        """Elements of the adapters' matrices."""
        pairs = zip(self.adapters, self.outputs, strict=False)
        return sum(rank * (self.inputs.size + out.size) for rank, out in pairs)

    @property
    def elements(self) -> int:
        """Elements of the matrices that one token is multiplied with, without adapters."""
        return self.active * self.inputs.size * sum(out.size for out in self.outputs)

    def flops_per_token(self, seq: int, causal: bool = True) -> int:
        return 2 * (self.elements + self.adapter_elements)


@dataclass(frozen=True)
class AttentionCore:
    """softmax(q kᵀ) v."""

    heads: int
    kv_heads: int
    key_width: int
    """Width of a head of queries and keys."""
    value_width: int
    window: int = 0
    """Tokens that each token attends to at most, itself included; 0 means no bound."""
    softcap: float = 0.0
    """c of c tanh(s / c), which scores s become; 0 means none."""
    kind: Literal["attention"] = "attention"

    def flops_per_token(self, seq: int, causal: bool = True) -> int:
        """Forward FLOPs for one token of a sequence of `seq`, on average, rounded down: it attends to itself and those
        before it, in a window to the nearest of these, or, without `causal`, to all or a whole window (what PaLM and
        Megatron-LM count). Raises `UserError` for a sequence without tokens."""
        if seq < 1:
            raise UserError(f"a sequence must have at least one token, not {seq}")
        return self.flops(self.pairs(seq) if causal else seq * min(self.window or seq, seq)) // seq

    def pairs(self, tokens: int) -> int:
        """Pairs of a token and one that it attends to, of the first `tokens` of a sequence."""
        window = min(self.window or tokens, tokens)
        return window * (2 * tokens - window + 1) // 2

    def flops(self, pairs: int) -> int:
        """Forward FLOPs of all heads for so many pairs of tokens."""
        return 2 * self.heads * (self.key_width + self.value_width) * pairs


@dataclass(frozen=True)
class Elementwise:
    """An operation that goes over tensors and multiplies no matrices."""

    kind: Literal[
        "lookup", "rmsnorm", "layernorm", "branch norm", "head norms", "joint norms", "low ranks", "shared key",
        "soft cap", "scale", "bias gradients", "split heads", "rotation", "dropout",
        "residual", "dispatch", "activation", "gated activation",
    ]  # fmt: skip
    widths: tuple[Width, ...]
    """Elements of the tensors per token."""
    rows: Rows = "tokens"
    count: int = 1
    active: int = 1
    """As of `LinearOp`."""
    frozen: bool = False
    """Whether a lookup's table is, so that nothing goes backward through it."""

    def flops_per_token(self, seq: int, causal: bool = True) -> int:
        """None are counted."""
        return 0


Operation = LinearOp | AttentionCore | Elementwise

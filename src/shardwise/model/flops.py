"""Floating-point operations of a model: sums over its blueprint's operations, as exact integers.

`operations.py` says what counts.

Attention is causal: each token attends to itself and those before it, half of the square. `causal=False` counts the
whole square, the convention of PaLM and Megatron-LM, for comparisons with what they published.
"""

from collections import Counter
from typing import Literal, NamedTuple

from shardwise.model.blueprint import Blueprint, PartKind
from shardwise.model.operations import LinearOp
from shardwise.model.parameters import Model, blueprint

Recompute = Literal["none", "selective", "full"]

MFU = "MFU counts causal attention once, which is half of the square"
"""Note beside every MFU: which FLOPs of attention `training_flops_per_token` counts."""


def matmul_parameters(config: Model) -> int:
    """Matrix elements that one token is multiplied with.

    Projections, feed-forward (of the experts, the router and those that are active) and output head; a tied head
    counts, since it multiplies although it stores nothing. The embedding does not: it is looked up.
    """
    parts = blueprint(config).parts
    return sum(part.count * op.elements for part in parts for op in part.operations if isinstance(op, LinearOp))


def attention_flops_per_token(config: Model, seq: int, causal: bool = True) -> int:
    """Forward FLOPs of the products QKᵀ and PV for one token of a sequence of `seq` tokens, all layers.

    4 · layers · heads · head_dim · (seq + 1) / 2: a token attends to itself and those before it. Without `causal` to
    all `seq` tokens (what PaLM and Megatron-LM count). Latent attention is counted with its expanded heads, as it is
    trained. Raises `UserError` for a sequence without tokens.
    """
    cores = ((part.count, op) for part in blueprint(config).parts for op in part.operations if op.kind == "attention")
    return sum(count * op.flops_per_token(seq, causal) for count, op in cores)


def forward_flops_per_token(config: Model, seq: int, causal: bool = True, kind: PartKind | None = None) -> int:
    """FLOPs of one forward pass, for one token of a sequence of `seq`: 2 for each matrix element, and attention. kind:
    of parts of this kind alone."""
    parts = blueprint(config).of_kind(kind) if kind else blueprint(config).parts
    return sum(part.count * op.flops_per_token(seq, causal) for part in parts for op in part.operations)


def training_flops_per_token(config: Model, seq: int, causal: bool = True) -> int:
    """Model FLOPs of a forward and a backward pass, for one token of a sequence of `seq`. For MFU.

    Backward costs twice the forward: a gradient of inputs and one of weights, but none of weights that are frozen.
    Recomputation is not counted. Without
    `causal` this is 6N + 12LHQT of PaLM (Chowdhery et al. 2022, appendix B), N the matrices of `matmul_parameters`, and
    72 B s l h² (1 + s / 6h + V / 12lh) of Megatron-LM (Narayanan et al. 2021, section 5.1, without recomputation).
    """
    parts = blueprint(config).parts
    maps = ((part.count, op) for part in parts for op in part.operations if isinstance(op, LinearOp))
    frozen = sum(count * op.elements for count, op in maps if op.frozen)
    return 3 * forward_flops_per_token(config, seq, causal) - 2 * frozen


def hardware_flops_per_token(config: Model, seq: int, recompute: Recompute = "none", causal: bool = True) -> int:
    """FLOPs that the device does for one token of a training step, those of recomputation included. For HFU.

    recompute: "full" runs all blocks forward once more, "selective" the two products of attention (Korthikanti et al.
    2022, section 5 and appendix A). Divide a hardware utilisation by this over `training_flops_per_token` for MFU.
    """
    again = {
        "none": 0,
        "selective": attention_flops_per_token(config, seq, causal),
        "full": forward_flops_per_token(config, seq, causal, "block"),
    }[recompute]
    return training_flops_per_token(config, seq, causal) + again


def training_flops_per_sequence(config: Model, seq: int, causal: bool = True) -> int:
    """Model FLOPs of a forward and a backward pass over a sequence of `seq` tokens; of a traced module, those of its
    operations for a row, whatever `causal` is."""
    if config.trace:
        flops = traced_flops(config)
        return flops.attention + flops.rest
    return seq * training_flops_per_token(config, seq, causal)


class RowFlops(NamedTuple):
    """FLOPs that one more row of a micro-batch costs a traced module, forward and backward."""

    attention: int
    rest: int
    blocks: int
    """Of these, the blocks' forward pass."""


def traced_flops(model: Blueprint) -> RowFlops:
    """FLOPs of its operations, over all ranks that share a row."""
    assert model.trace is not None
    first, second = model.trace.rows
    step = next(step for step in model.trace.steps if step.tp == min(model.trace.degrees) and step.operations)
    sums = Counter[str]()
    for each in step.operations:
        blocks = sum(model.kind(part) == "block" for part in each.parts)
        for op in each.operations:
            flops = op.count * (op.flops[1] - op.flops[0])
            sums["attention" if op.kind == "attention" else "rest"] += len(each.parts) * flops
            sums["blocks"] += blocks * flops * (op.phase == "forward")
    shared = step.tp * step.pieces
    return RowFlops(*(sums[name] * shared // (second - first) for name in RowFlops._fields))

"""Memory of a GPT trained by Megatron-LM with unfused attention in fp16, as its authors count it.

Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models: equations 1 to 6, section 4.2.3
for pipelines. What the decoder here saves is `activations.py`'s; this is for comparing with their tables.
"""

from __future__ import annotations

from typing import Literal

from shardwise.model import ModelConfig

Recompute = Literal["none", "selective", "full"]

STATE_BYTES = 18
"""Of a parameter: weight and gradient in fp16 and fp32, both moments and the master copy (2 + 4 + 12)."""

BLOCK_ITEMS = {
    "attention": {"input": 2, "queries, keys, values": 6, "projection's input": 2, "dropout mask": 1},
    "mlp": {"input": 2, "activation's input": 8, "second product's input": 8, "dropout mask": 1},
    "layernorm": {"first": 2, "second": 2},
}
"""What a layer saves beside its attention scores, in bytes for each of its s b h elements (section 4.1): 34 in all."""

SPLIT_ITEMS = ("queries, keys, values", "projection's input", "activation's input", "second product's input")
"""Those that tensor parallelism splits; sequence parallelism splits the others, too (section 4.2)."""


def block_activations(
    model: ModelConfig, micro: int, seq: int, tp: int = 1, sp: bool = False, recompute: Recompute = "none"
) -> float:
    """Bytes that one layer saves for one micro-batch on one of `tp` ranks."""
    hidden, heads = model.hidden, model.heads
    unit = float(seq * micro * hidden)
    scores = 5 * heads * seq / hidden
    if recompute == "full":
        return 2 * unit / (tp if sp else 1)
    core = 0.0 if recompute == "selective" else scores
    items = [(name, size) for part in BLOCK_ITEMS.values() for name, size in part.items()]
    split = sum(size for name, size in items if sp or name in SPLIT_ITEMS)
    whole = sum(size for _, size in items) - split
    return unit * (whole + split / tp + core / tp)


def activation_bytes(
    model: ModelConfig,
    micro: int,
    seq: int,
    tp: int = 1,
    sp: bool = False,
    recompute: Recompute = "none",
    pp: int = 1,
    virtual: int = 1,
) -> float:
    """Bytes of saved activations of the first stage, which holds as many micro-batches as there are stages, and
    1 + (pp - 1) / (pp x virtual) times that when interleaved."""
    held = model.layers * (1 + (pp - 1) / (pp * virtual) if virtual > 1 else 1)
    return held * block_activations(model, micro, seq, tp, sp, recompute)


def state_bytes(model: ModelConfig, tp: int = 1, pp: int = 1) -> float:
    """Bytes of parameters, gradients and optimizer of a stage's layers; biases, norms and the embedding left out, as
    in the paper's figure 1."""
    return STATE_BYTES * 12 * model.layers * model.hidden**2 / (tp * pp)

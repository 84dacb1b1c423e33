"""Memory of a GPT trained by Megatron-LM with unfused attention in fp16, as its authors count it; and by
Megatron-DeepSpeed, whose pipeline and ZeRO stage 1 hold more.

Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models: equations 1 to 6, section 4.2.3
for pipelines. What the decoder here saves is `activations.py`'s; this is for comparing with their tables.
"""

from __future__ import annotations

from collections.abc import Sequence
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


REDUCE_BUCKET = 5e8
"""Elements of the buffer that gradients are reduced in: DeepSpeed, reduce_bucket_size, its default."""


def deepspeed_bytes(
    model: ModelConfig,
    layers: Sequence[int],
    seq: int,
    micro: int,
    micro_batches: int,
    tp: int,
    dp: int,
    sharded: bool,
    wide: bool,
) -> float:
    """Bytes of the fuller one of a pipeline's ends, under Megatron-DeepSpeed with every layer recomputed.

    layers: of each stage; a table of the vocabulary is on the first and on the last one. sharded: ZeRO stage 1. wide:
    gradients of micro-batches are summed in fp32, on every rank whole. The CUDA context is not in it.

    States: weights and gradients in 16 bits; a master copy and two moments; at the step, the rank's own gradients
    once more, flat in 16 bits and in fp32 (DeepSpeed, runtime/zero/stage_1_and_2.py), or, if wide, fp32 sums of all
    gradients (runtime/bf16_optimizer.py). Activations: of each micro-batch in flight the input of every layer, and what
    the stage was sent and sends (runtime/pipe/engine.py).
    """
    table, block = model.vocab * model.hidden / tp, 12 * model.hidden**2 / tp
    stream = 2.0 * seq * micro * model.hidden
    again = block_activations(model, micro, seq, tp)
    found = []
    for stage in {0, len(layers) - 1}:
        last = stage == len(layers) - 1
        weights = layers[stage] * block + table
        own = weights / dp if sharded else weights
        states = 8 * weights + 12 * own if wide else 4 * weights + 12 * own + (6 * own if sharded else 0)
        flying = min(len(layers) - stage, micro_batches) * stream * (layers[stage] + 2)
        # In 16 bits, in fp32, and the gradient of that.
        logits = seq * micro * model.vocab / tp * (2 + 4 + 4) if last else 0.0
        found.append(states + flying + again + logits)
    return max(found) + REDUCE_BUCKET * (4 if wide else 2)

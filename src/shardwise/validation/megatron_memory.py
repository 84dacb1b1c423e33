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

BLOCK_ITEMS = {
    "attention": {"input": 2, "queries, keys, values": 6, "projection's input": 2, "dropout mask": 1},
    "mlp": {"input": 2, "activation's input": 8, "second product's input": 8, "dropout mask": 1},
    "layernorm": {"first": 2, "second": 2},
}
"""Bytes that a layer saves beside its attention scores per element of s b h (section 4.1): 34 in all."""

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


REDUCE_BUCKET = 5e8
"""Elements of the buffer that gradients are reduced in: DeepSpeed, reduce_bucket_size, its default."""

COMMUNICATOR_BYTES = {1: 0.0, 2: 544 * 2**20}
"""Bytes of an NCCL communicator inside a node of A100 with NVLink, by its ranks, as measured: NVIDIA/nccl issue 964."""
LARGER_COMMUNICATOR_BYTES = 688 * 2**20
"""Bytes of one with more than two ranks, from the same place."""

Optimizer = Literal["whole", "sharded", "wide"]
"""DeepSpeed's: at ZeRO stage 0 in 16 bits (FP16_Optimizer), at stage 1 in 16 bits, and with fp32 sums of all gradients
(BF16_Optimizer)."""


def deepspeed_bytes(
    model: ModelConfig,
    layers: Sequence[int],
    seq: int,
    micro: int,
    micro_batches: int,
    tp: int,
    dp: int,
    optimizer: Optimizer,
) -> float:
    """Bytes of the fuller one of a pipeline's ends, under Megatron-DeepSpeed with every layer recomputed.

    layers: of each stage; a table of the vocabulary is on the first and on the last one. The CUDA context is not in it,
    nor communicators between nodes, whose size is not stated.

    Activations: of each micro-batch in flight the input of every layer, and what the stage was sent and sends
    (DeepSpeed 0.6, runtime/pipe/engine.py). Two communicators span the tp ranks: Megatron-LM's own, and the
    one over which the pipeline's messages are cut (runtime/pipe/topology.py). All buffers are added up: torch's
    allocator gives none back.
    """
    table, block = model.vocab * model.hidden / tp, 12 * model.hidden**2 / tp
    stream = 2.0 * seq * micro * model.hidden
    again = block_activations(model, micro, seq, tp)
    results = []
    for stage in {0, len(layers) - 1}:
        last = stage == len(layers) - 1
        states = _deepspeed_states(layers[stage] * block + table, table, dp, optimizer)
        flying = min(len(layers) - stage, micro_batches) * stream * (layers[stage] + 2)
        # In fp32, in place of which come the softmax and its gradient; and in 16 bits (megatron/mpu/cross_entropy.py).
        logits = seq * micro * model.vocab / tp * (4 + 2) if last else 0.0
        results.append(states + flying + again + logits)
    return max(results) + 2 * COMMUNICATOR_BYTES.get(tp, LARGER_COMMUNICATOR_BYTES)


def _deepspeed_states(weights: float, table: float, dp: int, optimizer: Optimizer) -> float:
    """Bytes of `weights` parameters with all that updates them. table: elements of the largest one.

    Weights and gradients in 16 bits, a master copy and two moments, a bucket of gradients that are reduced. Besides:

    - whole: at the step, all gradients in fp32, one by one, and once more end to end (runtime/fp16/fused_optimizer.py).
    - sharded: at the step, the rank's own gradients end to end in 16 bits and in fp32 (runtime/zero/stage_1_and_2.py).
    - wide: fp32 sums of all gradients, to which each micro-batch's are added as an fp32 copy, one at a time
      (runtime/bf16_optimizer.py, update_hp_grads).

    Where sums are kept in 16 bits, autograd makes each micro-batch's gradient of a parameter before it adds it.
    """
    if optimizer == "wide":
        return 8 * weights + 12 * weights / dp + 4 * table + 4 * REDUCE_BUCKET
    local = weights / dp
    updating = 20 * weights if optimizer == "whole" else 18 * local
    return 4 * weights + updating + 2 * table + 2 * REDUCE_BUCKET

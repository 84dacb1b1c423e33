"""What an engine's software does, as far as the time of a step depends on it: facts, each with where it can be read.

A profile is fixed before anything is scored, and belongs to a piece of software, never to a table of measurements.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from shardwise.errors import UserError
from shardwise.predict.time.features import EVERYTHING, FEATURES, Features


@dataclass(frozen=True)
class EngineProfile:
    """Profile of one piece of software. `facts`: field -> where the fact can be read; every field has one but the name
    and the features.

    attention: "fused" (FlashAttention and the like) or "scores" (explicit products with a softmax between them).
    fused_softmax, fused_activation, fused_dropout_add, fused_rope: one kernel for scale, mask and softmax; for bias and
    activation; for bias, dropout and residual; for the rotation. fused_norm: one kernel for an RMSNorm, not one for
    each of its operations. fused_loss: cross-entropy without fp32 copies of the logits. loss_passes: of such a one,
    passes of 16 bits over the logits, forward and backward. dropout: dropout is on. graphs: kernels are captured, so
    the host is not waited for; experts_captured: those of expert layers are, too. compiled: element-wise chains are one
    kernel. wgrad_accumulates: weight gradients
    are added to fp32 ones inside the product. tensor_overlap: the tensor-parallel collective of a backward product
    runs beside the weight gradient's. grad_overlap: gradients are reduced beside the last backward; gather_overlap:
    parameters are gathered beside computation; gathers_at_end: but those that stages 1 and 2 have updated, before the
    step ends, beside nothing; gathers_by_stage: under a pipeline stage 3 gathers a stage's parameters once a step, and
    not for every micro-batch. pipeline_overlap: sends between stages run beside computation.
    scatter_hops: a stage's output travels in tp pieces. grad_bytes: of a gradient as it is reduced. optimizer_bytes:
    moved through memory for a parameter and step. accumulate_bytes: moved for a parameter and micro-batch to add a
    gradient to the accumulator. vocab_multiple: the vocabulary is padded to a multiple of this, times tp.
    attention_kernel: "measured" (the device's best, as in its constants) or "triton" (FlashAttention in Triton).
    softmax_multiple: the fused softmax needs sequences x heads of a rank to be a multiple of this. metric_losses:
    further losses computed on the logits for metrics. qkv_copied: the gradients of queries, keys and values are
    concatenated. sequence_copies: under sequence parallelism, gathered shards of several sequences are copied to lie
    end to end, and so are those that are to be scattered. shard_add_bytes: moved for a parameter of a rank's shard and
    micro-batch to add a reduced gradient to those before (stages 2 and 3). pipeline_launches: work of the host for a
    stage's sends, receives and bookkeeping of one micro-batch, in launches.

    For serving: head_replicated: every tp rank has the whole output head; head_quantised: it is stored as the blocks
    are. reads_peers: all-reduces of small messages read the peers' buffers at once. scales_apart: products with int8
    weights are multiplied with their scales by a kernel of its own. decode_kernels: launches of a block beside its
    products and its attention. cache_share: of the memory that is free after loading. reserve_bytes: workspace that
    is taken first. most_sequences, most_tokens: of one iteration. request_s: host's seconds for each request and
    iteration.

    features: layouts that it can run when training, with sources of their own.
    """

    name: str
    attention: Literal["fused", "scores"] = "fused"
    fused_softmax: bool = True
    fused_activation: bool = False
    fused_dropout_add: bool = False
    fused_rope: bool = False
    fused_norm: bool = True
    fused_loss: bool = False
    loss_passes: tuple[float, float] = (2.0, 2.0)
    dropout: bool = False
    graphs: bool = False
    experts_captured: bool = False
    compiled: bool = False
    wgrad_accumulates: bool = False
    tensor_overlap: bool = False
    grad_overlap: bool = True
    gather_overlap: bool = True
    gathers_at_end: bool = False
    gathers_by_stage: bool = False
    pipeline_overlap: bool = False
    scatter_hops: bool = False
    grad_bytes: float = 2.0
    optimizer_bytes: float = 30.0
    accumulate_bytes: float = 0.0
    vocab_multiple: int = 1
    attention_kernel: str = "measured"
    softmax_multiple: int = 1
    metric_losses: int = 0
    qkv_copied: bool = False
    sequence_copies: bool = False
    shard_add_bytes: float = 0.0
    pipeline_launches: int = 0
    head_replicated: bool = False
    head_quantised: bool = False
    reads_peers: bool = False
    scales_apart: bool = False
    decode_kernels: int = 6
    cache_share: float = 0.9
    reserve_bytes: float = 0.0
    most_sequences: int = 256
    most_tokens: int = 8192
    request_s: float = 0.0
    features: Features = EVERYTHING
    facts: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)


_SERVING = dict.fromkeys(
    (
        "head_replicated", "head_quantised", "reads_peers", "scales_apart", "decode_kernels",
        "cache_share", "reserve_bytes",         "most_sequences", "most_tokens", "request_s",
    ),
    "not used when training",
)  # fmt: skip
_MEGATRON = "NVIDIA/Megatron-LM"
_ADAM = "apex FusedAdam: reads p, m, v and g, writes p, m and v in fp32"


def _megatron_2022() -> EngineProfile:
    return EngineProfile(
        "megatron-lm-2022",
        attention="scores",
        fused_softmax=True,
        softmax_multiple=4,
        qkv_copied=True,
        pipeline_launches=40,
        fused_activation=True,
        fused_dropout_add=True,
        dropout=True,
        wgrad_accumulates=True,
        tensor_overlap=True,
        grad_overlap=False,
        gather_overlap=False,
        scatter_hops=True,
        grad_bytes=4.0,
        optimizer_bytes=46.0,
        vocab_multiple=128,
        facts=_SERVING
        | {
            "attention": f"{_MEGATRON} v3.0, megatron/model/transformer.py, CoreAttention: baddbmm, softmax, bmm",
            "fused_softmax": f"{_MEGATRON} v3.0, megatron/model/fused_softmax.py",
            "softmax_multiple": f"{_MEGATRON} v3.0, fused_softmax.py, is_kernel_available: attn_batches % 4 == 0",
            "qkv_copied": f"{_MEGATRON} v3.0, transformer.py: split_tensor_along_last_dim, whose backward concatenates",
            "sequence_copies": f"{_MEGATRON} v3.0, mpu/mappings.py, _gather_along_first_dim: a stream is [seq, batch, "
            "hidden]",
            "shard_add_bytes": "no shards of gradients",
            "attention_kernel": "no fused attention",
            "metric_losses": "none",
            "pipeline_launches": f"{_MEGATRON} v3.0, schedules.py and p2p_communication.py: two exchanges",
            "fused_activation": f"{_MEGATRON} v3.0, megatron/model/fused_bias_gelu.py (--no-bias-gelu-fusion is off)",
            "fused_dropout_add": f"{_MEGATRON} v3.0, transformer.py, bias_dropout_add_fused_train",
            "fused_rope": "learned positions: there is no rotation",
            "fused_norm": f"{_MEGATRON} v3.0, megatron/model/fused_layer_norm.py",
            "fused_loss": f"{_MEGATRON} v3.0, megatron/mpu/cross_entropy.py: several kernels on fp32 logits",
            "loss_passes": "not fused",
            "dropout": "Korthikanti et al. 2022, section 4.1: dropout masks are counted",
            "experts_captured": "no experts",
            "graphs": f"{_MEGATRON} v3.0 launches every kernel from Python",
            "compiled": f"{_MEGATRON} v3.0: torch.jit.script for three element-wise chains only",
            "wgrad_accumulates": f"{_MEGATRON} v3.0, --no-gradient-accumulation-fusion is off",
            "tensor_overlap": "Korthikanti et al. 2022, section 4.2.2: gathering again overlaps the input's gradient; "
            f"{_MEGATRON} v3.0, --no-async-tensor-model-parallel-allreduce is off",
            "grad_overlap": f"{_MEGATRON} v3.0, model/distributed.py: allreduce_gradients after the last backward",
            "gather_overlap": "no sharded parameters",
            "gathers_at_end": "no sharded parameters",
            "gathers_by_stage": "no sharded parameters",
            "pipeline_overlap": f"{_MEGATRON} v3.0, p2p_communication.py waits for every exchange",
            "scatter_hops": f"{_MEGATRON} v3.0, --no-scatter-gather-tensors-in-pipeline is off",
            "grad_bytes": f"{_MEGATRON} v3.0, --accumulate-allreduce-grads-in-fp32 with contiguous buffers",
            "optimizer_bytes": f"{_ADAM} (28); norm and unscaling read and write g (12); fp16 weights are written (6)",
            "accumulate_bytes": "none: added inside the product",
            "vocab_multiple": f"{_MEGATRON}, --make-vocab-size-divisible-by 128, times tp",
        },
    )


def _megatron_deepspeed() -> EngineProfile:
    """A fork of Megatron-LM from before some of its fusions; every other fact is read in the fork's own sources."""
    base = _megatron_2022()
    source = "bigscience-workshop/Megatron-DeepSpeed and microsoft/DeepSpeed 0.6"
    facts = {
        "attention": f"{source}: megatron/model/transformer.py, ParallelAttention: baddbmm, softmax, bmm",
        "fused_softmax": f"{source}: megatron/model/fused_softmax.py",
        "softmax_multiple": f"{source}: fused_softmax.py, is_kernel_available: attn_batches % 4 == 0",
        "qkv_copied": f"{source}: split_tensor_along_last_dim, whose backward concatenates",
        "pipeline_launches": f"{source}: runtime/pipe/engine.py, seven instructions a micro-batch, four of them "
        "messages of several tensors",
        "fused_activation": f"{source}: megatron/model/fused_bias_gelu.py",
        "fused_dropout_add": f"{source}: bias_dropout_add_fused_train",
        "fused_rope": "learned or ALiBi positions: there is no rotation",
        "fused_norm": f"{source}: megatron/model/fused_layer_norm.py",
        "fused_loss": f"{source}: megatron/mpu/cross_entropy.py, several kernels on fp32 logits",
        "loss_passes": "not fused",
        "dropout": f"{source}: hidden and attention dropout default to 0.1",
        "graphs": f"{source}: every kernel is launched from Python",
        "compiled": f"{source}: torch.jit.script for three element-wise chains only",
        "wgrad_accumulates": f"{source}: forked from Megatron-LM 2.4, before the fusion",
        "tensor_overlap": f"{source}: forked from Megatron-LM 2.4, before asynchronous all-reduces",
        "grad_overlap": f"{source}: runtime/pipe/engine.py, _exec_reduce_grads after the last micro-batch",
        "gather_overlap": f"{source}: stage 1 gathers parameters after the optimizer",
        "pipeline_overlap": f"{source}: runtime/pipe/p2p.py, blocking sends",
        "scatter_hops": f"{source}: runtime/pipe/engine.py, is_pipe_partitioned with model parallelism",
        "grad_bytes": f"{source}: gradients are reduced in 16 bits",
        "optimizer_bytes": f"{_ADAM} (28); norm and unscaling read and write g (12); weights are written (6)",
        "accumulate_bytes": f"{source}: autograd adds each micro-batch's 16-bit gradient: two reads, one write",
        "vocab_multiple": f"{source}: --make-vocab-size-divisible-by 128, times tp",
        "sequence_copies": f"{source}: no sequence parallelism",
        "shard_add_bytes": f"{source}: runtime/zero/stage_1_and_2.py, stage 1 reduces after the last micro-batch",
    }
    return replace(
        base, name="megatron-deepspeed-2022", wgrad_accumulates=False, tensor_overlap=False, grad_bytes=2.0,
        accumulate_bytes=6.0, facts={**base.facts, **facts},
    )  # fmt: skip


def _megatron_deepspeed_bf16() -> EngineProfile:
    base = _megatron_deepspeed()
    source = "microsoft/DeepSpeed 0.6, runtime/bf16_optimizer.py"
    facts = {
        "accumulate_bytes": f"{source}, update_hp_grads: gradients are widened (6), added in fp32 (12), cleared (2)",
        "grad_bytes": f"{source}: fp32 gradients are reduced",
    }
    return replace(
        base, name="megatron-deepspeed-bf16", accumulate_bytes=20.0, grad_bytes=4.0, facts={**base.facts, **facts}
    )


def _llm_foundry() -> EngineProfile:
    source = "mosaicml/llm-foundry 0.3 on composer and torch FSDP"
    return EngineProfile(
        "llm-foundry",
        attention="fused",
        attention_kernel="triton",
        fused_loss=True,
        metric_losses=2,
        qkv_copied=True,
        grad_overlap=True,
        gather_overlap=True,
        grad_bytes=4.0,
        optimizer_bytes=40.0,
        shard_add_bytes=12.0,
        facts=_SERVING
        | {
            "attention": f"{source}: attn_impl: triton or flash, scripts/train/benchmarking",
            "attention_kernel": f"{source}: attn_impl triton, scripts/train/yamls/pretrain/mpt-*.yaml",
            "metric_losses": f"{source}: modeling_mpt.py, train_metrics = LanguageCrossEntropy and LanguagePerplexity",
            "qkv_copied": f"{source}: models/layers/attention.py, qkv.chunk(3), whose backward concatenates",
            "sequence_copies": "no sequence parallelism",
            "shard_add_bytes": "torch FSDP, _runtime_utils.py, _accumulate_sharded_grad: += in the parameters' fp32",
            "softmax_multiple": "inside the fused attention",
            "pipeline_launches": "no pipeline",
            "fused_softmax": "inside the fused attention",
            "fused_activation": f"{source}: llmfoundry/models/layers/ffn.py, GELU is a kernel of its own",
            "fused_dropout_add": f"{source}: models/layers/blocks.py, no dropout by default, x = x + m",
            "fused_rope": "learned positions: there is no rotation",
            "fused_norm": f"{source}: low-precision layer norm of torch, one kernel",
            "fused_loss": f"{source}: loss_fn fused_crossentropy (flash_attn.losses)",
            "loss_passes": "flash_attn.losses: logits read, gradient written, once each",
            "dropout": f"{source}: resid_pdrop, emb_pdrop and attn_pdrop are 0",
            "experts_captured": "no experts",
            "graphs": f"{source}: eager",
            "compiled": f"{source}: eager",
            "wgrad_accumulates": f"{source}: autograd",
            "tensor_overlap": "no tensor parallelism",
            "grad_overlap": "torch FSDP: reduce-scatter of a unit beside the backward of the next",
            "gather_overlap": "torch FSDP: all-gather of the next unit beside a unit's computation",
            "gathers_at_end": "stage 3 alone",
            "gathers_by_stage": "no pipeline",
            "pipeline_overlap": "no pipeline",
            "scatter_hops": "no pipeline",
            "grad_bytes": "composer, mixed_precision: DEFAULT reduces gradients in fp32",
            "optimizer_bytes": f"{source}: decoupled AdamW over fp32 shards, foreach; clipping reads and writes g",
            "accumulate_bytes": "FSDP adds the reduced shard only",
            "vocab_multiple": "50368 is given",
        },
    )


def _llm_foundry_pure() -> EngineProfile:
    base = _llm_foundry()
    source = "mosaicml/llm-foundry 0.3, mixed_precision: PURE"
    facts = {
        "grad_bytes": f"{source}: gradients are reduced in bf16",
        "optimizer_bytes": f"{source}: parameters, gradients and both moments in bf16",
        "shard_add_bytes": "torch FSDP, _runtime_utils.py, _accumulate_sharded_grad: += in the parameters' bf16",
    }
    return replace(
        base, name="llm-foundry-pure", grad_bytes=2.0, optimizer_bytes=20.0, shard_add_bytes=6.0,
        facts={**base.facts, **facts},
    )  # fmt: skip


def _megatron_bridge() -> EngineProfile:
    source = "NVIDIA-NeMo/Megatron-Bridge on Megatron-Core and TransformerEngine"
    return EngineProfile(
        "megatron-bridge",
        attention="fused",
        fused_activation=True,
        fused_dropout_add=True,
        fused_rope=True,
        fused_loss=True,
        wgrad_accumulates=True,
        tensor_overlap=True,
        grad_overlap=True,
        gather_overlap=True,
        pipeline_overlap=True,
        scatter_hops=True,
        graphs=True,
        grad_bytes=4.0,
        optimizer_bytes=40.0,
        shard_add_bytes=12.0,
        vocab_multiple=128,
        facts=_SERVING
        | {
            "attention": f"{source}: cuDNN fused attention",
            "attention_kernel": f"{source}: cuDNN, NVIDIA's own for each device",
            "metric_losses": "none",
            "qkv_copied": f"{source}: TransformerEngine's SplitAlongDim and no_interleaved layouts avoid it",
            "sequence_copies": f"{source}: Megatron-Core's stream is [seq, batch, hidden]",
            "shard_add_bytes": f"{source}: Megatron-Core, megatron_fsdp: a reduced shard is added to an fp32 buffer",
            "softmax_multiple": "inside the fused attention",
            "pipeline_launches": "captured with the graphs",
            "fused_softmax": "inside the fused attention",
            "fused_activation": f"{source}: bias_activation_fusion",
            "fused_dropout_add": f"{source}: bias_dropout_fusion",
            "fused_rope": f"{source}: apply_rope_fusion",
            "fused_norm": f"{source}: TransformerEngine's RMSNorm",
            "fused_loss": f"{source}: cross_entropy_loss_fusion, te",
            "loss_passes": f"{source}: TransformerEngine's cross-entropy, logits read, gradient written, once each",
            "dropout": f"{source}: Llama-3 and Qwen-3 recipes have none",
            "graphs": f"{source}: docs/performance-guide.md, CUDA graphs in the performance recipes",
            "experts_captured": f"{source}: dropless routing has shapes that depend on data, which graphs cannot hold",
            "compiled": f"{source}: no",
            "wgrad_accumulates": f"{source}: gradient_accumulation_fusion",
            "tensor_overlap": f"{source}: tp_comm_overlap",
            "grad_overlap": f"{source}: overlap_grad_reduce",
            "gather_overlap": f"{source}: overlap_param_gather",
            "gathers_at_end": f"{source}: overlap_param_gather gathers in the next forward pass",
            "gathers_by_stage": f"{source}: its fully sharded data parallel gathers in every pass",
            "pipeline_overlap": f"{source}: overlap_p2p_comm with virtual stages",
            "scatter_hops": f"{source}: sequence parallel outputs are sent in tp pieces",
            "grad_bytes": f"{source}: grad_reduce_in_fp32, or bf16 in the mixed-precision recipes",
            "optimizer_bytes": f"{_ADAM} (28), clipping, 16-bit weights",
            "accumulate_bytes": "none: added inside the product",
            "vocab_multiple": f"{source}: make_vocab_size_divisible_by 128",
        },
    )


def _gpt_fast() -> EngineProfile:
    source = "meta-pytorch/gpt-fast"
    facts = dict.fromkeys(_FIELDS, "not used by gpt-fast, which decodes one sequence")
    return EngineProfile(
        "gpt-fast",
        head_replicated=True,
        head_quantised=True,
        reads_peers=True,
        scales_apart=True,
        decode_kernels=5,
        attention="scores",
        fused_activation=True,
        fused_dropout_add=True,
        fused_rope=True,
        graphs=True,
        compiled=True,
        facts=facts
        | {
            "attention": f"{source}: model.py, scaled_dot_product_attention over a static cache with a mask, compiled",
            "graphs": f'{source}: generate.py, torch.compile(mode="reduce-overhead")',
            "compiled": f"{source}: generate.py, --compile",
            "head_replicated": f"{source}: tp.py, _apply_tp_Transformer splits the blocks alone",
            "head_quantised": f"{source}: quantize.py replaces every nn.Linear, the head included",
            "reads_peers": f"{source}: README.md, ENABLE_INTRA_NODE_COMM=1; torch, c10d, intra_node_comm",
            "scales_apart": f"{source}: quantize.py, WeightOnlyInt8Linear: F.linear(...) * self.scales",
            "decode_kernels": f"{source}: model.py, compiled: two norms with their residuals, rotation with the "
            "cache's update, the masked softmax's second part, the activation",
        },
    )


def _trtllm() -> EngineProfile:
    source = "NVIDIA/TensorRT-LLM 1.0"
    facts = dict.fromkeys(_FIELDS, "not used when serving")
    return EngineProfile(
        "tensorrt-llm",
        decode_kernels=8,
        cache_share=0.95,
        reserve_bytes=4e9,
        most_sequences=2048,
        most_tokens=8192,
        request_s=5e-6,
        reads_peers=True,
        attention="fused",
        fused_activation=True,
        fused_dropout_add=True,
        fused_rope=True,
        graphs=True,
        facts=facts
        | {
            "attention": f"{source}: docs, fused multi-head attention, in-flight batching, paged FP8 cache",
            "graphs": f"{source}: docs/source/performance/perf-overview.md, cuda_graph_config",
            "cache_share": f"{source}: perf-overview.md, kv_cache_free_gpu_mem_fraction 0.95",
            "most_sequences": f"{source}: llm_args.py, max_batch_size 2048",
            "most_tokens": f"{source}: llm_args.py, max_num_tokens 8192",
            "reads_peers": f"{source}: allreduce strategy AUTO takes one-shot and two-shot kernels for small messages",
            "decode_kernels": f"{source}: two norms fused with residual and quantisation, rotation with the cache's "
            "update, activation with quantisation, two quantisations of attention's input and output",
            "reserve_bytes": f"{source}: activations of max_num_tokens, NCCL and CUDA contexts",
            "request_s": f"{source}: the executor's Python loop over requests",
        },
    )


_SHARDWISE = _SERVING | {
    "attention": "decoder/attention.py: scaled_dot_product_attention; attention=math has explicit products",
    "attention_kernel": "decoder/attention.py: the fused kernel that torch chooses",
    "fused_softmax": "decoder/attention.py, CoreAttention._math: the mask is added, then torch.softmax",
    "softmax_multiple": "no fused softmax",
    "fused_activation": "decoder/llama.py: silu and the product are two operations, decoder/gpt.py: one",
    "fused_dropout_add": "decoder/llama.py: dropout and residual are operations of their own",
    "fused_rope": "decoder/attention.py, _Rotate: four operations on halves",
    "fused_norm": "decoder/modules.py, rms_norm and rms_norm_backward: an operation after the other, in fp32",
    "fused_loss": "runtime/tensor/loss.py: a few rows at a time, without a second copy of the logits",
    "loss_passes": "runtime/tensor/loss.py: log_softmax to fp32 (3); softmax to fp32 (3), scaled (4), back (3)",
    "metric_losses": "none",
    "qkv_copied": "decoder/modules.py, Linears: three products, whose gradients are never joined",
    "sequence_copies": "runtime/transport/comms.py, gather_dim, reduce_scatter_dim: a stream is [batch, seq, hidden]",
    "shard_add_bytes": "runtime/zero/flat_unit.py, add_gradients: reads both, writes one, in fp32",
    "dropout": "not counted: models of the Llama kind have none",
    "experts_captured": "no experts",
    "graphs": "runtime/pipeline/step.py: every operation is called from Python",
    "compiled": "layout compile=off",
    "wgrad_accumulates": "ops/gradients.py, GradSlot.add_product: mm writes into the buffer, addmm_ adds",
    "accumulate_bytes": "ops/gradients.py: added inside the product",
    "tensor_overlap": "ops/linear.py, _Column.backward: reduce_later, beside the weights' gradients",
    "grad_overlap": "runtime/zero/engine.py, _reduce: a part's reduction is under way while the next one computes",
    "gather_overlap": "runtime/zero/engine.py, _follow: the next use's gather is started before a part computes",
    "gathers_at_end": "runtime/zero/engine.py, all_gather_params: all gathers are waited for after the optimizer",
    "gathers_by_stage": "schedule/pipeline: UNSHARD before a stage's first action, RESHARD after its last",
    "pipeline_overlap": "runtime/pipeline/executor.py: receives are posted ahead, sends are not waited for",
    "pipeline_launches": "runtime/pipeline/executor.py: for each message a post and a wait; autograd's start and end",
    "scatter_hops": "runtime/pipeline/executor.py: a stage sends its residual stream as it is",
    "grad_bytes": "layout/units.py, wire_dtype: bf16, and fp32 under precision=fp32",
    "optimizer_bytes": "runtime/zero/optimizer.py: the norm reads g (2), g is widened (6), clipped (8), fused AdamW "
    "reads p, m, v and g and writes p, m and v (28), p is narrowed (6)",
    "vocab_multiple": "layout/placement.py: padded to a multiple of tp alone",
    "head_quantised": "serving/engine.py, _keep: int8 is for the head's own matrix, too",
}
"""Where each value of this runtime's profile is in its source."""


def _shardwise() -> EngineProfile:
    """This project's runtime on GPUs."""
    return EngineProfile(
        "shardwise",
        fused_softmax=False,
        fused_norm=False,
        fused_loss=True,
        loss_passes=(3.0, 10.0),
        wgrad_accumulates=True,
        tensor_overlap=True,
        grad_overlap=True,
        gather_overlap=True,
        gathers_at_end=True,
        gathers_by_stage=True,
        pipeline_overlap=True,
        grad_bytes=2.0,
        optimizer_bytes=50.0,
        sequence_copies=True,
        shard_add_bytes=12.0,
        pipeline_launches=8,
        head_quantised=True,
        facts=_SHARDWISE,
    )


def _shardwise_cpu() -> EngineProfile:
    """This project's runtime on CPU: whoever waits for a collective does its work, so nothing runs beside anything."""
    base = _shardwise()
    alone = "runtime/transport/shared.py: nothing runs in the background; a collective is done by who waits for it"
    overlaps = ("tensor_overlap", "grad_overlap", "gather_overlap", "pipeline_overlap")
    facts = dict.fromkeys(overlaps, alone) | {
        "pipeline_launches": "a message's work is in its measured time",
        "attention_kernel": "decoder/attention.py: torch's fused kernel for CPU",
        "fused_norm": "counted as one kernel; its share of the bandwidth is measured whole (calibrate device)",
        "loss_passes": "counted as two each; their share of the bandwidth is measured whole (calibrate device)",
        "optimizer_bytes": "counted as 40; their share of the bandwidth is measured whole (calibrate device)",
    }
    return replace(
        base,
        name="shardwise-cpu",
        fused_norm=True,
        loss_passes=(2.0, 2.0),
        optimizer_bytes=40.0,
        tensor_overlap=False,
        grad_overlap=False,
        gather_overlap=False,
        pipeline_overlap=False,
        pipeline_launches=0,
        facts={**base.facts, **facts},
    )


_FIELDS = [name for name in EngineProfile.__dataclass_fields__ if name not in ("name", "features", "facts")]


def _all() -> dict[str, EngineProfile]:
    made = (
        _megatron_2022(),
        _megatron_deepspeed(),
        _megatron_deepspeed_bf16(),
        _llm_foundry(),
        _llm_foundry_pure(),
        _megatron_bridge(),
        _gpt_fast(),
        _trtllm(),
        _shardwise(),
        _shardwise_cpu(),
    )
    return {engine.name: replace(engine, features=FEATURES.get(engine.name, EVERYTHING)) for engine in made}


ENGINES = _all()


def engine(name: str) -> EngineProfile:
    """The profile of that name. Raises `UserError` with the nearest one."""
    if name not in ENGINES:
        near = difflib.get_close_matches(name, ENGINES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(ENGINES)}"
        raise UserError(f"no engine profile {name!r}; {hint}")
    return ENGINES[name]


def attending(engine: EngineProfile, attention: str) -> EngineProfile:
    """The engine with explicit attention where a layout has it and the engine would not."""
    return replace(engine, attention="scores") if attention == "math" and engine.attention != "scores" else engine

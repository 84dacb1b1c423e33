"""Megatron-LM's arguments, as a script that starts pretrain_gpt.py. Names and checks: megatron/training/arguments.py of
NVIDIA/Megatron-LM's main branch in August 2026.
"""

from __future__ import annotations

from typing import Any

from shardwise.interop.reading.known_keys import rows
from shardwise.interop.writing import megatron_model
from shardwise.interop.writing.canonical import defaults
from shardwise.interop.writing.commands import command, flag_words, nodes_of, torchrun, with_comments
from shardwise.interop.writing.old_limits import Changes, Limit, always, only, without
from shardwise.interop.writing.request import EngineWriter, WriteRequest
from shardwise.layout import Layout, pipeline
from shardwise.layout.layout import ORDER
from shardwise.model import ModelConfig

KEYS = rows("megatron", "layout")
CLIP = 1.0
"""Norm to which gradients are clipped: this project's default."""


def write(request: WriteRequest) -> tuple[str, list[str]]:
    """The script, and comments on what it leaves to its user."""
    layout = request.layout
    flags = {
        **megatron_model.flags(request.model, request.workload.seq),
        **_degrees(layout, request.model),
        **_pipeline(layout, request.model),
        **_sharding(layout),
        **_numbers(layout),
        **_optimizer(request.workload.optimizer),
        KEYS["micro"]: layout.micro,
        "global_batch_size": request.workload.batch,
    }
    comments = ["tokenizer, data, learning rate and checkpoints are the user's: give them to this script"]
    if nodes_of(request)[0] > 1:
        comments.append("run it on every node, with HEAD_ADDRESS set to the first node's address")
    lines = command([*torchrun(request), 'pretrain_gpt.py "$@"', *flag_words(flags)])
    # Overlap of tensor-parallel communication needs one connection; Megatron-FSDP rejects that.
    return ("" if layout.zero >= 2 else "export CUDA_DEVICE_MAX_CONNECTIONS=1\n") + lines, comments


def _degrees(layout: Layout, model: ModelConfig) -> dict[str, Any]:
    kinds = rows("megatron", "cpkind")
    return {
        KEYS["tp"]: layout.tp,
        KEYS["pp"]: layout.pp,
        KEYS["cp"]: layout.cp,
        KEYS["cpkind"]: kinds[layout.cpkind] if layout.cp > 1 else None,
        KEYS["ep"]: layout.ep if model.experts else None,
        # Left out, it is tp even beside expert parallelism.
        KEYS["etp"]: layout.expert_tp if model.experts else None,
        KEYS["sp"]: layout.sp,
        KEYS["order"]: layout.order != ORDER,
    }


def _pipeline(layout: Layout, model: ModelConfig) -> dict[str, Any]:
    if layout.pp == 1:
        return {}
    layers = pipeline.stages(model, layout).layers
    if len(set(layers)) == 1:
        return {KEYS["virtual"]: layers[0] if layout.virtual > 1 else None}
    # E and L are the embedding and the loss, t a layer.
    words = [f"t*{n}" if n > 1 else "t" * n for n in layers]
    words[0], words[-1] = f"E{words[0]}", f"{words[-1]}L"
    return {KEYS["stages"]: "|".join(words)}


def _sharding(layout: Layout) -> dict[str, Any]:
    instances = layout.replicate_ranks if layout.stage and layout.replicate_ranks > 1 else None
    flags: dict[str, Any] = {
        "use_distributed_optimizer": layout.zero >= 1,
        "overlap_grad_reduce": layout.zero >= 1,
        "overlap_param_gather": layout.zero >= 1,
        KEYS["shard"]: instances,
    }
    if layout.zero >= 2:
        flags |= {
            "use_megatron_fsdp": True,
            KEYS["zero"]: "optim_grads" if layout.zero == 2 else "optim_grads_params",
            "ckpt_format": "fsdp_dtensor",
            "no_gradient_accumulation_fusion": True,
        }
    if layout.offload != "none":
        flags |= {
            "use_precision_aware_optimizer": True,
            "optimizer_cpu_offload": True,
            KEYS["offload"]: f"{layout.offload_fraction:g}",
        }
    return flags


def _numbers(layout: Layout) -> dict[str, Any]:
    half = layout.precision == "bf16"
    flags: dict[str, Any] = {
        KEYS["precision"]: half,
        KEYS["grads"]: half and layout.grads == "bf16",
        "accumulate_allreduce_grads_in_fp32": half and layout.grads == "fp32",
        KEYS["attention"]: "unfused" if layout.attention == "math" else "auto",
    }
    if layout.recompute == "selective":
        flags |= {KEYS["recompute"]: "selective", "recompute_modules": "core_attn"}
    if layout.recompute == "full":
        flags |= {KEYS["recompute"]: "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return flags


def _optimizer(name: str) -> dict[str, Any]:
    sgd = {"optimizer": "sgd", "sgd_momentum": 0.9 if name == "momentum" else 0.0}
    return ({"optimizer": "adam"} if name == "adamw" else sgd) | {"clip_grad": CLIP}


def _schedule(layout: Layout) -> Changes:
    return {"schedule": "interleaved"} if layout.virtual > 1 else defaults("schedule")


LIMITS = (
    Limit(
        "schedule",
        lambda layout: layout.schedule != ("interleaved" if layout.virtual > 1 else "1f1b"),
        _schedule,
        "it has 1f1b, and interleaved with virtual stages",
    ),
    without("zero", lambda x: x.zero >= 2 and x.pp > 1, "Megatron-FSDP (zero=2, 3) is written without a pipeline",
            "offload_params"),
    only("order", (ORDER, "dp-pp-cp-tp"), ORDER, "it has two orders of ranks"),
    Limit("sp", lambda x: x.tp > 1 and not x.sp, lambda _: {"sp": True},
          "experts beside tensor parallelism need sequence parallelism", experts=True),
    Limit("offload", lambda x: x.offload_home == "nvme", lambda x: {"offload": f"cpu:{x.offload_fraction:g}"},
          "it offloads to the host's memory"),
    Limit("offload", lambda x: x.offload_home != "none" and x.zero != 1, lambda _: {"zero": 1},
          "it offloads the distributed optimizer (zero=1)"),
    only("recompute", ("none", "selective", "full"), "full", "it recomputes blocks, or attention's core"),
    only("precision", ("bf16", "fp32"), "fp32", "it has no fp64"),
    without("offload_params", always, "it keeps parameters on the GPU"),
)  # fmt: skip

WRITER = EngineWriter(
    name="megatron",
    title="Megatron-LM",
    keys={"dp": "torchrun's ranks / (tp x pp x cp)"} | KEYS,
    left={
        "algorithm": "NCCL chooses algorithms: see NCCL_ALGO",
        "node": "NCCL finds the nodes by itself",
    },
    limits=LIMITS,
    write=write,
    comment=with_comments,
    file="megatron.sh",
    profile="megatron-core",
    objection=megatron_model.objection,
)

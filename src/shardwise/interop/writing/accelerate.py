"""accelerate's YAML with FSDP2, or DDP without sharding. Names: accelerate 1.15. Batch and sequence length are the
program's."""

from __future__ import annotations

from typing import Any

from shardwise.interop.reading.known_keys import rows
from shardwise.interop.writing import fsdp
from shardwise.interop.writing.canonical import SHARDING, defaults
from shardwise.interop.writing.commands import commented, nodes_of
from shardwise.interop.writing.old_limits import Limit, only, without
from shardwise.interop.writing.request import EngineWriter, WriteRequest
from shardwise.layout import Layout

KEYS = rows("accelerate", "layout")
KINDS = rows("accelerate", "cpkind")


def write(request: WriteRequest) -> tuple[str, list[str]]:
    """The file, and comments on what is the program's."""
    layout, work = request.layout, request.workload
    nodes, _ = nodes_of(request)
    plain = layout.zero == 0 and layout.data_ranks > 1
    data: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if plain else "FSDP",
        "num_processes": layout.ranks,
        "num_machines": nodes,
        KEYS["precision"]: "bf16" if layout.precision == "bf16" else "no",
    }
    if nodes > 1:
        data |= {"machine_rank": 0, "main_process_ip": "HEAD_ADDRESS", "main_process_port": 29500}
    if not plain:
        data |= {"fsdp_config": _fsdp(layout), "parallelism_config": _sizes(layout)}
    steps = work.micro_batches(layout)
    comments = [
        f"the program sets the batch: {layout.micro} sequences of {work.seq} tokens, Accelerator("
        f"gradient_accumulation_steps={steps}), clip_grad_norm_(1.0)"
    ]
    if nodes > 1:
        comments.append("set main_process_ip, and machine_rank on every node")
    return _yaml(data), comments


def _fsdp(layout: Layout) -> dict[str, Any]:
    return {
        # Left out, it is FSDP1.
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        KEYS["zero"]: layout.zero != 2,
        KEYS["offload"]: layout.offload != "none",
        KEYS["recompute"]: layout.recompute == "full",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def _sizes(layout: Layout) -> dict[str, Any]:
    shard = layout.shard_ranks // layout.cp if layout.zero else 1
    sizes: dict[str, Any] = {
        "parallelism_config_dp_replicate_size": layout.dp // shard,
        KEYS["shard"]: shard,
        KEYS["tp"]: layout.tp,
        KEYS["cp"]: layout.cp,
    }
    return sizes | ({KEYS["cpkind"]: KINDS[layout.cpkind]} if layout.cp > 1 else {})


def _yaml(data: dict[str, Any], indent: str = "") -> str:
    lines = []
    for key, value in data.items():
        if isinstance(value, dict):
            lines.append(f"{indent}{key}:\n{_yaml(value, indent + '  ')}")
        else:
            # A bare no is false.
            text = str(value).lower() if isinstance(value, bool) else "'no'" if value == "no" else str(value)
            lines.append(f"{indent}{key}: {text}\n")
    return "".join(lines)


def _no_ddp(layout: Layout) -> bool:
    return layout.tp > 1 or layout.cp > 1 or layout.precision == "bf16"


LIMITS = (
    *fsdp.LIMITS,
    Limit("zero", lambda x: x.zero == 0 and x.data_ranks > 1 and _no_ddp(x),
          lambda _: defaults(*SHARDING) | {"zero": 3}, "bf16, tp and cp are written with FSDP"),
    Limit("shard", lambda x: x.cp > 1 and x.shard == x.cp, lambda _: {"shard": 0},
          "beside tp and cp, replicas need a dp_shard_size above 1"),
    only("cpkind", tuple(KINDS), "ring", "its Ulysses is DeepSpeed's"),
    without("recompute", lambda x: x.zero == 0 and x.data_ranks > 1, "it recomputes with FSDP"),
)  # fmt: skip

WRITER = EngineWriter(
    name="accelerate",
    title="accelerate",
    keys={"dp": "num_processes / (tp x cp)", "offload_params": KEYS["offload"], "grads": KEYS["precision"]} | KEYS,
    left={
        "micro": "the program sets the micro-batch",
        "attention": "the model's code chooses attention's kernel (attn_implementation=eager)",
        "compile": "the program compiles blocks",
        "algorithm": "NCCL chooses algorithms: see NCCL_ALGO",
        "node": "NCCL finds the nodes by itself",
    },
    limits=LIMITS,
    write=write,
    comment=lambda text, comments: commented(comments) + text,
    file="accelerate.yaml",
    profile="fsdp2",
    fixed=fsdp.GRADS,
)

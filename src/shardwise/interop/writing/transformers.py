"""Two tables for a program with transformers' Trainer. Names: transformers 5.24, distributed/configuration and
training_args.py.
"""

from __future__ import annotations

import json
from typing import Any

from shardwise.interop.reading.known_keys import rows
from shardwise.interop.writing import fsdp
from shardwise.interop.writing.formats import COMMENT
from shardwise.interop.writing.old_limits import Limit
from shardwise.interop.writing.request import EngineWriter, WriteRequest

KEYS = rows("transformers", "layout")
CLIP = 1.0


def write(request: WriteRequest) -> tuple[str, list[str]]:
    """The tables, and comments on their use."""
    layout = request.layout
    shard = layout.shard_ranks
    half = layout.precision == "bf16"
    sizes: dict[str, Any] = {
        KEYS["tp"]: layout.tp,
        KEYS["shard"]: shard,
        "dp_replicate_size": layout.dp // shard,
        KEYS["ep"]: layout.ep,
        KEYS["offload"]: layout.offload != "none",
        KEYS["precision"]: half,
    }
    arguments: dict[str, Any] = {
        KEYS["micro"]: layout.micro,
        "gradient_accumulation_steps": request.workload.micro_batches(layout),
        "max_grad_norm": CLIP,
        "bf16": half,
        KEYS["recompute"]: layout.recompute == "full",
        "optim": {"adamw": "adamw_torch", "sgd": "sgd"}[request.workload.optimizer],
    }
    comments = [
        "from_pretrained(..., distributed_config=DistributedConfig(**distributed_config)) and "
        "TrainingArguments(**training_arguments)",
        f"start {layout.ranks} ranks with torchrun, on sequences of {request.workload.seq} tokens",
    ]
    return json.dumps({"distributed_config": sizes, "training_arguments": arguments}, indent=2), comments


LIMITS = (
    *fsdp.LIMITS,
    Limit("zero", lambda x: x.zero == 2, lambda _: {"zero": 3}, "its FSDP shards parameters"),
    Limit("ep", lambda x: x.ep > 1 and x.ep % x.tp > 0, lambda _: {"ep": 1, "etp": 0},
          "its expert parallelism spans tensor parallelism"),
    Limit("ep", lambda x: x.ep > 1 and (x.shard_ranks * x.tp) % x.ep > 0, lambda _: {"ep": 1, "etp": 0},
          "experts are spread over fsdp_size x tp_size"),
)  # fmt: skip

WRITER = EngineWriter(
    name="transformers",
    title="transformers",
    keys={"dp": "dp_replicate_size", "zero": KEYS["shard"], "offload_params": KEYS["offload"],
          "grads": KEYS["precision"]} | KEYS,
    left={
        "attention": "from_pretrained(..., attn_implementation=eager)",
        "compile": "the program compiles blocks",
        "algorithm": "NCCL chooses algorithms: see NCCL_ALGO",
        "node": "NCCL finds the nodes by itself",
    },
    limits=LIMITS,
    write=write,
    comment=lambda text, comments: json.dumps({COMMENT: comments, **json.loads(text)}, indent=2) + "\n",
    file="transformers.json",
    profile="fsdp2",
    fixed=fsdp.GRADS,
    optimizers=("adamw", "sgd"),
)  # fmt: skip

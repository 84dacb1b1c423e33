"""transformers' two tables, `distributed_config` and `training_arguments`, or TrainingArguments alone. Names:
transformers 5.24, distributed/configuration.py and training_args.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import UserError
from shardwise.interop.reading.fields import ConfigFields
from shardwise.interop.reading.known_keys import known, rows
from shardwise.interop.reading.settings import Reading
from shardwise.layout import Layout

_KEYS = rows("transformers", "layout")
TABLES = ("distributed_config", "training_arguments")


def read(data: Mapping[str, Any], ranks: int | None) -> Reading:
    """Layout of the tables. Raises `UserError` for sizes that do not multiply to the number of processes."""
    if not any(table in data for table in TABLES):
        data = {TABLES[1]: data}
    top = ConfigFields(data, known("transformers"))
    sizes = top.table(TABLES[0], known("transformers", "distributed"))
    arguments = top.table(TABLES[1], known("transformers", "arguments"))
    words = _sizes(sizes, ranks) | _arguments(arguments)
    half = [sizes.flag(_KEYS["precision"]), arguments.flag("bf16"), arguments.flag("fp16")]
    if half[2]:
        top.fact("fp16: counted as bf16")
    # Shards, and what is summed into them, are fp32.
    words |= {"grads": "fp32"} if any(half) else {"precision": "fp32"}
    layout = Layout(**words)
    steps = arguments.integer("gradient_accumulation_steps", 1)
    top.fact("the length of a sequence is the program's: --seq says it here")
    optimizer = "sgd" if arguments.word("optim", "adamw_torch").lower() == "sgd" else None
    return top.reading("transformers", layout, batch=layout.micro * layout.dp * steps, optimizer=optimizer)


def _sizes(sizes: ConfigFields, ranks: int | None) -> dict[str, Any]:
    tp, shard, ep = (sizes.integer(_KEYS[key], 1) for key in ("tp", "shard", "ep"))
    replicas = sizes.integer("dp_replicate_size", 1)
    pp = sizes.integer("pp_size", 1)
    dp = replicas * shard
    if dp * tp * pp == 1 and ranks:
        dp = ranks  # DDP: nothing is said.
    if ranks and dp * tp * pp != ranks:
        raise UserError(f"the sizes of distributed_config multiply to {dp * tp * pp}, but there are {ranks} ranks")
    words: dict[str, Any] = {"dp": dp, "tp": tp, "pp": pp, "ep": ep}
    if shard > 1:
        words |= {"zero": 3, "shard": shard}
    if sizes.flag("enable_expert_parallel") and ep == 1:
        words["ep"] = tp
    if sizes.flag(_KEYS["offload"]) and shard > 1:
        words |= {"offload": "cpu", "offload_params": "cpu"}
    return words


def _arguments(arguments: ConfigFields) -> dict[str, Any]:
    words: dict[str, Any] = {"micro": arguments.integer(_KEYS["micro"], 8)}
    if arguments.flag(_KEYS["recompute"]):
        words["recompute"] = "full"
    if arguments.flag("torch_compile"):
        arguments.fact("torch_compile: the model is compiled as a whole")
    for key in ("fsdp", "fsdp_config", "deepspeed", "parallelism_config"):
        if arguments.given(key):
            arguments.note(f"{key} is accelerate's or DeepSpeed's: explain its own file; it is not counted here")
    arguments.given("gradient_checkpointing_kwargs")
    return words

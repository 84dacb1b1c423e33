"""transformers' two tables, `distributed_config` and `training_arguments`, or TrainingArguments alone. Names:
transformers 5.24, distributed/configuration.py and training_args.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwise.errors import UserError
from shardwise.interop.engines import deepspeed
from shardwise.interop.reading import accelerate
from shardwise.interop.reading.engine_reader import read_as
from shardwise.interop.reading.fields import ConfigFields
from shardwise.interop.reading.known_keys import known, rows
from shardwise.interop.reading.settings import FileReader, Reading
from shardwise.interop.spec import spec
from shardwise.layout import Layout

_KEYS = rows("transformers", "layout")
TABLES = ("distributed_config", "training_arguments")
_NODE = 8
_ADAPTERS = ("use_peft", "load_in_4bit", "load_in_8bit", "adapter", "finetuning_type")
_LENGTHS = ("max_length", "max_seq_length", "model_max_length")


def read(data: Mapping[str, Any], ranks: int | None, other: FileReader, title: str = "transformers") -> Reading:
    """Layout of the tables. other: reads the files that they name. title: engine's, of a trainer with these arguments.
    Raises `UserError` for sizes that do not multiply to the number of processes."""
    if TABLES[1] not in data:
        data = {key: data[key] for key in TABLES if key in data} | {
            TABLES[1]: {key: value for key, value in data.items() if key not in TABLES}
        }
    top = ConfigFields(data, known("transformers"))
    sizes = top.table(TABLES[0], known("transformers", "distributed"))
    arguments = top.table(TABLES[1], known("transformers", "arguments"))
    said: dict[str, Any] = {
        "model": arguments.word("model_name_or_path") or None,
        "seq": next((size for key in _LENGTHS if (size := arguments.integer(key))), None),
        "optimizer": "sgd" if arguments.word("optim", "adamw_torch").lower() == "sgd" else None,
    }
    recompute: dict[str, Any] = {"recompute": "full"} if arguments.flag(_KEYS["recompute"]) else {}
    _remarks(top, arguments, said["seq"])
    if arguments.given("deepspeed"):
        inner = _deepspeed(arguments, ranks, other)
        inner = replace(inner, layout=replace(inner.layout, **recompute))
        return deepspeed.within(top, f"{title} with DeepSpeed", inner, **said)
    words = _sizes(sizes, ranks, arguments, other) | recompute
    words["micro"] = arguments.integer(_KEYS["micro"], 8)
    half = [sizes.flag(_KEYS["precision"]), arguments.flag("bf16"), arguments.flag("fp16")]
    if half[2]:
        top.fact("fp16: counted as bf16")
    # Shards, and what is summed into them, are fp32.
    words |= {"grads": "fp32"} if any(half) else {"precision": "fp32"}
    layout = Layout(**words)
    steps = arguments.integer("gradient_accumulation_steps", 1)
    return top.reading(title, layout, batch=layout.micro * layout.dp * steps, **said)


def _remarks(top: ConfigFields, arguments: ConfigFields, seq: int | None) -> None:
    if not seq:
        top.fact("the length of a sequence is the program's: --seq says it here")
    if arguments.flag("torch_compile"):
        arguments.fact("torch_compile: the model is compiled as a whole")
    for key in _ADAPTERS:
        word = arguments.word(key).lower()
        if word not in ("", "false", "no", "full"):
            arguments.unprice(f"{key}: {word}: weights are frozen or narrow: see plan --lora")
    if arguments.given("parallelism_config"):
        arguments.unsettle("parallelism_config is not read here: explain accelerate's file with it")
    arguments.given("gradient_checkpointing_kwargs")


def _deepspeed(arguments: ConfigFields, ranks: int | None, other: FileReader) -> Reading:
    """DeepSpeed's file that the arguments name, with their values where it says "auto"."""
    named = arguments.value("deepspeed")
    if any(arguments.given(key) for key in ("fsdp", "fsdp_config")):
        raise UserError("deepspeed and fsdp are both given; the trainer takes one of them")
    file = named if isinstance(named, Mapping) else other(str(named))
    return read_as(spec("deepspeed"), deepspeed.filled(file, **deepspeed.settings_of(arguments)), ranks)


def _sizes(sizes: ConfigFields, ranks: int | None, arguments: ConfigFields, other: FileReader) -> dict[str, Any]:
    fsdp = _fsdp(arguments, ranks, other)
    tp, cp, ep = (sizes.integer(key, 1) for key in (_KEYS["tp"], "cp_size", _KEYS["ep"]))
    replicas, pp = sizes.integer("dp_replicate_size", 1), sizes.integer("pp_size", 1)
    rest = replicas * tp * pp * cp
    shard = sizes.integer(_KEYS["shard"], max(1, (ranks or 1) // rest) if fsdp.get("zero") else 1)
    dp = replicas * shard
    if rest * shard == 1 and ranks is None:
        raise UserError("the arguments do not say on how many GPUs this runs: give --ranks N, or --cluster")
    if rest * shard == 1 and ranks:
        dp = ranks  # DDP: nothing is said.
    if ranks and dp * tp * pp * cp != ranks:
        raise UserError(f"the sizes of distributed_config multiply to {dp * tp * pp * cp}, but there are {ranks} ranks")
    words: dict[str, Any] = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep}
    if shard * cp > 1:
        words |= {"zero": 3, "shard": shard * cp} | fsdp
    if sizes.flag("enable_expert_parallel") and ep == 1:
        words["ep"] = tp
    if sizes.flag(_KEYS["offload"]) and shard > 1:
        words |= {"offload": "cpu", "offload_params": "cpu"}
    return words


def _fsdp(arguments: ConfigFields, ranks: int | None, other: FileReader) -> dict[str, Any]:
    """Layout keys of the trainer's `fsdp` and `fsdp_config`; none without them. Raises `UserError` as accelerate."""
    words = arguments.word("fsdp").lower().split()
    named = arguments.given("fsdp_config") and arguments.value("fsdp_config")
    table = named if isinstance(named, Mapping) else other(named) if isinstance(named, str) else {}
    if not (words or table) or words == ["false"]:
        return {}
    table = {f"fsdp_{key.removeprefix('fsdp_')}": value for key, value in table.items()}
    strategy = next((word for word in words if word.endswith(("shard", "_op", "zero2"))), "full_shard")
    table.setdefault("fsdp_sharding_strategy", strategy)
    if table.get("fsdp_version") == 2:
        table.pop("fsdp_sharding_strategy")
    if "offload" in words:
        table["fsdp_offload_params"] = True
    nodes = 1
    if "hybrid" in strategy and ranks and ranks > _NODE:
        nodes = -(-ranks // _NODE)
        arguments.unsettle(f"{strategy} shards inside a node, counted as {_NODE} ranks")
    fields = ConfigFields(table, known("accelerate", "fsdp"), "fsdp_config.")
    arguments.join(fields)
    return accelerate.fsdp(fields, ranks or 1, nodes)

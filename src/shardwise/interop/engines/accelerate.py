"""accelerate's degrees, DeepSpeed's file that it names, and flags of `accelerate launch`."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwise.errors import UserError, did_you_mean
from shardwise.interop.engines import deepspeed, transformers
from shardwise.interop.reading.engine_reader import read_as
from shardwise.interop.reading.fields import ConfigFields
from shardwise.interop.reading.settings import FileReader, Reading
from shardwise.interop.reading.source import ConfigInput
from shardwise.interop.spec import spec

_SWITCHES = {f"use_{kind.lower()}": kind for kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM")} | {"multi_gpu": "MULTI_GPU"}
_OF_DEEPSPEED = ("deepspeed_config_file", "zero", "offload_", "gradient_")
"""Beginnings of flags of `accelerate launch` that are keys of `deepspeed_config`."""
_LAUNCHED = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "mixed_precision")
"""Flags of `accelerate launch` that TRL's command passes on."""


def read(
    data: Mapping[str, Any],
    ranks: int | None,
    other: FileReader,
    engine: str = "accelerate",
    trainer: Mapping[str, Any] | None = None,
) -> Reading:
    """Layout of a file. other: reads the DeepSpeed file that it may name. trainer: arguments of the program, by
    transformers' names. Raises `UserError` where the number of processes is missing, and where sizes do not multiply to
    it."""
    fields = ConfigFields(trainer or {})
    # TrainingArguments write theirs over accelerate's.
    mixed = [{"mixed_precision": kind} for kind in ("bf16", "fp16") if fields.flag(kind)]
    reading = read_as(spec(engine), {**data, **(mixed or [{}])[0]}, ranks, other=other, trainer=trainer or {})
    if not trainer:
        return reading
    micro, batch = reading.layout.micro, reading.batch
    if micro_given := fields.integer("per_device_train_batch_size"):
        micro, batch = micro_given, micro_given * fields.integer("gradient_accumulation_steps", 1) * reading.layout.dp
    recompute = "full" if fields.flag("gradient_checkpointing") else reading.layout.recompute
    seq = fields.integer("max_length") or fields.integer("max_seq_length") or None
    layout, frozen = replace(reading.layout, micro=micro, recompute=recompute), transformers.adapters(fields)
    return replace(
        reading, layout=layout, seq=seq, batch=batch, model=fields.word("model_name_or_path") or None,
        unpriced="; ".join(filter(None, [reading.unpriced, *frozen])), unsettled=(*reading.unsettled, *frozen),
    )  # fmt: skip


def launched(data: dict[str, Any], source: ConfigInput, ranks: int | None) -> Reading | int | None:
    """Layout of TRL's arguments that name accelerate's file, or one of TRL's, else their number of processes. What is
    accelerate's leaves `data`. Raises `UserError` for a name without a file."""
    flags = {key: data.pop(key) for key in _LAUNCHED if key in data}
    if (named := data.pop("accelerate_config", None)) is None:
        count = f"{flags.get('num_processes', '')}"
        return int(count) if count.isdigit() else None
    known = spec("trl").presets
    if named not in known and not str(named).endswith((".yaml", ".yml", ".json")):
        raise UserError(f"accelerate_config {named} is no file; {did_you_mean(str(named), known, 'TRL has')}")
    settings = merged(known.get(named) or source.file(str(named)), flags)
    return read(settings, ranks, source.file, trainer=transformers.trainer(data, "trl"))


def merged(data: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """A file with the flags of `accelerate launch` in place of its keys."""
    result = {key: dict(one) if isinstance(one, Mapping) else one for key, one in data.items()}
    for key, value in flags.items():
        kind = re.match("fsdp|parallelism|megatron_lm", key)
        table = f"{kind[0]}_config" if kind else "deepspeed_config" if key.startswith(_OF_DEEPSPEED) else ""
        if key in _SWITCHES:
            result["distributed_type"] = _SWITCHES[key]
        else:
            (result.setdefault(table, {}) if table else result)[key] = value
    return result


def derive(names: Mapping[str, Any], _: ConfigFields) -> dict[str, Any]:
    """ZeRO's groups, or the reading of DeepSpeed's file. Raises `UserError` for degrees that DeepSpeed has not."""
    group = names["shards_of_data"] * names["cp"]
    if names["kind"] == "DEEPSPEED":
        return _deepspeed(names)
    if names["kind"] == "MEGATRON_LM":
        recompute = names["granularity"] or ("selective" if names["megatron_core"] else "none")
        return {"recompute": recompute, "zero": int(names["megatron_zero"])}
    if names["product"] == 1 or (names["zero"] and group > 1):
        return {"shard": names["shard"] if names["product"] == 1 else group}
    # A group of one rank shards nothing, and what FSDP offloads stays.
    return {"shard": 0, "zero": 0, "offload": "none", "offload_params": "none"}


def _deepspeed(names: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed's own file where one is named, else the few keys that accelerate writes into its place."""
    cp, mixed, trainer = names["cp"], names["mixed"], names["trainer"]
    if names["tp"] > 1 or (cp > 1 and names["cpkind"] != "ulysses"):
        raise UserError("beside DeepSpeed, parallelism_config has data-parallel sizes and sp_size alone")
    config: dict[str, Any] = {"sequence_parallel_size": cp} if cp > 1 else {}
    if name := names["deepspeed_file"]:
        said: dict[str, Any] = {"bf16": mixed == "bf16", "fp16": mixed == "fp16"}
        if trainer:
            fields = ConfigFields(trainer)
            said["micro"] = fields.integer("per_device_train_batch_size", 8)
            said["steps"] = fields.integer("gradient_accumulation_steps", 1)
            said["clip"] = fields.number("max_grad_norm", 1.0)
        config = {**deepspeed.filled(names["other"](name), **said), **config}
    else:
        homes = {f"offload_{key}": {"device": names[f"{key}_home"]} for key in ("optimizer", "params")}
        homes["offload_param"] = homes.pop("offload_params")
        config |= {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": names["clip"],
            "zero_optimization": {"stage": names["stage"], **homes},
            **({mixed: {"enabled": True}} if mixed in ("bf16", "fp16") else {}),
        }
    inner = read_as(spec("deepspeed"), config, names["processes"])
    inner = inner if name else replace(inner, batch=None)
    return {"inner": inner, "title": "accelerate with DeepSpeed"}

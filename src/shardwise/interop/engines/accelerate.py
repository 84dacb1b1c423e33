"""accelerate's degrees, DeepSpeed's file that it names, and flags of `accelerate launch`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from shardwise.errors import UserError
from shardwise.interop.engines import deepspeed
from shardwise.interop.reading.engine_reader import read_as
from shardwise.interop.reading.fields import ConfigFields
from shardwise.interop.reading.settings import FileReader, Reading
from shardwise.interop.spec import spec

_SWITCHES = {f"use_{kind.lower()}": kind for kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM")} | {"multi_gpu": "MULTI_GPU"}
_OF_DEEPSPEED = ("deepspeed_config_file", "zero", "offload_", "gradient_")
"""Beginnings of flags of `accelerate launch` that are keys of `deepspeed_config`."""


def read(
    data: Mapping[str, Any], ranks: int | None, other: FileReader, trainer: Mapping[str, Any] | None = None
) -> Reading:
    """Layout of a file. other: reads the DeepSpeed file that it may name. trainer: arguments of the program, by
    transformers' names. Raises `UserError` where the number of processes is missing, and where sizes do not multiply to
    it."""
    reading = read_as(spec("accelerate"), data, ranks, other=other, trainer=trainer or {})
    if not trainer:
        return reading
    fields, micro, batch = ConfigFields(trainer), reading.layout.micro, reading.batch
    if micro_given := fields.integer("per_device_train_batch_size"):
        micro, batch = micro_given, micro_given * fields.integer("gradient_accumulation_steps", 1) * reading.layout.dp
    recompute = "full" if fields.flag("gradient_checkpointing") else reading.layout.recompute
    seq = fields.integer("max_length") or fields.integer("max_seq_length") or None
    layout = replace(reading.layout, micro=micro, recompute=recompute)
    return replace(reading, layout=layout, seq=seq, batch=batch, model=fields.word("model_name_or_path") or None)


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


def derive(names: Mapping[str, Any], fields: ConfigFields) -> dict[str, Any]:
    """Degrees and ZeRO's groups, or the reading of DeepSpeed's file. Raises `UserError` for sizes that do not multiply
    to the number of processes."""
    if names["kind"] == "MEGATRON_LM":
        return _megatron(names)
    degrees = _degrees(names)
    return _deepspeed(names, degrees) if names["kind"] == "DEEPSPEED" else degrees


def _degrees(names: Mapping[str, Any]) -> dict[str, Any]:
    shards, ulysses, processes = names["shards_of_data"], names["ulysses"], names["processes"]
    product = prod([shards, ulysses, *(names[key] for key in ("replicas_of_groups", "tp_size", "cp_size"))])
    if product == 1:
        # Nothing said: all processes are data-parallel.
        return {"dp": processes, "tp": 1}
    if product != processes:
        rest = product // shards
        fits = f"parallelism_config_dp_shard_size={processes // rest} would use them all"
        hint = f"the others' product {rest} would have to divide it" if processes % rest else fits
        raise UserError(f"parallelism_config's sizes multiply to {product}, but num_processes is {processes}; {hint}")
    if names["cp_size"] > 1 and ulysses > 1:
        raise UserError("parallelism_config has both cp_size and sp_size; accelerate takes one of them")
    cp = names["cp_size"] * ulysses
    degrees = {"dp": names["replicas_of_groups"] * shards, "tp": names["tp_size"], "cp": cp, "shard": shards * cp}
    if names["zero"] and shards * cp > 1:
        return degrees
    # A group of one rank shards nothing, and what FSDP offloads stays.
    return degrees | {"shard": 0, "zero": 0, "offload": "none", "offload_params": "none"}


def _megatron(names: Mapping[str, Any]) -> dict[str, Any]:
    processes, (tp, pp, cp, ep) = names["processes"], (names[f"megatron_{key}"] for key in ("tp", "pp", "cp", "ep"))
    if processes % (tp * pp * cp):
        raise UserError(f"num_processes {processes} cannot be divided by tp x pp x cp = {tp * pp * cp}")
    recompute = names["granularity"] or ("selective" if names["megatron_core"] else "none")
    return {
        "dp": processes // (tp * pp * cp), "tp": tp, "pp": pp, "cp": cp, "ep": ep, "recompute": recompute,
        "sp": names["megatron_sp"] and tp > 1, "zero": int(names["megatron_zero"]),
    }  # fmt: skip


def _deepspeed(names: Mapping[str, Any], degrees: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed's own file where one is named, else the few keys that accelerate writes into its place."""
    cp, mixed, trainer = degrees.get("cp", 1), names["mixed"], names["trainer"]
    if degrees.get("tp", 1) > 1 or (cp > 1 and names["cpkind"] != "ulysses"):
        raise UserError("beside DeepSpeed, parallelism_config has data-parallel sizes and sp_size alone")
    config: dict[str, Any] = {"sequence_parallel_size": cp} if cp > 1 else {}
    if name := names["deepspeed_file"]:
        said = deepspeed.settings_of(ConfigFields(trainer)) if trainer else {}
        said |= {"bf16": mixed == "bf16", "fp16": mixed == "fp16"}
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
    return {**degrees, "tp": 1, "inner": inner, "title": "accelerate with DeepSpeed"}

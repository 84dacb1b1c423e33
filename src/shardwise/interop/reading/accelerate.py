"""accelerate's YAML. Names and defaults: huggingface/accelerate 1.x, commands/config/config_args.py,
utils/dataclasses.py, parallelism_config.py.

Sequence length and batch stand in the training script, not here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from shardwise.errors import UserError
from shardwise.interop.engines import deepspeed
from shardwise.interop.reading.engine_reader import read_as
from shardwise.interop.reading.fields import ConfigFields, nearest_multiples
from shardwise.interop.reading.known_keys import Known, known, rows
from shardwise.interop.reading.settings import FileReader, Reading
from shardwise.interop.spec import spec
from shardwise.layout import Layout

_KINDS = ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_HPU", "FSDP", "DEEPSPEED", "MEGATRON_LM")
_OF_KIND = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM"}
_LAYOUT = rows("accelerate", "layout")
_SWITCHES = {f"use_{kind.lower()}": kind for kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM")} | {"multi_gpu": "MULTI_GPU"}
_OF_DEEPSPEED = ("deepspeed_config_file", "zero", "offload_", "gradient_")
"""Beginnings of flags of `accelerate launch` that are keys of `deepspeed_config`."""
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


def read(
    data: Mapping[str, Any], ranks: int | None, other: FileReader, trainer: Mapping[str, Any] | None = None
) -> Reading:
    """Layout of a file. other: reads the DeepSpeed file that it may name. trainer: arguments of the program, by
    transformers' names. Raises `UserError` where the number of processes is missing, and where sizes do not multiply to
    it."""
    reading = _read(data, ranks, other, trainer or {})
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


def _read(data: Mapping[str, Any], ranks: int | None, other: FileReader, trainer: Mapping[str, Any]) -> Reading:
    top = ConfigFields(data, known("accelerate"))
    kind = top.word("distributed_type", "NO", _KINDS).upper()
    processes = top.integer("num_processes", 1 if kind == "NO" else 0, least=0) or ranks
    if not processes:
        raise UserError("num_processes is missing: give it in the file, or --ranks N, or --cluster")
    machines = top.integer("num_machines", 1)
    top.fact("sequence length and batch stand in the training script: --seq, --batch and --micro say them here")
    for key, other_kind in _OF_KIND.items():
        if kind != other_kind and top.given(key) and data[key]:
            top.note(f"{key} does nothing with distributed_type {kind}")
    if kind == "DEEPSPEED":
        return _deepspeed(top, processes, other, trainer)
    words = _precision(top, kind)
    if kind == "FSDP":
        words |= fsdp(top.table("fsdp_config", known("accelerate", "fsdp")), processes, machines)
    if kind == "MEGATRON_LM":
        words |= _megatron(top, processes)
    else:
        words |= _degrees(top, processes, words)
    dynamo = top.table("dynamo_config", Known(frozenset(), ("dynamo_",)))
    if dynamo.word("dynamo_backend", "no").lower() not in ("no", "false"):
        top.fact("dynamo_config: the model is compiled")
    return top.reading("accelerate", Layout(**words))


def _precision(top: ConfigFields, kind: str) -> dict[str, Any]:
    mixed = top.word("mixed_precision", "no", ("no", "fp16", "bf16", "fp8")).lower()
    if top.given("fp8_config"):
        top.fact("fp8_config: matrix products in 8 bits; weights and activations count as 16 bits here")
    if mixed in ("no", "false"):
        return {"precision": "fp32"}
    if mixed != "bf16":
        top.fact(f"{mixed}: counted as bf16")
    if kind not in ("FSDP", "MEGATRON_LM"):
        top.fact(
            "mixed precision is autocast: weights stay in fp32 and are cast in every operation; 16 bytes a parameter "
            "as here, and the casts besides"
        )
        return {}
    # FSDP keeps its shards, and what it sums into them, in fp32.
    return {"grads": "fp32"}


def fsdp(table: ConfigFields, processes: int, machines: int) -> dict[str, Any]:
    """Layout keys of `fsdp_config`. Raises `UserError` for what FSDP rejects."""
    version = table.integer("fsdp_version", 1)
    strategy = table.word("fsdp_sharding_strategy", "FULL_SHARD", [*_STRATEGIES, *"12345"]).upper()
    strategy = _STRATEGIES[int(strategy) - 1] if strategy.isdigit() else strategy
    again = table.word(_LAYOUT["zero"], "true")
    if version == 1 and again.upper() in _STRATEGIES:
        strategy = again.upper()
    words: dict[str, Any] = {"zero": 3}
    if version >= 2:
        if again.lower() not in ("true", "false"):
            raise UserError(
                f"{table.name('fsdp_reshard_after_forward')} must be true or false with fsdp_version 2, not {again}"
            )
        if again.lower() == "false":
            words["zero"] = 2
            table.note(
                "fsdp_reshard_after_forward: false keeps the weights from forward to backward: ZeRO-2's traffic, and "
                "its memory while a step runs"
            )
        if table.given("fsdp_sharding_strategy"):
            table.note("fsdp_sharding_strategy does nothing with fsdp_version 2; fsdp_reshard_after_forward does")
    else:
        table.note("fsdp_version is 1, the default of old files; FSDP2 is fsdp_version: 2")
        words = {"zero": {"SHARD_GRAD_OP": 2, "HYBRID_SHARD_ZERO2": 2, "NO_SHARD": 0}.get(strategy, 3)}
        if strategy.startswith("HYBRID") and processes % machines:
            raise UserError(f"{strategy} shards inside a machine, but num_processes {processes} is no multiple of "
                            f"num_machines {machines}: nearest: {nearest_multiples(processes, machines)}")  # fmt: skip
        if strategy.startswith("HYBRID") and machines > 1:
            words |= {"shard": processes // machines} if machines < processes else {"zero": 0}
    if table.flag(_LAYOUT["recompute"]):
        words["recompute"] = "full"
    if table.flag(_LAYOUT["offload"]):
        words |= {"offload": "cpu"} | ({"offload_params": "cpu"} if words["zero"] == 3 else {})
    return words


def _degrees(top: ConfigFields, processes: int, words: Mapping[str, Any]) -> dict[str, Any]:
    prefix = "parallelism_config_"
    table = top.table("parallelism_config", known("accelerate", "parallelism"))
    sizes = {name: table.integer(f"{prefix}{name}_size", 1) for name in ("dp_replicate", "dp_shard", "tp", "cp")}
    ulysses = table.integer(f"{prefix}sp_size", 1)
    product = prod([ulysses, *sizes.values()])
    if product == 1:
        # Nothing said: all processes are data-parallel.
        return {"dp": processes}
    if product != processes:
        rest = product // sizes["dp_shard"]
        fits = f"{prefix}dp_shard_size={processes // rest} would use them all"
        hint = f"the others' product {rest} would have to divide it" if processes % rest else fits
        raise UserError(f"parallelism_config's sizes multiply to {product}, but num_processes is {processes}; {hint}")
    if sizes["cp"] > 1 and ulysses > 1:
        raise UserError("parallelism_config has both cp_size and sp_size; accelerate takes one of them")
    found: dict[str, Any] = {"dp": sizes["dp_replicate"] * sizes["dp_shard"], "tp": sizes["tp"]}
    found["cp"] = sizes["cp"] * ulysses
    kinds = {word: kind for kind, word in rows("accelerate", "cpkind").items()}
    kind = kinds.get(table.word(_LAYOUT["cpkind"]).lower(), "ring")
    if found["cp"] > 1:
        found["cpkind"] = "ulysses" if ulysses > 1 else kind
    shard = sizes["dp_shard"] * found["cp"]
    if words.get("zero"):
        # A group of one rank shards nothing, and what FSDP offloads stays.
        found |= {"shard": shard} if shard > 1 else {"zero": 0, "offload": "none", "offload_params": "none"}
    if sizes["tp"] > 1:
        top.fact("tensor parallelism follows the model's own plan (tp_plan), without sequence parallelism")
    return found


def _megatron(top: ConfigFields, processes: int) -> dict[str, Any]:
    table = top.table("megatron_lm_config", known("accelerate", "megatron"))
    get = "megatron_lm_{}".format
    tp, pp, cp = (table.integer(get(name), 1) for name in ("tp_degree", "pp_degree", "context_parallel_size"))
    if processes % (tp * pp * cp):
        raise UserError(f"num_processes {processes} cannot be divided by tp x pp x cp = {tp * pp * cp}")
    if micro := table.integer(get("num_micro_batches")):
        top.fact(f"{micro} micro-batches a step")
    words: dict[str, Any] = {"dp": processes // (tp * pp * cp), "tp": tp, "pp": pp, "cp": cp, "grads": "fp32"}
    words["ep"] = table.integer(get("expert_model_parallel_size"), 1)
    if table.flag(get("sequence_parallelism")) and tp > 1:
        words["sp"] = True
    if table.flag(get("use_distributed_optimizer")):
        words["zero"] = 1
        top.note("megatron_lm_use_distributed_optimizer is ZeRO-1: parameters and gradients are whole")
    granularity = table.word(get("recompute_granularity"), "", ("full", "selective"))
    if table.flag(get("recompute_activations")) or granularity:
        words["recompute"] = granularity or "selective"
    if top.word("mixed_precision", "no").lower() == "no":
        words |= {"precision": "fp32", "grads": "bf16"}
    return words


def _deepspeed(top: ConfigFields, processes: int, other: FileReader, trainer: Mapping[str, Any]) -> Reading:
    """DeepSpeed's own file where one is named, else the few keys that accelerate writes into its place."""
    table = top.table("deepspeed_config", known("accelerate", "deepspeed"))
    mixed = top.word("mixed_precision", "no", ("no", "fp16", "bf16", "fp8")).lower()
    ulysses = _ulysses(top, processes)
    if name := table.word("deepspeed_config_file"):
        said = deepspeed.settings_of(ConfigFields(trainer)) if trainer else {}
        said |= {"bf16": mixed == "bf16", "fp16": mixed == "fp16"}
        file = deepspeed.filled(other(name), **said)
        return deepspeed.within(top, "accelerate with DeepSpeed", read_as(spec("deepspeed"), {**file, **ulysses}, processes))
    stage = table.integer("zero_stage", 2, least=0)
    steps = table.integer("gradient_accumulation_steps", 1)
    clip = table.number("gradient_clipping", 1.0)
    if not table.given("gradient_clipping"):
        top.note("gradient_clipping is not given: accelerate then clips the gradient norm at 1.0")
    devices = [table.word(f"offload_{what}_device", "none", ("none", "cpu", "nvme")) for what in ("optimizer", "param")]
    config: dict[str, Any] = (
        ulysses
        | {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": clip,
            "zero_optimization": {"stage": stage}
            | {f"offload_{what}": {"device": d} for what, d in zip(("optimizer", "param"), devices, strict=True)},
        }
        | ({mixed: {"enabled": True}} if mixed in ("bf16", "fp16") else {})
    )
    inner = replace(read_as(spec("deepspeed"), config, processes), batch=None)
    if steps > 1:
        top.fact(f"{steps} micro-batches are accumulated in a step")
    return deepspeed.within(top, "accelerate with DeepSpeed", inner)


def _ulysses(top: ConfigFields, processes: int) -> dict[str, Any]:
    """DeepSpeed's key for sequence parallelism, of the sizes beside its file. Raises `UserError` for others."""
    sizes = _degrees(top, processes, {})
    if sizes.get("tp", 1) > 1 or (sizes.get("cp", 1) > 1 and sizes["cpkind"] != "ulysses"):
        raise UserError("beside DeepSpeed, parallelism_config has data-parallel sizes and sp_size alone")
    return {"sequence_parallel_size": sizes["cp"]} if sizes.get("cp", 1) > 1 else {}

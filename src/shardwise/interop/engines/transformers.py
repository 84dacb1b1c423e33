"""The Trainer's degrees, and the files of FSDP and DeepSpeed that its arguments name."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwise.errors import UserError, nearest
from shardwise.interop.engines import deepspeed
from shardwise.interop.reading.engine_reader import read_as, values_of
from shardwise.interop.reading.fields import ConfigFields, renamed
from shardwise.interop.reading.settings import FileReader, Reading
from shardwise.interop.spec import spec

_TABLES = ("distributed_config", "training_arguments")
_NODE = 8
DIALECTS = ("axolotl", "llamafactory", "trl")
"""Engines whose files are the Trainer's arguments with other defaults."""
_BY_TRAINER: dict[str, Any] = {
    **dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
    **{key: {"enabled": "auto"} for key in ("bf16", "fp16")},
}
"""What programs fill in that write DeepSpeed's table themselves."""
_ADAPTERS = ("use_peft", "load_in_4bit", "load_in_8bit", "adapter", "finetuning_type")


def read(data: Mapping[str, Any], ranks: int | None, other: FileReader, engine: str = "transformers") -> Reading:
    """Layout of the tables. other: reads the files that they name. engine: transformers, or a dialect. Raises
    `UserError` for sizes that do not multiply to the number of processes."""
    written = {new: old for old, new in spec(engine).renamed.items() if old in data}
    prefix = f"{_TABLES[1]}." if _TABLES[1] not in data else ""

    def shown(key: str) -> str:
        key = key.removeprefix(prefix)
        return written.get(key, key)

    data = trainer(data, engine)
    if _TABLES[1] not in data:
        arguments = {key: value for key, value in data.items() if key not in _TABLES}
        data = {key: data[key] for key in _TABLES if key in data} | {_TABLES[1]: arguments}
    return read_as(spec(engine), data, ranks, shown=shown, other=other, title=spec(engine).title)


def trainer(data: Mapping[str, Any], engine: str) -> dict[str, Any]:
    """The Trainer's arguments in a dialect's file, by transformers' names. Raises `UserError` for a mistyped one."""
    one = spec(engine)
    for key in data:
        if key not in one.renamed and (near := nearest(key, one.renamed, cutoff=0.85)):
            raise UserError(f"{key} is not known; did you mean {near[0]}?")
    table = renamed({key: value for key, value in data.items() if key not in one.dropped}, one.renamed)
    if table.pop("disable_gradient_checkpointing", False) is True:
        table["gradient_checkpointing"] = False
    usual = {key: value for key, value in one.defaults.items() if key != "bf16" or not table.get("fp16")}
    return table | {key: value for key, value in usual.items() if table.get(key, "auto") == "auto"}


def derive(names: Mapping[str, Any], fields: ConfigFields) -> dict[str, Any]:
    """Degrees, batch and adapters, or the reading of DeepSpeed's file. Raises `UserError` as `read`."""
    arguments = fields.within(_TABLES[1], spec("transformers").known)
    for sentence in adapters(arguments):
        fields.say("unpriced", sentence)
    if named := names["deepspeed"]:
        if names["fsdp"] or names["fsdp_config"]:
            raise UserError("deepspeed and fsdp are both given; the trainer takes one of them")
        if named is True:
            stage = arguments.integer("zero_stage", least=0)
            counted = f"--zero_stage {stage}" if arguments.given("zero_stage") else "plain data parallel"
            kind = next((kind for kind in ("bf16", "fp16") if names[kind] is True), "fp32")
            fields.say(
                "doubts", f"--deepspeed names no file: its stage is the program's: counted as {counted} in {kind}"
            )
            named = {"zero_optimization": {"stage": stage}, **_BY_TRAINER}
        file = named if isinstance(named, Mapping) else names["other"](str(named))
        said = {key: names[key] for key in ("bf16", "fp16", "micro", "steps", "clip")}
        cut = {"sequence_parallel_size": names["cp"]} if names["cp"] > 1 else {}
        inner = read_as(spec("deepspeed"), deepspeed.filled(file, **said) | cut, names["ranks"])
        # Sequences that the trainer cuts pass around a ring; Ulysses is DeepSpeed's.
        kind = "ring" if cut else inner.layout.cpkind
        kept = {key: names[key] for key in ("recompute", "offload_activations") if key in names}
        inner = replace(inner, layout=replace(inner.layout, cpkind=kind, **kept))
        return {"inner": inner, "title": f"{names['title']} with DeepSpeed"}
    return {}


def adapters(arguments: ConfigFields) -> list[str]:
    """Why a trainer's memory is not that of whole training, a sentence each."""
    words = {key: arguments.word(key).lower() for key in _ADAPTERS}
    said = {key: word for key, word in words.items() if word not in ("", "false", "no", "full")}
    return [f"{key}: {word}: weights are frozen or narrow: see plan --lora" for key, word in said.items()]


def keys_of_fsdp(text: str, named: Any, ranks: int | None, other: FileReader, fields: ConfigFields) -> dict[str, Any]:
    """Layout keys of the trainer's `fsdp` (text) and `fsdp_config` (named); none without them. Raises `UserError` as
    accelerate."""
    words = text.split()
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
        fields.say("doubts", f"{strategy} shards inside a node, counted as {_NODE} ranks")
    inner = ConfigFields(table, spec("fsdp_config").known(), "fsdp_config.")
    fields.join(inner)
    read = values_of(spec("fsdp_config"), inner, kind="FSDP", processes=ranks or 1, machines=nodes)
    keys = {key: read[key] for key in ("shard", "recompute", "offload", "offload_params")}
    return {"zero": read["zero"]} | {key: value for key, value in keys.items() if value not in (0, "none")}

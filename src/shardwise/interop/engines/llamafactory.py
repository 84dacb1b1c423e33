"""LLaMA-Factory's YAML as the Trainer's arguments, or as Megatron-LM's."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwise.interop.engines import transformers
from shardwise.interop.reading.engine_reader import read_as
from shardwise.interop.reading.fields import renamed
from shardwise.interop.reading.settings import FileReader, Reading
from shardwise.interop.spec import spec


def read(data: Mapping[str, Any], ranks: int | None, other: FileReader, engine: str) -> Reading:
    """Layout of a file. Raises `UserError` as the readers of transformers and Megatron-LM."""
    one = spec(engine)
    if not any(key.endswith("_model_parallel_size") or key == "use_mca" for key in data):
        return transformers.read(data, ranks, other, engine)
    flags = renamed({key: data[key] for key in data if key not in one.dropped}, one.renamed_for_megatron)
    model = flags.pop("model_name_or_path", None)
    kind = flags.pop("finetuning_type", "full")
    reading = read_as(spec("megatron"), {"recompute_method": "uniform"} | flags, ranks)
    why = "" if kind == "full" else f"finetuning_type: {kind}: weights are frozen or narrow: see plan --lora"
    unsettled = (*reading.unsettled, *filter(None, [why]))
    return replace(reading, engine=f"{one.title} with Megatron-Core", model=model, unpriced=why, unsettled=unsettled)

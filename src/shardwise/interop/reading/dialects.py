"""Configurations that say another engine's in keys of their own: renamed, and read by that engine's reader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwise.interop.engines import transformers
from shardwise.interop.reading.engine_reader import read_as
from shardwise.interop.reading.known_keys import renamed
from shardwise.interop.reading.settings import FileReader, Reading
from shardwise.interop.spec import spec

_OWN = ("stage", "template", "preprocessing_num_workers", "dataset")
"""LLaMA-Factory's keys that change no layout."""


def axolotl(data: Mapping[str, Any], ranks: int | None, other: FileReader) -> Reading:
    """Axolotl's YAML. Names: axolotl-ai-cloud/axolotl 0.13, utils/schemas. Raises `UserError` as transformers'."""
    return transformers.read(trainer_of("axolotl", data), ranks, other, "Axolotl")


def llamafactory(data: Mapping[str, Any], ranks: int | None, other: FileReader) -> Reading:
    """LLaMA-Factory's YAML, of its Trainer or of Megatron-Core. Names: hiyouga/LLaMA-Factory 0.9, hparams/. Raises
    `UserError` as their readers."""
    if not any(key.endswith("_model_parallel_size") or key == "use_mca" for key in data):
        return transformers.read(trainer_of("llamafactory", data), ranks, other, "LLaMA-Factory")
    flags = renamed({key: data[key] for key in data if key not in _OWN}, "llamafactory", "megatron")
    model = flags.pop("model_name_or_path", None)
    kind = flags.pop("finetuning_type", "full")
    reading = read_as(spec("megatron"), {"recompute_method": "uniform"} | flags, ranks)
    why = "" if kind == "full" else f"finetuning_type: {kind}: weights are frozen or narrow: see plan --lora"
    unsettled = (*reading.unsettled, *filter(None, [why]))
    return replace(reading, engine="LLaMA-Factory with Megatron-Core", model=model, unpriced=why, unsettled=unsettled)


def trainer_of(engine: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a dialect's trainer by transformers' names; others' as they are."""
    if engine not in ("axolotl", "llamafactory"):
        return dict(data)
    table = renamed({key: data[key] for key in data if key not in _OWN}, engine)
    if engine == "axolotl" and table.get("bf16", "auto") == "auto" and not table.get("fp16"):
        table["bf16"] = True
    return table

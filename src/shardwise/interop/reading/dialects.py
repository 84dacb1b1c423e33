"""Configurations that say another engine's in keys of their own: renamed, and read by that engine's reader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwise.interop.reading import megatron, transformers
from shardwise.interop.reading.fields import ConfigFields
from shardwise.interop.reading.known_keys import known, renamed
from shardwise.interop.reading.settings import FileReader, Reading, ServerSettings
from shardwise.interop.reading.sglang import attention
from shardwise.interop.reading.vllm import check_count
from shardwise.layout import Layout

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
    reading = megatron.read({"recompute_method": "uniform"} | flags, ranks)
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


def tensorrt_llm(data: Mapping[str, Any], ranks: int | None) -> Reading:
    """Flags of trtllm-serve, or the YAML of its LLM API. Names: NVIDIA/TensorRT-LLM 1.0, llmapi/llm_args.py. Raises
    `UserError` where there are fewer GPUs than the degrees need."""
    fields = ConfigFields(renamed(data, "tensorrt-llm"), known("tensorrt-llm"))
    tp, pp = (fields.integer(f"{name}_parallel_size", 1) for name in ("tensor", "pipeline"))
    ep = fields.integer("moe_expert_parallel_size", 1)
    fields.given("moe_tensor_parallel_size")
    check_count(fields, tp * pp, ranks)
    dp = tp if fields.flag("enable_attention_dp") else 1
    if dp > 1:
        tp, ep = attention(fields, tp, dp, ep)
    cache = fields.word("kv_cache_dtype", "auto").lower()
    fields.unsettle("the share of memory for the cache is of what weights leave: counted as 90% of all memory")
    served = ServerSettings(
        cache="float8_e4m3fn" if cache.startswith("fp8") else "bfloat16",
        length=fields.integer("max_model_len") or None,
        sequences=fields.integer("max_num_seqs") or None,
        tokens=fields.integer("max_num_batched_tokens") or None,
    )
    layout = Layout(dp=dp, tp=tp, pp=pp, ep=ep)
    return fields.reading("TensorRT-LLM", layout, model=fields.word("model") or None, served=served)

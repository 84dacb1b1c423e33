"""DeepSpeed's optimizer, and its file with the values of a trainer."""

from collections.abc import Mapping
from typing import Any

from shardwise.interop.reading.fields import ConfigFields, Known


def derive(_: Mapping[str, Any], fields: ConfigFields) -> dict[str, Any]:
    """The optimizer; None for all that is counted as AdamW."""
    table = fields.value("optimizer")
    if not isinstance(table, Mapping) or str(table.get("type")).lower() != "sgd":
        return {"optimizer": None}
    params = fields.table("optimizer", Known(frozenset({"type"}))).table("params", Known(prefixes=("",)))
    return {"optimizer": "momentum" if params.number("momentum") else "sgd"}


def home(device: str, old: bool, share: float) -> str:
    """Where state is: none, cpu or nvme, with a fraction below 1. old: the flag of older files."""
    if device == "none" or share == 1:
        return "cpu" if old and device == "none" else device
    return f"{device}:{share:g}" if share else "none"


def filled(data: Mapping[str, Any], **trainer: Any) -> dict[str, Any]:
    """The file with a trainer's values where it says "auto". trainer: bf16, fp16, micro, steps, clip; None where the
    trainer does not say."""
    result = dict(data)
    for key, name in (
        ("train_micro_batch_size_per_gpu", "micro"),
        ("gradient_accumulation_steps", "steps"),
        ("gradient_clipping", "clip"),
    ):
        if result.get(key) == "auto" and trainer.get(name) is not None:
            result[key] = trainer[name]
    for key in ("bf16", "fp16"):
        table = result.get(key)
        if isinstance(table, Mapping) and table.get("enabled") == "auto" and trainer.get(key) is not None:
            result[key] = {**table, "enabled": trainer[key]}
    return result

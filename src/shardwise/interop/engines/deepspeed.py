"""DeepSpeed's batch equation, and its file inside another engine's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import UserError
from shardwise.interop.expressions import nearest_multiples
from shardwise.interop.reading.fields import ConfigFields, Known

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def derive(names: Mapping[str, Any], fields: ConfigFields) -> dict[str, Any]:
    """The batch by DeepSpeed's rules (of three numbers two give the third, of one the others follow; None where a
    trainer decides), and the optimizer, None for all that is counted as AdamW. Raises `UserError` for a batch that is
    not the product."""
    return _batches(names, fields) | {"optimizer": _optimizer(fields)}


def _batches(names: Mapping[str, Any], fields: ConfigFields) -> dict[str, Any]:
    whole, micro, steps, world = (names[key] for key in ("batch", "micro", "steps", "dp"))
    if not (whole or micro):
        if any(map(fields.automatic, _BATCH[:2])):
            return {"batch": None, "micro": 1, "steps": steps or 1}
        raise UserError(f"one of {_BATCH[0]} and {_BATCH[1]} must be a number, or there is no batch")
    given = steps
    micro = micro or whole // world // (steps or 1)
    steps = steps or (whole // micro // world if whole and micro else 1)
    whole = whole or micro * steps * world
    if min(micro, steps) < 1 or whole != micro * steps * world:
        nearest = nearest_multiples(whole, max(1, micro * (steps if given else 1)) * world)
        raise UserError(
            f"{_BATCH[0]} = {whole} is not {_BATCH[1]} x {_BATCH[2]} x data-parallel ranks = {micro} x {steps} x "
            f"{world}; nearest {_BATCH[0]} that is: {nearest}"
        )
    return {"batch": whole, "micro": micro, "steps": steps}


def _optimizer(fields: ConfigFields) -> str | None:
    table = fields.value("optimizer")
    if not isinstance(table, Mapping) or str(table.get("type")).lower() != "sgd":
        return None
    params = fields.table("optimizer", Known(frozenset({"type"}))).table("params", Known(prefixes=("",)))
    return "momentum" if params.number("momentum") else "sgd"


def home(device: str, old: bool, share: float) -> str:
    """Where state is: none, cpu or nvme, with a fraction below 1. old: the flag of older files."""
    if device == "none" or share == 1:
        return "cpu" if old and device == "none" else device
    return f"{device}:{share:g}" if share else "none"


def filled(data: Mapping[str, Any], **trainer: Any) -> dict[str, Any]:
    """The file with a trainer's values where it says "auto". trainer: bf16, fp16, micro, steps, clip; None where the
    trainer does not say."""
    result = dict(data)
    for key, name in (*zip(_BATCH[1:], ("micro", "steps"), strict=True), ("gradient_clipping", "clip")):
        if result.get(key) == "auto" and trainer.get(name) is not None:
            result[key] = trainer[name]
    for key in ("bf16", "fp16"):
        table = result.get(key)
        if isinstance(table, Mapping) and table.get("enabled") == "auto" and trainer.get(key) is not None:
            result[key] = {**table, "enabled": trainer[key]}
    return result


def settings_of(trainer: ConfigFields) -> dict[str, Any]:
    """Values that the arguments of Hugging Face's trainer fill in."""
    return {
        "bf16": trainer.flag("bf16"),
        "fp16": trainer.flag("fp16"),
        "micro": trainer.integer("per_device_train_batch_size", 8),
        "steps": trainer.integer("gradient_accumulation_steps", 1),
        "clip": trainer.number("max_grad_norm", 1.0),
    }

"""Seconds of a step from what a training row states: the time, tokens/s, or FLOP/s by one of the known conventions."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.errors import UserError
from shardwise.model import ModelConfig
from shardwise.model.flops import hardware_flops_per_token, training_flops_per_token
from shardwise.model.parameters import count
from shardwise.validation.scoreboard.configuration import Row, whole

OLD_FORMULA = "old formula"
"""In the notes of rows whose FLOPs are 8 per parameter and token, all parameters (BLOOM's chronicles, before the page's
remark "TFLOPs calculation improved")."""

CONVENTIONS: dict[str, Callable[[ModelConfig, int], int]] = {
    "model FLOPs, causal attention counted half": training_flops_per_token,
    "model FLOPs, full attention counted": lambda model, seq: training_flops_per_token(model, seq, causal=False),
    "model FLOPs (6N + attention)": lambda model, seq: training_flops_per_token(model, seq, causal=False),
    "recompute counted (about 8N per token)": lambda model, seq: hardware_flops_per_token(
        model, seq, "full", causal=False
    ),
}
"""Start of what tables say of their TFLOP/s -> FLOPs per token. Of the rows that state a time, too, each convention
gives that time within 1% at the median."""


def step_seconds_of(row: Row, model: ModelConfig) -> float:
    """Measured seconds of a step. Raises `UserError` with the reason where the row does not say."""
    if (seconds := _stated(row, "iter_time_s")) is not None:
        return seconds
    tokens = whole(row, "gbs") * whole(row, "seq") / whole(row, "gpus")
    if (rate := _stated(row, "tokens_per_s_per_gpu")) is not None:
        return tokens / rate
    if (tera := _stated(row, "tflops_per_gpu")) is not None:
        return tokens * _flops_per_token(row, model) / (tera * 1e12)
    raise UserError("no measured time of a step, tokens/s or TFLOP/s")


def _flops_per_token(row: Row, model: ModelConfig) -> int:
    if OLD_FORMULA in str(row.get("notes", "")):
        return 8 * count(model)
    text = str(row.get("tflops_convention"))
    for start, flops in CONVENTIONS.items():
        if text.startswith(start):
            return flops(model, whole(row, "seq"))
    raise UserError(f"TFLOP/s by a convention that is not known: {text}")


def _stated(row: Row, key: str) -> float | None:
    """A positive number of the row, None where it says nothing. Raises `UserError`."""
    value = row.get(key)
    if value is not None and (type(value) not in (int, float) or not 0 < value < float("inf")):
        raise UserError(f"{key} must be a positive number, not {value!r}")
    return None if value is None else float(value)

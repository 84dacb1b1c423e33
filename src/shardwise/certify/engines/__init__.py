"""Adapters of engines, one file per engine: functions and constants that `certify.adapter.Adapter` names."""

from pathlib import Path

from shardwise.errors import UserError, did_you_mean

ENGINES = ("ddp", "fsdp2", "tensor_parallel", "pipelining", "accelerate", "transformers", "deepspeed", "megatron",
           "torchtitan", "shardwise")  # fmt: skip


def check_engine(text: str) -> None:
    """Raise `UserError` for what is neither an engine nor the file of an adapter. Imports no torch."""
    if text not in ENGINES and not text.endswith(".py"):
        raise UserError(f"no engine {text!r}, and no path of an adapter.py; {did_you_mean(text, ENGINES, 'one of')}")
    if text not in ENGINES and not Path(text).is_file():
        raise UserError(f"there is no file {text}")

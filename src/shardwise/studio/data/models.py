"""The models that a view offers, and why it leaves others out."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.model import ModelConfig
from shardwise.model.catalog import catalog

SEQS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Tokens of a sequence that training views offer."""
SEQ = 8192


def offered(why_not: Callable[[ModelConfig], str]) -> tuple[list[str], dict[str, str]]:
    """(names of the catalog that a view can show, name -> reason of the others). why_not: the reason, "" for none."""
    reasons = {name: why_not(model) for name, model in catalog().items()}
    return [name for name, why in reasons.items() if not why], {name: why for name, why in reasons.items() if why}


def most_seq(model: ModelConfig) -> int:
    """Tokens of the longest sequence that a model can be trained on: learned positions have an end."""
    return model.max_positions if model.positions == "learned" else 1 << 24


def too_long(model: ModelConfig, seq: int) -> str:
    """Why a model cannot be trained on sequences of `seq` tokens; "" where it can."""
    most = most_seq(model)
    return f"{seq:,} tokens exceed its {most:,} positions" if seq > most else ""


def seqs(model: ModelConfig) -> list[int]:
    """Lengths of sequences to choose from."""
    return [seq for seq in SEQS if seq <= most_seq(model)]

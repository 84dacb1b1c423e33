"""Rows of other engines' memory (`engines.toml`): tensors that a block saves, and bytes of weights and their state."""

from __future__ import annotations

import tomllib
from dataclasses import field, replace
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.predict.time.profiles import listed
from shardwise.records import dataclass

SECTIONS = ("saved", "dense", "experts", "backward", "backward_dense", "backward_experts")


@dataclass(frozen=True)
class TensorRow:
    """One tensor of a block, per micro-batch."""

    size: tuple[str, ...]
    """Names of `engine_bytes.Widths` and whole numbers, which are multiplied."""
    wide: float
    """Bytes of an element with products of 16 bits."""
    narrow: float
    """Bytes of an element with products of 8 bits."""
    modes: frozenset[str]
    """Values of `recompute` that save it; empty for every value but full."""
    freed_by: frozenset[str]
    """Recomputed modules that do not save it."""
    source: str
    """Place where it can be read."""

    @classmethod
    def of(cls, row: list[Any]) -> TensorRow:
        """The row as the file has it."""
        size, wide, narrow, when, source = row
        words = frozenset(when.split())
        freed = frozenset(word[1:] for word in words if word.startswith("-"))
        modes = frozenset(word for word in words if not word.startswith("-"))
        return cls(tuple(size.split()), wide, narrow, modes, freed, source)

    def saved_under(self, recompute: str, modules: frozenset[str]) -> bool:
        """Whether it is saved with that recomputation."""
        return recompute != "full" and not (self.modes and recompute not in self.modes) and not self.freed_by & modules


@dataclass(frozen=True)
class EngineMemory:
    """One engine's memory, as its code has it."""

    name: str
    weight_bytes: float = 2.0
    """Bytes of a stored weight."""
    fp8_weight_bytes: float = 2.0
    """Bytes of a block's stored weight with products of 8 bits."""
    gradient_bytes: float = 4.0
    lasting_gradients: bool = True
    """Gradients have their memory all through a step."""
    master_bytes: float = 4.0
    """Bytes of a master weight; 0 where the stored weights are updated."""
    moment_bytes: float = 4.0
    """Bytes of one moment of a parameter."""
    update_bytes: float = 0.0
    """Bytes per updated parameter while the optimizer runs."""
    reduced_bytes: float = 4.0
    """Stages 2 and 3: bytes per parameter of the unit whose gradients are reduced."""
    keeps_gathered: bool = False
    """Under a pipeline, stage 3 keeps a rank's weights whole through a step, and adds whole gradients in fp32."""
    keeps_outer: bool = False
    """Stage 3 keeps the weights of embedding and head whole through a step."""
    loss_bytes: float = 6.0
    """Bytes per logit at the loss, at their most."""
    loss_bytes_tp: float = 6.0
    """The same with the vocabulary cut over tp ranks."""
    loss_chunks: int = 1
    """Chunks of tokens in which the loss is computed."""
    reserved_share: float = 0.0
    """Memory that the allocator holds beside what is allocated, as a share of it."""
    selective: tuple[str, ...] = ()
    """Modules that `recompute=selective` recomputes."""
    modules: tuple[str, ...] = ()
    """Modules that can be recomputed."""
    partial: bool = False
    """Some of a chunk's blocks can be recomputed whole."""
    precisions: tuple[str, ...] = ()
    """Products in fewer than 16 bits that it trains with."""
    optimizers: tuple[str, ...] = ()
    """Optimizers that it has beside those of this runtime."""
    offloads: bool = False
    """Saved tensors can be kept in the host's memory, without a pipeline."""
    rows: dict[str, dict[str, TensorRow]] = field(default_factory=dict, hash=False, repr=False)
    """Section of the file -> tensor -> row."""
    facts: dict[str, str] = field(default_factory=dict, hash=False, repr=False)
    """Field -> place where it can be read."""

    def of_block(self, section: str, routed: bool) -> dict[str, TensorRow]:
        """Rows of a block: `section` "saved" or "backward"."""
        feed_forward = "experts" if routed else "dense"
        return self.rows[section] | self.rows[feed_forward if section == "saved" else f"{section}_{feed_forward}"]


@cache
def _text() -> str:
    return Path(__file__).with_name("engines.toml").read_text(encoding="utf-8")


@cache
def _table() -> dict[str, EngineMemory]:
    found: dict[str, EngineMemory] = {}
    for name, table in tomllib.loads(_text()).items():
        base = found[table.pop("base")] if "base" in table else EngineMemory(name, rows={key: {} for key in SECTIONS})
        rows = {
            key: base.rows[key] | {tensor: TensorRow.of(row) for tensor, row in table.pop(key, {}).items()}
            for key in SECTIONS
        }
        values, facts = listed(table)
        found[name] = replace(base, name=name, rows=rows, facts=base.facts | facts, **values)
    return found


def engine_memory(name: str) -> EngineMemory | None:
    """Memory of the engine of that name; None where it is not known."""
    # Most commands ask for this project's runtime, which has no table: nothing is parsed then.
    return _table().get(name) if f"[{name}]" in _text() else None

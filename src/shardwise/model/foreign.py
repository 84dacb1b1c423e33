"""The names under which Hugging Face stores a family's parameters, and how their rows lie in its tensors.

GPT-2 keeps its matrices as [in, out] (`Conv1D`), with query, key and value side by side. GPT-NeoX keeps query, key and
value as the rows of one matrix, head by head: head 0's query, its key, its value, then head 1's. Others are as ours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Literal

from shardwise.model.blueprint import ForeignSlice, Parameter
from shardwise.model.config import ModelConfig

FUSED = ("q", "k", "v")
"""Order of the parameters in a fused tensor."""


@dataclass(frozen=True, slots=True)
class ForeignNames:
    """Names of one family's tensors."""

    trunk: str
    """Prefix of all but the output head, which the folder of a base model leaves out."""
    layers: str
    """Prefix of the blocks, before their number."""
    names: dict[str, str]
    """Our module, without its block -> theirs; in blocks without `layers` and the number."""
    ignored: re.Pattern[str]
    """Tensors that hold no parameter, such as masks that old versions stored."""
    fused: Literal["", "side by side", "by head"] = ""
    """Order of query, key and value in one tensor; empty if they have a tensor each."""
    transposed: bool = False
    """Whether the blocks' matrices are stored as [in, out]."""
    whole: dict[str, str] = field(default_factory=dict)
    """Our parameter -> their tensor, for parameters that are no module's `weight` or `bias`."""

    @property
    def head(self) -> str:
        return f"{self.names['head.out']}.weight"

    @property
    def embedding(self) -> str:
        return f"{self.names['embedding.tokens']}.weight"

    def give(self, model: ModelConfig, part: str, p: Parameter) -> Parameter:
        """`p`, a parameter inside `part`, with its place in this family's tensors, if the family has such a one."""
        return replace(p, foreign=self._slice(model, part, p))

    def _slice(self, model: ModelConfig, part: str, p: Parameter) -> ForeignSlice | None:
        rows = p.shape[0]
        module, _, leaf = p.name.rpartition(".")
        if part != "blocks":
            theirs = self.names.get(f"{part}.{module}")
            name = f"{theirs}.{leaf}" if theirs else self.whole.get(f"{part}.{p.name}")
            return ForeignSlice(name, p.shape, 0, rows, rows) if name else None
        if module not in self.names:
            return None
        first, run, stride, whole = 0, rows, rows, rows
        if self.fused and module.startswith("attention.qkv."):
            run = model.head_dim if self.fused == "by head" else rows
            first, stride, whole = FUSED.index(module[-1]) * run, len(FUSED) * run, len(FUSED) * rows
        shape = (whole, *p.shape[1:])
        transposed = self.transposed and len(shape) == 2
        name = f"{self.layers}{{}}.{self.names[module]}.{leaf}"
        return ForeignSlice(name, shape[::-1] if transposed else shape, first, run, stride, transposed)

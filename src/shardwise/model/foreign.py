"""The names under which Hugging Face stores a family's parameters, and how their rows lie in its tensors.

GPT-2 keeps its matrices as [in, out] (`Conv1D`), with query, key and value side by side. GPT-NeoX keeps query, key and
value as the rows of one matrix, head by head: head 0's query, its key, its value, then head 1's. Mixtures have a tensor
for each expert, as [out, in]. DeepSeek keeps the two numbers that a rotation turns side by side. Others are as ours.
"""

import re
from dataclasses import field, replace
from typing import Literal

from shardwise.model.blueprint import ForeignSlice, Parameter
from shardwise.model.config import ModelConfig
from shardwise.records import dataclass

FUSED = ("q", "k", "v")
"""Order of the parameters in a fused tensor."""

_TURNED = ("mlp.experts.gate", "mlp.experts.up")
"""Weights of experts that are [in, out] here."""

_ROTATED = ("attention.q", "attention.q_up", "attention.kv_down")
"""Maps of latent attention whose last outputs (of each head) are rotated."""


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
    """Our parameter -> their tensor, for parameters that are no module's `weight` or `bias`. `{expert}` stands for the
    number of an expert, where each has a tensor."""
    stacked: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Tensor of a block of a model in the memory of transformers 5 -> tensors of its files: of each expert, those that
    are above each other in a matrix of the first, [experts, rows, columns]; or its other name."""

    @property
    def head(self) -> str:
        return f"{self.names['head.out']}.weight"

    @property
    def embedding(self) -> str:
        return f"{self.names['embedding.tokens']}.weight"

    def give(self, model: ModelConfig, part: str, p: Parameter) -> Parameter:
        """`p`, a parameter inside `part`, with its place in this family's tensors, if the family has such a one."""
        name = self._name(part, p)
        return replace(p, foreign=self._slice(model, part, p, name) if name else None)

    def _name(self, part: str, p: Parameter) -> str | None:
        inside = "" if part == "blocks" else f"{part}."
        module, _, leaf = f"{inside}{p.name}".rpartition(".")
        theirs = self.names.get(module)
        name = self.whole.get(f"{inside}{p.name}") or (f"{theirs}.{leaf}" if theirs else None)
        return f"{self.layers}{{}}.{name}" if name and part == "blocks" else name

    def _slice(self, model: ModelConfig, part: str, p: Parameter, name: str) -> ForeignSlice:
        tensors = p.heads if p.cut == "expert" else 1
        rows = p.shape[0] // tensors
        module = p.name.rpartition(".")[0]
        first, run, stride, whole, paired = 0, rows, rows, rows, 0
        if self.fused and module.startswith("attention.qkv."):
            run = model.head_dim if self.fused == "by head" else rows
            first, stride, whole = FUSED.index(module[-1]) * run, len(FUSED) * run, len(FUSED) * rows
        if model.latent_attention and module in _ROTATED:
            run = stride = rows // max(1, p.heads)
            paired = model.latent_attention.rope_head_dim
        shape = (whole, *p.shape[1:])
        transposed = p.name in _TURNED or (self.transposed and part == "blocks" and len(shape) == 2)
        shape = shape[::-1] if transposed else shape
        # So small steps move a router's bias that 16 bits would lose them.
        wide = p.name == "mlp.router.bias"
        return ForeignSlice(name, shape, first, run, stride, transposed, tensors, paired, wide)

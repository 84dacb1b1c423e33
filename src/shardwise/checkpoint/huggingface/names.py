"""Where each parameter lies among the tensors of a Hugging Face model: under which name, transposed, or fused.

GPT-2 keeps its matrices as [in, out] (`Conv1D`), query, key and value side by side. GPT-NeoX keeps query, key and
value as the rows of one matrix, head by head: head 0's query, its key, its value, then head 1's. Others are as ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.model import ModelConfig
from shardwise.model.parameters import Parameter, parameters

FUSED = "qkv"
"""The order of the parts of a fused tensor."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter's rows lie in a file's tensor of `shape`: row r is its row first + r // run * stride + r % run,
    or its column where it is transposed. The elements of a vector count as rows."""

    tensor: str
    shape: tuple[int, ...]
    first: int
    run: int
    stride: int
    transposed: bool = False

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(row, row in the file, count) of the unbroken runs of rows [start, stop)."""
        while start < stop:
            group, within = divmod(start, self.run)
            count = min(self.run - within, stop - start)
            yield start, self.first + group * self.stride + within, count
            start += count

    def held(self, start: int, stop: int, rows: int) -> Iterator[tuple[int, int, int]]:
        """The same of those among `rows` rows that lie in the file's rows (or columns) [start, stop)."""
        for group in range(max(0, (start - self.first) // self.stride), -(-rows // self.run)):
            at = self.first + group * self.stride
            if at >= stop:
                return
            a, b = max(start, at), min(stop, at + self.run)
            if a < b:
                yield group * self.run + a - at, a, b - a


@dataclass(frozen=True, slots=True)
class Family:
    """Names of one family. trunk: prefix of all but the output head, which the folder of a base model leaves out.
    layers: prefix of the blocks. outside, inside: our modules -> theirs. ignored: tensors that hold no parameter, such
    as masks that old versions stored."""

    trunk: str
    layers: str
    embedding: str
    outside: dict[str, str]
    inside: dict[str, str]
    ignored: re.Pattern[str]

    @property
    def head(self) -> str:
        return f"{self.outside['head.out']}.weight"


_LLAMA = Family(
    "model.",
    "model.layers.",
    "model.embed_tokens.weight",
    {"embedding.tokens": "model.embed_tokens", "head.norm": "model.norm", "head.out": "lm_head"},
    {
        "attention_norm": "input_layernorm",
        "attention.qkv.q": "self_attn.q_proj",
        "attention.qkv.k": "self_attn.k_proj",
        "attention.qkv.v": "self_attn.v_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "attention.out": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate_up.gate": "mlp.gate_proj",
        "mlp.gate_up.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
    re.compile(r".*\brotary_emb\.inv_freq"),
)
_GPT2 = Family(
    "transformer.",
    "transformer.h.",
    "transformer.wte.weight",
    {"embedding.tokens": "transformer.wte", "head.norm": "transformer.ln_f", "head.out": "lm_head"},
    {
        "attention_norm": "ln_1",
        **{f"attention.qkv.{part}": "attn.c_attn" for part in FUSED},
        "attention.out": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    re.compile(r".*\battn\.(masked_)?bias"),
)
_GPT_NEOX = Family(
    "gpt_neox.",
    "gpt_neox.layers.",
    "gpt_neox.embed_in.weight",
    {"embedding.tokens": "gpt_neox.embed_in", "head.norm": "gpt_neox.final_layer_norm", "head.out": "embed_out"},
    {
        "attention_norm": "input_layernorm",
        **{f"attention.qkv.{part}": "attention.query_key_value" for part in FUSED},
        "attention.out": "attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    re.compile(r".*\battention\.((masked_)?bias|rotary_emb\.inv_freq)"),
)


def family(model: ModelConfig) -> Family:
    """The names under which Hugging Face keeps a runnable model."""
    if model.decoder == "llama":
        return _LLAMA
    return _GPT2 if model.positions == "learned" else _GPT_NEOX


def places(model: ModelConfig) -> dict[str, Place]:
    """Parameter -> where it lies, for every parameter of a runnable model."""
    names = family(model)
    return {p.name: _place(names, model, p) for p in parameters(model)}


def _place(names: Family, model: ModelConfig, p: Parameter) -> Place:
    if p.name == "embedding.positions":
        return Place("transformer.wpe.weight", p.shape, 0, p.shape[0], p.shape[0])
    rows, transposed = p.shape[0], False
    first, run, stride, whole = 0, rows, rows, rows
    module, _, leaf = p.name.rpartition(".")
    if p.part in ("embedding", "head"):
        return Place(f"{names.outside[module]}.{leaf}", p.shape, first, run, stride)
    inner = module.removeprefix(f"{p.part}.")
    if inner.startswith("attention.qkv.") and names is not _LLAMA:
        part = FUSED.index(inner[-1])
        run = model.head_dim if names is _GPT_NEOX else rows
        first, stride, whole = part * run, len(FUSED) * run, len(FUSED) * rows
    shape = (whole, *p.shape[1:])
    if names is _GPT2 and len(shape) == 2:
        shape, transposed = shape[::-1], True
    layer = p.part.removeprefix("blocks.")
    return Place(f"{names.layers}{layer}.{names.inside[inner]}.{leaf}", shape, first, run, stride, transposed)

"""Forms of decode steps on CUDA: a block in seven kernels for one sequence, eleven for several.

One sequence: queries, keys and values (with the norm); rotation and cache; two of attention; output (with the sum);
gate and up (with norm and activation); down (with the sum). Several have norms and the activation apart. Steps with
longer chunks, and modules without such a form, compute as elsewhere (`ops/generate.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from shardwise.decoder import Batch
from shardwise.decoder.attention import Attention
from shardwise.decoder.blocks import LlamaBlock
from shardwise.decoder.decoder import Head
from shardwise.decoder.modules import GatedMLP, RMSNorm, soft_cap_
from shardwise.ops import generate
from shardwise.ops.blockwise import ScoreRule
from shardwise.ops.cuda import launch
from shardwise.ops.cuda.launch import FusedOps, HeadShape
from shardwise.ops.cuda.products import Chooser, CudaProducts, Matrix
from shardwise.ops.generate import Forward, GenerationContext, norm_factors
from shardwise.ops.paged import DecodeRows

Attend = Callable[[Tensor, DecodeRows], Tensor]
"""Queries, keys and values of all heads, side by side [B, ...] -> [B, H D]."""


class _Never:
    kernels = False


def _chooser(at: GenerationContext) -> Chooser | _Never:
    """Says whether kernels serve, which may end: where one fails."""
    return at.keep.chooser if isinstance(at.keep, CudaProducts) else _Never()


def attends(module: nn.Module) -> bool:
    """Whether the kernels compute a module's attention: not with joint norms of all heads, nor over latents."""
    return isinstance(module, Attention) and module.qk_norm is None


def core(module: Attention, at: GenerationContext) -> Attend | None:
    """What attention does between its products; None where the kernels do not compute it."""
    cache = at.cache
    if cache is None or not _chooser(at).kernels or not attends(module):
        return None
    rule, rope, kv, width = ScoreRule.of(module.core), module.rope, cache.shape.heads, module.head_dim
    gains, eps = None, 0.0
    if module.q_norm is not None and module.k_norm is not None:
        gains, eps = (norm_factors(module.q_norm, at), norm_factors(module.k_norm, at)), module.q_norm.eps

    def forward(y: Tensor, rows: DecodeRows) -> Tensor:
        heads = y.view(len(y), -1, width)
        shape = HeadShape(heads.shape[1] - 2 * kv, kv, width)
        tables = None
        if rope is not None:
            make = rope.tables
            tables = rows.shared("cosines and sines", lambda: _tables(make(rows.positions, y.dtype)))
        factors = None if gains is None else (gains[0](), gains[1]())
        q = launch.turn_and_store(heads, shape, tables, factors, eps, cache.tensor, cache.size, rows)
        return launch.attend(q, shape, cache.tensor, cache.size, rows, rule)

    return forward


def _tables(tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Cosines and sines [1, B, 1, r / 2] as [B, r / 2]."""
    cos, sin = (table[0, :, 0].contiguous() for table in tables)
    return cos, sin


def attention(module: Attention, at: GenerationContext) -> Forward:
    """[1, T, hidden] -> the same."""
    plain, attend = generate.attention(module, at), core(module, at)
    if attend is None:
        return plain
    chooser = _chooser(at)
    qkv, out = generate.side_by_side(module.qkv), module.out.forward

    def forward(x: Tensor, batch: Batch) -> Tensor:
        if not isinstance(batch, DecodeRows) or not chooser.kernels:
            return plain(x, batch)
        result: Tensor = out(attend(qkv(x)[0], batch)[None])
        return result

    return forward


def block(module: LlamaBlock, at: GenerationContext) -> Forward:
    """x + attention(norm(x)), then x + mlp(norm(x)). x: [1, T, hidden], overwritten in decode steps."""
    plain = generate.block(module, at)
    if not isinstance(module.attention, Attention) or not isinstance(module.mlp, GatedMLP):
        return plain
    attend, gate = core(module.attention, at), launch.gate_of(module.mlp.activation)
    matrices: list[Any] = [
        generate.side_by_side(module.attention.qkv), module.attention.out.forward,
        generate.side_by_side(module.mlp.gate_up), module.mlp.down.forward,
    ]  # fmt: skip
    if attend is None or not gate or not all(isinstance(each, Matrix) for each in matrices):
        return plain
    qkv, out, gate_up, down = matrices
    chooser = _chooser(at)
    first, second = _norm(module.attention_norm, at), _norm(module.mlp_norm, at, gate)
    qkv.before, gate_up.before = first, second

    def forward(x: Tensor, batch: Batch) -> Tensor:
        if not isinstance(batch, DecodeRows) or not chooser.kernels:
            return plain(x, batch)
        y = x[0]
        attended = attend(qkv.decode(y, first()), batch)
        y = out.decode(attended, FusedOps(residual=y))
        inner = gate_up.decode(y, second())
        result: Tensor = down.decode(inner, FusedOps(residual=y))
        return result[None]

    return forward


def _norm(module: RMSNorm, at: GenerationContext, gate: int = 0) -> Callable[[], FusedOps]:
    gain = norm_factors(module, at)
    return lambda: FusedOps(gain(), module.eps, gate)


def head(module: Head, at: GenerationContext) -> Forward:
    """Logits [B, vocabulary]."""
    plain, out, norm = generate.head(module, at), module.out.forward, module.norm
    chooser = _chooser(at)
    if not chooser.kernels or not isinstance(out, Matrix) or not isinstance(norm, RMSNorm):
        return plain
    around, cap = _norm(norm, at), module.softcap
    out.before = around

    def forward(x: Tensor, batch: Batch) -> Tensor:
        if not isinstance(batch, DecodeRows) or not chooser.kernels:
            return plain(x, batch)
        logits = out.decode(x[0], around())
        return soft_cap_(logits, cap)

    return forward

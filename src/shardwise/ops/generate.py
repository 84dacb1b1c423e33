"""Forms of generation: forward alone, in as few operations as there can be, each on all tokens of an engine step.

What a token needs besides its products takes a microsecond here and there: a call of a module, a view, a launch. So
a block is one function over the forms of what is in it; queries, keys and values stay together from their product to
the cache; and what all blocks share is made once per step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.decoder import Batch
from shardwise.decoder.attention import Attention, MultiHeadLatentAttention, Rope, rotate
from shardwise.decoder.blocks import MLP, GPTBlock, LlamaBlock
from shardwise.decoder.decoder import Head
from shardwise.decoder.modules import GatedMLP, Linear, Linears, Lookup, RMSNorm, TiedLinear, norm_scale, soft_cap_
from shardwise.ops.blockwise import ScoreRule
from shardwise.ops.context import LOCAL, Around, OpContext, Redistribute
from shardwise.ops.expert_share import ExpertShare
from shardwise.ops.linear import end_to_end
from shardwise.ops.paged import PagedCache, Rows
from shardwise.ops.products import MakeProduct, Plain, Product

Forward = Callable[[Tensor, Batch], Tensor]


class Copied(NamedTuple):
    """A parameter of which `keep` has copies, so that its own memory can go."""

    module: nn.Module
    name: str
    saved: int
    """Bytes that the copies need less."""


def copied(module: nn.Module, name: str, keep: MakeProduct, *matrices: Tensor) -> Iterator[Copied]:
    """A parameter that `keep` has copied, matrix by matrix; nothing where it is read where it is."""
    if keep.copies:
        yield Copied(module, name, sum(matrix.nbytes - keep.nbytes(matrix) for matrix in matrices))


@dataclass(frozen=True)
class GenerationContext(OpContext):
    """Inputs of generation's forms beside `OpContext`'s. The weights have been read."""

    keep: MakeProduct = field(default_factory=Plain)
    """Form in which matrices are stored."""
    lasting: bool = True
    """Whether weights stay where they have been read, and are not gathered anew."""
    cache: PagedCache | None = None
    """A block's keys and values."""
    share: ExpertShare | None = None
    """The rank's share in mixtures of experts, where the model has them."""
    copied: list[Copied] = field(default_factory=list)
    """Parameters whose matrices `keep` has copied."""


class SideBySide:
    """Several maps of one input. `product`: all their outputs in one tensor, side by side."""

    def __init__(self, product: Product, rows: list[int]) -> None:
        self.product, self.rows = product, rows

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.product(x).split(self.rows, -1)


def linears(module: Linears, at: GenerationContext) -> SideBySide:
    """Several column-parallel maps of one input: one product where their weights are adjacent, or copied."""
    maps, keep = module.maps, at.keep
    rows = [len(m.weight) for m in maps]
    at.copied.extend(one for m in maps for one in copied(m, "weight", keep, m.weight))
    weight, bias = _joined([m.weight for m in maps], keep), _joined([m.bias for m in maps], keep)
    if weight is None or (bias is None and maps[0].bias is not None):
        products = [keep(m.weight, m.bias) for m in maps]
        return SideBySide(lambda x: torch.cat([each(x) for each in products], -1), rows)
    return SideBySide(keep(weight, bias), rows)


def _joined(tensors: Sequence[Tensor | None], keep: MakeProduct) -> Tensor | None:
    """One tensor of all rows; None where that would need memory of its own that is not freed."""
    present = [tensor for tensor in tensors if tensor is not None]
    if not present:
        return None
    joined = end_to_end(present)
    return torch.cat(present) if joined is None and keep.copies else joined


def linear(module: Linear, at: GenerationContext) -> Product:
    """One map."""
    around = at.around()
    at.copied.extend(copied(module, "weight", at.keep, module.weight))
    if around.leave is LOCAL or not around.late_bias:
        return _leaving(at.keep(module.weight, module.bias), around.leave)
    partial_sum, bias = _leaving(at.keep(module.weight, None), around.leave), module.bias
    return partial_sum if bias is None else lambda x: partial_sum(x).add_(bias)


def tied_linear(module: TiedLinear, at: GenerationContext) -> Product:
    return _leaving(at.keep(module.weight, None), at.arounds.get("vocab", Around()).leave)


def _leaving(product: Product, leave: Redistribute) -> Product:
    return product if leave is LOCAL else lambda x: leave.forward(product(x))


def lookup(module: Lookup, at: GenerationContext) -> Product:
    """A lookup in the rows `at.vocabulary` of the table of tokens."""
    if at.vocabulary is None:
        return lambda ids: F.embedding(ids, module.weight)
    (start, stop), leave = at.vocabulary, at.arounds["lookup"].leave

    def forward(ids: Tensor) -> Tensor:
        elsewhere = (ids < start) | (ids >= stop)
        y = F.embedding((ids - start).masked_fill_(elsewhere, 0), module.weight)
        return leave.forward(y.masked_fill_(elsewhere.unsqueeze(-1), 0))

    return forward


def head(module: Head, at: GenerationContext) -> Forward:
    """Logits [B, vocabulary] of the rows that need them, equal on every rank."""
    norm, out, cap = module.norm.forward, module.out.forward, module.softcap

    def forward(x: Tensor, batch: Batch) -> Tensor:
        assert isinstance(batch, Rows)
        if batch.wanted is not None:
            x = x.index_select(1, batch.wanted)
        logits: Tensor = out(norm(x))[0]
        return soft_cap_(logits, cap)

    return forward


def norm(module: RMSNorm, at: GenerationContext) -> Product:
    """torch's own."""
    scale = norm_factors(module, at)
    return lambda x: F.rms_norm(x, module.weight.shape, scale(), module.eps)


def norm_factors(module: RMSNorm, at: GenerationContext) -> Callable[[], Tensor]:
    """Factors of a norm, computed once where its weight will not change: where matrices are copied."""
    if at.keep.copies:
        once = norm_scale(module.weight, module.weight.dtype, module.zero_centered).detach()
        return lambda: once
    if module.zero_centered:
        return lambda: norm_scale(module.weight, module.weight.dtype, zero_centered=True)
    return lambda: module.weight  # converting to its own type, twice per norm, cost several percent of a small token


def block(module: LlamaBlock | GPTBlock, at: OpContext) -> Forward:
    """x + attention(norm(x)), then x + mlp(norm(x)), or both of the same x. x: [1, T, hidden]."""
    first, attention = module.attention_norm.forward, module.attention.forward
    second = module.mlp_norm.forward
    mlp: Product = module.mlp.forward  # type: ignore[assignment]
    parallel = getattr(module, "parallel_residual", False)

    def forward(x: Tensor, batch: Batch) -> Tensor:
        after: Tensor = attention(first(x), batch).add_(x)
        out: Tensor = mlp(second(x if parallel else after)).add_(after)
        return out

    return forward


def attention(module: Attention, at: GenerationContext) -> Forward:
    """[1, T, hidden] -> the same."""
    qkv, out, cache = side_by_side(module.qkv), module.out.forward, at.cache
    assert cache is not None
    attend, width, kv = cache.attend, module.head_dim, cache.shape.heads
    norms = None
    if module.q_norm is not None and module.k_norm is not None:
        norms = module.q_norm.forward, module.k_norm.forward
    joint = module.qk_norm.forward if module.qk_norm is not None else None
    rule, keys = ScoreRule.of(module.core), kv * width
    turn = _rotation(module.rope, width, kv) if module.rope is not None else None

    def forward(x: Tensor, batch: Batch) -> Tensor:
        assert isinstance(batch, Rows)
        y = qkv(x)
        if joint is not None:
            q, k, v = y.split([y.shape[-1] - 2 * keys, keys, keys], -1)
            y = torch.cat((*joint(q, k), v), -1)
        heads = y.view(y.shape[1], -1, width)
        if norms is not None:
            q, k = norms[0](heads[:, : -2 * kv]), norms[1](heads[:, -2 * kv : -kv])
            heads = torch.cat((q, k, heads[:, -kv:]), 1)
        if turn is not None:
            heads = turn(heads, batch)
        result: Tensor = out(attend(heads, batch, rule)[None])
        return result

    return forward


def latent_attention(module: MultiHeadLatentAttention, at: GenerationContext) -> Forward:
    """[1, T, hidden] -> the same, over a cache of latents (DeepSeek-AI 2024, section 2.1.2).

    A head's products with the map from the latent are taken out of the sum over keys: queries go through its keys'
    rows, so that they meet the latent itself, and its values' rows come after the mean of the latents.
    """
    cache, widths, rule = at.cache, module.widths, ScoreRule.of(module.core)
    assert cache is not None
    if at.keep.copies:  # products of single heads have no other form
        module.kv_up.weight = nn.Parameter(module.kv_up.weight.detach().clone(), requires_grad=False)
    nope, rank = widths.nope_head_dim, widths.kv_rank
    by_head = module.kv_up.weight.detach().view(-1, nope + widths.v_head_dim, rank)
    to_latent, to_values = by_head[:, :nope], by_head[:, nope:].mT
    attend, kv_down, norm, out = cache.attend, module.kv_down.forward, module.kv_down_norm.forward, module.out.forward

    def forward(x: Tensor, batch: Batch) -> Tensor:
        assert isinstance(batch, Rows)
        q = module.queries(x)[0].unflatten(-1, (-1, widths.head_dim))
        latent, shared = kv_down(x)[0].split([rank, widths.rope_head_dim], -1)
        queries = torch.bmm(q[..., :nope].transpose(0, 1), to_latent).transpose(0, 1)
        rotated = torch.cat((q[..., nope:], shared.unsqueeze(1)), 1)
        rotate(rotated[None], module.rope.shared(batch, x.dtype))
        heads = torch.cat((torch.cat((queries, norm(latent).unsqueeze(1)), 1), rotated), -1)
        attended = attend(heads, batch, rule).unflatten(-1, (-1, rank)).transpose(0, 1)
        values = torch.bmm(attended, to_values).transpose(0, 1)
        result: Tensor = out(values.flatten(1)[None])
        return result

    return forward


def side_by_side(module: nn.Module) -> Product:
    """The product of all maps of a `Linears` that has its form."""
    form = module.forward
    assert isinstance(form, SideBySide)
    return form.product


def _rotation(rope: Rope, width: int, kv: int) -> Forward:
    """Rotation of heads [T, H + 2 K, D]: the pairs (i, i + r/2) of the first r numbers turned by the angles of their
    positions.

    Values, the last K heads, and the numbers from r on are turned by no angle, so that everything is done at once.
    """

    def tables(heads: Tensor, batch: Batch) -> tuple[int, Tensor, Tensor]:
        cos, sin = (table[0] for table in rope.tables(batch.positions, heads.dtype))
        half = cos.shape[-1]
        same, other = torch.ones_like(heads), torch.zeros_like(heads)
        same[:, :-kv, : 2 * half] = torch.cat((cos, cos), -1)
        other[:, :-kv, : 2 * half] = torch.cat((-sin, sin), -1)
        return half, same, other

    def forward(heads: Tensor, batch: Batch) -> Tensor:
        half, same, other = batch.shared("rope", lambda: tables(heads, batch))
        if 2 * half == width:
            partners = heads.roll(half, -1)
        else:
            partners = torch.cat((heads[..., half : 2 * half], heads[..., :half], heads[..., 2 * half :]), -1)
        return (heads * same).addcmul_(partners, other)

    return forward


def gated_mlp(module: GatedMLP, at: OpContext) -> Product:
    return gated(side_by_side(module.gate_up), module.down.forward, module.activation)


def gated(gate_up: Product, down: Product, activation: Product) -> Product:
    """The same of products. gate_up: the outputs of both maps, side by side."""

    def forward(x: Tensor) -> Tensor:
        gate, up = gate_up(x).chunk(2, -1)
        out: Tensor = down(activation(gate).mul_(up))
        return out

    return forward


def mlp(module: MLP, at: OpContext) -> Product:
    """down(gelu(up(x)))."""
    up, down, approximate = side_by_side(module.up), module.down.forward, module.approximate
    return lambda x: down(F.gelu(up(x), approximate=approximate))

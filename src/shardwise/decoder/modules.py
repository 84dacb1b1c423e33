"""The building blocks that both decoders share. Plain PyTorch; every weight may be any slice of the whole.

Widths and head counts are inferred from the weights at hand, never from the configuration, so that a decoder whose
weights were cut computes its share. What autograd saves is chosen with care (`predict/memory/activations.py` counts
it): tensors stay [batch, seq, heads, head_dim] until attention, norms save their input and one number a row, dropout
and rotary embedding save nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.decoder import random
from shardwise.decoder.bases import FrozenBase
from shardwise.model import ModelConfig
from shardwise.model.adapters import A, is_narrow
from shardwise.model.blueprint import Blueprint
from shardwise.model.chunking import dropout_chunk
from shardwise.model.lora import INT8, stored_columns


@dataclass
class Batch:
    """Inputs of the decoder for a micro-batch of B sequences of S tokens.

    ids: [B, S] token ids. positions: [B, S] position of each token in its document. index: [B, S] global index of each
    token in the run, by which dropout is keyed. documents: [B, S] document of each token, where packed documents must
    not attend to each other; None for plain causal attention. stream_positions, stream_index: the same for the tokens
    of the residual stream at hand. dropout_key: random key of this training step; None switches dropout off.
    """

    ids: Tensor
    positions: Tensor
    index: Tensor
    documents: Tensor | None
    stream_positions: Tensor
    stream_index: Tensor
    dropout_key: int | None = None
    reference: Tensor | None = None
    """Of preference pairs [B]: log p(chosen) - log p(rejected) of the reference."""
    auxiliary: float = 0.0
    """Share of one sequence in the step's auxiliary losses of routers; 0 where nothing is trained."""
    pool: int = 1
    """Sequences of a micro-batch, which a balance loss may count over, where B is more than that."""
    loads: dict[str, Tensor] | None = None
    """Name of a mixture of experts -> tokens that each expert was chosen for: int64 [E]; None to leave them."""
    _shared: dict[str, Any] = field(default_factory=dict)

    def shared(self, name: str, make: Callable[[], Any]) -> Any:
        """A value that all blocks share (mask, rotary tables), made at its first use."""
        if name not in self._shared:
            self._shared[name] = make()
        return self._shared[name]

    def fresh(self) -> "Batch":
        """A copy without the values that blocks share: they live as long as the copy."""
        return replace(self, _shared={})

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """Additive mask [B, 1, S, S] in `dtype`, or None where plain causal attention will do."""
        documents = self.documents
        return None if documents is None else self.shared("mask", lambda: causal_mask(documents, dtype))


def causal_mask(documents: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive causal mask that also keeps packed documents apart. documents: [B, S] ids; returns [B, 1, S, S]."""
    allowed = (documents[:, :, None] == documents[:, None, :]).tril_()
    mask = torch.zeros(allowed.shape, dtype=dtype, device=documents.device)
    return mask.masked_fill_(allowed.logical_not_(), torch.finfo(dtype).min).unsqueeze(1)


class Linear(nn.Module):
    """y = x W^T + b. weight: [out, in]; bias: [out] or None."""

    def __init__(self, inp: int, out: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, inp))
        self.bias = nn.Parameter(torch.empty(out)) if bias else None
        self.frozen_base: FrozenBase | None = None
        """How a weight in fewer bits is stored (`narrow`), beside `weight_scale`."""

    def forward(self, x: Tensor) -> Tensor:
        base = self.frozen_base
        weight = self.weight if base is None else base.dense(self.weight, self.get_parameter("weight_scale"), x.dtype)
        return F.linear(x, weight, self.bias)

    def narrow(self, base: str) -> None:
        """Memory for its weight in fewer bits, with scales, in place of the weight."""
        FrozenBase.narrow(self, base, self.weight.dtype if base == INT8 else torch.int8)
        outputs, inputs = self.weight.shape
        numbers = torch.empty(outputs, stored_columns(base, inputs), dtype=torch.int8, device=self.weight.device)
        self.weight = nn.Parameter(numbers, requires_grad=False)


class Linears(nn.Module):
    """Several linear maps of one input, kept apart by name: query, key and value; gate and up."""

    def __init__(self, inp: int, outs: dict[str, int], bias: bool) -> None:
        super().__init__()
        for name, out in outs.items():
            self.add_module(name, Linear(inp, out, bias))

    @property
    def maps(self) -> list[Linear]:
        return list(self.children())  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(linear(x) for linear in self.maps)


class Lookup(nn.Module):
    """Rows of a table. weight: [vocab, hidden]; ids [B, S] -> [B, S, hidden]."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class TiedLinear(nn.Module):
    """A linear map whose weight is a lookup's table (the tied output head). Owns no parameter."""

    def __init__(self, lookup: Lookup) -> None:
        super().__init__()
        self._lookup = [lookup]  # in a list, so that the table is not registered twice
        self._leaf: list[Tensor] = []

    @property
    def weight(self) -> Tensor:
        return self._leaf[0] if self._leaf else self._lookup[0].weight

    bias = None

    def use(self, leaf: Tensor) -> None:
        """Read the table through another leaf on the same memory, which then receives this map's gradient."""
        self._leaf = [leaf]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap)."""
    return torch.tanh(x / cap) * cap


def soft_cap_(x: Tensor, cap: float | None) -> Tensor:
    """`soft_cap` in place, where there is a cap."""
    return x.div_(cap).tanh_().mul_(cap) if cap else x


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> tuple[Tensor, Tensor]:
    """(x / rms(x) * weight, 1 / rms(x) [..., 1]), the latter in fp32 for bf16. zero_centered: by 1 + weight, and
    rounded after that product."""
    wide = x.float() if x.dtype == torch.bfloat16 else x
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    rstd = torch.addcmul(_scalar(eps, wide.dtype, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    if zero_centered:
        return (wide * rstd).mul_(norm_scale(weight, wide.dtype, zero_centered)).to(x.dtype), rstd
    return (wide * rstd).to(x.dtype).mul_(weight), rstd


@cache
def _scalar(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((), value, dtype=dtype, device=device)


def norm_scale(weight: Tensor, dtype: torch.dtype, zero_centered: bool) -> Tensor:
    return weight.to(dtype) + 1 if zero_centered else weight.to(dtype)


def rms_norm_backward(
    dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """The gradients of x and weight from that of what `rms_norm` has made of them."""
    normed, width = x * rstd, x.shape[-1]
    dy, scale = dy.to(normed.dtype), norm_scale(weight, normed.dtype, zero_centered)
    product = dy * normed
    dw = product.flatten(0, -2).sum(0)
    inner = product.mul_(scale).sum(-1, keepdim=True)
    dx = torch.mul(dy, scale, out=product).addcmul_(normed, inner, value=-1 / width).mul_(rstd)
    return dx.to(x.dtype), dw.to(weight.dtype)


class _RMSNorm(torch.autograd.Function):
    """Saves (x, 1/rms, weight): the built-in decomposes on CPU and saves several copies of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        y, rstd = rms_norm(x, weight, eps, zero_centered)
        ctx.zero_centered = zero_centered
        ctx.save_for_backward(x, rstd, weight)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, rstd, weight = ctx.saved_tensors
        return *rms_norm_backward(grads[0], x, rstd, weight, ctx.zero_centered), None, None


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim (Zhang and Sennrich 2019), or * (1 + weight) where that is zero-centered;
    statistics in fp32 for bf16 inputs."""

    def __init__(self, width: int, eps: float, zero_centered: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps, self.zero_centered = eps, zero_centered

    @classmethod
    def of(cls, config: ModelConfig, width: int) -> Self:
        return cls(width, config.norm_eps, config.norm_zero_centered)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            # In a form that the compiler fuses and differentiates.
            wide = x.float() if x.dtype == torch.bfloat16 else x
            rstd = (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
            if self.zero_centered:
                return (wide * rstd * norm_scale(self.weight, wide.dtype, self.zero_centered)).to(x.dtype)
            return (wide * rstd).to(x.dtype) * self.weight
        out: Tensor = _RMSNorm.apply(x, self.weight, self.eps, self.zero_centered)  # type: ignore[no-untyped-call]
        return out


class LayerNorm(nn.Module):
    """(x - mean) / std * weight + bias over the last dim."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class JointNorm(nn.Module):
    """Norms of queries [..., H D] and keys [..., K D], each with one mean square over all heads (OLMo-2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.q_width = config.q_width
        self.q = RMSNorm.of(config, config.q_width)
        self.k = RMSNorm.of(config, config.kv_width)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.q(q), self.k(k)


class _Dropout(torch.autograd.Function):
    """x * mask / (1 - p), the mask drawn again in backward: nothing is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counter: Callable[[], Tensor], key: int, drop: float) -> Tensor:
        ctx.counter, ctx.key, ctx.drop = counter, key, drop
        return _Dropout._masked(x, counter, key, drop)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _Dropout._masked(grads[0], ctx.counter, ctx.key, ctx.drop), None, None, None

    @staticmethod
    def _masked(x: Tensor, counter: Callable[[], Tensor], key: int, drop: float) -> Tensor:
        width = x.shape[-1]
        out = x.mul(1 / (1 - drop))
        rows, firsts = out.view(-1, width), counter().expand(x.shape[:-1]).reshape(-1) * width
        columns = torch.arange(width, device=x.device)
        step = max(1, dropout_chunk(x.numel()) // width)
        for a in range(0, len(rows), step):
            rows[a : a + step].mul_(random.keep_mask(key, firsts[a : a + step, None] + columns, drop))
        return out


class Dropout(nn.Module):
    """Dropout whose mask is a function of (step, site, global index).

    forward: x [..., width], counter() [...]: one number for each row, unique within the step; asked for again in
    backward, so that it need not be kept.
    """

    def __init__(self, drop: float, site: str) -> None:
        super().__init__()
        self.drop, self.site = drop, site

    def forward(self, x: Tensor, counter: Callable[[], Tensor], step_key: int | None) -> Tensor:
        if self.drop == 0.0 or step_key is None:
            return x
        out: Tensor = _Dropout.apply(x, counter, random.key(step_key, self.site), self.drop)  # type: ignore[no-untyped-call]
        return out

    def of_batch(self, x: Tensor, counter: Callable[[], Tensor], batch: Batch) -> Tensor:
        """Dropout with the key of `batch`. It changes every step, so compiled code must not read it."""
        return self(x, counter, batch.dropout_key)


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) with SiLU or tanh-GELU (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, width: int = 0) -> None:
        super().__init__()
        width = width or config.ffn
        self.gate_up = Linears(config.hidden, {"gate": width, "up": width}, bias=False)
        self.down = Linear(width, config.hidden, bias=False)
        self.activation = F.silu if config.activation == "silu" else partial(F.gelu, approximate="tanh")

    def forward(self, x: Tensor, batch: Batch | None = None) -> Tensor:
        gate, up = self.gate_up(x)
        return self.down(self.activation(gate) * up)


class Adapted(nn.Module):
    """What a linear map with an adapter has beside its weight and bias: A [inner, in], B [out, inner], their scale."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    scale: float

    def _add_factors(self, base: nn.Module, inner: int, scale: float) -> None:
        weight = base.get_parameter("weight")
        self.lora_a = nn.Parameter(weight.new_empty(inner, weight.shape[1]))
        self.lora_b = nn.Parameter(weight.new_empty(weight.shape[0], inner))
        self.scale = scale

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        return self.lora_a, self.lora_b

    def low(self, x: Tensor) -> Tensor:
        """scale (x A^T) B^T."""
        return self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


class AdaptedLinear(Adapted, Linear):
    """y = x W^T + b + scale (x A^T) B^T."""

    def __init__(self, base: Linear, inner: int, scale: float) -> None:
        out, inp = base.weight.shape
        Linear.__init__(self, inp, out, base.bias is not None)
        self._add_factors(base, inner, scale)

    def forward(self, x: Tensor) -> Tensor:
        return Linear.forward(self, x) + self.low(x)


def adapt(decoder: nn.Module, scale: float, whole: Blueprint) -> None:
    """Replace the maps of a decoder that have adapters in its blueprint, and narrow those with a base in fewer bits."""
    for parameter in whole.parameters():
        if parameter.name.endswith(f".{A}"):
            owner, _, leaf = parameter.name.removesuffix(f".{A}").rpartition(".")
            parent = decoder.get_submodule(owner)
            base = parent.get_submodule(leaf)
            assert isinstance(base, Linear)
            setattr(parent, leaf, AdaptedLinear(base, parameter.shape[0], scale))
    for parameter in whole.parameters():
        if is_narrow(parameter):
            module = decoder.get_submodule(parameter.name.rpartition(".")[0])
            assert isinstance(module, Linear)
            module.narrow(parameter.dtype)

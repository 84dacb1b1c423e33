"""The table of forms: (kind of module, mode, device, options) -> how it computes. `lower` alone applies it.

A module whose kind has no row computes as it is written in `decoder/`, over the forms of what is in it: a new family's
block needs a row only for a form of its own.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from torch import nn

from shardwise.decoder.attention import Attention, CoreAttention, MultiHeadLatentAttention, Rope, SharedKey
from shardwise.decoder.blocks import MLP, GPTBlock, LlamaBlock
from shardwise.decoder.decoder import Head
from shardwise.decoder.experts import Mixture
from shardwise.decoder.modules import (
    AdaptedLinear,
    Dropout,
    GatedMLP,
    JointNorm,
    Linear,
    Linears,
    Lookup,
    RMSNorm,
    TiedLinear,
)
from shardwise.ops import compiled, generate, generate_experts, linear
from shardwise.ops.attention import blocked_attention, core_across_ranks, core_attention
from shardwise.ops.context import Mode, OpContext, Options
from shardwise.ops.cpu.attention import short_attention
from shardwise.ops.cpu.norm import mirrored_norm
from shardwise.ops.cuda import decode
from shardwise.ops.cuda.halves import cuda_halves
from shardwise.ops.cuda.norm import fused_norm
from shardwise.ops.cuda.rotary import rotary
from shardwise.ops.experts import mixture, routed_parts
from shardwise.ops.fusion import LLAMA_HALVES
from shardwise.ops.joint_norm import joint_norm
from shardwise.ops.linear import uncapped_head
from shardwise.ops.llama_halves import llama_halves
from shardwise.ops.recompute import recomputed_core

Form = Callable[[Any, Any], Callable[..., Any] | None]
"""(module, its `OpContext`) -> the function that computes it; None to leave it. A form may use the one that the module
has (`module.forward`), and those of modules inside, which come first."""


class Row(NamedTuple):
    """One row of the table."""

    mode: Mode
    kind: type[nn.Module]
    form: Form
    device: str = ""
    """Type of the device; empty for every one."""
    when: Callable[[Options], bool] = lambda options: True
    writes: bool = False
    """Whether the form writes the gradients of its weights into their `GradSlot`, past autograd."""
    covers: Callable[[Any], Iterable[nn.Module]] = lambda module: ()
    """The modules inside that the form computes itself: they get no form of their own."""
    breaks: bool = False
    """Whether the form splits a compiled graph."""
    method: str = "forward"
    """The module's method that it replaces."""


class Lowered(NamedTuple):
    """Result of `lower` for a part."""

    writing: set[nn.Module]
    """Modules whose gradients do not pass through autograd's accumulation."""
    breaks: bool
    """Whether a compiled graph of the part is split."""


def _by_hand(options: Options) -> bool:
    """A compiler takes a block's maps as they are, unless they communicate: it cannot write gradients into a slot."""
    return options.split or not options.compiled


def _eager(options: Options) -> bool:
    return not options.compiled


def _in_halves(options: Options) -> bool:
    return options.fused is LLAMA_HALVES


def _splits(options: Options) -> bool:
    return options.split


def _maps(module: Linears) -> Iterable[nn.Module]:
    return module.maps


def _halves(block: LlamaBlock) -> Iterable[nn.Module]:
    return chain.from_iterable(block.get_submodule(name).modules() for name in LLAMA_HALVES.replaces)


TABLE = (
    Row("train", Linears, linear.linears, when=_by_hand, writes=True, covers=_maps),
    Row("train", Linear, linear.linear, when=_by_hand, writes=True),
    Row("train", AdaptedLinear, linear.linear, when=_by_hand, writes=True),
    Row("train", TiedLinear, linear.tied_linear, writes=True),
    Row("train", Lookup, linear.lookup, writes=True),
    Row("train", SharedKey, linear.shared_key, when=_splits),
    Row("train", CoreAttention, core_attention),
    Row("train", CoreAttention, short_attention, "cpu", lambda o: o.attention == "sdpa" and not o.compiled),
    Row("train", CoreAttention, blocked_attention, when=lambda o: o.attention == "sdpa"),
    Row("train", CoreAttention, core_across_ranks, when=lambda o: o.cut_sequence),
    Row("train", CoreAttention, recomputed_core, when=lambda o: o.recompute == "selective"),
    Row("train", Mixture, mixture, writes=True, covers=routed_parts),
    Row("train", RMSNorm, fused_norm, "cuda", when=_eager),
    Row("train", Rope, rotary, "cuda", when=_eager),
    Row("train", LlamaBlock, llama_halves, when=_in_halves, writes=True, covers=_halves),
    Row("train", LlamaBlock, cuda_halves, "cuda", when=_in_halves, writes=True, covers=_halves),
    Row("compiled", Linears, compiled.leave_eager, when=_splits, covers=_maps, breaks=True),
    Row("compiled", Linear, compiled.leave_eager, when=_splits, breaks=True),
    Row("compiled", AdaptedLinear, compiled.leave_eager, when=_splits, breaks=True),
    Row("compiled", SharedKey, compiled.leave_eager, when=_splits, breaks=True),
    Row("train", JointNorm, joint_norm, when=_splits),
    Row("train", Head, uncapped_head),
    Row("compiled", JointNorm, compiled.leave_eager, when=_splits, breaks=True),
    Row("compiled", Mixture, compiled.leave_eager, breaks=True),
    Row("compiled", CoreAttention, compiled.eager_core, breaks=True),
    Row("compiled", CoreAttention, compiled.checkpointed_core, when=lambda o: o.recompute == "selective"),
    Row("compiled", Dropout, compiled.eager_dropout, method="of_batch", breaks=True),
    Row("generate", Linears, generate.linears, covers=_maps),
    Row("generate", Linear, generate.linear),
    Row("generate", TiedLinear, generate.tied_linear),
    Row("generate", Lookup, generate.lookup),
    Row("generate", RMSNorm, generate.norm),
    Row("generate", RMSNorm, mirrored_norm, "cpu"),
    Row("generate", JointNorm, joint_norm, when=_splits),
    Row("generate", Attention, generate.attention),
    Row("generate", Attention, decode.attention, "cuda"),
    Row("generate", MultiHeadLatentAttention, generate.latent_attention, covers=lambda module: [module.kv_up]),
    Row("generate", GatedMLP, generate.gated_mlp),
    Row("generate", MLP, generate.mlp),
    Row("generate", Mixture, generate_experts.mixture, covers=generate_experts.served_parts),
    Row("generate", LlamaBlock, generate.block),
    Row("generate", LlamaBlock, decode.block, "cuda"),
    Row("generate", GPTBlock, generate.block),
    Row("generate", Head, generate.head),
    Row("generate", Head, decode.head, "cuda"),
)
"""If several rows match a module, they are applied in this order, each to the result of the one before."""


def lower(part: nn.Module, context: OpContext) -> Lowered:
    """Give every module of a part the forms that suit it, inner ones first."""
    options = context.options
    rows: dict[type[nn.Module], list[Row]] = {}
    for row in TABLE:
        if row.mode == options.mode and row.device in ("", options.device) and row.when(options):
            rows.setdefault(row.kind, []).append(row)
    named = list(part.named_modules(prefix=context.unit))
    covered = {inner for _, module in named for row in rows.get(type(module), ()) for inner in row.covers(module)}
    lowered = Lowered(set(), False)
    for name, module in reversed(named):
        for row in rows.get(type(module), ()) if module not in covered else ():
            if (form := row.form(module, replace(context, name=name))) is None:
                continue
            install(module, form, row.method)
            if row.writes:
                lowered.writing.update((module, *row.covers(module)))
            lowered = lowered._replace(breaks=lowered.breaks or row.breaks)
    return lowered


def install(module: nn.Module, form: Callable[..., Any], method: str = "forward") -> None:
    """Let this one module compute by another function; its parameters and their names stay."""
    module.__dict__[method] = form

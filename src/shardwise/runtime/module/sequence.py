"""Sequence parallelism of a user's module (Korthikanti et al. 2022): between its maps the stream is cut along the
sequence.

From the entry of the first block to the exit of the last one each tensor-parallel rank has a shard of the stream
[batch, seq, width]. It is gathered where the module that owns column-parallel maps begins (attention, feed-forward), or
at the map itself where that is the block; row-parallel maps scatter their sums. Norms see shards, so that the gradients
of their weights are parts that are summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardwise.errors import LayoutError, UserError
from shardwise.layout import Layout
from shardwise.layout.axes import TP
from shardwise.layout.styles import SEQUENCE, MapStyle
from shardwise.layout.tensor import Edges, Redistribution
from shardwise.ops.context import COMPLETE, Exchange, Pending
from shardwise.runtime.tensor.redistribute import SEQUENCE_DIM, GatherSequence
from shardwise.runtime.transport.comms import Comms

_LEAVES: dict[Redistribution, Redistribution] = {"sum": "scatter sequence"}


@dataclass(frozen=True)
class SequencePlan:
    """Where a module's stream is gathered, and which parameters see shards."""

    blocks: tuple[str, ...] = ()
    """In the order of their forward passes; none without sequence parallelism."""
    gathered: tuple[str, ...] = ()
    """Modules whose first tensor is gathered."""
    partial: frozenset[str] = field(default_factory=frozenset)
    """Names of parameters of which each rank has a part of the gradient."""

    def sees_shards(self, aliases: Sequence[str]) -> bool:
        """Whether a parameter with these names sees shards. Raises `LayoutError` where some of its uses do not."""
        shards = self.partial.intersection(aliases)
        if shards and len(shards) < len(aliases):
            raise LayoutError(
                f"sp: {' and '.join(aliases)} are one parameter, and not all see shards of sequences: leave sp out"
            )
        return bool(shards)


def sequence_plan(
    module: nn.Module, layout: Layout, styles: Mapping[str, MapStyle], named: Mapping[str, str], blocks: Sequence[str]
) -> tuple[SequencePlan, dict[str, MapStyle]]:
    """(the plan, styles with the edges of cut sequences). named: module -> the name of its style. Raises `LayoutError`
    for a module whose blocks cannot have shards, as far as the plan shows it."""
    _check(module, blocks)
    owners = {name.rpartition(".")[0] for name, style in styles.items() if style.cut == "column" and _in(name, blocks)}
    containers = (nn.ModuleList, nn.ModuleDict)
    gathered = {o for o in owners if o not in blocks and not isinstance(module.get_submodule(o), containers)}
    if not owners:
        raise LayoutError("sp needs column- and row-parallel maps in the blocks, and the plan has none: leave it out")
    cut = dict(styles)
    for name, style in styles.items():
        if _in(name, blocks) and style.cut != "replicated":
            enter: Redistribution = style.edges.enter
            if enter == "copy":
                enter = "none" if name.rpartition(".")[0] in gathered else "gather sequence"
            cut[name] = style._replace(edges=Edges(enter, _LEAVES.get(style.edges.leave, style.edges.leave)))
    shards = frozenset(_shards(module, blocks, gathered, styles, named))
    return SequencePlan(tuple(blocks), tuple(sorted(gathered)), shards), cut


def _in(name: str, parts: Sequence[str] | set[str]) -> bool:
    """Whether a name is one of some paths, or below one."""
    return any(f"{name}.".startswith(f"{part}.") for part in parts)


def _check(module: nn.Module, blocks: Sequence[str]) -> None:
    if len({type(module.get_submodule(block)) for block in blocks}) != 1:
        raise LayoutError(
            f"sp cuts the stream between the blocks of {type(module).__name__}, which must be of one class, one after "
            "the other: leave it out"
        )


def _shards(
    module: nn.Module, blocks: Sequence[str], gathered: set[str], styles: Mapping[str, MapStyle],
    named: Mapping[str, str],
) -> list[str]:  # fmt: skip
    """Names of the parameters that see shards. Raises `LayoutError` for one of which nothing says what it sees."""
    shards = []
    for name, _ in module.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        style = styles.get(owner, MapStyle())
        if not _in(name, blocks) or (style.cut != "replicated" and leaf != "bias"):
            continue
        if style.cut == "column":
            if style.edges.leave != "none":
                raise LayoutError(f"sp: the bias of {owner} is added to gathered outputs: leave sp out")
        elif style.cut == "row" or named.get(owner) == SEQUENCE:
            shards.append(name)
        elif _in(name, gathered):
            if not style.partial:
                raise LayoutError(
                    f"sp: {name} is whole beside maps that are cut and sees whole sequences: leave sp out"
                )
        elif "norm" in type(module.get_submodule(owner)).__name__.lower():
            shards.append(name)
        else:
            raise LayoutError(
                f"sp: {name} is in no norm and no cut map: give {owner or 'it'} the style {SEQUENCE} if it sees the "
                "stream, or leave sp out"
            )
    return shards


class _WholeStream(GatherSequence):
    """The whole stream of all ranks' shards, which all of them go on with in the same way."""

    def backward(self, grad: Tensor) -> tuple[Tensor, Pending]:
        return grad.chunk(self.comms.size(TP), SEQUENCE_DIM)[self.comms.index(TP)].contiguous(), COMPLETE


class _StreamShard(_WholeStream):
    """This rank's shard of a stream that all ranks have; its gradient is gathered."""

    def forward(self, x: Tensor) -> Tensor:
        ranks = self.comms.size(TP)
        if x.dim() < 2 or x.shape[SEQUENCE_DIM] % ranks:
            raise UserError(f"sp: tp={ranks} does not divide the sequence of a stream of shape {list(x.shape)}")
        return super().backward(x)[0]

    def backward(self, grad: Tensor) -> tuple[Tensor, Pending]:
        return super().forward(grad), COMPLETE


def gather_inputs(
    module: nn.Module, plan: SequencePlan, comms: Comms, outside: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Let the modules of column-parallel maps gather their first tensor. outside: keeps communication out of
    compiled blocks."""
    for path in plan.gathered:
        part = next(block for block in plan.blocks if _in(path, [block]))
        child, gather = module.get_submodule(path), partial(Exchange.apply, GatherSequence(comms, part))
        child.forward = partial(_first, outside(gather), child.forward)  # type: ignore[assignment]


def cut_stream(module: nn.Module, plan: SequencePlan, comms: Comms) -> None:
    """Cut the stream where the first block begins, and gather it where the last one ends."""
    if not plan.blocks:
        return
    first, last = (module.get_submodule(plan.blocks[at]) for at in (0, -1))
    shard = partial(Exchange.apply, _StreamShard(comms, plan.blocks[0]))
    first.forward = partial(_first, shard, first.forward)  # type: ignore[assignment]
    last.forward = partial(_gathered, partial(Exchange.apply, _WholeStream(comms, plan.blocks[-1])), last.forward)  # type: ignore[assignment]


def _first(change: Callable[[Tensor], Tensor], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A forward whose first argument, a tensor, is changed."""
    if args:
        return forward(change(args[0]), *args[1:], **kwargs)
    name = next(iter(kwargs))
    return forward(**{name: change(kwargs[name])} | {key: x for key, x in kwargs.items() if key != name})


def _gathered(change: Callable[[Tensor], Tensor], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A forward whose result, or its first element, is changed."""
    out = forward(*args, **kwargs)
    return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

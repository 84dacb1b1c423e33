"""`Blueprint`: a model's parts and their parameters, without torch. Layout, engine, checkpoint and prediction read it.

A part that repeats is described once, with its count, so that a model of a trillion parameters is as short as a small
one. A parameter says itself how it may be cut over ranks, how it starts, whether weight decay touches it, and where
other software stores it; nothing has to be concluded from its name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shardwise.codec import Json
from shardwise.model.operations import Elementwise, Operation
from shardwise.records import dataclass

if TYPE_CHECKING:
    from shardwise.model.trace import Trace

Cut = Literal["column", "kv heads", "row", "vocab", "expert", "replicated"]
"""Cut of a parameter under tensor parallelism. column: its rows, which are outputs; kv heads: its rows, by key/value
head; row: its columns, which are inputs; vocab: its rows, which are tokens; expert: its rows by expert, which expert
parallelism splits, and its columns, the experts' width, which tensor parallelism inside experts splits."""

PartKind = Literal["embedding", "block", "head", "root", "entry", "exit"]
"""root: everything of a user's module that is in none of its blocks. It computes around all of them. entry, exit: under
a pipeline, where that is what comes before and after them."""


@dataclass(frozen=True, slots=True)
class ForeignSlice:
    """The rows of another software's tensor that hold a parameter. Elements of a vector count as rows."""

    tensor: str
    """Its name; in a part that repeats, `{}` stands for the part's number, and `{expert}` for an expert's."""
    shape: tuple[int, ...]
    """Shape of the whole tensor, in which several parameters may be fused."""
    first: int
    run: int
    stride: int
    """Row r of the parameter is row first + r // run * stride + r % run, or that column where it is transposed."""
    transposed: bool = False
    tensors: int = 1
    """Tensors of this shape, one for each expert: each holds as many rows of the parameter, in order."""
    paired: int = 0
    """Last rows of each run that are pairs of neighbors in the tensor: here the first rows of all pairs come before the
    second ones."""
    wide: bool = False
    """Whether the tensor is float32 in files whose others have 16 bits."""

    def each(self, rows: int) -> Iterator[tuple[int, ForeignSlice]]:
        """(first row, slice) of every tensor that holds some of the parameter's `rows` rows."""
        if self.tensors == 1:
            yield 0, self
            return
        for expert in range(self.tensors):
            name = self.tensor.replace("{expert}", str(expert))
            yield expert * (rows // self.tensors), self._under(name, 1)

    def _strides(self) -> tuple[tuple[int, int, int, int], ...]:
        """(row, row in the tensor, count, step in the tensor) of the pieces of a run, from its start."""
        plain, pairs = self.run - self.paired, self.paired // 2
        if not pairs:
            return ((0, 0, plain, 1),)
        return (0, 0, plain, 1), (plain, plain, pairs, 2), (plain + pairs, plain + 1, pairs, 2)

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """(row, row in the tensor, count, step in the tensor) of the unbroken runs of rows [start, stop)."""
        for group in range(start // self.run, -(-stop // self.run)):
            at, theirs = group * self.run, self.first + group * self.stride
            for row, there, count, step in self._strides():
                a, b = max(start, at + row), min(stop, at + row + count)
                if a < b:
                    yield a, theirs + there + (a - at - row) * step, b - a, step

    def held(self, start: int, stop: int, rows: int) -> Iterator[tuple[int, int, int, int]]:
        """Like `runs`, of those among `rows` rows that are in the tensor's rows (or columns) [start, stop)."""
        for group in range(max(0, (start - self.first) // self.stride), -(-rows // self.run)):
            at = self.first + group * self.stride
            if at >= stop:
                return
            for row, there, count, step in self._strides():
                a, b = max(0, -(-(start - at - there) // step)), min(count, -(-(stop - at - there) // step))
                if a < b:
                    yield group * self.run + row + a, at + there + a * step, b - a, step

    def at(self, number: int) -> ForeignSlice:
        return self._under(self.tensor.replace("{}", str(number)), self.tensors)

    def _under(self, name: str, tensors: int) -> ForeignSlice:
        # `dataclasses.replace` takes twice as long.
        return ForeignSlice(
            name, self.shape, self.first, self.run, self.stride, self.transposed, tensors, self.paired, self.wide
        )


@dataclass(frozen=True)
class Parameter:
    """One parameter tensor."""

    name: str
    """Global (`blocks.3.mlp.down.weight`); inside a `Part` without the part's name."""
    shape: tuple[int, ...]
    part: str = ""
    """Name of the part that holds it; empty inside a `Part`."""
    init: Literal["normal", "zeros", "ones"] = "normal"
    std: float = 0.02
    decay: bool = True
    """Whether weight decay touches it: matrices, but not norms and biases (GPT-2, Llama practice)."""
    cut: Cut = "replicated"
    heads: int = 0
    """Heads, or experts, along the dim that is cut; 0 where there are none."""
    partial: bool = False
    """Whether each rank of a tensor-parallel group sees its gradient only for its own heads, tokens or widths."""
    foreign: ForeignSlice | None = None
    """Its place in Hugging Face files; None if unknown."""
    transposed: bool = False
    """Whether a matrix is [inputs, outputs]: its rows and columns change places in `cut` (GPT-2's Conv1D)."""
    absorbed: bool = False
    """Whether generation multiplies single heads of it, in the layout's precision, with queries and with outputs."""
    frozen: bool = False
    """Whether training leaves it as it is: it has no gradient and no optimizer state."""
    module_shape: tuple[int, ...] = ()
    """Shape in its module; all dims but the last are the rows of `shape`; empty where it is `shape`."""
    packed: int = 0
    """Of stacked experts: maps whose outputs each expert's rows are, end to end. The width is split in each of them; it
    is columns where this is 0."""
    dtype: str = ""
    """Format of a frozen matrix, and of its scales, that is not the layout's precision (`lora.BASES`)."""
    sees_shards: bool = False
    """Of a user's module: whether it sees shards of sequences under sequence parallelism."""
    stored: str = ""
    """Of a model that is only counted: the precision of its files, by `precision.py`; empty for 16 bits."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def at(self, part: str, number: int) -> Parameter:
        foreign = self.foreign.at(number) if self.foreign else None
        name = f"{part}.{self.name}"
        return Parameter(
            name, self.shape, part, self.init, self.std, self.decay, self.cut, self.heads, self.partial, foreign,
            self.transposed, self.absorbed, self.frozen, self.module_shape, self.packed, self.dtype, self.sees_shards,
            self.stored,
        )  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Consecutive equal pieces of a model that a token passes through, such as its blocks."""

    name: str
    """`embedding`, `head`; of blocks, which are numbered, `blocks`."""
    kind: PartKind
    module: str
    """Name of the plain PyTorch module that computes it."""
    parameters: tuple[Parameter, ...]
    operations: tuple[Operation, ...]
    """In the order of the forward pass."""
    gathered: int
    """Inputs of column-parallel maps: under tensor parallelism each needs the whole residual stream."""
    summed: int
    """Outputs that tensor-parallel ranks have parts of: each is summed, or scattered over the stream's shards."""
    first: int | None = None
    """Number of the first one; None for a part that is not numbered."""
    count: int = 1
    reads: tuple[str, ...] = ()
    """Global names of parameters of other parts that it reads as well: a tied head's table."""

    @property
    def names(self) -> list[str]:
        return [self.name] if self.first is None else [f"{self.name}.{self.first + i}" for i in range(self.count)]

    @property
    def statistics(self) -> tuple[int, ...]:
        """Numbers per token that tensor-parallel ranks sum for each norm over heads of several of them, forward and
        backward."""
        return tuple(
            len(op.widths) for op in self.operations if isinstance(op, Elementwise) and op.kind == "joint norms"
        )

    @property
    def numel(self) -> int:
        """Elements of the parameters of one of them."""
        return sum(p.numel for p in self.parameters)

    @property
    def routes(self) -> bool:
        return any(p.cut == "expert" for p in self.parameters)

    @property
    def without_experts(self) -> Part:
        kept = tuple(p for p in self.parameters if p.cut != "expert")
        return replace(
            self, parameters=kept, operations=tuple(o for o in self.operations if getattr(o, "rows", "") != "routed")
        )

    def trains(self, module: str = "") -> bool:
        """Whether any parameter of a module inside, or of the part, is trained."""
        prefix = f"{module}." if module else ""
        return any(not p.frozen for p in self.parameters if p.name.startswith(prefix))

    def at(self, name: str) -> list[Parameter]:
        """The parameters of the single part of this name. What is in no block has its global names already."""
        if self.kind in ("root", "entry", "exit"):
            return [replace(p, part=name) for p in self.parameters]
        number = 0 if self.first is None else int(name.rpartition(".")[2])
        return [p.at(name, number) for p in self.parameters]


@dataclass(frozen=True)
class Blueprint(Json):
    """A model: its parts in the order in which a token passes through them."""

    json_name = "a shardwise blueprint"
    json_later = (("Trace", "shardwise.model.trace"),)

    name: str
    hidden: int
    """Width of the residual stream."""
    parts: tuple[Part, ...]
    trace: Trace | None = field(default=None, hash=False)
    """What its steps do, of a user's module that was traced."""

    @cached_property
    def _by_name(self) -> dict[str, Part]:
        return {name: part for part in self.parts for name in part.names}

    @property
    def names(self) -> list[str]:
        return list(self._by_name)

    def part(self, name: str) -> Part:
        return self._by_name[name]

    def kind(self, name: str) -> PartKind:
        return self._by_name[name].kind

    def of_kind(self, kind: PartKind) -> list[Part]:
        return [part for part in self.parts if part.kind == kind]

    @cached_property
    def distinct_blocks(self) -> list[tuple[Part, int]]:
        """Blocks with different operations, and how many there are of each."""
        found: dict[tuple[Any, ...], tuple[Part, int]] = {}
        for part in self.of_kind("block"):
            computes = part.operations, part.gathered, part.summed
            first, count = found.get(computes, (part, 0))
            found[computes] = first, count + part.count
        return list(found.values())

    def parameters_of(self, name: str) -> Sequence[Parameter]:
        return self._parameters[name]

    @cached_property
    def _parameters(self) -> dict[str, list[Parameter]]:
        """Made once: searches ask for them for each layout."""
        return {name: part.at(name) for name, part in self._by_name.items()}

    def parameters(self) -> Iterator[Parameter]:
        """All parameters, part by part. A tied head has none of its own (`Part.reads`)."""
        for name in self._by_name:
            yield from self.parameters_of(name)

    # -- what a configuration has, too

    kv_heads: ClassVar[int] = 1 << 30
    """No two ranks that cut heads have the same one (`layout.styles`)."""
    experts: ClassVar[None] = None
    """None that a search would split."""
    lora: ClassVar[None] = None
    """None that a search would price apart: a traced module's adapters are parameters like others."""
    attention_dropout: ClassVar[float] = 0.0
    """What it drops is in its trace."""
    full_attention_every: ClassVar[int] = 0
    """Its blocks are as they were traced."""
    counted: ClassVar[None] = None
    positions: ClassVar[str] = ""
    max_positions: ClassVar[int] = 1 << 24
    """Its rows are those of its trace."""

    @cached_property
    def layers(self) -> int:
        return max(1, sum(part.count for part in self.of_kind("block")))

    @property
    def tied(self) -> bool:
        """Both ends of a traced module are one root without a pipeline; under one, where they share a parameter."""
        return self.trace is not None

    def why_not_runnable(self) -> None:
        """No reason: its code computes it."""

    @cached_property
    def freezes(self) -> bool:
        return any(p.frozen for part in self.parts for p in part.parameters)

    @cached_property
    def routes(self) -> bool:
        return any(part.routes for part in self.parts)

    def routes_in(self, part: str) -> bool:
        """Whether a part has a router."""
        return any(op.kind == "router" for op in self.part(part).operations)

    @cached_property
    def sums_table(self) -> bool:
        """Whether there is a shared table whose gradient is a sum over two ends of the model."""
        shared = self.shared
        return bool(shared) and any(p.name in shared and not p.frozen for p in self.parameters())

    def trains_in(self, part: str, module: str = "") -> bool:
        """Whether a part, or a module inside, computes gradients of weights that it reads."""
        of = self.part(part)
        return of.trains(module) or (bool(of.reads) and self.sums_table)

    @cached_property
    def table(self) -> Parameter:
        """The table of tokens that the embedding looks up; of a user's module, what its entry shares."""
        if self.of_kind("entry"):
            return next(p for p in self.parameters() if p.name in self.shared)
        (first, *_) = self.of_kind("embedding")
        return next(p for p in first.at(first.name) if p.cut == "vocab")

    @cached_property
    def piped(self) -> Blueprint:
        """The parts under a pipeline: of a traced module with a known order the root is cut into entry and exit."""
        if self.trace is None or (ends := self.trace.ends) is None or not (roots := self.of_kind("root")):
            return self
        (root,) = roots

        def end(kind: PartKind, names: tuple[str, ...], reads: tuple[str, ...]) -> Part:
            held = tuple(p for p in root.parameters if p.name in names)
            return replace(root, name=kind, kind=kind, parameters=held, reads=reads)

        entry, last = end("entry", ends.entry, ()), end("exit", ends.exit, ends.reads)
        return replace(self, parts=(entry, *self.of_kind("block"), last))

    @cached_property
    def with_whole_experts(self) -> Blueprint:
        """A user's module where no degree splits its experts: they are parameters like others."""

        def joined(part: Part) -> Part:
            held = (
                replace(p, cut="replicated", heads=0, packed=0) if p.cut == "expert" else p for p in part.parameters
            )
            return replace(part, parameters=tuple(held))

        return replace(self, parts=tuple(map(joined, self.parts))) if self.routes else self

    @cached_property
    def on_shards(self) -> Blueprint:
        """A user's module under sequence parallelism: what sees shards has a part of its gradient on each rank, and the
        traced steps are those with shards."""

        def cut(part: Part) -> Part:
            held = tuple(replace(p, partial=True) if p.sees_shards else p for p in part.parameters)
            return replace(part, parameters=held)

        trace = self.trace and self.trace.on_shards
        return replace(self, parts=tuple(map(cut, self.parts)), trace=trace)

    def stages(self, blocks: Sequence[int]) -> list[list[str]]:
        """Names of the parts on each stage of a pipeline. blocks: so many on each, in order; what is before the model's
        blocks is on the first stage, what is after them on the last."""
        names = self.names
        first = next(i for i, name in enumerate(names) if self.kind(name) == "block")
        ends = [first + sum(blocks[: stage + 1]) for stage in range(len(blocks))]
        ends[-1] = len(names)
        return [names[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    @cached_property
    def sharing(self) -> frozenset[str]:
        if not self.shared:
            return frozenset()
        readers = {name for part in self.parts if part.reads for name in part.names}
        return frozenset(readers | {p.part for p in self.parameters() if p.name in self.shared})

    @cached_property
    def shared(self) -> frozenset[str]:
        """Parameters that a part reads beside the one that holds them."""
        return frozenset(name for part in self.parts for name in part.reads)

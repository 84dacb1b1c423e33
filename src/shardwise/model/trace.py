"""`Trace`: observed memory, communication and operations of a module without a description, free of torch.

A traced step is a step of the runtime on fake tensors, on one data-parallel rank. What ZeRO, data parallelism and
offloading add follows from the units, so that one traced step stands for every layout with its tp, sp, precision and
recomputation.
Numbers are kept for two sizes of a micro-batch; between and beyond these they are taken to be linear. A single row,
which needs fewer copies, has steps without operations.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from shardwise.errors import LayoutError
from shardwise.model.traced_stages import Pair, TracedEnds, TracedStages


@dataclass(frozen=True)
class TracedOp:
    """Operations of one kind and size in a part and a pass."""

    kind: Literal["product", "attention", "pass"]
    """pass: over tensors in memory, without matrix products."""
    name: str
    """torch's own, such as `mm`."""
    module: str
    """Path of the submodule that ran it, inside the module; empty in a backward pass."""
    phase: Literal["forward", "backward"]
    sizes: tuple[Pair, ...]
    """product: batch, m, n, k; attention: batch, queries, keys, heads, key/value heads, width of a head, 1
    where it is causal."""
    flops: Pair
    nbytes: Pair
    """Bytes of the tensors that it reads and writes."""
    count: int = 1
    end: Literal["", "entry", "exit"] = ""
    """Of the root: whether it comes before the blocks or behind them."""


@dataclass(frozen=True)
class TracedPart:
    """Operations of equal parts."""

    parts: tuple[str, ...]
    """Names of single parts."""
    operations: tuple[TracedOp, ...]


@dataclass(frozen=True)
class TracedMoment:
    """Bytes of activations and inputs at one moment of a micro-batch, the engine's buffers left out."""

    when: Literal["loss", "begin", "backward", "reduction", "between"]
    """loss: the most until the loss is there; begin: before a part's backward pass; backward: the most in it;
    reduction: after it; between: the most until the next one begins."""
    part: str
    first: Pair
    later: Pair
    """Where gradients of weights are added to those of an earlier micro-batch."""
    received: Pair = (0, 0)
    """Of `first`, bytes of rows that experts here receive where all receive as many."""


@dataclass(frozen=True)
class TracedCollective:
    """Collectives of a part that are neither gathers of parameters nor sums of their gradients."""

    phase: Literal["forward", "backward"]
    op: str
    unit: str
    dtype: str
    elements: Pair
    count: int
    """Per micro-batch."""
    end: Literal["", "entry", "exit"] = ""
    """As of `TracedOp`."""
    group: str = ""
    """Its ranks, as a ledger names them; empty for the tensor-parallel ones."""
    received: Pair = (0, 0)
    """Of its elements, those of rows that experts here receive where all receive as many."""


@dataclass(frozen=True)
class TracedStep:
    """One traced step."""

    tp: int
    precision: str
    recompute: str
    inputs: Pair
    """Bytes of a micro-batch's inputs."""
    saved: tuple[tuple[str, Pair], ...]
    """(part, bytes that autograd saves in its forward pass)."""
    moments: tuple[TracedMoment, ...]
    """In the order of a micro-batch."""
    collectives: tuple[TracedCollective, ...]
    operations: tuple[TracedPart, ...]
    stages: TracedStages | None = None
    """None without a known order of parts."""
    sp: bool = False
    """Whether the stream was cut along the sequence."""
    cut: str = ""
    """Keys of the layout beside these, as of `traced_cut`."""
    pieces: int = 1
    """Ranks that have a part of a row's tokens each."""
    received: tuple[tuple[str, Pair], ...] = ()
    """Of what is saved, bytes of rows that experts here receive where all receive as many."""
    single: bool = False
    """Whether its numbers are those of a single row, twice."""


@dataclass(frozen=True)
class TraceSource:
    """What was traced, as the command names it: the code of a module, or a configuration of a class of transformers."""

    file: str = ""
    """Path of the Python file: in a trace's file from its folder on."""
    build: str = ""
    """What builds the module, in that file."""
    example: str = ""
    loss: str = ""
    plan: tuple[tuple[str, str], ...] | None = None
    blocks: tuple[str, ...] | None = None
    parts: tuple[str, ...] | None = None
    config: Mapping[str, Any] | None = None
    """Contents of the class's config.json."""


@dataclass(frozen=True)
class Trace:
    """All traced steps of a module."""

    rows: Pair
    """Rows of the micro-batches that were traced."""
    seq: int
    """Elements of a row, which is a sequence's tokens: the second size of the example's first tensor, or 1."""
    steps: tuple[TracedStep, ...]
    ends: TracedEnds | None = None
    """None where its parts are in no known order."""
    unpiped: str = ""
    """Why there are no predictions for pipelines, and what to do; empty where there are."""
    uncut: str = ""
    """Why there are none for sequence parallelism; empty where there are."""
    source: TraceSource | None = None
    """None of a module that a program has handed over."""

    @cached_property
    def _steps(self) -> dict[tuple[int, str, str, str], TracedStep]:
        return {_key(step): step for step in self.steps if not step.sp and not step.single}

    @cached_property
    def _single(self) -> dict[tuple[int, str, str, str], TracedStep]:
        return {_key(step): step for step in self.steps if not step.sp and step.single}

    @cached_property
    def on_shards(self) -> "Trace":
        """The steps under sequence parallelism, as if there were no others."""
        return replace(self, steps=tuple(replace(step, sp=False) for step in self.steps if step.sp))

    @property
    def degrees(self) -> list[int]:
        return sorted({tp for tp, *_ in self._steps})

    @property
    def cuts(self) -> list[str]:
        return sorted({cut for *_, cut in self._steps})

    def has(self, tp: int, precision: str, recompute: str, cut: str = "") -> bool:
        return (tp, precision, recompute, cut) in self._steps

    def step(self, tp: int, precision: str, recompute: str, cut: str = "", rows: int = 0) -> TracedStep:
        """The traced step of a layout's keys. rows: of a micro-batch; of a single one its own step, where there is one.
        Raises `LayoutError` for one that was not traced."""
        if cut not in self.cuts:
            known = ", ".join(there or "none" for there in self.cuts)
            raise LayoutError(
                f"{cut or 'a layout without cuts'} was not traced, of cuts the trace has {known}: choose among these, "
                "or trace the module again"
            )
        if not self.has(tp, precision, recompute, cut):
            there: dict[str, list[Any]] = {
                key: sorted({step[place] for step in self._steps})
                for place, key in enumerate(("tp", "precision", "recompute"))
            }
            words = "; ".join(f"{key}={'|'.join(map(str, values))}" for key, values in there.items())
            raise LayoutError(
                f"tp={tp},precision={precision},recompute={recompute} was not traced; the trace has {words}: choose "
                "among these, or trace the module again"
            )
        usual = self._steps[tp, precision, recompute, cut]
        return self._single.get(_key(usual), usual) if rows == 1 else usual

    def at(self, pair: Pair, rows: int) -> int:
        """A number for a micro-batch of `rows` rows."""
        (low, high), (below, above) = self.rows, pair
        return max(0, below + (above - below) * (rows - low) // (high - low))


def _key(step: TracedStep) -> tuple[int, str, str, str]:
    return step.tp, step.precision, step.recompute, step.cut

"""`TracedStages`: memory of a module's parts as stages of a pipeline, observed in one stage that has all parts.

Any cut into stages follows from it: a stage has some parts in a row, and keeps the tensors that these keep.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

Pair = tuple[int, int]
"""A number at each of `Trace.rows`."""
When = Literal["forward", "made", "backward", "adding", "inputs", "weights"]


@dataclass(frozen=True)
class TracedEnds:
    """The part of a module's root that comes before its blocks, and the part behind them, by names of parameters."""

    entry: tuple[str, ...]
    exit: tuple[str, ...]
    reads: tuple[str, ...] = ()
    """Parameters of the entry that the exit reads, too: a tied table."""


@dataclass(frozen=True)
class TracedTensors:
    """Memory of a micro-batch that the same parts keep after its forward pass."""

    savers: tuple[str, ...]
    """Parts whose forward passes save it for autograd."""
    holders: tuple[str, ...]
    """Parts that read it when they are computed again."""
    keepers: tuple[str, ...]
    """Parts whose gradients of weights read it, where these come apart from the gradients of inputs."""
    kind: Literal["activation", "input", "lasting"]
    """input: of the micro-batch; lasting: a buffer of the module."""
    nbytes: Pair


@dataclass(frozen=True)
class TracedPeak:
    """Bytes at one moment of a part, without the micro-batch's inputs, the module's buffers and the engine's."""

    when: When
    """forward: the most in it; made: after it; backward: the most in it; adding: likewise, where gradients of weights
    are added to others; inputs: the most in a backward pass without gradients of weights; weights: the most that these
    add to what is there before."""
    part: str
    nbytes: Pair


@dataclass(frozen=True)
class TracedMessage:
    """The tensor that a part hands on to the next one."""

    part: str
    dtype: str
    elements: Pair
    kept: bool
    """Whether the next part keeps it for its backward pass."""


@dataclass(frozen=True)
class TracedStages:
    """Parts are `entry`, the blocks in order, `exit`."""

    tensors: tuple[TracedTensors, ...]
    peaks: tuple[TracedPeak, ...]
    messages: tuple[TracedMessage, ...]
    buffers: Pair
    """Bytes of the module's buffers that a forward pass reads."""

    @cached_property
    def recorded(self) -> dict[int, Any]:
        """Rows of a micro-batch -> numbers that predictions have made of this, for the next prediction."""
        return {}

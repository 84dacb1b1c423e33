"""A collective or a message that a rank made: recorded from a program, or read from a file of other software."""

from dataclasses import dataclass
from typing import Literal

from shardwise.codec import Json

MESSAGES = ("send", "recv")
State = Literal["scheduled", "started", "completed"]
"""How far a call came: queued, begun on the device, ended."""


@dataclass(frozen=True, slots=True)
class Call(Json):
    """One call of one rank.

    op: torch's name without `_tensor` and leading underscores (all_reduce, all_gather_into, reduce_scatter, broadcast,
    all_to_all, barrier, send, recv). group: global ranks, in the order of their ranks within it; () where unknown.
    order: 0, 1, ... among the rank's calls. inputs, outputs: bytes that the rank gives and gets. peer: global rank of
    the other end of a message. where: file:line of the program, "" where unknown. phase: forward, backward, or "".
    begin, end: seconds of the rank's clock; None where unknown. shape: of the (first) tensor that is sent. comm: name
    of the communicator, which tells groups of the same ranks apart. engine: what made the call (ddp, fsdp, dtensor,
    pipelining, deepspeed, zero-redundancy), "" for the program itself or unknown. step: optimizer steps before it.
    number: of the call in its group, where the recording counts and may have lost the first ones. passes: backward
    passes that the rank began before it.
    """

    rank: int
    order: int
    op: str
    group: tuple[int, ...]
    dtype: str = ""
    shape: tuple[int, ...] = ()
    inputs: int = 0
    outputs: int = 0
    peer: int | None = None
    where: str = ""
    phase: str = ""
    begin: float | None = None
    end: float | None = None
    state: State = "completed"
    comm: str = ""
    engine: str = ""
    step: int = 0
    number: int = 0
    passes: int = 0

"""`Action`: one thing that a rank of a pipeline does, and what an executor owes it.

An executor takes its rank's actions one by one, in the order of the list, and decides nothing:

- ``F``, ``I``, ``W``, ``B``, ``OVERLAP_F_B`` compute, one at a time. Each waits first for what it needs: the received
  message of its stage and micro-batch (or the result that lies on the rank already, where the neighbouring stage is),
  and the gathered parameters of its stage. F saves what backward needs; I gives the gradient of the stage's input (and
  of biases and norms, which cost next to nothing, and of the head's matrix) and keeps what W needs; W adds the products
  that are the gradients of the other matrices, and frees the rest; B is I and W at once. The last stage's
  F ends with the loss, so that its I and B need no message. OVERLAP_F_B runs its parts side by side, or one after the
  other, and ends when both do. With recompute, F keeps the stage's input alone, and I or B does the forward once more.
- ``SEND_F``, ``SEND_B`` hand over the result of the same stage and micro-batch to rank `peer` and go on: at once, or
  when that rank has posted the receive, but never later than that. The tensor is kept until the message is complete.
- ``RECV_F``, ``RECV_B`` post the receive of what the stage named needs from rank `peer`, and go on at once: a buffer of
  known shape (micro-batch x sequence x hidden; there is no negotiation). The first compute action of that stage and
  micro-batch that needs it waits. Between two ranks, sends and receives stand in the same order in both lists,
  so that messages need no tags. Nothing that is posted may keep anything else from going on: not another rank's
  messages, and not those the other way. Those of the tied table stand in this order, too.
- ``UNSHARD`` starts to gather the parameters of a stage, ``RESHARD`` frees them; the compute actions of the stage in
  between wait for the gather. Without these (`gather=False`) parameters are always there, or the executor gathers them
  unit by unit inside an action, as the unit plan says.
- ``REDUCE_GRAD`` starts the reduction of a stage's gradients over the data ranks, while later actions go on. With a
  micro-batch it is one for that micro-batch (ZeRO-2 and 3); without one, it comes once, after the stage's last W or B.
- ``SUM_TIED`` exchanges the reduced gradients of the tied table with rank `peer`, and adds when both are there: both
  ends hold the same shard of it, and do the same update. The end of stage 0 counts in the gradient norm, the other does
  not. Where both ends are on one rank, as in a V, there is no such action: the table is one tensor of stage 0, is there
  while either stage computes, and is reduced with stage 0, whose reductions stand after the last stage's weight
  gradients.
- ``SHARE_LOSS``: rank `peer`, which has the last stage, tells the summed loss to all others (a sum to which the others
  add zero, over the data ranks at once), at which all may wait for each other. Every rank then logs it.

At the end of the list everything that was started is complete.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple, get_args

from shardwise.errors import UserError

Kind = Literal[
    "F",
    "I",
    "W",
    "B",
    "OVERLAP_F_B",
    "SEND_F",
    "RECV_F",
    "SEND_B",
    "RECV_B",
    "UNSHARD",
    "RESHARD",
    "REDUCE_GRAD",
    "SUM_TIED",
    "SHARE_LOSS",
]

COMPUTE = frozenset({"F", "I", "W", "B", "OVERLAP_F_B"})
OURS = frozenset({"SUM_TIED", "SHARE_LOSS"})
"""Kinds that torch.distributed.pipelining does not have."""

_WORD = re.compile(rf"(\d{{1,9}})({'|'.join(kind for kind in get_args(Kind) if kind != 'OVERLAP_F_B')})(\d{{0,9}})")
_WITH_MICRO = COMPUTE | {"SEND_F", "RECV_F", "SEND_B", "RECV_B"}


class Action(NamedTuple):
    """One action of a rank; the module says what each kind means.

    stage: the virtual stage, counted over all ranks from the model's first layers to its last; for messages the
    sender's or the receiver's own. micro: the micro-batch, or -1 for the whole step. peer: the other rank of a message,
    or -1. parts: what an OVERLAP_F_B is made of (which has stage and micro -1).
    """

    kind: Kind
    stage: int = -1
    micro: int = -1
    peer: int = -1
    parts: tuple[Action, ...] = ()  # type: ignore[misc]

    def __str__(self) -> str:
        """torch's text: 2F0, 1SEND_F3, 3UNSHARD, (0F4;7B1)OVERLAP_F_B."""
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        return f"{self.stage}{self.kind}{self.micro if self.micro >= 0 else ''}"

    def leaves(self) -> tuple[Action, ...]:
        return self.parts or (self,)

    def overlaps(self) -> bool:
        """Whether it has the parts of an OVERLAP_F_B: one F and one B."""
        return self.kind == "OVERLAP_F_B" and sorted(part.kind for part in self.parts) == ["B", "F"]


def parse_action(text: str) -> Action:
    """The action of a word as `str` gives it; peers are not in it. Raises `UserError` for words that are none."""
    word = text.strip()
    if match := re.fullmatch(r"\(([^()]+)\)OVERLAP_F_B", word):
        action = Action("OVERLAP_F_B", parts=tuple(parse_action(part) for part in match[1].split(";")))
        if not action.overlaps():
            raise UserError(f"{word[:60]!r}: an OVERLAP_F_B is made of one F and one B")
        return action
    match = _WORD.fullmatch(word)
    if not match or ((match[2] in _WITH_MICRO) != bool(match[3]) and match[2] != "REDUCE_GRAD"):
        raise UserError(
            f"{word[:60]!r} is no pipeline action; they look like 2F0, 1SEND_F3, 3UNSHARD or (0F4;7B1)OVERLAP_F_B"
        )
    return Action(match[2], int(match[1]), int(match[3]) if match[3] else -1)  # type: ignore[arg-type]


@contextmanager
def without_collections() -> Iterator[None]:
    """No garbage collection inside: for loops that make many objects without reference cycles.

    Afterwards all objects count as old: nothing looks at them before the next full collection.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()

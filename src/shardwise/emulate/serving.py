"""`TimedStage`: a stage whose arithmetic is a timed wait. Processes, messages, scheduler and cache are the real
ones, so that what a pipeline makes of a prompt's chunks can be measured on any machine (`bubble.py`)."""

import sys
import time

import torch
from torch import Tensor

from shardwise.emulate.job import WORD
from shardwise.emulate.rank import hop
from shardwise.ops.paged import Rows
from shardwise.runtime.job import rank as process
from shardwise.runtime.job.launch import USER_MISTAKE
from shardwise.serving.engine import Progress, TokenGenerator
from shardwise.serving.job import Weights
from shardwise.serving.rank import main
from shardwise.serving.scheduler import EngineStep

_NUMBERS = 128
"""Engine steps are counted up to here, and then anew: every type of activations has these numbers."""


class TimedStage(TokenGenerator):
    """Stage that waits `job.emulate` seconds in every engine step that has tokens; what a wait lasts too long, the next
    one lasts less, unless the rank stood still for others in between. What it sends begins with the step's number, and
    what it gets is checked to be of this engine step."""

    _number, _late = 0, 0.0

    def load(self, weights: Weights, progress: Progress = lambda done, of: None) -> None:
        """No-op: emulated stages need no weights."""

    def forward(self, step: EngineStep, rows: Rows, x: Tensor | None = None) -> Tensor:
        """The shape of `TokenGenerator.forward`'s result without its values; on the last stage every token is 0."""
        self._number = (self._number + 1) % _NUMBERS
        if x is not None and (result := int(x.view(-1)[0])) != self._number:
            raise RuntimeError(f"the message of turn {self._number} was expected, that of turn {result} came")
        self._wait()
        if self.plan.of_kind("head"):
            return torch.zeros(len(step.wanted), self.plan.model.vocab, dtype=self.dtype, device=self.device)
        shape = 1, step.tokens, self.plan.model.hidden
        return torch.full(shape, float(self._number), dtype=self.dtype, device=self.device)

    def _wait(self) -> None:
        now = time.monotonic()
        stood = sum(timing.wait for timing in self.comms.timings.values())
        until = now + self.job.emulate - max(0.0, self._late - stood)
        if until > now:
            time.sleep(until - now)
        self._late = time.monotonic() - until

    def hop(self) -> float:
        """Seconds of a message between stages, as large as a whole chunk's. All ranks must call it."""
        nbytes = self.job.chunk * self.plan.model.hidden * self.dtype.itemsize
        return hop(self.comms, -(-nbytes // WORD) * WORD)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(USER_MISTAKE)
    process.leave(main(sys.argv[1:], TimedStage), at_once=True)

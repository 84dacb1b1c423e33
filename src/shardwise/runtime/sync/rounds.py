"""Rounds of `sync=local`: the steps from one outer step to the next. In lockstep each step is a round."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.layout import Layout


@dataclass(frozen=True)
class Rounds:
    """Rounds of a run. Steps count from 0, and go on counting when a run is resumed."""

    every: int
    """Steps of a round; the last one of a run may be shorter."""
    steps: int
    """Steps of the run."""

    @classmethod
    def of(cls, layout: Layout, steps: int) -> Rounds:
        return cls(layout.every if layout.local_sgd else 1, steps)

    def begins(self, step: int) -> bool:
        """Whether a round begins with a step."""
        return step % self.every == 0

    def ends(self, step: int) -> bool:
        """Whether a round ends with a step."""
        return (step + 1) % self.every == 0 or step + 1 == self.steps

    def due(self, period: int, step: int) -> bool:
        """Whether something that is to happen every `period` steps does so after a step: rounded up to the end of a
        round. Never, if `period` is 0."""
        start = step // self.every * self.every
        return period > 0 and self.ends(step) and (step + 1) // period > start // period

    def ends_after(self, step: int) -> int:
        """The first step before which all ranks can stop when one of them, about to begin `step`, says so: no rank has
        begun it, and it begins a round."""
        return step + 2 if self.every == 1 else -(-(step + 1) // self.every) * self.every

    def measured(self, start: int, warm: int) -> int:
        """The step whose report is taken, of a run that starts at `start`: it ends a round, after `warm` steps if there
        are enough, and another one follows whose last step gives the times."""
        ends = [step for step in range(start, self.steps) if self.ends(step)]
        first = sum(step < start + warm for step in ends)
        return ends[max(0, min(first, len(ends) - 2))]

"""The parts of a training step, as a program begins them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardwise.ops import recompute

if TYPE_CHECKING:
    from shardwise.runtime.pipeline.program import StepProgram


class PartWatcher:
    """Tells `begin` of each part of a step between `start` and `stop`: forward blocks.0, optimizer step."""

    def __init__(self, program: StepProgram, begin: Callable[[str], object]) -> None:
        self._program, self._report = program, begin
        self._part = self._outer = ""
        self._replaced: list[tuple[Any, str, Any]] = []

    def start(self) -> None:
        program = self._program
        engine = program.engine
        self._note(engine, "begin_step", lambda: "start of the step")
        self._note(engine, "use_unit", lambda kind, part: f"{kind} {part}")
        self._note(engine, "finish_step", lambda: "end of backward")
        self._note(program.optimizer, "step", lambda lr: "optimizer step")
        self._note(engine, "all_gather_params", lambda: "optimizer's new parameters")
        self._note(program.comms, "in_phase", lambda phase: "loss" if phase == "loss" else None)
        recompute.watch(self._again)

    def stop(self) -> None:
        recompute.watch(None)
        for owner, name, before in reversed(self._replaced):
            delattr(owner, name)
            if before is not None:
                setattr(owner, name, before)
        self._replaced = []

    def _begin(self, part: str) -> None:
        self._part = part
        self._report(part)

    def _again(self, begins: bool) -> None:
        """A piece of the part whose backward pass is under way is computed again, or has been."""
        if begins:
            self._outer = self._part
        self._begin(f"recompute {self._outer.partition(' ')[2]}" if begins else self._outer)

    def _note(self, owner: Any, method: str, what: Callable[..., str | None]) -> None:
        plain = getattr(owner, method)

        def noted(*args: Any, **kwargs: Any) -> Any:
            part = what(*args, **kwargs)
            if part is not None:
                self._begin(part)
            return plain(*args, **kwargs)

        self._replaced.append((owner, method, vars(owner).get(method)))
        setattr(owner, method, noted)

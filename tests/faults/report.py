"""Results of faults, as a table and as JSON."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from faults.draw import Fault
from faults.trial import PROBLEMS, Problem


@dataclass(frozen=True)
class Result:
    """One fault's outcome. told: what was done. skipped: why nothing was done, empty where something was."""

    fault: Fault
    seconds: float
    problems: tuple[Problem, ...] = ()
    told: tuple[str, ...] = ()
    skipped: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "problems": [problem._asdict() for problem in self.problems]}


def table(results: Sequence[Result]) -> list[str]:
    """Lines: kind of fault by number, layouts, problems and seconds, then every reason and problem."""
    lines = [_row("fault", ("number", "layouts", "passed", *PROBLEMS, "skipped", "s each"))]
    for kind in sorted({result.fault.kind for result in results}):
        lines.append(_row(kind, _cells([result for result in results if result.fault.kind == kind])))
    lines.append(_row("all", _cells(results)))
    reasons = sorted({(result.fault.kind, result.skipped) for result in results if result.skipped})
    lines += [f"skipped: {kind}: {reason}" for kind, reason in reasons]
    for result in results:
        lines += [
            f"fault {result.fault.number}, {result.fault.kind} under {result.fault.layout}: {what}: {text}"
            for what, text in result.problems
        ]
    return lines


def _cells(results: Sequence[Result]) -> list[object]:
    done = [result for result in results if not result.skipped]
    found = Counter(what for result in done for what in {problem.what for problem in result.problems})
    seconds = f"{mean(result.seconds for result in done):.1f}" if done else "-"
    return [
        len(done), len({result.fault.layout for result in done}), sum(not result.problems for result in done),
        *(found[what] for what in PROBLEMS), len(results) - len(done), seconds,
    ]  # fmt: skip


def _row(name: str, cells: Sequence[object]) -> str:
    return f"{name:<20}" + "".join(f"{cell!s:>9}" for cell in cells)

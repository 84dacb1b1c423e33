"""The algorithms by collective and name, and `build`, which turns one into a `CommSchedule`.

An algorithm is a function of the number of ranks (and of options, integers with defaults) that returns a `Draft`. It
becomes known by the decorator `algorithm`, and must work for any number of ranks from 1. Algorithms outside this
package are in modules that the environment names, and every process imports: SHARDWISE_ALGORITHMS=module[,module].
"""

import importlib
import inspect
import os
from collections.abc import Callable
from functools import cache, cached_property, partial
from typing import Any

from shardwise.errors import UserError, did_you_mean
from shardwise.records import dataclass
from shardwise.schedule.comm import COLLECTIVES, ROOTED, CommSchedule, Draft


@dataclass(frozen=True)
class Algorithm:
    """One way to do a collective. natural: the numbers of ranks that it was made for; on others it does extra work.

    summary: what it does, in one line. source: who published it. reads: it needs ranks that read each other's memory.
    most: the largest number of ranks that it is for, where a round lists all pairs of ranks, or rounds are too many.
    """

    collective: str
    name: str
    summary: str
    draft: Callable[..., Draft]
    source: str
    natural: str = "any"
    reads: bool = False
    most: int | None = None

    @cached_property
    def options(self) -> dict[str, int]:
        """Option -> default. `root` is there for the collectives that have one."""
        parameters = list(inspect.signature(self.draft).parameters.values())[1:]
        return {parameter.name: parameter.default for parameter in parameters}


PAIRS = 1024
"""Ranks of which all pairs can be listed: a million rows."""
READS: dict[str, Any] = {
    "natural": "one node", "source": "TensorRT-LLM custom all-reduce", "reads": True, "most": PAIRS,
}  # fmt: skip
"""Fields of algorithms whose ranks read each other's memory."""
nearest = partial(did_you_mean, otherwise="there are", most=2, cutoff=0.5)

_KNOWN: dict[str, dict[str, Algorithm]] = {collective: {} for collective in COLLECTIVES}
_ALIASES = {"butterfly": "recursive-doubling", "double-binary-tree": "double-tree", "binomial-tree": "tree"}


def algorithm(
    collective: str, name: str, summary: str = "", **fields: Any
) -> Callable[[Callable[..., Draft]], Callable[..., Draft]]:
    """Make an algorithm known under a collective and a name. summary: left out, the first paragraph of the function's
    docstring. fields: further ones of `Algorithm`, `source` at least."""

    def register(draft: Callable[..., Draft]) -> Callable[..., Draft]:
        _KNOWN[collective][name] = Algorithm(collective, name, summary or first_paragraph(draft), draft, **fields)
        return draft

    return register


def first_paragraph(function: Callable[..., Any]) -> str:
    """The first paragraph of a docstring as an entry of a list: without capital and period."""
    text = " ".join(inspect.cleandoc(function.__doc__ or "").partition("\n\n")[0].split()).removesuffix(".")
    return text[:1].lower() + text[1:]


def collective_name(text: str) -> str:
    """A collective by its name, or by torch's (all_gather_into). Raises `UserError` with the nearest names."""
    name = text.strip().lower().replace("_", "-").removesuffix("-tensor").removesuffix("-single").removesuffix("-into")
    if name not in COLLECTIVES:
        raise UserError(f"no collective {text!r}; {nearest(name, COLLECTIVES)}")
    return name


def algorithms(collective: str | None = None) -> list[Algorithm]:
    """All algorithms, or those of one collective. Raises `UserError` for a collective that there is not."""
    names = COLLECTIVES if collective is None else [collective_name(collective)]
    import_named()
    return [found for name in names for found in _KNOWN[name].values()]


def import_named() -> None:
    """Import the modules that SHARDWISE_ALGORITHMS names. Raises `UserError` for one that cannot be imported."""
    _import(os.environ.get("SHARDWISE_ALGORITHMS", ""))


@cache
def _import(modules: str) -> None:
    for module in filter(None, modules.split(",")):
        try:
            importlib.import_module(module.strip())
        except ImportError as error:
            raise UserError(f"SHARDWISE_ALGORITHMS: cannot import {module.strip()!r}: {error}") from None


def find(collective: str, name: str) -> Algorithm:
    """One algorithm. Raises `UserError` with the nearest names when there is none."""
    import_named()
    known = _KNOWN[collective_name(collective)]
    wanted = name.strip().lower().replace("_", "-")
    wanted = _ALIASES.get(wanted, wanted)
    if wanted not in known:
        raise UserError(f"{collective_name(collective)} has no algorithm {name!r}; {nearest(wanted, known)}")
    return known[wanted]


def build(collective: str, algorithm: str, ranks: int, **options: int) -> CommSchedule:
    """The schedule of a collective by an algorithm for `ranks` ranks, 1 or more; the same for every size of buffer.

    options: the algorithm's own (`root`, `segments`, `node`: see `shardwise list algorithms`).
    Raises `UserError` for unknown names and options, and for values that make no sense.
    """
    found = find(collective, algorithm)
    if type(ranks) is not int or ranks < 1:
        raise UserError(f"ranks must be a positive integer, not {ranks!r}")
    if found.most and ranks > found.most:
        raise UserError(f"{found.collective} {found.name} is for at most {found.most} ranks, not {ranks}")
    for option, value in options.items():
        if option not in found.options:
            known = ", ".join(found.options) or "none"
            raise UserError(f"{found.collective} {found.name} has no option {option!r}; it has {known}")
        if type(value) is not int or value < (0 if option == "root" else 1):
            allowed = "an integer from 0" if option == "root" else "a positive integer"
            raise UserError(f"{option} must be {allowed}, not {value!r}")
    chosen = {**found.options, **options}
    root = chosen.get("root", 0)
    if root >= ranks:
        raise UserError(f"root {root} is none of the {ranks} ranks; they are 0 to {ranks - 1}")
    draft = found.draft(ranks, **chosen)
    return CommSchedule(
        collective=found.collective,
        algorithm=found.name,
        ranks=ranks,
        chunks=draft.chunks,
        stages=tuple(draft.stages),
        regions=draft.regions,
        result=draft.result,
        reads=found.reads,
        root=root if found.collective in ROOTED else 0,
        options={name: value for name, value in chosen.items() if name != "root"},
    )

"""The static site: the studio's page, and files of answers that its controls look up; needs no server."""

import base64
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from shardwise.errors import UserError, os_errors
from shardwise.report.files import write_whole
from shardwise.studio.columns import View, encode, exact
from shardwise.studio.data.registry import VIEWS, answer, parts
from shardwise.studio.page import on_disk, parse_view

WORDS, NUMBERS = 12, 5
"""Values of a control that have an answer, at most; those of a longer list are evenly spread."""

LARGEST = 1 << 18
"""Bytes of a file of answers; states that need more, such as schedules of 100,000 events, have none."""

PAIRS: dict[str, list[tuple[str, str]]] = {
    "tokens": [("a", "b"), ("cluster", "batch")],
    "experts": [("dp", "load"), ("tp", "etp")],
    "collectives": [("collective", "algorithm"), ("ranks", "algorithm")],
    "pipelines": [("a", "micro")],
    "memory": [("tp", "zero"), ("zero", "recompute"), ("tp", "sp")],
    "plan": [("cluster", "by")],
    "sync": [("sync", "slow")],
}
"""View -> controls whose values have answers together; all others are varied one by one."""

_NO_RUNS = Path(os.devnull)


class Preset(NamedTuple):
    """A state of a view that has an answer."""

    view: str
    given: dict[str, str]
    """Its words in the address."""
    first: View
    """The answer of the view's first part."""


def preset_of(view: str, given: Mapping[str, str]) -> Preset:
    """The preset of an address's words. Raises `UserError` where they are not legal."""
    words = {name: value for name, value in given.items() if not name.startswith("_")}
    return Preset(view, words, answer(view, words, _NO_RUNS))


def presets(view: str, mixed: Random | None = None) -> Iterator[Preset]:
    """The view's first state, every control varied by itself, and the pairs; of controls in a random order if mixed."""
    first = preset_of(view, {})
    axes = [*((name,) for name in first.first.choices), *PAIRS.get(view, ())]
    if mixed:
        mixed.shuffle(axes)
    seen = set()
    for preset in chain((first,), *(_along(first, axis) for axis in axes)):
        if (state := json.dumps(preset.first.state)) not in seen:
            seen.add(state)
            yield preset


def _along(preset: Preset, axis: Sequence[str]) -> Iterator[Preset]:
    """All values of one control with all of the next, as far as they are legal."""
    if not axis:
        yield preset
        return
    name = axis[0]
    yield from _along(preset, axis[1:])
    for value in thinned(preset.first.choices.get(name, ())):
        text = exact(value) if isinstance(value, float) else str(value)
        words = preset.given | {"cluster" if name == "devices" else name: text}
        try:
            other = preset_of(preset.view, words)
        except UserError:
            continue
        yield from _along(other, axis[1:])


def thinned(values: Sequence[Any]) -> list[Any]:
    """Values spread over a list, its ends among them."""
    most = WORDS if any(isinstance(value, str) for value in values) else NUMBERS
    last = min(most, len(values)) - 1
    return [values[i * (len(values) - 1) // max(1, last)] for i in range(last + 1)]


def write_site(
    folder: Path,
    views: Iterable[str] = VIEWS,
    most: int | None = None,
    mixed: Random | None = None,
    also: Iterable[str] = (),
) -> dict[str, list[Preset]]:
    """Write index.html and answers/ of `most` states a view, all of them by default. Returns the states by view.

    also: further states that have an answer, such as pipelines?ranks=8. Raises `UserError` for one that is not legal,
    and when a file cannot be written.
    """
    answers = folder / "answers"
    written: dict[str, list[Preset]] = {view: [] for view in views}
    with os_errors(f"write {answers}"):
        answers.mkdir(parents=True, exist_ok=True)
        for older in (path for view in written for path in answers.glob(f"{view}-*.js")):
            older.unlink()
    further = [parse_view(text) for text in also]
    for view, states in written.items():
        more = (preset_of(view, given) for name, given in further if name == view)
        for preset in chain(islice(presets(view, mixed), most), more):
            rest = {part: answer(part, preset.given, _NO_RUNS) for part in parts(view)[1:]}
            packed = base64.b64encode(zlib.compress(encode({view: preset.first, **rest}), 9)).decode()
            if len(packed) > LARGEST:
                continue
            name = f"{view}-{len(states)}"
            write_whole(answers / f"{name}.js", f'(globalThis.answers ??= {{}})["{name}"] = "{packed}";\n')
            states.append(preset)
    embedded = {
        "views": [{"view": view, "given": {}} for view in written],
        "presets": {view: [_indexed(preset, states[0]) for preset in states] for view, states in written.items()},
    }
    write_whole(folder / "index.html", on_disk(embedded, " 'self' file:"))
    return written


def _indexed(preset: Preset, first: Preset) -> dict[str, Any]:
    usual = first.first.state if preset is not first else {}
    state = {name: value for name, value in preset.first.state.items() if usual.get(name) != value}
    return {"asked": list(preset.given), "state": state}

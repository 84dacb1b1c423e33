"""`EngineSpec`: an engine as `engines/NAME.toml` describes it, read by both drivers.

A file has the engine's title, limits and, under `[options]`, a row for each layout key, number of a step or a server,
and further option: what the engine calls it, what is read from it, and what is written. Texts under `read`, `write`,
`check`, `when` and `set` are Python expressions of the rows' names; those of messages are f-strings of them.
Functions that they call are in `engines/NAME.py`.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib import import_module, resources
from typing import Any

from shardwise.interop.expressions import Names, evaluate, sentence
from shardwise.interop.reading.fields import LAYOUT_WORDS, SPLITS, Known
from shardwise.interop.writing.canonical import DEFAULTS, SHARDING, SYNC
from shardwise.layout import Layout
from shardwise.layout.keys import defaults, goes_with
from shardwise.layout.optimizers import OPTIMIZERS
from shardwise.model.blueprint import Blueprint
from shardwise.model.catalog import catalog
from shardwise.model.parameters import Model

_KINDS = {int: "integer", bool: "flag", str: "word"}
_TYPES: dict[str, Any] = {"integer": 0, "size": 0, "number": 0.0, "raw": None}
_TYPES |= dict.fromkeys(("flag", "switch", "given"), False)


_DEGREES = ("tp", "pp", "cp")
"""Axes whose ranks become data-parallel ones without them."""
_WITH = {"virtual": ("schedule", "stages"), "zero": (*SHARDING, "offload", "offload_params")}
"""Key -> keys beside those that go with it that cannot stay when it gets its default."""


@dataclass(frozen=True)
class Limit:
    """A bound on the layouts that an engine expresses. Without `set`, the key gets its default."""

    key: str
    """The layout key that messages name."""
    why: str
    when: str = "True"
    """Expression of a layout, and its `model`, that are outside."""
    set: str = ""
    """Arguments of the layout that is nearest, such as zero=3."""
    plain: str = ""
    """Keys that get their defaults there, first; with * the keys that depend on one, too."""
    experts: bool = False
    """Whether it bounds models with experts alone."""
    functions: Mapping[str, Any] = field(default_factory=dict)
    """Those of its engine's Python."""

    def broken(self, layout: Layout, model: Model) -> bool:
        """Whether a layout of a model is outside."""
        if not self.set and getattr(layout, self.key) == DEFAULTS[self.key]:
            return False
        return bool(evaluate(self.when, Names(layout, model=model, **self.functions)))

    def repair(self, layout: Layout) -> dict[str, Any]:
        """Key -> value of the nearest layout within the bound."""
        keys = [self.key] if not self.set else []
        for key in self.plain.split():
            name = key.rstrip("*")
            keys += [name, *((*goes_with(name), *_WITH.get(name, ())) if key.endswith("*") else ())]
        changes = defaults(*keys)
        if self.set:
            return changes | evaluate(f"dict({self.set})", Names(layout))
        if self.key in _DEGREES:
            changes["dp"] = layout.dp * getattr(layout, self.key)
        return changes


def absent(expressed: Iterable[str], left: Iterable[str], source: str, missing: Mapping[str, str]) -> list[Limit]:
    """Limits for every key that an engine has no word for. left: keys that its files may leave to the user's code.
    source: the version that was read. missing: key -> what the engine has in place of a word."""
    known = {*expressed, *left}
    keys = [key for key in DEFAULTS if key not in known and (key not in SYNC or key == "sync")]
    return [Limit(key, missing.get(key, f"{source} has no word for it"), plain=f"{key}*") for key in keys]


@dataclass(frozen=True)
class EngineOption:
    """One row of `[options]`."""

    name: str
    """A layout key, a number of a step or of a server, or a name for other rows."""
    option: str = ""
    """The engine's word, with the tables that it is in; empty for what other rows give."""
    kind: str = ""
    """Method of `ConfigFields` that reads it; empty for what is only written."""
    default: Any = None
    least: int = 1
    choices: tuple[str, ...] = ()
    words: Mapping[str, Any] = field(default_factory=dict)
    """The engine's word -> value."""
    otherwise: Any = None
    """Value of a word that is not listed."""
    check: str = ""
    error: str = ""
    """Message where `check` does not hold."""
    read: str = ""
    """Expression of the value; `value` is what the option says."""
    write: str = ""
    """Expression of what is written; None and, on a command line, False leave the option out."""
    fact: str = ""
    note: str = ""
    """Said where the option is given."""
    shown: str = ""
    """Name in tables, where it is not the option's last part."""
    versions: tuple[str, ...] = ()
    """Versions whose files have it; empty: all."""

    @property
    def path(self) -> tuple[str, str]:
        """(Tables that it is in, its name there)."""
        table, _, key = self.option.rpartition(".")
        return table, key

    def said(self, value: Any) -> Any:
        """The engine's word for a value, which it is itself without a list of words."""
        if not self.words or value is None:
            return value
        return next((word for word, meaning in self.words.items() if meaning == value), None)


@dataclass(frozen=True)
class Remark:
    """A sentence about a configuration: an error, a fact, a note, a doubt, or a comment in a written file."""

    say: str
    when: str = "True"


@dataclass(frozen=True)
class EngineSpec:
    """One engine."""

    name: str
    title: str = ""
    """Name in sentences; empty for a file that others share."""
    source: str = "it"
    """The version whose names were read."""
    like: str = ""
    """File with what several engines share."""
    include: Mapping[str, str] = field(default_factory=dict)
    """Table -> file with the rows of its options."""
    gates: Mapping[str, str] = field(default_factory=dict)
    """Table -> expression of what must hold for it to be read."""
    place: int = 99
    """Place among the engines."""
    options: Mapping[str, EngineOption] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)
    """Layout key -> comment where it is not the default: what the user's code or environment has to do."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Layout key that is in neither table -> what the engine has in place of it."""
    limits: tuple[Limit, ...] = ()
    """Bounds beside the keys that are in neither table."""
    harmless: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Table -> its keys, and beginnings of keys (`prefixes`), that change nothing. "top" is the outermost."""
    alone: frozenset[str] = frozenset()
    """Flags that never take a value, beside switches."""
    short: Mapping[str, str] = field(default_factory=dict)
    """Other names of flags."""
    program: str = ""
    """Regular expression of a command's word and the next that start the engine."""
    marks: frozenset[str] = frozenset()
    """Keys that tell it from other engines."""
    extends: tuple[str, ...] = ()
    """Engines whose marks are its own, too."""
    names_file: tuple[str, ...] = ()
    """Flags that name its file."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Keys of other names, such as a dialect's, -> keys; a dotted one is in a table."""
    renamed_for_megatron: Mapping[str, str] = field(default_factory=dict)
    """The same where a dialect trains with Megatron-Core."""
    dropped: tuple[str, ...] = ()
    """Keys of a dialect that change nothing."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of a dialect where it says auto, or nothing."""
    packages: tuple[str, ...] = ()
    """Packages of Python that have the `calls`."""
    calls: tuple[str, ...] = ()
    """Functions and classes that take the engine's arguments."""
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Configurations of the engine's own that an option names -> their tables."""
    needs_ranks: str = ""
    """Error where nothing says how many processes there are; empty where degrees do."""
    flags: bool = False
    """Whether options are flags of a command line."""
    command: tuple[str, ...] = ()
    """Start of the command that is written."""
    end: tuple[str, ...] = ()
    """Its last words."""
    before: str = "''"
    """Expression of the script's lines before it."""
    launcher: bool = False
    """Whether torchrun starts it."""
    remarks: Mapping[str, tuple[Remark, ...]] = field(default_factory=dict)
    """Kind -> sentences."""
    job: str = ""
    """Command of a job that runs its `file`, where that is no script."""
    template: str = ""
    """File beside this one with a program's text: between `#if EXPRESSION` and `#end` is what some layouts need."""
    file: str = ""
    """Usual name of the file; its suffix tells the reader its kind."""
    profile: str = ""
    """Profile of the planner (`predict.time.ENGINES`) that prices it."""
    forced: tuple[str, ...] = ()
    """Layout keys that get the engine's value in place of an error."""
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    serves: bool = False
    loads_model: bool = False
    """Whether it loads the model by a name, which says the model's sizes."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Version -> name of its file, where it is another."""
    versions: tuple[str, ...] = ("",)
    """Versions whose files differ, the newest first."""

    @cached_property
    def functions(self) -> dict[str, Any]:
        """Functions of the Python beside the file, and of that of engines like it."""
        result: dict[str, Any] = {}
        for name in filter(None, (self.like, *self.include.values())):
            result |= spec(name).functions
        if (_FOLDER / f"{self.name}.py").is_file():
            module = vars(import_module(f"shardwise.interop.engines.{self.name}"))
            own = f"shardwise.interop.engines.{self.name}"
            result |= {name: one for name, one in module.items() if getattr(one, "__module__", "") == own}
        return result

    @cached_property
    def keys(self) -> dict[str, str]:
        """Layout key -> option that says it."""
        if "layout" in self.options:
            return dict.fromkeys(DEFAULTS, "--layout")
        rows = {name: row for name, row in self.options.items() if name in DEFAULTS}
        return {name: row.shown or row.path[1] for name, row in rows.items() if row.shown or row.option}

    @cached_property
    def bounds(self) -> tuple[Limit, ...]:
        """Every limit: keys without a word first."""
        limits = (replace(limit, functions=self.functions) for limit in self.limits)
        return (*absent(self.keys, self.left, self.source, self.missing), *limits)

    @cached_property
    def standing_alone(self) -> frozenset[str]:
        """Flags that never take a value."""
        return self.alone | {row.option for row in self.options.values() if row.kind == "switch"}

    def plain_name(self, flag: str) -> str:
        """An option's name, of another name of it. What a dotted one sets inside a flag's table is left out unless it
        is named like the layout."""
        if not self.flags:
            return flag
        key, _, inner = flag.replace("-", "_").partition(".")
        words = SPLITS if key in self.known().keys or key in self.options else LAYOUT_WORDS
        if words.search(inner):
            return flag.replace("-", "_")
        # Names with one dash, as vLLM's -tp, are no others with two.
        return next((one for short, one in self.short.items() if short.replace("-", "_") == f"__{key}"), key)

    def known(self, table: str = "top") -> Known:
        """Keys of a table that change nothing."""
        row = self.harmless.get(table, {})
        keys = {*row.get("keys", "").split(), *(self.alone if table == "top" else ())}
        return Known(frozenset(keys), tuple(row.get("prefixes", "").split()))

    @cached_property
    def says_model(self) -> bool:
        """Whether its files name a model or its sizes; else the user's code builds it."""
        return self.loads_model or any("model." in row.write for row in self.options.values())

    def objection(self, model: Model) -> str:
        """Why the engine does not support a model; empty where it does."""
        module = isinstance(model, Blueprint)
        if module and self.says_model:
            others = [
                one.name for one in specs().values() if one.file and not one.says_model and not one.objection(model)
            ]
            return f"its file describes a model, and a traced module has its code: choose {' or '.join(others)}"
        known = {"module": module, "model": model, "options": self.options, "catalog": catalog()}
        names = Names(model, **self.functions, **known)
        return next((sentence(one.say, names) for one in self.remarks["objections"] if evaluate(one.when, names)), "")

    def program_text(self, names: Mapping[str, Any]) -> str:
        """The template's lines for these names."""
        text, kept = [], True
        for line in (_FOLDER / self.template).read_text(encoding="utf-8").splitlines(keepends=True):
            if line.startswith("#if "):
                kept = bool(evaluate(line.removeprefix("#if ").strip(), names))
            elif line.rstrip() == "#end":
                kept = True
            elif kept:
                text.append(line)
        return "".join(text)

    def left_to_code(self, layout: Layout) -> list[str]:
        """Comments on keys that the file leaves to others."""
        changed: dict[str, Any] = {key: getattr(layout, key) for key in self.left}
        return [f"{key}={value}: {self.left[key]}" for key, value in changed.items() if value != DEFAULTS[key]]


_FOLDER = resources.files("shardwise.interop.engines")


@cache
def spec(name: str) -> EngineSpec:
    """The engine of that name, with the limits, rows and remarks of the file that it is `like`."""
    data = tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    base = spec(data["like"]) if "like" in data else EngineSpec(name)
    included = {table: spec(one) for table, one in data.get("include", {}).items()}
    rows = {key: _option(key, row) for key, row in data.pop("options", {}).items()}
    for table, one in included.items():
        rows |= {key: replace(row, option=row.option and f"{table}.{row.option}") for key, row in one.options.items()
                 if key not in rows}  # fmt: skip
        data.setdefault("harmless", {})[table] = one.harmless["top"]
    remarks = {kind: tuple(Remark(**row) for row in data.pop(kind, ())) for kind in REMARKS}
    words = {key: frozenset(data.pop(key, "").split()) for key in ("alone", "marks")}
    merged: dict[str, Any] = {
        "options": {**base.options, **rows},
        "harmless": {**base.harmless, **data.pop("harmless", {})},
        "left": {**base.left, **data.pop("left", {})},
        "limits": (*(Limit(**row) for row in data.pop("limits", ())), *base.limits),
        "forced": (*base.forced, *data.pop("forced", ())),
        "remarks": {
            kind: (*(remark for one in (base, *included.values()) for remark in one.remarks.get(kind, ())), *more)
            for kind, more in remarks.items()
        },
    }
    inherited = {key: getattr(base, key) for key in _INHERITED}
    given: dict[str, Any] = {key: tuple(one) if isinstance(one, list) else one for key, one in data.items()}
    return EngineSpec(**{"name": name, **inherited, **given, **words, **merged})


_INHERITED = ("source", "job", "serves", "loads_model", "flags", "profile", "template", "optimizers")
REMARKS = ("errors", "facts", "notes", "doubts", "unpriced", "comments", "objections")
"""Kinds of sentences."""


def _option(name: str, said: str | Mapping[str, Any]) -> EngineOption:
    row: dict[str, Any] = {"option": said} if isinstance(said, str) else dict(said)
    if {"kind", "fact", "note"} & row.keys():
        row.setdefault("option", name)
    kind = row.get("kind", "given" if {"fact", "note"} & row.keys() else "")
    if not kind and "option" in row and not ("write" in row and not {"read", "words", "choices"} & row.keys()):
        kind = _KINDS.get(type(DEFAULTS.get(name)), "word")
    if kind:
        usual, own = _TYPES.get(kind, ""), DEFAULTS.get(name)
        row.setdefault("default", own if type(own) is type(usual) else usual)
    lists: dict[str, Any] = {key: tuple(row[key]) for key in ("choices", "versions") if key in row}
    return EngineOption(name, **(row | {"kind": kind} | lists))


@cache
def specs() -> dict[str, EngineSpec]:
    """Name -> engine, in the order of their places."""
    every = [spec(one.name[:-5]) for one in _FOLDER.iterdir() if one.name.endswith(".toml")]
    return {one.name: one for one in sorted(every, key=lambda one: (one.place, one.name)) if one.title}

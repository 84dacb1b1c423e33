"""`WriteRequest`, what is to be written, and `EngineWriter`, one engine that it is written for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.cluster import Cluster
from shardwise.codec import Json
from shardwise.interop.reading.settings import ServerSettings
from shardwise.interop.writing.canonical import DEFAULTS
from shardwise.interop.writing.limits import Limit, absent
from shardwise.layout import Layout, Workload
from shardwise.layout.optimizers import OPTIMIZERS
from shardwise.model import ModelConfig


@dataclass(frozen=True)
class WriteRequest:
    """A layout of a model for an engine."""

    model: ModelConfig
    layout: Layout
    workload: Workload = field(default_factory=Workload)
    """Sequence length and batch of a training step; empty for a server."""
    served: ServerSettings | None = None
    """Numbers of a server; None for training."""
    cluster: Cluster | None = None
    """Ranks per node; None: 8."""
    source: str = ""
    """The model as the engine loads it: a folder, a hub's name, or the catalog's."""
    version: str = ""
    """Version of the engine; empty for its newest that is known."""
    notes: tuple[str, ...] = ()
    """Comments on numbers that were not given."""

    @property
    def stored(self) -> str:
        """The precision of a quantized model's files, which an engine reads from their configuration; else empty."""
        return self.model.counted.stored if self.model.counted else ""


@dataclass(frozen=True)
class EngineWriter:
    """One engine."""

    name: str
    """Name on the command line and of its reader."""
    title: str
    keys: Mapping[str, str]
    """Layout key -> option that says it."""
    left: Mapping[str, str]
    """Layout key -> comment where it is not the default: what the user's code or environment has to do."""
    limits: tuple[Limit, ...]
    """Bounds beside the keys that are in neither table."""
    write: Callable[[WriteRequest], tuple[str, list[str]]]
    """Text without its comments, and comments beside those of `left`."""
    comment: Callable[[str, list[str]], str]
    """Text with comments."""
    file: str
    """Usual name of the file; its suffix tells the reader its kind."""
    profile: str
    """Profile of the planner (`predict.time.ENGINES`) that prices it."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Layout keys that plans do not search, with the only value that it has: it replaces another."""
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    serves: bool = False
    loads_model: bool = False
    """Whether it loads the model by a name, which says the model's sizes."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Version -> name of its file, where it is another."""
    versions: tuple[str, ...] = ("",)
    """Versions whose files differ, the newest first."""
    objection: Callable[[ModelConfig], str] = field(default=lambda model: "")
    """Why the engine does not know a model; empty where it does."""

    @property
    def bounds(self) -> list[Limit]:
        """Every limit: keys without a word first."""
        return [*absent(self.keys, self.left), *self.limits]

    def remarks(self, layout: Layout) -> list[str]:
        """Comments on keys that the file leaves to others."""
        changed: dict[str, Any] = {key: getattr(layout, key) for key in self.left}
        return [
            f"{key}={value}: {self.left[key]}" for key, value in changed.items() if value != DEFAULTS[key]
        ]  # fmt: skip


@dataclass(frozen=True)
class EngineFile(Json):
    """A configuration that has been written."""

    json_keys = "engine version layout ranks=layout.ranks file text comments"

    engine: str
    version: str
    layout: Layout
    file: str
    text: str
    comments: tuple[str, ...] = ()

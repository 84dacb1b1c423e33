"""`Family`: all that shardwise knows of a family of models beside the mechanisms that it is made of."""

from collections.abc import Callable
from typing import Any

from shardwise.model.config import ModelConfig
from shardwise.model.fields import Fields
from shardwise.model.foreign import ForeignNames
from shardwise.records import dataclass


@dataclass(frozen=True)
class Family:
    """A family of models, as Hugging Face knows it."""

    model_type: str
    """Its name in a `config.json`."""
    fits: Callable[[ModelConfig], bool]
    """Whether a model has the features that tell this family from those listed after it."""
    read: Callable[[Fields], dict[str, Any]]
    """Fields of a `config.json` -> fields of a `ModelConfig`."""
    module: str
    """Name of the decoder room's modules."""
    harmless: frozenset[str] = frozenset()
    """Fields of its own that leave the mathematics alone; in families that are only counted, every shape."""
    names: ForeignNames | None = None
    """Names of its tensors; None where it is only counted, and not read or written."""
    architecture: str = ""
    write: Callable[[ModelConfig], dict[str, Any]] | None = None
    """The inverse of `read`; None where another family stands for it, or it is only counted."""
    lacks: Callable[[ModelConfig], dict[str, bool]] | None = None
    """Features that the family has not -> whether a model has them."""

"""What a reader of another trainer's checkpoint finds: tensors by that trainer's names, and what it says of its run."""

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.checkpoint.dtypes import numpy_dtype
from shardwise.checkpoint.manifest import TensorSpec
from shardwise.data.extras import require
from shardwise.errors import UserError

_QUOTER = reprlib.Repr()
_QUOTER.maxstring = _QUOTER.maxother = 120

SETTINGS = ("lr", "betas", "eps", "weight_decay")
"""Settings read from AdamW's parameter groups, by torch's names."""


@dataclass(frozen=True)
class ForeignTensor:
    """A tensor that is not read yet. shape: None where the file holds its elements in a row and nobody says more.

    dtype: torch's name. load: reads all elements, as a vector (`uint16` for bfloat16). where: for messages.
    """

    shape: tuple[int, ...] | None
    dtype: str
    numel: int
    load: Callable[[], np.ndarray]
    where: str


@dataclass
class ForeignState:
    """Another trainer's checkpoint.

    tensors: kind ("model", "first", "second") -> name -> tensor. steps: updates made, None when it does not say.
    samples, batch: sequences seen, and in one step. groups: the settings of AdamW's parameter groups. about: plain
    facts about where it came from.
    """

    folder: Path
    tensors: dict[str, dict[str, ForeignTensor]]
    steps: int | None = None
    samples: int | None = None
    batch: int | None = None
    groups: list[dict[str, Any]] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)


def quoted(value: Any) -> str:
    """A name out of a file, for a message: in quotes, and not longer than a line."""
    return _QUOTER.repr(value)


def dtype_name(dtype: Any, where: str) -> str:
    """torch's name of a dtype. Raises `UserError` for one that checkpoints do not store."""
    name = str(dtype).removeprefix("torch.")
    try:
        numpy_dtype(name)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return name


def number(value: Any, otherwise: str) -> float:
    """A number, or the one element of a tensor. Raises `UserError(otherwise)` for anything else."""
    if hasattr(value, "numel") and value.numel() == 1:
        value = value.item()
    if type(value) not in (int, float):
        raise UserError(otherwise)
    return float(value)


def one_step(steps: Mapping[str, float], folder: Path) -> int | None:
    """The update count that all parameters share. Raises `UserError` when they do not, or it is none."""
    found: dict[int, str] = {}
    for name, value in steps.items():
        if not (0 <= value < 1 << 48 and value == int(value)):
            raise UserError(f"{folder}: the optimizer's step of {name} is {value}, which is no number of steps")
        found.setdefault(int(value), name)
    if len(found) > 1:
        (a, first), (b, second), *_ = found.items()
        raise UserError(f"{folder}: {first} has made {a} optimizer steps and {second} {b}; here all make the same")
    return next(iter(found), None)


def distinct(values: Sequence[Any]) -> list[Any]:
    return [value for i, value in enumerate(values) if value not in values[:i]]


def settings(group: Any) -> dict[str, Any]:
    """Learning rate, betas, epsilon and weight decay of a parameter group, those of them that are plain numbers."""
    if not isinstance(group, dict):
        return {}
    # What a scheduler has made of the peak: it goes on from there, though by which schedule is unknown.
    return {name: plain for name in SETTINGS if (plain := _plain(group.get(name))) is not None}


def _plain(value: Any) -> float | list[float] | None:
    if isinstance(value, (tuple, list)) and len(value) == 2:
        pair = [_plain(v) for v in value]
        return [v for v in pair if isinstance(v, float)] if None not in pair else None
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if type(value) not in (int, float) or not math.isfinite(value):
        return None
    return float(value)


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """A tensor to write."""

    name: str
    spec: TensorSpec
    read: Callable[[], np.ndarray]
    """All elements as a vector (`uint16` for bfloat16)."""

    def load(self) -> Any:
        torch = torch_for_writing()
        flat = torch.from_numpy(self.read())
        return (flat.view(torch.bfloat16) if self.spec.dtype == "bfloat16" else flat).view(self.spec.shape)


@dataclass(frozen=True)
class WrittenState:
    """Everything that a writer writes."""

    kinds: tuple[str, ...]
    """"model", and with AdamW's state "first" and "second"."""
    tensors: dict[str, list[WrittenTensor]]
    """Kind -> its tensors, each kind with the same names."""
    aliases: dict[str, str]
    """Second name of a weight -> its first: a tied head."""
    decays: dict[str, bool]
    """Name -> whether AdamW decays the weight."""
    settings: dict[str, Any]
    """AdamW's lr, betas, eps and weight_decay; empty without its state."""
    updates: int
    """Updates that AdamW has made."""
    step: int
    samples: int
    """Sequences that the run has seen."""
    batch: int | None
    """Sequences of a step, where the checkpoint says it."""
    nonfinite: dict[str, None]
    """Tensors that have been read and have an element which is not finite."""

    def groups(self) -> list[dict[str, Any]]:
        """AdamW's parameter groups with names as `params`: weights that decay, then all others. Other keys are those of
        the installed torch."""
        torch = torch_for_writing()
        found = []
        for decay in (True, False):
            names = [name for name, decays in self.decays.items() if decays is decay]
            settings = self.settings | ({} if decay else {"weight_decay": 0.0})
            (group,) = torch.optim.AdamW([torch.zeros(1)], **settings).state_dict()["param_groups"]
            found += [group | {"params": names}] if names else []
        return found


def torch_for_writing() -> Any:
    """torch. Raises `UserError` where it is not installed."""
    return require("torch", "train", "writing other trainers' checkpoints")

"""A checkpoint as another trainer's writer needs it: tensors by name, and AdamW's settings as torch has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.checkpoint.manifest import TensorSpec
from shardwise.data.extras import require


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """A tensor to write."""

    name: str
    spec: TensorSpec
    read: Callable[[], np.ndarray]
    """All elements as a vector (`uint16` for bfloat16)."""

    def load(self) -> Any:
        """The tensor, as torch's."""
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

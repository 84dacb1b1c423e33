"""`verify`: whether a split module computes what the module computes, in float64 processes on this machine."""

from __future__ import annotations

import importlib.util
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import spawn
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import UserError, did_you_mean, near_path
from shardwise.layout import Layout
from shardwise.layout.keys import KEYS, defaults
from shardwise.layout.modules import check_module_layout
from shardwise.runtime.job.rank import RankJob
from shardwise.runtime.measure.job import whole

if TYPE_CHECKING:
    from torch import nn

TOLERANCE = 1e-9
"""Largest error, as a share of the value's norm."""
LIMIT = 300.0
"""Seconds that a rank waits for others."""


@dataclass(frozen=True, kw_only=True)
class VerifyJob(RankJob):
    """What the ranks of a verification compare. setup: pickled (how to import the caller's main module); request:
    pickled `VerifyRequest`."""

    setup: str
    request: str


@dataclass(frozen=True)
class VerifyRequest:
    """One comparison."""

    model: Any
    """The module, or a function that builds it."""
    layout: Layout
    example: Any
    """Inputs of one forward pass, or a function that makes them."""
    plan: Mapping[str, str] | None
    blocks: Sequence[str] | None
    tolerance: float
    parts: Sequence[str] | None = None


@dataclass(frozen=True)
class Verification:
    """Result of `verify`: true where outputs and all gradients are equal within the tolerance."""

    layout: str
    module: str | None = None
    """The first module, in the order of the forward pass, whose output differs or that failed."""
    parameter: str | None = None
    """The first parameter whose gradient differs."""
    error: float = 0.0
    """Largest error of any output or gradient, as a share of its norm."""
    reason: str = ""
    """What the first module or parameter that differs did."""
    modules: int = 0
    """Modules whose outputs were compared."""
    parameters: int = 0
    """Parameters whose gradients were compared."""

    def __bool__(self) -> bool:
        return self.module is None and self.parameter is None

    def __str__(self) -> str:
        if self:
            return (
                f"{self.layout}: equal to one device. Outputs of {self.modules} modules and gradients of "
                f"{self.parameters} parameters, largest error {self.error:.1e}"
            )
        what = f"module {self.module}" if self.module is not None else f"the gradient of {self.parameter}"
        return f"{self.layout}: differs from one device, first in {what}: {self.reason}"

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, with the verdict as `equal`."""
        return {"equal": bool(self), **asdict(self)}


@dataclass(frozen=True)
class FromFile:
    """An object of a Python file, called: `path.py:name`."""

    path: str
    name: str

    @classmethod
    def parse(cls, text: str) -> FromFile:
        """Raises `UserError` for a text without a file and a name."""
        path, colon, name = text.rpartition(":")
        if not colon or not name.isidentifier() or not Path(path).is_file():
            hint = near_path(path) or ", such as model.py:build"
            raise UserError(f"{text!r} names no object of a file: give FILE.py:NAME{hint}")
        return cls(str(Path(path).resolve()), name)

    def __call__(self) -> Any:
        """Load the file and call the object; one that cannot be called is the result. Raises `UserError` without it."""
        made = self.loaded()
        return made() if callable(made) else made

    def loaded(self) -> Any:
        """Load the file, and give the object. Raises `UserError` without it."""
        name = f"_shardwise_{Path(self.path).stem}"
        spec = importlib.util.spec_from_file_location(name, self.path)
        assert spec is not None and spec.loader is not None
        if name not in sys.modules:
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        if not hasattr(sys.modules[name], self.name):
            names = [each for each in vars(sys.modules[name]) if not each.startswith("_")]
            raise UserError(f"{self.path} has no {self.name}; {did_you_mean(self.name, names, 'it has')}")
        return getattr(sys.modules[name], self.name)


def verify(
    model: nn.Module | Callable[[], nn.Module],
    layout: Layout | str,
    example: Any,
    *,
    plan: Mapping[str, str] | None = None,
    blocks: Sequence[str] | None = None,
    parts: Sequence[str] | None = None,
    tolerance: float = TOLERANCE,
) -> Verification:
    """Compare a split module with the module on one device: the output of every submodule, and the gradient of every
    parameter, of a random linear loss of the outputs, in float64 and evaluation mode.

    model: the module, or a function that builds it, the same weights for the same seed of torch.
    layout: as for `split`; its precision and ZeRO++'s packing are left out. example: inputs of one forward pass: a
    dictionary of keyword arguments, a tuple, or one tensor, with the same number of rows in every tensor, which dp
    divides; or a function that makes them. plan, blocks, parts: as for `split`. tolerance: largest error, as a share
    of the value's norm. Processes import the caller's main module, which must start nothing when it is imported.
    Raises `UserError` for what `split` rejects, and `RunFailed` when a process dies.
    """
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    check_module_layout(layout)
    rounding = (key.name for key in KEYS.values() if "inexact" in key.marks)
    exact = replace(layout, **defaults("grads", *rounding), precision="fp64")
    request = VerifyRequest(model, exact, example, plan, blocks, tolerance, parts)
    try:
        packed = pickle.dumps(request).hex()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"verify starts processes, to which it cannot hand the module ({error}): define classes and functions at "
            "the top of a file"
        ) from None
    # A process cannot hand on its key for connections, and none are made.
    setup = spawn.get_preparation_data("verify")
    setup.pop("authkey", None)
    job = partial(_job, pickle.dumps(setup).hex(), packed)
    found = whole("shardwise.runtime.module.verify_rank", job, layout.ranks)
    return Verification(**found | {"layout": str(layout)})


def _job(setup: str, request: str, out: str) -> dict[str, Any]:
    return asdict(VerifyJob(timeout=LIMIT, out=out, setup=setup, request=request))

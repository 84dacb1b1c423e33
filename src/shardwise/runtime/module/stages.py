"""The stages of a user's module on one rank of a pipeline.

A stage runs the module's whole forward, where only its own parts compute: what is before them is skipped, its first
block takes what has arrived, and the forward is left as soon as the stage's last block has its result. So masks,
positions and whatever else a model derives from its inputs are made on every stage by its own code. What is skipped
gives NaN: results that another stage would need besides the chain's tensor are noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree

from shardwise.errors import UserError
from shardwise.layout import pipeline
from shardwise.layout.units import UnitPlan
from shardwise.runtime.module.chain import Chain

LARGEST = 8
"""Most dims of a tensor between stages."""


class _Left(BaseException):
    """The stage has its result: the rest of the forward is another stage's. No error, so that no handler takes it."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output


class ModuleStages:
    """The forward passes of a rank's stages. Blocks, and what is before them, are wrapped."""

    def __init__(
        self, module: nn.Module, chain: Chain, plan: UnitPlan, wrap: Callable[..., Callable[..., Any]]
    ) -> None:
        """wrap: (block, its forward pass) -> what runs in its place."""
        self.module, self.chain, self.plan = module, chain, plan
        ends = list(accumulate(pipeline.stages(plan.subject, plan.layout).layers))
        self.blocks = list(zip([0, *ends], ends, strict=False))
        """Stage -> its (first block, last + 1)."""
        self.last = len(ends) - 1
        self.where = pipeline.placement(plan.layout)
        self._stage, self._arrived = 0, torch.empty(0)
        self._checked: set[str] = set()
        """Blocks whose other arguments were looked at."""
        self._next = 0
        """Number of the block whose turn is next in this forward pass."""
        for path in chain.entry:
            child = module.get_submodule(path)
            child.forward = partial(self._before, child.forward)  # type: ignore[assignment]
        for number, path in enumerate(chain.blocks):
            child = module.get_submodule(path)
            child.forward = partial(self._block, number, path, wrap(child, child.forward))  # type: ignore[assignment]

    def run(self, stage: int, x: Tensor | None, forward: Callable[[], Any]) -> Any:
        """The result of a stage: a tensor, and of the last stage what `forward` returns. x: what has arrived; None on
        the first stage. Raises `UserError` when it ends before the stage's last block."""
        self._stage, self._next = stage, 0
        if x is not None:
            self._arrived = x
        try:
            result = forward()
        except _Left as left:
            return left.output
        finally:
            self._arrived = torch.empty(0)
        if stage < self.last:
            block = self.chain.blocks[self.blocks[stage][1] - 1]
            raise UserError(f"the forward pass ended before {block}: each part computes once per pass, in order")
        if self._next < len(self.chain.blocks):
            raise self._left_out()
        return result

    def _left_out(self) -> UserError:
        block = self.chain.blocks[self._next]
        return UserError(f"{block} was left out of a forward pass; under pp every block runs, in order: leave pp out")

    def computes(self, path: str) -> bool:
        """Whether a module's output is that of the whole model now: it is in a part of this stage, or, on the first
        one, in none."""
        home = self.chain.home(f"{path}.")
        return home in self.plan.stages[self._stage] if home else self._stage == 0

    def _before(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) if self._stage == 0 else self._nothing()

    def _nothing(self) -> Tensor:
        return torch.full_like(self._arrived, float("nan"), requires_grad=False)

    def _block(self, number: int, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        first, stop = self.blocks[self._stage]
        if number > self._next:
            raise self._left_out()
        if number < self._next:
            raise UserError(
                f"{path} came twice in one micro-batch; under pp the module is called once, and each block computes "
                "once: call it with the rows of both (torch.cat), or leave pp out"
            )
        self._next += 1
        if number < first:
            return self._arrived if number == first - 1 else self._nothing()
        if number >= stop:  # the stage has only what is before the blocks
            raise _Left(_first_of(args, kwargs, path))
        if self._stage:
            args, kwargs = _replaced(args, kwargs, self._arrived) if number == 0 else (args, kwargs)
            self._check_others(path, args, kwargs)
        out: Tensor = forward(*args, **kwargs)
        check_output(path, out)
        if number == stop - 1 and self._stage < self.last:
            raise _Left(out)
        return out

    def _check_others(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise `UserError` for a block that takes a result of what is before the blocks, on a later stage."""
        if path in self._checked:
            return
        self._checked.add(path)
        for x in _pytree.tree_leaves([*args, *kwargs.values()][1:]):
            real = isinstance(x, Tensor) and x.is_floating_point() and not isinstance(x, FakeTensor) and x.numel()
            if real and x.isnan().all():
                raise UserError(
                    f"{path} takes a second tensor from a part before the blocks, which only the first stage has: "
                    "compute it inside of the blocks, or leave pp out"
                )


def check_output(path: str, out: Any) -> None:
    """Raise `UserError` for a block's output that is no tensor."""
    if not isinstance(out, Tensor):
        raise UserError(
            f"{path} returns a {type(out).__name__}; under a pipeline each block returns one tensor, which the next "
            "one takes: leave pp out"
        )


def _first_of(args: tuple[Any, ...], kwargs: dict[str, Any], path: str) -> Tensor:
    first = next(iter((*args, *kwargs.values())), None)
    if not isinstance(first, Tensor):
        raise UserError(
            f"{path} takes a {type(first).__name__} first; under a pipeline it takes the tensor that travels"
        )
    return first


def _replaced(args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (x, *args[1:]), kwargs
    return args, kwargs | dict.fromkeys(list(kwargs)[:1], x)


def free_others(module: nn.Module, held: Collection[str]) -> None:
    """Give up the parameters that this rank has in no unit. held: global names of the others."""
    kept = {id(module.get_parameter(name)) for name in held}
    for child in module.modules():
        for leaf, parameter in child.named_parameters(recurse=False):
            if id(parameter) not in kept:
                blank = torch.empty_like(parameter, device="meta")
                setattr(child, leaf, nn.Parameter(blank, requires_grad=parameter.requires_grad))

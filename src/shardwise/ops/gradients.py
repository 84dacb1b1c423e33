"""Gradient accumulators: one buffer for the whole run, into which matrix products write.

Autograd would make a tensor for each weight's gradient and then add it to a zeroed buffer. A `GradSlot` avoids the
tensor, the zeroing and the addition: the first product of a step overwrites, later ones accumulate.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardwise.errors import UserError
from shardwise.ops.limits import CACHED, product_chunk


class GradSlot:
    """View of a flat gradient buffer, for one parameter. `empty`: nothing has been added yet, whatever it holds.
    `arrived`: whether this step has computed a gradient for it, which may be zero."""

    __slots__ = ("arrived", "empty", "view")

    def __init__(self, view: Tensor) -> None:
        self.view, self.empty, self.arrived = view, True, False

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Add a @ b. a: [rows, n]; b: [n, columns]; the view: [rows, columns]."""
        if self.empty:
            torch.mm(a, b, out=self.view)
        elif self.view.is_cuda or self.view.numel() < CACHED:
            self.view.addmm_(a, b)
        else:
            # The product reads and writes what is there piece by piece: on a CPU that is slow once no cache holds it.
            step = product_chunk(*self.view.shape)
            if step >= len(self.view):
                self.view.add_(torch.mm(a, b))
                return
            for start in range(0, len(self.view), step):
                part = slice(start, start + step)
                self.view[part].add_(torch.mm(a[part], b))
        self.empty, self.arrived = False, True

    def add(self, gradient: Tensor) -> None:
        if self.empty:
            self.view.copy_(gradient)
        else:
            self.view.add_(gradient)
        self.empty, self.arrived = False, True

    def add_nothing(self) -> None:
        if self.empty:
            self.view.zero_()
        self.empty, self.arrived = False, True

    def add_sum(self, rows: Tensor) -> None:
        """Add the sum of `rows` [n, *view's shape] over their first dim."""
        if self.empty:
            torch.sum(rows, 0, out=self.view)
        else:
            self.view.add_(rows.sum(0))
        self.empty, self.arrived = False, True

    def add_rows(self, index: Tensor, rows: Tensor) -> None:
        """Add each of `rows` [n, columns] to the row that `index` [n] names."""
        if self.empty:
            self.view.zero_()
        if self.view.is_cuda:
            # index_add_ there adds atomically: in any order, and rounding each time
            self.view.index_put_((index,), rows, accumulate=True)
        else:
            self.view.index_add_(0, index, rows)
        self.empty, self.arrived = False, True


class WeightGradient(NamedTuple):
    """Weight gradients of `part` that are still to be added. reads: the tensors that are kept for it."""

    part: str
    add: Callable[[], None]
    reads: tuple[Tensor, ...]


class WeightGradients:
    """When the products that make the gradients of weights are computed: with the gradient of the input, or apart, as
    schedules without a bubble want it (Qi et al. 2024). Gradients of biases and norms, which cost next to nothing,
    always come with that of the input, and so do those of the parts in `at_once`: of a head the gradient of all logits
    would have to be kept.
    """

    def __init__(self, at_once: Collection[str] = ()) -> None:
        self._at_once = frozenset(at_once)
        self._kept: list[WeightGradient] | None = None
        self.outside = False
        """Whether no backward pass of a step is running, so that gradients have no place."""

    @property
    def waiting(self) -> bool:
        return self._kept is not None

    def check(self) -> None:
        """Raise `UserError` outside of a step's backward pass."""
        if self.outside:
            raise UserError(
                "loss_fn computes a gradient of the module itself (torch.autograd.grad), and its maps and blocks have "
                "theirs in a step's one backward pass alone: leave that gradient out of the loss"
            )

    def add(self, part: str, add: Callable[[], None], *reads: Tensor) -> None:
        """Call `add`, now or later."""
        self.check()
        if self._kept is None or part in self._at_once:
            add()
        else:
            self._kept.append(WeightGradient(part, add, reads))

    @contextmanager
    def split_weight_grad(self) -> Iterator[list[WeightGradient]]:
        """Defer the products of a backward pass; the caller must call them in order."""
        self._kept = []
        try:
            yield self._kept
        finally:
            self._kept = None


def grad_slot(parameter: nn.Parameter | Tensor) -> GradSlot:
    """The slot that `bind_grad_slot` gave to a parameter."""
    place = parameter.place  # type: ignore[union-attr]
    assert isinstance(place, GradSlot)
    return place


def bind_grad_slot(parameter: Tensor, place: GradSlot) -> None:
    """Accumulate `parameter`'s gradient in `place`; its `grad` is a view of that."""
    parameter.grad = place.view
    parameter.place = place  # type: ignore[attr-defined]

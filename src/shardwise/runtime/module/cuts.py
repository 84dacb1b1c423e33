"""How a cut of one dim over tensor-parallel ranks passes through torch's operators.

A cut dim is seen as [outer, units, inner]: each rank has some of the units. `through` gives the cut of an operator's
result from those of its arguments, or raises `Uncut` where ranks would need each other's elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwise.runtime.module.inputs import tensors_in


class Uncut(Exception):
    """The reason why a cut ends at an operator."""


@dataclass(frozen=True)
class DimCut:
    """A dim whose units are spread over ranks."""

    dim: int
    units: int
    inner: int = 1
    """Elements of a unit along the dim."""

    def outer(self, shape: Sequence[int]) -> int:
        """Runs of units along the dim."""
        return shape[self.dim] // (self.units * self.inner)


Argument = tuple[Tensor, DimCut | None]
"""A tensor and its cut."""


def through(func: Any, args: Sequence[Any], kwargs: dict[str, Any], cut: Callable[[Tensor], DimCut | None],
            out: Tensor) -> DimCut | None:  # fmt: skip
    """The cut of an operator's first result. cut: that of an argument. Raises `Uncut`."""
    tensors = [(x, cut(x)) for x in tensors_in(args)]
    if all(found is None for _, found in tensors):
        return None
    name = func._overloadpacket.__name__
    if torch.Tag.pointwise in func.tags or name in _LIKE:
        return _pointwise(tensors, out.shape)
    if (rule := _OF_ONE.get(name.removesuffix("_copy"))) is not None:
        x, found = tensors[0]
        return None if found is None else rule(name, x, found, args, kwargs, out)
    if (joint := _OF_SEVERAL.get(name)) is None:
        raise Uncut(f"{name} mixes its elements")
    return joint(name, tensors, args, kwargs, out)


def _pointwise(tensors: Sequence[Argument], shape: Sequence[int]) -> DimCut:
    """Element by element, with broadcasting: all tensors have the cut, or one element along it."""
    result: DimCut | None = None
    for x, found in tensors:
        if found is not None:
            moved = replace(found, dim=found.dim + len(shape) - x.dim())
            result = moved if result is None else _agreed(result, moved)
    assert result is not None
    for x, found in tensors:
        dim = result.dim - len(shape) + x.dim()
        if found is None and dim >= 0 and x.shape[dim] > 1:
            raise Uncut("it meets a tensor that every rank has whole")
    return result


def _agreed(one: DimCut, other: DimCut) -> DimCut:
    if one.dim != other.dim or one.units * one.inner != other.units * other.inner:
        raise Uncut("two tensors are cut in different ways")
    return min(one, other, key=lambda cut: cut.units)


def _view(name: str, x: Tensor, cut: DimCut, args: Sequence[Any], kwargs: Any, out: Tensor) -> DimCut | None:
    """The dim of the new shape that has the outermost part of the units."""
    step = cut.inner * prod(x.shape[cut.dim + 1 :])
    size = step * cut.units
    for dim in range(out.dim()):
        inside = prod(out.shape[dim + 1 :])
        whole = inside * out.shape[dim]
        if out.shape[dim] == 1 or inside >= size or whole <= step:
            continue
        inner = max(step, inside)
        if whole % size or size % inner or inner % inside or inner % step:
            break
        return DimCut(dim, size // inner, inner // inside)
    raise Uncut(f"{name} to {list(out.shape)} does not keep its units together")


def _permuted(name: str, x: Tensor, cut: DimCut, args: Sequence[Any], kwargs: Any, out: Tensor) -> DimCut | None:
    order = list(range(x.dim()))
    if name == "permute":
        order = [dim % x.dim() for dim in args[1]]
    else:
        a, b = (0, x.dim() - 1) if name == "t" else (args[1] % x.dim(), args[2] % x.dim())
        order[a], order[b] = order[b], order[a]
    return replace(cut, dim=order.index(cut.dim))


def _inserted(name: str, x: Tensor, cut: DimCut, args: Sequence[Any], kwargs: Any, out: Tensor) -> DimCut | None:
    dim = args[1] % out.dim()
    return replace(cut, dim=cut.dim + (dim <= cut.dim))


def _squeezed(name: str, x: Tensor, cut: DimCut, args: Sequence[Any], kwargs: Any, out: Tensor) -> DimCut | None:
    dims = [args[1]] if isinstance(args[1], int) else list(args[1])
    gone = sum(dim % x.dim() < cut.dim and x.shape[dim] == 1 for dim in dims)
    return replace(cut, dim=cut.dim - gone)


def _expanded(name: str, x: Tensor, cut: DimCut, args: Sequence[Any], kwargs: Any, out: Tensor) -> DimCut | None:
    return replace(cut, dim=cut.dim + out.dim() - x.dim())


def _piece(name: str, x: Tensor, cut: DimCut, args: Sequence[Any], kwargs: Any, out: Tensor) -> DimCut | None:
    """A part of a tensor along a dim."""
    place = 1 if name in ("slice", "select", "unbind", "narrow") else 2
    dim = (args[place] if len(args) > place else kwargs.get("dim", 0)) % x.dim()
    if dim == cut.dim:
        if x.shape[dim] == out.shape[dim] and name == "slice":
            return cut
        raise Uncut(f"{name} takes a part of its elements")
    return replace(cut, dim=cut.dim - (name in ("select", "unbind") and dim < cut.dim))


def _joined(name: str, tensors: Sequence[Argument], args: Sequence[Any], kwargs: Any, out: Tensor) -> DimCut | None:
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.dim()
    first = next(cut for _, cut in tensors if cut is not None)
    for x, cut in tensors:
        if cut is None and x.numel():
            raise Uncut(f"{name} joins it with a tensor that every rank has whole")
        first = first if cut is None else _agreed(first, cut)
    if name == "stack":
        return replace(first, dim=first.dim + (dim <= first.dim))
    if dim == first.dim:
        raise Uncut(f"{name} puts other elements between its units")
    return first


def _reduced(name: str, x: Tensor, cut: DimCut, args: Sequence[Any], kwargs: Any, out: Tensor) -> DimCut | None:
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    if dims is None or dims == []:
        raise Uncut(f"{name} goes over all of its elements")
    gone = {dim % x.dim() for dim in ([dims] if isinstance(dims, int) else dims)}
    if cut.dim in gone:
        raise Uncut(f"{name} goes over it")
    kept = out.dim() == x.dim()
    return cut if kept else replace(cut, dim=cut.dim - sum(dim < cut.dim for dim in gone))


def _along(name: str, x: Tensor, cut: DimCut, args: Sequence[Any], kwargs: Any, out: Tensor) -> DimCut | None:
    """A function along one dim, such as a softmax."""
    if args[1] % x.dim() == cut.dim:
        raise Uncut(f"{name} goes over it")
    return cut


def _normed(name: str, x: Tensor, cut: DimCut, args: Sequence[Any], kwargs: Any, out: Tensor) -> DimCut | None:
    if cut.dim >= x.dim() - len(args[1]):
        raise Uncut("a norm goes over it")
    return cut


def _product(name: str, tensors: Sequence[Argument], args: Sequence[Any], kwargs: Any, out: Tensor) -> DimCut | None:
    (a, left), (_, right) = tensors[-2:]
    last = a.dim() - 1
    if (left and left.dim == last) or (right and right.dim == last - 1):
        raise Uncut("a product sums over it")
    if left and right:
        if left.dim == right.dim == 0 and a.dim() == 3:
            return _agreed(left, right)
        raise Uncut("both sides of a product are cut")
    cut = left or right
    assert cut is not None
    if a.dim() == 3 and cut.dim == 0:
        raise Uncut("it meets a tensor that every rank has whole")
    return cut


def _attended(name: str, tensors: Sequence[Argument], args: Sequence[Any], kwargs: Any, out: Tensor) -> DimCut | None:
    """Heads are independent of each other; those of keys and values may be shared by several of the queries'."""
    cuts = [cut for _, cut in tensors[:3] if cut is not None]
    if len(cuts) < 3:
        raise Uncut("attention meets queries, keys or values that every rank has whole")
    if len({cut.dim for cut in cuts}) > 1 or cuts[0].dim > 1:
        raise Uncut("attention goes over it")
    dim, units = cuts[0].dim, min(cut.units for cut in cuts)
    return DimCut(dim, units, out.shape[dim] // units)


_LIKE = (
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "clone", "_to_copy", "detach", "alias",
    "dropout", "native_dropout", "contiguous", "lift_fresh", "copy_",
)  # fmt: skip
_OF_ONE: dict[str, Callable[[str, Tensor, DimCut, Sequence[Any], Any, Tensor], DimCut | None]] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), _view),
    **dict.fromkeys(("permute", "transpose", "t"), _permuted),
    "unsqueeze": _inserted,
    "squeeze": _squeezed,
    "expand": _expanded,
    **dict.fromkeys(("slice", "select", "unbind", "narrow", "split", "split_with_sizes"), _piece),
    **dict.fromkeys(("mean", "sum", "amax", "amin", "var", "std", "linalg_vector_norm", "norm", "prod"), _reduced),
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax", "cumsum"), _along),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), _normed),
}
"""Rules of operators whose result has the elements of their first tensor."""
_OF_SEVERAL: dict[str, Callable[[str, Sequence[Argument], Sequence[Any], Any, Tensor], DimCut | None]] = {
    **dict.fromkeys(("cat", "stack"), _joined),
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm"), _product),
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention", "_scaled_dot_product_attention_math",
        ),
        _attended,
    ),
}  # fmt: skip

"""torch's newer names, under those of 2.13 as well as under those of 2.9 to 2.12.

Names are looked up when they are called. `tests/runtime/test_torch_versions.py` lists every torch name that the package
uses; what torch 2.9 lacks is used here alone.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather_single(
    out: Tensor, piece: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
) -> Any:
    """`torch.distributed.all_gather_single`, which was `all_gather_into_tensor`."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(out, piece, group=group, async_op=async_op)


def reduce_scatter_single(
    out: Tensor, full: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
) -> Any:
    """`torch.distributed.reduce_scatter_single`, which was `reduce_scatter_tensor`."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(out, full, group=group, async_op=async_op)


def know_fake_collectives() -> None:
    """Have collectives accept fake tensors, for the dry run. Where torch does not by itself, importing one of its tools
    has it do so."""
    if find_spec("torch.distributed._meta_registrations") is None:
        import_module("torch.distributed._tools.fake_collectives")


def default_backend() -> str:
    """The backend of torch.compile where none is named, which could not be changed before."""
    known = getattr(torch.compiler, "get_default_backend", None)
    return str(known()) if known else "inductor"


def patience_with_recompilations() -> AbstractContextManager[object]:
    """A context in which compiled code may be compiled anew as often as it asks to. Under a dispatch mode, torch 2.9
    asks at every call, and gives up at the ninth."""
    config: Any = import_module("torch._dynamo.config")
    patience: AbstractContextManager[object] = config.patch(
        recompile_limit=1 << 20, accumulated_recompile_limit=1 << 20
    )
    return patience


def know_fp64_attention() -> None:
    """Have the compiler know what attention on CPUs returns in fp64. That of 2.9 and 2.11 takes the log-sums for fp32,
    so that its code converts them, and the backward pass rejects what it gets."""
    operation: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    kernels, meta = operation.py_kernels, torch._C.DispatchKey.Meta
    known, x = kernels[meta], torch.empty(1, 1, 1, 1, dtype=torch.float64, device="meta")
    if known(x, x, x)[1].dtype == x.dtype:
        return

    def exact(query: Tensor, *args: Any, **named: Any) -> tuple[Tensor, Tensor]:
        out, sums = known(query, *args, **named)
        return out, sums.to(torch.promote_types(sums.dtype, query.dtype))

    kernels[meta] = exact
    operation._dispatch_cache.clear()


def compile_apart(function: Callable[..., Any], *, fullgraph: bool) -> Callable[..., Any]:
    """torch.compile with static shapes, whose compilations do not count as those of another call for this function."""
    know_fp64_attention()
    options: dict[str, Any] = {"fullgraph": fullgraph, "dynamic": False}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        options["isolate_recompiles"] = True
    elif isinstance(function, FunctionType):
        function = _copied(function)  # compilations are counted by the function's code
    compiled: Callable[..., Any] = torch.compile(function, **options)
    return compiled


def _copied(function: FunctionType) -> FunctionType:
    copy = FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy

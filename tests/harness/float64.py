"""Models of `transformers` that compute in float64 throughout.

Their norms, rotary angles, routers and softmaxes ask for float32 by name, in a model of float64, too. Here that name
means float64, so that such a model is an oracle to the last digits.
"""

import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

_running = threading.local()


class _Float32IsFloat64(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _pytree.tree_map(
            lambda value: torch.float64 if value is torch.float32 else value, (args, kwargs or {})
        )
        return (Tensor.double if func is Tensor.float else func)(*args, **kwargs)


def oracle(model: nn.Module) -> nn.Module:
    """A model of `transformers` in float64, whose modules compute in that. Frequencies of rotary angles and scales of
    tables, which it has rounded to float32, are made anew. Modules keep this where a model is split."""
    model.double()
    for module in list(model.modules()):
        if not type(module).__module__.startswith("transformers."):
            continue
        if hasattr(module, "inv_freq") and hasattr(module, "config"):
            with _Float32IsFloat64():
                fresh = type(module)(module.config)
            for name, buffer in fresh.named_buffers(recurse=False):
                setattr(module, name, buffer)
        if hasattr(module, "scalar_embed_scale"):
            module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=torch.float64)
        module.__class__ = _exact(type(module))
    return model


@cache
def _exact(kind: type[nn.Module]) -> type[nn.Module]:
    """The class with another forward, by its own name, by which blocks are found."""
    forward = _in_float64(kind.forward)
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _in_float64(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)  # `transformers` reads the arguments' names
    def run(*args: Any, **kwargs: Any) -> Any:
        if getattr(_running, "inside", False):
            return forward(*args, **kwargs)
        _running.inside = True
        try:
            with _Float32IsFloat64():
                return forward(*args, **kwargs)
        finally:
            _running.inside = False

    return run

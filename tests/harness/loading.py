"""What a rank holds while it loads a model to generate with: every tensor's memory, at most and in the end."""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.runtime.job.setup import make_comms
from shardwise.serving.engine import TokenGenerator
from shardwise.serving.job import ServingJob, weights_in


@dataclass
class Loaded:
    """Bytes of one rank. peak: of all tensors, each memory once, but for the cache; left: in the end; share: of its
    weights, as the engine has it."""

    peak: int
    left: int
    share: int


class Live(TorchDispatchMode):
    """Sums, after every operation, the memory that tensors have then. One of oneDNN's shows none, and counts itself."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, Any] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                memory = leaf if leaf.layout == torch._mkldnn else leaf.untyped_storage()  # type: ignore[attr-defined]
                self._seen[id(memory) if memory is leaf else memory._cdata] = weakref.ref(memory)
        self.peak = max(self.peak, self.now)
        return out

    @property
    def now(self) -> int:
        alive = (found for ref in list(self._seen.values()) if (found := ref()) is not None)
        return sum(each.nbytes if isinstance(each, Tensor) else each.nbytes() for each in alive)


def load(rank: int, job: ServingJob) -> Loaded:
    comms = make_comms(job.layout, job.model, rank, timeout=60.0, transport=job.transport)
    _, weights = weights_in(job.weights)
    live = Live()
    with live:
        generator = TokenGenerator(job, comms, rank, torch.device("cpu"))
        generator.load(weights)
        left = live.now
    comms.close()
    cache = generator.cache_bytes
    return Loaded(live.peak - cache, left - cache, generator.parameter_bytes)

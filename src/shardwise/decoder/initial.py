"""Initial weights as a function of (seed, name, global index): every split of a model starts from the same one."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.decoder import random
from shardwise.model.parameters import Parameter


def initial_values(parameter: Parameter, index: Tensor, seed: int) -> Tensor:
    """Values of `parameter` at row-major global positions `index` (int64, any shape); float64 of the same shape."""
    if parameter.init == "zeros":
        return torch.zeros(index.shape, dtype=torch.float64, device=index.device)
    if parameter.init == "ones":
        return torch.ones(index.shape, dtype=torch.float64, device=index.device)
    return random.normal(random.key(seed, parameter.name), index).mul_(parameter.std)

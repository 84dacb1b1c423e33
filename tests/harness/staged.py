"""Staging of CPU tensors, as if they were on a GPU that ranks share."""

from torch import Tensor

from shardwise.runtime.transport.staged import StagedTransport


class StagesAll(StagedTransport):
    def stages(self, tensor: Tensor) -> bool:
        return True

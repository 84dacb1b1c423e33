"""dtypes in which a rank has weights and gradients, and sends them."""

from collections.abc import Callable
from functools import cached_property

from shardwise.layout.layout import Layout
from shardwise.layout.optimizers import widens_gradients
from shardwise.layout.unit import Unit
from shardwise.records import dataclass


@dataclass(frozen=True)
class Dtypes:
    """dtypes of a layout's units. trains: whether there is a training step."""

    layout: Layout
    trains: bool
    micro_batches: Callable[[], int]
    """Number of a step; called where it matters, since a batch may not divide."""

    @property
    def master(self) -> str:
        """dtype in which the optimizer updates weights."""
        return "float64" if self.layout.precision == "fp64" else "float32"

    @property
    def interval(self) -> str:
        """dtype of a rank's interval of the weights: at stage 3 the optimizer's, where that is on the device."""
        masters = self.trains and self.layout.stage == 3 and self.layout.offload_home == "none"
        return self.master if masters else self.layout.dtype

    def of(self, unit: Unit) -> str:
        """dtype of a rank's interval of a unit."""
        return self.gathered(unit) if unit.frozen else self.interval

    def gathered(self, unit: Unit) -> str:
        """dtype of a whole unit's parameters."""
        return unit.dtype or self.layout.dtype

    @cached_property
    def gradients(self) -> str:
        """dtype of the gradient accumulators. More than one bf16 micro-batch is summed in fp32."""
        if self.layout.precision != "bf16":
            return self.master
        wide = widens_gradients(self.layout.grads == "fp32", self.micro_batches())
        return "float32" if wide else "bfloat16"

    @property
    def wire(self) -> str:
        """dtype in which full gradients are summed."""
        return self.layout.dtype if self.layout.stage >= 2 else self.gradients

    @cached_property
    def stages_gradients(self) -> bool:
        """Whether full gradients are staged, in compute precision, on their way into the accumulators."""
        return self.layout.stage >= 2 or self.gradients != self.layout.dtype

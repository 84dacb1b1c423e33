"""Settings of other engines that a layout has no key for: products of 8 bits, and recomputation of a part."""

from dataclasses import replace

from shardwise.errors import UserError, did_you_mean
from shardwise.layout import Layout
from shardwise.layout.keys import CHOICES
from shardwise.layout.optimizers import ELSEWHERE, OPTIMIZERS, check_own
from shardwise.predict.memory.engine_rows import EngineMemory, engine_memory
from shardwise.records import dataclass

MUON = "the time of an update is AdamW's: Muon's orthogonalization is not in it"
"""Note on every time of a step with Muon."""
NARROW = {"fp8": "float8_e4m3fn", "mxfp8": "float8_e4m3fn"}
"""Precision -> torch's name of the products' type."""


@dataclass(frozen=True)
class EngineSettings:
    """How another engine's software is set up. The defaults are those of a layout."""

    precision: str = ""
    """"fp8" or "mxfp8"; empty for the layout's."""
    modules: tuple[str, ...] = ()
    """Modules that backward computes again (Megatron's --recompute-modules)."""
    layers: int = 0
    """Blocks of each chunk that backward computes again, the first ones (--recompute-num-layers with block)."""
    narrow_state: bool = False
    """Weights, gradients and moments are stored in 16 bits, without master weights."""

    @property
    def narrow(self) -> bool:
        """Whether products are of 8 bits."""
        return self.precision in NARROW

    @property
    def dtype(self) -> str | None:
        """torch's name of the products' type; None for the layout's."""
        return NARROW.get(self.precision)

    def stored(self, memory: EngineMemory) -> EngineMemory:
        """An engine's memory with the bytes of a parameter's state under these settings."""
        if not self.narrow_state:
            return memory
        return replace(memory, weight_bytes=2.0, gradient_bytes=2.0, moment_bytes=2.0, master_bytes=0.0)

    def recomputed(self, blocks: int, chunks: int) -> float:
        """Share of a model's blocks that are recomputed. chunks: of the whole pipeline."""
        return min(1.0, self.layers * chunks / blocks)

    def check(self, engine: str, layout: Layout | None = None) -> None:
        """Raise `UserError` for what an engine has not, and beside what a layout recomputes; "" is this project's
        runtime."""
        if self == EngineSettings():
            return
        if self.precision in CHOICES["precision"]:
            raise UserError(f"precision={self.precision} is a key of layouts: leave it out here")
        if self.precision and self.precision not in NARROW:
            hint = did_you_mean(self.precision, [*NARROW, "bf16"], "choose one of", cutoff=0.5)
            raise UserError(f"precision={self.precision} is no setting of engines; {hint}")
        memory = engine_memory(engine)
        if memory is None:
            who = engine if engine not in ("", "shardwise", "shardwise-cpu") else "this runtime"
            raise UserError(f"{self._first()}: {who} has no such setting; give --engine NAME, such as megatron-core")
        if self.precision and self.precision not in memory.precisions:
            raise UserError(f"{memory.name} does not train in {self.precision}: leave it out")
        for module in self.modules:
            if module not in memory.modules:
                known = did_you_mean(module, memory.modules, "modules:") if memory.modules else "it has no modules"
                raise UserError(f"recomputed module {module!r} is unknown to {engine}: {known}")
        if self.layers and not memory.partial:
            raise UserError(f"{engine} does not recompute a part of a chunk's layers: leave recompute-layers out")
        if self.layers < 0:
            raise UserError(f"recomputed layers must be a positive integer, not {self.layers}")
        if self.layers and layout and layout.recompute != "none":
            raise UserError(f"recompute={layout.recompute} and recomputed layers are two ways to recompute: give one")
        if self.layers and self.modules:
            raise UserError("recomputed layers and recomputed modules are two ways to recompute: give one of them")

    def _first(self) -> str:
        if self.precision:
            return f"precision={self.precision}"
        if self.narrow_state:
            return "states in 16 bits"
        return f"recompute-modules={'+'.join(self.modules)}" if self.modules else f"recompute-layers={self.layers}"


def check_optimizer(engine: str, optimizer: str) -> None:
    """Raise `UserError` for an optimizer that the software has not; "" is this project's runtime."""
    memory = engine_memory(engine)
    if memory is None:
        check_own(optimizer)
    elif optimizer in ELSEWHERE and optimizer not in memory.optimizers:
        raise UserError(f"optimizer={optimizer}: {engine} has {', '.join((*OPTIMIZERS, *memory.optimizers))}")


USUAL = EngineSettings()
"""Nothing beside the layout."""

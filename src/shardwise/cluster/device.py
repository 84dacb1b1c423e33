"""One device, and one link between two of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardwise.errors import UserError


@dataclass(frozen=True)
class Device:
    """What computes. A figure that nobody measured or published is None, never a guess.

    memory_bytes: what a program can allocate, in bytes; for kind "cpu" the whole machine's, shared by all its ranks.
    memory_bandwidth: bytes/s. peak_flops: torch's dtype name -> dense FLOP/s (a multiply-add counts as two), "tfloat32"
    apart from "float32". source: where the figures are from.
    """

    name: str
    kind: Literal["cuda", "cpu"]
    memory_bytes: int | None
    memory_bandwidth: float | None
    peak_flops: Mapping[str, float] = field(default_factory=dict, hash=False)
    source: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("cuda", "cpu"):
            raise UserError(f"device {self.name!r}: kind must be cuda or cpu, not {self.kind!r}")
        figures = {"memory_bytes": self.memory_bytes, "memory_bandwidth": self.memory_bandwidth}
        figures |= {f"peak_flops.{dtype}": value for dtype, value in self.peak_flops.items()}
        for what, value in figures.items():
            if value is not None and not 0 < value < float("inf"):
                raise UserError(f"device {self.name!r}: {what} must be positive, not {value!r}")

    def peak(self, dtype: str) -> float | None:
        """Dense FLOP/s in that dtype, None when not known."""
        return self.peak_flops.get(dtype)


@dataclass(frozen=True)
class Link:
    """What connects a device with another one, in one direction: a message of n bytes takes alpha + n / bandwidth.

    alpha: seconds a message; bandwidth: bytes/s a device. None where not known. source: where the figures are from.
    """

    alpha: float | None
    bandwidth: float | None
    source: str = ""

    def __post_init__(self) -> None:
        if self.alpha is not None and not 0 <= self.alpha < float("inf"):
            raise UserError(f"a link's alpha must be finite and not negative, not {self.alpha!r}")
        if self.bandwidth is not None and not 0 < self.bandwidth < float("inf"):
            raise UserError(f"a link's bandwidth must be positive, not {self.bandwidth!r}")

"""A device's room for a predicted peak: it fits, it is at risk, or it does not fit."""

from dataclasses import asdict
from typing import Any, Literal

from shardwise.records import dataclass
from shardwise.report.units import format_bytes, format_share

RoomState = Literal["fits", "at risk", "does not fit"]


@dataclass(frozen=True)
class DeviceRoom:
    """Bytes of a device that a run may use."""

    usable: float
    """Bytes."""
    margin: float = 0.0
    """Share of a predicted peak by which a real one may be higher."""
    why: str = ""
    """What the margin is for."""

    @property
    def safe(self) -> float:
        """Bytes of the largest predicted peak that fits with the margin."""
        return self.usable / (1 + self.margin)

    def state(self, peak: float) -> RoomState:
        """Whether a predicted peak fits with the margin, only without it, or not at all."""
        return "fits" if peak <= self.safe else "at risk" if peak <= self.usable else "does not fit"

    def verdict(self, peak: float) -> str:
        size = format_bytes(self.usable)
        return f"at risk in {size}" if self.state(peak) == "at risk" else f"{self.state(peak)} {size}"

    def warning(self, peak: float) -> str:
        """What the risk is, in a sentence; empty where there is none."""
        if self.state(peak) != "at risk":
            return ""
        return (
            f"at risk: {format_bytes(peak)} of {format_bytes(self.usable)} leaves less than the margin of "
            f"{format_share(self.margin)} for {self.why}; --reserve BYTES sets another reserve"
        )

    def to_json(self, peak: float) -> dict[str, Any]:
        return asdict(self) | {"safe": self.safe, "state": self.state(peak)}

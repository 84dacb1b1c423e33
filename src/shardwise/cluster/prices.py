"""Dated list prices of devices: `prices.toml`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.cluster.device import Device

HOUR = 3600.0
"""Seconds."""


class DevicePrice(NamedTuple):
    """DevicePrice of one device for one hour."""

    usd: float
    """US dollars per device-hour."""
    source: str
    """Provider and date, or that it was given."""
    highest: float
    """Highest list price of the same device; equal to `usd` where there is one."""

    def per_million_tokens(self, devices: int, tokens_per_second: float) -> float:
        """US dollars per million tokens."""
        return self.usd * devices / HOUR / tokens_per_second * 1e6

    def to_json(self) -> dict[str, Any]:
        return {"usd_per_device_hour": self.usd, "source": self.source, "highest_list_price": self.highest}


@cache
def _table() -> tuple[str, dict[str, list[tuple[float, str]]]]:
    """The date, and device -> (US dollars, offer), cheapest first."""
    import tomllib

    table = tomllib.loads((Path(__file__).parent / "prices.toml").read_text(encoding="utf-8"))
    offers: dict[str, list[tuple[float, str]]] = {}
    for row in table["prices"]:
        offers.setdefault(row["device"], []).append((row["usd"], row["offer"]))
    return table["date"], {device: sorted(rows) for device, rows in offers.items()}


def price_date() -> str:
    """Year and month of the list prices."""
    return _table()[0]


def price_of(device: Device, given: float | None = None) -> DevicePrice | None:
    """The given price per device-hour, else the lowest list price; None where the device has none."""
    if given is not None:
        return DevicePrice(given, "--price", given)
    date, offers = _table()
    if device.name not in offers:
        return None
    rows = offers[device.name]
    return DevicePrice(rows[0][0], f"{rows[0][1]}, list price of {date}", rows[-1][0])

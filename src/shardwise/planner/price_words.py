"""Prices of plans in words, and as plain data."""

from typing import Any

from shardwise.cluster.catalog import DevicePrice


def money(usd: float | None) -> str:
    """US dollars with three significant digits, whole ones from 100 on; nothing where there is no price."""
    if usd is None:
        return ""
    return f"{usd:,.0f}" if usd >= 99.95 else f"{usd:.2f}" if usd >= 1 else f"{usd:.3g}"


def priced(price: DevicePrice | None, devices: int, tokens_per_second: float) -> dict[str, Any] | None:
    """Price of so many devices that make so many tokens, for --json; None where the device has no price."""
    if price is None:
        return None
    return price.to_json() | {
        "usd_per_hour": price.usd * devices,
        "usd_per_million_tokens": price.per_million_tokens(devices, tokens_per_second),
    }


def price_line(price: dict[str, Any] | None, device: str) -> str:
    """`priced` in one line."""
    if price is None:
        return f"price: no list price of {device} is recorded; --price X gives US dollars per device-hour"
    lowest, highest = price["usd_per_device_hour"], price["highest_list_price"]
    others = f"; others up to {highest:.2f}" * (highest > lowest)
    return (
        f"price: {money(price['usd_per_million_tokens'])} USD per million tokens, {money(price['usd_per_hour'])} USD "
        f"per hour ({lowest:.2f} per device-hour: {price['source']}{others})"
    )

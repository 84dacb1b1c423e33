"""List prices of devices: dated, each with its offer, and overridden by a given one."""

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cluster import prices
from shardwise.cluster.accelerators import accelerators
from shardwise.cluster.prices import price_date, price_of

ROWS = tomllib.loads((Path(prices.__file__).parent / "prices.toml").read_text())["prices"]


def test_every_price_is_dated_and_of_a_device_of_the_catalog():
    assert re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", price_date())
    assert len({(row["device"], row["offer"]) for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert row["device"] in accelerators().devices and row["offer"] and 0.05 < row["usd"] < 50


@pytest.mark.parametrize("name", accelerators().devices)
def test_the_lowest_list_price_counts_and_the_highest_is_kept(name):
    offers = [row["usd"] for row in ROWS if row["device"] == name]
    price = price_of(accelerators().devices[name].device)
    if not offers:
        assert price is None
        return
    assert price is not None and (price.usd, price.highest) == (min(offers), max(offers))
    assert price_date() in price.source


@given(st.floats(0.01, 100), st.integers(1, 1000), st.floats(1, 1e7))
def test_a_given_price_overrides_and_a_million_tokens_cost_their_hours(usd, devices, speed):
    price = price_of(accelerators().devices["H100-80GB-SXM"].device, usd)
    assert price is not None and price.usd == usd and price.source == "--price"
    hours = 1e6 / speed / 3600
    assert price.per_million_tokens(devices, speed) == pytest.approx(usd * devices * hours)

"""A browser, and a server and a folder with a run for all tests of the page."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from studio_visitor import Visitor, make_run, serving

from shardwise.studio.server import Studio

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
HOW = "Debian's Chromium draws the page here: apt-get install -y --no-install-recommends chromium fonts-dejavu-core"


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one finished run: twelve steps with loads of experts, both reports, a timeline."""
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "first", steps=12, experts=True)
    return folder


@pytest.fixture(scope="session")
def studio(runs: Path) -> Iterator[Studio]:
    with serving(runs) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium. As long as it is there an event loop runs, beside which other tests could not have their own."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.fail("playwright is missing: pip install 'shardwise[test]'", pytrace=False)
    if not CHROMIUM.exists():
        # Where nobody is told to install it, the rest of the tests still say something; CI installs it.
        missing = pytest.fail if os.environ.get("CI") else pytest.skip
        missing(f"{CHROMIUM} is missing. {HOW}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS.split())
        yield browser
        browser.close()


@pytest.fixture
def visitor(browser: Any, studio: Studio) -> Iterator[Visitor]:
    """A tab with reduced motion; at its end nothing outside was asked for, and nothing went wrong."""
    found = Visitor(browser, studio, reduced_motion="reduce")
    yield found
    found.close()

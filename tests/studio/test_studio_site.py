"""The static site: opens from disk, and its controls lead to the answers that the server gives."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from studio_visitor import Visitor

from harness.cases import table
from harness.documents import ROOT
from harness.today import EVERYTHING, seed, some_of
from screenshots import FIGURES, SHOWN
from shardwise.errors import UserError
from shardwise.studio.columns import encode
from shardwise.studio.data.registry import VIEWS, answer, parts
from shardwise.studio.page import parse_view
from shardwise.studio.site import Preset, write_site


class Site(NamedTuple):
    folder: Path
    states: dict[str, list[Preset]]

    @property
    def index(self) -> Path:
        return self.folder / "index.html"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Two states of each view besides the first one, of controls that change with the day; or all of them."""
    folder = tmp_path_factory.mktemp("site")
    return Site(folder, write_site(folder) if EVERYTHING else write_site(folder, most=3, mixed=random.Random(seed())))


@pytest.fixture
def reader(browser: Any, studio: Any) -> Iterator[Visitor]:
    """A tab without a network; it remembers which files it read."""
    tab = Visitor(browser, studio, reduced_motion="reduce")
    tab.context.set_offline(True)
    yield tab
    tab.close()


def test_every_view_opens_from_disk_and_is_small(reader: Visitor, site: Site) -> None:
    read: list[str] = []
    reader.page.on("request", lambda request: read.append(request.url))
    reader.page.goto(site.index.as_uri())
    reader.ready()
    files = [Path(url.removeprefix("file://")) for url in read if not url.startswith("data:")]
    assert files == [site.index, site.folder / "answers" / f"{next(iter(VIEWS))}-0.js"]
    assert sum(path.stat().st_size for path in files) < 600_000
    assert sum(path.stat().st_size for path in site.folder.rglob("*.*")) < 30_000_000
    for title in VIEWS.values():
        reader.after(lambda title=title: reader.page.get_by_role("link", name=title, exact=True).click())
        assert reader.page.locator("h1").inner_text() == title
        assert not reader.page.get_by_role("alert").is_visible()
    assert "shardwise studio --runs DIR" in reader.page.locator("main .sentence").first.inner_text()
    assert {Path(url.removeprefix("file://")).parent for url in read if not url.startswith("data:")} == {
        site.folder,
        site.folder / "answers",
    }


CHANGE = table(__file__, "CHANGE")
"""Set a control to a value; whether the address then has it."""


@pytest.mark.parametrize("turn", range(10))
def test_controls_lead_to_the_servers_answers(reader: Visitor, site: Site, turn: int) -> None:
    every = [preset for states in site.states.values() for preset in states if preset.given]
    for preset in every[turn::10] if EVERYTHING else some_of(every, 10, "presets")[turn : turn + 1]:
        tables: dict[str, dict[str, list[Any]]] = {}
        for part in parts(preset.view):
            tables |= {name: table.columns for name, table in answer(part, preset.given).tables.items()}
        reader.page.goto("about:blank")
        reader.page.goto(f"{site.index.as_uri()}#{preset.view}?_tables={','.join(tables)}&_controls=1&_more=1")
        reader.ready()
        for name, value in preset.given.items():
            reader.after(lambda name=name, value=value: _change(reader, name, value))
        assert {name: value for name, value in reader.given.items() if name[0] != "_"} == preset.given
        for name, columns in tables.items():
            if columns and len(next(iter(columns.values()))):
                exact = {heading: json.loads(encode(list(values)))[:100] for heading, values in columns.items()}
                assert reader.table(name) == exact, f"{preset.view}, {preset.given}: {name}"


def _change(reader: Visitor, name: str, value: str) -> None:
    assert reader.page.evaluate(CHANGE, [name, value]), f"{name} is not offered as {value}"


@pytest.mark.parametrize("name", some_of(FIGURES, 3, "figures"))
def test_a_figure_of_the_documentation_opens_alone_without_a_server(reader: Visitor, tmp_path: Path, name: str) -> None:
    _, given = parse_view(FIGURES[name])
    write_site(tmp_path, most=1, also=[FIGURES[name]])
    reader.page.goto(f"{(tmp_path / 'index.html').as_uri()}#{FIGURES[name]}")
    reader.ready()
    shown = reader.page.locator("[data-figure]:visible")
    assert {shown.nth(i).get_attribute("data-figure") for i in range(shown.count())} == set(given["_only"].split(","))
    for other in (reader.page.locator("header"), reader.page.locator("h1"), reader.page.get_by_role("alert")):
        assert not other.is_visible()


def test_pages_show_the_figures_that_are_made_for_them() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "lessons").glob("*.py")]
    named = {page: set(re.findall(r"screenshots/([\w-]+)-light\.png", page.read_text())) for page in pages}
    assert set(FIGURES) <= set().union(*named.values()) <= {*FIGURES, *SHOWN}
    bare = {page.stem[:2] for page, names in named.items() if page.suffix == ".py" and not names}
    assert bare == {"05", "11", "12", "13"}, "rounding, tables, and other trainers have no view"
    assert all((ROOT / "docs" / "screenshots" / f"{name}-light.png").is_file() for name in FIGURES)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write"):
        write_site(tmp_path / "file", ["sync"])


def test_a_combination_without_an_answer_takes_other_controls_back(reader: Visitor, tmp_path: Path) -> None:
    (states,) = write_site(tmp_path, ["experts"]).values()
    assert not [preset for preset in states if {"tokens", "load"} <= set(preset.given)]
    reader.page.goto(f"{(tmp_path / 'index.html').as_uri()}#experts?load=balanced&_chapter=2")
    reader.ready()
    offered = reader.page.locator('[data-control="tokens"] input').get_attribute("max")
    assert offered == str(len({preset.first.state["tokens"] for preset in states}) - 1), "all that any state has"
    reader.after(lambda: _change(reader, "tokens", "8"))
    assert reader.given == {"tokens": "8", "_chapter": "2"}
    assert reader.page.get_by_role("button", name="Skewed").get_attribute("aria-pressed") == "true"
    reader.page.goto(f"{(tmp_path / 'index.html').as_uri()}#experts?tokens=9")
    reader.until("document.querySelector('.error').textContent")
    assert 'run shardwise studio --view "experts?tokens=9"' in reader.page.get_by_role("alert").inner_text()

"""The page as a whole: nothing from outside, no serious finding of axe, narrow screens, zoom, export."""

from pathlib import Path
from typing import Any

import pytest
from studio_visitor import Visitor

from harness.cases import table
from harness.today import some_of
from shardwise.errors import UserError
from shardwise.studio.data.registry import VIEWS
from shardwise.studio.page import exported, write_export


@pytest.mark.parametrize("view", some_of(VIEWS, 5, "views"))
def test_every_view_is_drawn_told_accessible_and_narrow(visitor: Visitor, view: str) -> None:
    page = visitor.open(f"{view}?_tables=compared,rounds,a,devices,ranked,steps&_how=compared,rounds,a,devices,ranked")
    _drawn(page)
    answers_the_pointer(page)
    explains_by_keyboard(page)
    is_accessible_in_both_themes(page)
    for width in (600, 320):  # 600 pixels is what a 1200-pixel window has at 200% zoom
        has_room(page, width)
        assert page.evaluate(
            "[...document.querySelectorAll('.scroll:has(.metrics)')].every((e) => e.scrollWidth <= e.clientWidth)"
        )


OVERLAPPING = table(__file__, "OVERLAPPING")
"""Pairs of what is written, drawn or pressed, of which one lies over the other, but for text that passes below a pinned
drawing."""


def _drawn(page: Any) -> None:
    drawings = page.evaluate(
        """() => [...document.querySelectorAll("canvas")].filter((c) => c.offsetParent).map((c) => {
            const pixels = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
            return [c.getAttribute("aria-label"), new Set(new Uint32Array(pixels.buffer)).size];
        })"""
    )
    assert drawings
    for label, colours in drawings:
        assert len(label) > 10 and colours > 5, label


def answers_the_pointer(page: Any) -> None:
    silent = page.evaluate(
        """() => [...document.querySelectorAll("canvas")].filter((c) => c.offsetParent).filter((canvas) => {
            const box = canvas.getBoundingClientRect();
            for (let i = 1; i < 40; i++) for (let k = 1; k < 40; k++) {
                const clientX = box.left + box.width * i / 40, clientY = box.top + box.height * k / 40;
                canvas.dispatchEvent(new PointerEvent("pointermove", { clientX, clientY }));
                if (document.querySelector(".tip:not([hidden])")?.textContent.match(/.{4}.*[0-9]/s)) {
                    canvas.dispatchEvent(new PointerEvent("pointerleave"));
                    return false;
                }
            }
            return true;
        }).map((canvas) => canvas.getAttribute("aria-label"))"""
    )
    assert silent == []


def explains_by_keyboard(page: Any) -> None:
    """Each figure opens its exact values and its formula with the Enter key."""
    figures = page.locator("[data-figure]:visible")
    for figure in (figures.nth(i) for i in range(figures.count())):
        for label, rows in (("Table", ".behind tbody tr"), ("How computed", ".how li")):
            button = figure.get_by_role("button", name=label, exact=True)
            if button.get_attribute("aria-expanded") == "false":
                button.press("Enter")
            assert figure.locator(rows).first.is_visible(), (figure.get_attribute("data-figure"), label)


def is_accessible_in_both_themes(page: Any) -> None:
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        assert find_serious(page) == []


def has_room(page: Any, *widths: int) -> None:
    """At each width, in pixels, nothing overlaps and nothing needs to be scrolled sideways."""
    for width in widths:
        page.set_viewport_size({"width": width, "height": 844})
        page.wait_for_timeout(80)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(OVERLAPPING) == []


def find_serious(page: Any) -> list[tuple[str, list[str]]]:
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    serious = [one for one in found if one["impact"] in ("serious", "critical")]
    return [(one["id"], [node["html"][:120] for node in one["nodes"][:3]]) for one in serious]


def test_the_theme_switch_changes_drawings_too_and_is_kept(visitor: Visitor) -> None:
    page = visitor.open("pipelines")
    pixel = "() => [...document.querySelector('canvas').getContext('2d').getImageData(100, 20, 1, 1).data].join()"
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(pixel), page.evaluate(background)
    page.get_by_label("Colours").select_option("dark")
    page.wait_for_timeout(120)
    dark = page.evaluate(pixel), page.evaluate(background)
    assert dark[1] != light[1]
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.reload()
    visitor.ready()
    assert page.evaluate(background) == dark[1]


def test_words_are_explained(visitor: Visitor) -> None:
    page = visitor.open("memory")
    visitor.tab_to("button[aria-haspopup=dialog]")
    page.keyboard.press("Enter")
    assert "optimizer" in page.get_by_role("dialog").inner_text()
    assert page.evaluate("document.querySelector('dialog[open]').scrollTop") == 0, "it opens at its start"
    page.keyboard.press("Escape")
    assert not page.get_by_role("dialog").is_visible()


@pytest.mark.parametrize(
    "view",
    some_of(
        [
            "collectives?ranks=5&_round=2&_tables=rounds",
            "pipelines?ranks=3&_tables=compared",
            "tokens?output=16&_step=2",
            "runs",
        ],
        2,
        "exports",
    ),
)
def test_an_export_opens_from_disk_and_shows_the_same(
    browser: Any, studio: Any, runs: Path, tmp_path: Path, view: str
) -> None:
    path = tmp_path / "page.html"
    write_export(path, view, runs=runs)
    live, disk = (Visitor(browser, studio, reduced_motion="reduce") for _ in range(2))
    live.open(view)
    disk.context.set_offline(True)
    disk.page.goto(path.as_uri())
    disk.ready()
    words = """() => [...document.querySelectorAll("main h2, main dd, main .sentence, main td")]
        .filter((e) => e.offsetParent).map((e) => e.textContent)"""
    assert disk.page.evaluate(words) == live.page.evaluate(words)
    drawn = "[...document.querySelectorAll('main canvas')].filter((c) => c.offsetParent).map((c) => c.toDataURL())"
    assert disk.page.evaluate(drawn) == live.page.evaluate(drawn)
    assert disk.page.locator("fieldset:enabled").count() == 0
    live.close()
    disk.close()


def test_an_export_holds_no_address_and_no_path(runs: Path) -> None:
    text = exported("runs", runs=runs)
    assert "127.0.0.1" not in text and str(Path(__file__).parents[2]) not in text
    assert "http://" not in text.replace("http://www.w3.org", "").split('id="palette"')[0].split("importmap")[0]


def test_a_wrong_export_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no view 'memry'; did you mean memory"):
        exported("memry")
    with pytest.raises(UserError, match="cannot write"):
        write_export(tmp_path / "missing" / "page.html", "pipelines")

"""The six chapters of Tokens: by mouse and by keys alone, in any width and theme, with motion and without."""

import json
from typing import Any

import pytest
from studio_visitor import Visitor
from test_studio_page import answers_the_pointer, has_room, is_accessible_in_both_themes

from harness.today import CHAPTERS, of_some, some_of
from shardwise.studio.data import tokens

GIVEN = {"model": "llama-3-8b", "cluster": "8xH100", "output": "32"}
STATE = "tokens?" + "&".join(f"{name}={value}" for name, value in GIVEN.items())
FIGURES = (
    {"layer", "holds"}, {"layer", "product"}, {"through", "where"}, {"spent"}, {"trained", "shares"}, set()
)  # fmt: skip
"""What each chapter draws, beside the table of numbers that is always there."""
SHOWN = """() => [...document.querySelectorAll(".scene [data-figure]")].filter((each) => each.checkVisibility())
    .map((each) => each.dataset.figure)"""
PLACE = """() => [".tale", ".tale .primary", ".scene"].map((each) => {
    const { x, y, width } = document.querySelector(each).getBoundingClientRect();
    return [x, y + scrollY, width];
})"""

SUMMARY = """() => Object.fromEntries([...document.querySelectorAll(".summary tbody tr")].map((row) =>
    [row.cells[0].textContent, [...row.querySelectorAll("[data-v]")].map((cell) => JSON.parse(cell.dataset.v))]))"""


def chapters() -> list[dict[str, Any]]:
    return list(tokens.data(GIVEN).more["chapters"])


def is_told(page: Any, number: int) -> None:
    """The chapter's words are those of Python, and its drawings are there and no others."""
    chapter = chapters()[number - 1]
    tale = page.locator(".tale")
    assert f"Chapter {number} of 6" in tale.inner_text()
    assert tale.locator("h2").inner_text() == chapter["title"]
    assert tale.locator(".sentences p").all_inner_texts() == chapter["sentences"]
    assert set(page.evaluate(SHOWN)) == FIGURES[number - 1]
    assert page.locator(".headline").inner_text() == tokens.data(GIVEN).more["headline"]
    assert page.locator("table.metrics").is_visible()
    short = {row["short"]: row["values"] for row in tokens.data(GIVEN).more["metrics"] if row["short"]}
    assert page.evaluate(SUMMARY) == short
    assert page.evaluate("document.querySelector('.summary').getBoundingClientRect().bottom <= innerHeight")


@of_some("by mouse", CHAPTERS, 1)
def test_the_chapters_by_mouse_and_back(visitor: Visitor) -> None:
    page = visitor.open(STATE)
    place, following, previous = (
        page.evaluate(PLACE),
        *(page.get_by_role("button", name=n, exact=True) for n in ("Next", "Previous")),
    )
    assert previous.is_disabled()
    for number in range(1, 7):
        is_told(page, number)
        assert page.evaluate(PLACE) == place, "the stage stays where it is"
        assert visitor.given.get("_chapter", "1") == str(number)
        if number < 6:
            following.click()
    assert following.is_disabled()
    previous.click()
    is_told(page, 5)
    page.get_by_role("button", name="Chapter 2: Inside one layer").click()
    is_told(page, 2)
    page.evaluate("(hash) => { location.hash = hash; }", f"{STATE}&_chapter=4")
    visitor.until("document.querySelector('.tale').textContent.includes('Chapter 4 of 6')")
    is_told(page, 4)
    page.go_back()
    visitor.until("document.querySelector('.tale').textContent.includes('Chapter 2 of 6')")


@of_some("by keys", CHAPTERS, 1)
def test_the_chapters_by_keys_alone(visitor: Visitor) -> None:
    page = visitor.open(STATE)
    for number in range(2, 7):
        page.keyboard.press("Space")
        is_told(page, number)
    page.keyboard.press("Space")
    is_told(page, 6)
    page.keyboard.press("Shift+Space")
    is_told(page, 5)
    visitor.tab_to(".tale .row button:not(.primary)")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    is_told(page, 5)
    # The controls are in a drawer, where Space is the inputs' own.
    visitor.tab_to("button[aria-controls^=drawer]")
    page.keyboard.press("Enter")
    assert visitor.given["_controls"] == "1"
    visitor.tab_to('[data-control="batch"] input')
    page.keyboard.press("Space")
    visitor.after(lambda: page.keyboard.press("ArrowRight"))
    is_told_of = page.locator(".tale h2").inner_text()
    assert (visitor.given["batch"], is_told_of) == ("2", chapters()[4]["title"])


@pytest.mark.parametrize("number", some_of(range(1, 7), 3, "chapters"))
def test_a_chapter_has_room_and_is_accessible(visitor: Visitor, number: int) -> None:
    page = visitor.open(f"{STATE}&_chapter={number}")
    is_accessible_in_both_themes(page)
    for opened in ("", "&_controls=1"):
        page.evaluate("(hash) => { location.hash = hash; }", f"{STATE}&_chapter={number}{opened}")
        for width in (1440, 390, 320):
            has_room(page, width)
            if opened and width == 1440 and number < 6:
                drawer, scene = (page.locator(each).bounding_box() for each in (".drawer", ".scene"))
                assert scene["x"] + scene["width"] <= drawer["x"], "the drawer covers no drawing"


def test_every_drawing_of_the_chapters_answers_the_pointer_and_has_a_table(visitor: Visitor) -> None:
    page, counted = visitor.open(STATE), 0
    for number in range(1, 7):
        page.evaluate("(hash) => { location.hash = hash; }", f"{STATE}&_chapter={number}")
        visitor.until(f"document.querySelector('.tale').textContent.includes('Chapter {number} of 6')")
        page.wait_for_timeout(80)
        answers_the_pointer(page)
        for name in page.evaluate(SHOWN):
            figure = page.locator(f'[data-figure="{name}"]')
            assert figure.locator("canvas").count() == 1
            figure.get_by_role("button", name="Table").click()
            assert visitor.table(name), name
            counted += 1
    assert counted == sum(map(len, FIGURES)) == 9


def test_a_chapter_plays_when_it_is_come_to_and_not_against_the_systems_wish(browser: Any, studio: Any) -> None:
    moving, calm = Visitor(browser, studio), Visitor(browser, studio, reduced_motion="reduce")
    page = moving.open(STATE)
    page.get_by_role("button", name="Next", exact=True).click()
    moving.until("document.querySelector('[data-figure=layer] .player input').value >= 1")
    page.get_by_role("button", name="Next", exact=True).click()
    moving.until("document.querySelector('[data-figure=through] .player input').value >= 2")
    page.get_by_role("button", name="Next", exact=True).click()
    moving.until("document.querySelectorAll('.words[data-side=A] span').length > 2")
    assert page.get_by_role("button", name="Stop").is_visible()
    page = calm.open(STATE)
    for _ in range(3):
        page.keyboard.press("Space")
    page.wait_for_timeout(300)
    assert "_step" not in calm.given and "_layer" not in calm.given
    said = page.locator('[data-figure="spent"] .sentence')
    assert said.inner_text().startswith("After 32 tokens")
    # The race advances by whole seconds there.
    columns = tokens.spent(GIVEN).tables["spent"].columns
    race = page.locator("[data-figure=spent] .race button")
    for second in range(3):
        race.click()
        done = [min(32, sum(end <= second for end in columns[f"{side} time so far"])) for side in "AB"]
        words = [page.locator(f".words[data-side={side}] span").count() for side in "AB"]
        assert words == done
        assert (
            f"{second} s after the prompt: A has written {done[0]} of 32 tokens, B has written {done[1]}"
            in said.inner_text()
        )
    page.locator('[data-figure="spent"] .player input').press("Home")
    assert page.locator(".words span").count() == 0 and said.inner_text().startswith("No token yet")
    moving.close()
    calm.close()


def test_a_rank_that_is_pointed_at_is_marked_in_all_drawings(visitor: Visitor) -> None:
    page = visitor.open(STATE)
    pixels = (
        "() => ['layer', 'holds'].map((each) => document.querySelector(`[data-figure=${each}] canvas`).toDataURL())"
    )
    page.wait_for_timeout(100)
    before = page.evaluate(pixels)
    box = page.locator('[data-figure="layer"] canvas').bounding_box()
    page.mouse.move(box["x"] + 20, box["y"] + 88 + 3 * 34 + 10)
    page.wait_for_timeout(100)
    pointed = page.evaluate(pixels)
    assert pointed[0] != before[0] and pointed[1] != before[1]
    assert "rank 3" in page.locator(".tip:visible").inner_text()
    page.mouse.move(5, 5)
    page.wait_for_timeout(100)
    assert page.evaluate(pixels) == before


def test_a_cursor_sweeps_over_training_and_a_token(visitor: Visitor) -> None:
    page = visitor.open(f"{STATE}&_chapter=5")
    sentences = tokens.data(GIVEN).more["trained"]["sentences"]
    figure = page.locator('[data-figure="trained"]')
    pixels = "document.querySelector('[data-figure=trained] canvas').toDataURL()"
    assert figure.locator(".sentence").inner_text() == sentences[-1]
    before = page.evaluate(pixels)
    figure.get_by_role("slider").press("Home")
    figure.get_by_role("slider").press("ArrowRight")
    visitor.until(f"{pixels} !== {json.dumps(before)}")
    assert figure.locator(".sentence").inner_text() == sentences[1]
    assert visitor.given["_train"] == "1"

"""The chapters of Tokens as one scroll: by mouse and by keys alone, in any width and theme, with motion and without."""

import json
from typing import Any

import pytest
from studio_visitor import Visitor
from test_studio_page import answers_the_pointer, has_room, is_accessible_in_both_themes

from harness.cases import table
from shardwise.studio.data import tokens

GIVEN = {"model": "llama-3-8b", "cluster": "8xH100", "output": "32"}
STATE = "tokens?" + "&".join(f"{name}={value}" for name, value in GIVEN.items())
FIGURES = (
    {"race"}, {"holds"}, {"product"}, {"clock", "layer"}, {"through", "where"}, {"spent"},
    {"flip", "trained", "shares"}, {"zero"}, {"uses"}, {"compared"},
)  # fmt: skip
"""What each chapter draws."""
CHAPTER = """(n) => {
    const node = document.querySelector(`.chapter[data-chapter="${n}"]`), { top } = node.getBoundingClientRect();
    const texts = (what) => [...node.querySelectorAll(what)].map((each) => each.textContent);
    return { title: texts(".tale h2")[0], sentences: texts(".sentences p"), top,
        figures: [...node.querySelectorAll("[data-figure]")].map((each) => each.dataset.figure),
        now: Number(document.querySelector(".mark[aria-current]").textContent) };
}"""


def is_told(page: Any, number: int, chapter: dict[str, Any], figures: set[str]) -> None:
    """The chapter has been come to; its words are those of Python, and its drawings are there and no others."""
    page.wait_for_timeout(120)
    found = page.evaluate(CHAPTER, number)
    assert (found["title"], found["sentences"]) == (chapter["title"], chapter["sentences"])
    assert found["now"] == number and set(found["figures"]) == figures
    assert found["top"] < 450 or page.evaluate("innerHeight + scrollY >= document.documentElement.scrollHeight - 2")


def test_the_chapters_by_mouse_by_keys_and_by_scrolling(visitor: Visitor) -> None:
    page, chapters = visitor.open(STATE), tokens.data(GIVEN).more["chapters"]
    assert page.locator(".headline").inner_text() == tokens.data(GIVEN).more["headline"]
    for number, figures in enumerate(FIGURES, 1):
        page.wait_for_timeout(1100 if number == 10 else 0)  # the steps of one second are one entry of the history
        page.get_by_role("button", name=f"Chapter {number}: {chapters[number - 1]['title']}").click()
        is_told(page, number, chapters[number - 1], figures)
        assert visitor.given.get("_chapter", "1") == str(number)
    page.go_back()
    visitor.until("location.hash.includes('_chapter=9')")
    is_told(page, 9, chapters[8], FIGURES[8])
    page.evaluate("(hash) => { location.hash = hash; }", f"{STATE}&_chapter=4")
    visitor.until("document.querySelector('.mark[aria-current]').textContent === '4'")
    is_told(page, 4, chapters[3], FIGURES[3])
    # The wheel and the space bar scroll as on any page; the address follows.
    page.mouse.move(600, 500)
    page.mouse.wheel(0, -20000)
    visitor.until("!location.hash.includes('_chapter')")
    page.locator("main").focus()
    for _ in range(3):
        page.keyboard.press("Space")
        page.wait_for_timeout(150)
    visitor.until("location.hash.includes('_chapter=')")
    visitor.tab_to(".mark:nth-child(7)")
    page.keyboard.press("Enter")
    is_told(page, 7, chapters[6], FIGURES[6])


RACE = """() => [".headline", "[data-figure=race] canvas", ".words", ".race button"].map((each) =>
    document.querySelector(each).getBoundingClientRect().bottom)"""
PIXELS = table(__file__, "PIXELS")


@pytest.mark.parametrize(("wide", "theme"), [(1280, "light"), (1440, "dark")])
def test_the_race_is_above_the_fold_and_its_areas_are_linear(browser: Any, studio: Any, wide: int, theme: str) -> None:
    visitor = Visitor(
        browser, studio, reduced_motion="reduce", viewport={"width": wide, "height": 720}, color_scheme=theme
    )
    page = visitor.open("tokens")
    page.wait_for_timeout(150)
    assert max(page.evaluate(RACE)) <= 720
    less, more = page.evaluate(PIXELS, ["--k-a", "--k-b"])
    sends = [side["sends"] for side in tokens.data({}).more["sides"]]
    assert more / less == pytest.approx(sends[1] / sends[0], rel=0.02) and sends[1] / sends[0] > 25_000
    visitor.close()


def test_the_race_goes_at_the_predicted_pace(visitor: Visitor) -> None:
    page, columns = visitor.open(STATE), tokens.spent(GIVEN).tables["spent"].columns
    race = page.locator('[data-figure="race"]')
    sides = tokens.data(GIVEN).more["sides"]
    for second in range(3):
        race.locator(".race button").click()
        done = [min(32, sum(end <= second for end in columns[f"{side} time so far"])) for side in "AB"]
        assert [race.locator(f".words[data-side={side}] span").count() for side in "AB"] == done
        said = f"{second} s after the prompt: A has written {done[0]} of 32 tokens, B has written {done[1]}"
        assert said in race.inner_text()
    for i, side in enumerate(sides):
        assert side["fits"] in race.inner_text() and side["speed"] == pytest.approx(1 / side["seconds"])
        assert f"{done[i]} written" in race.locator(".counter").nth(i).inner_text()


CLOCK = table(__file__, "CLOCK")


def test_one_layer_is_drawn_on_one_clock(visitor: Visitor) -> None:
    page, clock = visitor.open("tokens?_chapter=4"), tokens.data({}).more["clock"]
    page.wait_for_timeout(150)
    rows = page.evaluate(CLOCK)
    wide, columns = len(rows[0]), clock["columns"]
    # What is filled begins and ends where its seconds are on one scale, within two pixels.
    for row in (2, 3):
        events = zip(columns["rank"], columns["start"], columns["seconds"], strict=True)
        mine = [(start, seconds) for rank, start, seconds in events if rank == row]
        begin, end = min(start for start, _ in mine), max(start + seconds for start, seconds in mine)
        filled = [x for x, there in enumerate(rows[row]) if there]
        assert filled[0] == pytest.approx(begin / clock["span"] * wide, abs=2)
        assert filled[-1] + 1 == pytest.approx(end / clock["span"] * wide, abs=2)
    first = sum(rows[2]) / wide
    assert first == pytest.approx(1 - begin_of(clock, 2) / clock["span"], abs=0.005)
    sums = sum(before and not after for before, after in zip(rows[1], [*rows[1][1:], False], strict=True))
    assert sums >= 2 * 30, "tensor parallelism sums twice in each of more than thirty layers"


def begin_of(clock: dict[str, Any], row: int) -> float:
    columns = clock["columns"]
    return min(start for start, rank in zip(columns["start"], columns["rank"], strict=True) if rank == row)


@pytest.mark.parametrize("width", [1440, 390, 320])
def test_the_scroll_has_room_and_is_accessible(visitor: Visitor, width: int) -> None:
    page = visitor.open(STATE)
    has_room(page, width)
    if width == 1440:
        is_accessible_in_both_themes(page)
        page.evaluate("(hash) => { location.hash = hash; }", f"{STATE}&_controls=1")
        drawer, scene = (page.locator(each).first.bounding_box() for each in (".drawer", ".scene"))
        assert scene["x"] + scene["width"] <= drawer["x"], "the drawer covers no drawing"
    elif width == 390:
        assert page.locator("header").bounding_box()["height"] <= 49


def test_every_drawing_of_the_chapters_answers_the_pointer_and_has_a_table(visitor: Visitor) -> None:
    page = visitor.open(STATE)
    answers_the_pointer(page)
    drawn = [name for figures in FIGURES for name in figures]
    for name in drawn:
        figure = page.locator(f'[data-figure="{name}"]')
        figure.get_by_role("button", name="Table").click()
        assert visitor.table(name), name
        figure.get_by_role("button", name="Table").click()
    assert len(drawn) == 14


def test_a_chapter_plays_when_it_is_come_to_and_not_against_the_systems_wish(browser: Any, studio: Any) -> None:
    moving, calm = Visitor(browser, studio), Visitor(browser, studio, reduced_motion="reduce")
    page = moving.open(STATE)
    moving.until("document.querySelectorAll('.words[data-side=A] span').length > 3")
    page.get_by_role("button", name="Chapter 4: One layer on one clock").click()
    moving.until("Number(document.querySelector('[data-figure=clock] .player input').value) % 60 >= 2")
    assert page.locator(".race button").inner_text() == "Continue", "the race stands still"
    page = calm.open(STATE)
    page.get_by_role("button", name="Chapter 5: Through all layers").click()
    page.wait_for_timeout(300)
    assert page.locator('[data-figure="through"] .player output').inner_text() == "0 of 32"
    assert page.locator(".words span").count() == 0
    moving.close()
    calm.close()


def test_what_a_slider_of_the_chapters_says_is_pythons(visitor: Visitor) -> None:
    page, more = visitor.open(STATE), tokens.data(GIVEN).more
    for name, word, lines in (
        ("trained", "_train", more["trained"]["sentences"]), ("clock", "_clock", more["clock"]["sentences"]),
        ("product", "_product", more["product"]["sentences"]), ("flip", "_tokens", more["flip"]),
        ("zero", "_stage", more["zero"]),
    ):  # fmt: skip
        figure = page.locator(f'[data-figure="{name}"]')
        pixels = f"document.querySelector('[data-figure={name}] canvas').toDataURL()"
        slider = figure.locator(".player input")
        slider.press("Home")
        page.wait_for_timeout(80)
        before = page.evaluate(pixels)
        slider.press("ArrowRight")
        visitor.until(f"{pixels} !== {json.dumps(before)}")
        assert figure.locator(".sentence").inner_text() == lines[1]
        visitor.until(f"location.hash.includes('{word}=1')")
    crossing = more["ratios"][0]["faster_from_tokens"]
    assert f"From about {crossing:,} tokens on" in page.locator('[data-figure="flip"] .sentence').inner_text()


def test_the_devices_in_training_are_a_slider(visitor: Visitor) -> None:
    page = visitor.open(STATE)
    visitor.after(lambda: page.locator('[data-control="gpus"] input').press("ArrowRight"))
    assert visitor.given["gpus"] == "16"
    wanted = tokens.data(GIVEN | {"gpus": "16"})
    assert page.locator('[data-figure="zero"] .sentence').inner_text() == wanted.more["zero"][3]
    said = page.locator('[data-figure="trained"] > .lead').inner_text()
    assert all(fit in said for fit in wanted.tables["trained"].columns["memory"])


def test_words_of_the_text_open_the_list_where_they_are_explained(visitor: Visitor) -> None:
    page = visitor.open("experts?_chapter=4")
    term = page.locator(".sentences .term").filter(has_text="all-to-all")
    term.focus()
    page.keyboard.press("Enter")
    assert page.locator("dialog[open] :focus").inner_text() == "all-to-all"
    assert page.locator("dialog[open] :focus + dd").inner_text() == term.get_attribute("title")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Words", exact=True).click()
    assert page.locator("dialog[open] h2:focus").count() == 1
    page.keyboard.press("Escape")
    told = page.locator(".sentences .term").evaluate_all("(all) => all.map((each) => each.title)")
    assert len(told) == len(set(told)) > 4  # each at its first use
    is_accessible_in_both_themes(page)


def test_on_a_phone_the_text_passes_below_a_drawing_that_leaves_it_room(browser: Any, studio: Any) -> None:
    phone = Visitor(browser, studio, viewport={"width": 390, "height": 800}, reduced_motion="reduce")
    page = phone.open("experts")
    places = page.evaluate("""() => [...document.querySelectorAll(".chapter")].map((chapter) => {
        const [scene, tale] = [".scene", ".tale"].map((name) => chapter.querySelector(name));
        chapter.scrollIntoView({ behavior: "instant" });
        scrollBy(0, scene.offsetHeight / 2);
        return [scene.offsetHeight, scene.getBoundingClientRect(), tale.getBoundingClientRect()];
    })""")
    pinned = [height < 480 for height, _, _ in places]
    assert any(pinned) and not all(pinned)
    for (height, scene, tale), stays in zip(places, pinned, strict=True):
        assert tale["top"] >= scene["bottom"] - height / 2
        assert (scene["top"] >= 40) == stays
    marks = page.locator(".marks").bounding_box()
    assert marks["y"] == 0
    phone.close()

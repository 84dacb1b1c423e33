import json
from typing import Any

import pytest
from studio_visitor import Visitor, plain_columns

from harness.cases import table
from harness.today import some_of
from shardwise.model.catalog import get
from shardwise.report.units import format_bytes, format_time
from shardwise.studio.columns import encode
from shardwise.studio.data.registry import VIEWS, answer, parts

STATES = table(__file__, "STATES")
CONTROLS = {
    "tokens": ("batch", "precision"),
    "experts": ("tokens", "etp"),
    "collectives": ("ranks", "collective"),
    "pipelines": ("micro", "a"),
    "memory": ("tp", "recompute"),
    "plan": ("batch", "by"),
    "sync": ("workers", "sync"),
}
"""A slider and a list of each view."""
OPENED = {"tokens": {"_controls": "1"}, "memory": {"_more": "1"}}
"""Words of the page's own under which these are there."""


def expected(view: str, given: dict[str, str], runs: Any) -> dict[str, dict[str, list[Any]]]:
    tables = {}
    for part in parts(view):
        tables |= answer(part, given, runs).tables
    return {name: plain_columns(table) for name, table in tables.items()}


def address(view: str, given: dict[str, str]) -> str:
    return view + "?" + "&".join(f"{name}={value}" for name, value in given.items())


def test_every_view_has_a_state_here() -> None:
    assert set(STATES) == set(VIEWS)


@pytest.mark.parametrize("view", VIEWS)
def test_tables_are_the_functions_values(visitor: Any, runs: Any, view: str) -> None:
    tables = expected(view, STATES[view], runs)
    visitor.open(address(view, STATES[view] | {"_tables": ",".join(tables), "_how": ",".join(tables)}))
    assert tables
    for name, columns in tables.items():
        if columns and next(iter(columns.values())):
            shown = visitor.table(name)
            assert shown == {heading: values[:100] for heading, values in columns.items()}, name
            assert visitor.page.locator(f'[data-figure="{name}"] .how li').count() > 0


def test_the_answers_slider_moves_its_figure_and_asks_nothing(visitor: Any, runs: Any) -> None:
    given = {"model": "tiny-llama", "cluster": "2xH100", "a": "tp=2", "b": "dp=2,zero=3", "output": "16"}
    page = visitor.open(address("tokens", given | {"prompt": "64", "_chapter": "4"}))
    found = answer("tokens/spent", given | {"prompt": "64"}, runs)
    columns, most = found.tables["spent"].columns, len(found.tables["spent"].columns["token"])
    assert most == min(1024, get("tiny-llama").max_positions - 64) > 16
    figure = page.locator('[data-figure="spent"]')
    slider, canvas, words = figure.get_by_role("slider"), figure.locator("canvas"), figure.locator(".odometers")
    assert (slider.input_value(), slider.get_attribute("max")) == ("16", str(most))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    pixels = "() => document.querySelector('[data-figure=spent] canvas').toDataURL()"
    for key, token in (("End", most), ("ArrowLeft", most - 1), ("Home", 0), ("ArrowRight", 1)):
        before = page.evaluate(pixels)
        slider.press(key)
        visitor.until(f"location.hash.includes('_token={token}')")
        visitor.until(f"({pixels})() !== {json.dumps(before)}")
        for side in "AB":
            sent, time = (columns[f"{side} {what} so far"][token - 1] if token else 0 for what in ("sent", "time"))
            assert f"{format_time(time)}\n{format_bytes(sent)} sent by each device" in words.inner_text()
    slider.press("End")
    before = page.evaluate(pixels)
    figure.get_by_label("Logarithmic scale").check()
    visitor.until(f"({pixels})() !== {json.dumps(before)}")
    assert visitor.given["_log"] == "1" and asked == []
    box, drawing = slider.bounding_box(), canvas.bounding_box()
    assert drawing["y"] - box["y"] < 240, "the slider is beside the areas that it fills"


@pytest.mark.parametrize("view", some_of(CONTROLS, 2, "keyboard"))
def test_keyboard_alone(visitor: Any, runs: Any, view: str) -> None:
    slider, choice = CONTROLS[view]
    page = visitor.open(address(view, STATES[view] | OPENED.get(view, {})))
    visitor.tab_to(f'[data-control="{slider}"] input')
    visitor.after(lambda: page.keyboard.press("ArrowRight"))
    visitor.tab_to(f'[data-control="{choice}"] select')
    visitor.after(lambda: page.keyboard.press("ArrowDown"))
    given = {name: value for name, value in visitor.given.items() if not name.startswith("_")}
    assert given[slider] != STATES[view].get(slider) and given[choice] != STATES[view].get(choice)
    first = next(iter(expected(view, given, runs)))
    visitor.tab_to(f'[data-figure="{first}"] .buttons button')
    page.keyboard.press("Enter")
    rows = {name: values[:100] for name, values in expected(view, given, runs)[first].items()}
    assert visitor.table(first) == rows


@pytest.mark.parametrize("view", some_of(CONTROLS, 2, "mouse"))
def test_mouse_alone(visitor: Any, runs: Any, view: str) -> None:
    slider, choice = CONTROLS[view]
    page = visitor.open(address(view, STATES[view] | OPENED.get(view, {})))
    before = visitor.given
    page.locator(f'[data-control="{slider}"] input').click(position={"x": 100, "y": 16})
    visitor.after(lambda: None)
    after = visitor.given
    assert after[slider] != before.get(slider)
    page.locator(f'[data-control="{choice}"] select').select_option(index=1)
    visitor.after(lambda: None)
    tables = expected(view, {k: v for k, v in visitor.given.items() if not k.startswith("_")}, runs)
    first = next(iter(tables))
    page.locator(f'[data-figure="{first}"] .buttons button').first.click()
    assert visitor.table(first) == {name: values[:100] for name, values in tables[first].items()}


def test_a_long_table_comes_by_pages(visitor: Any, runs: Any) -> None:
    given = {"a": "1f1b", "b": "none", "ranks": "4", "micro": "32"}
    page = visitor.open(address("pipelines", given | {"_tables": "events"}))
    columns = expected("pipelines", given, runs)["events"]
    assert len(columns["kind"]) > 200
    page.get_by_role("button", name="Show 100 more").click()
    assert visitor.table("events")["start"] == columns["start"][:200]


@pytest.mark.every_day
def test_the_state_survives_a_reload_and_the_way_back(visitor: Any) -> None:
    page = visitor.open("collectives?ranks=6&_round=3&_tables=rounds")
    page.reload()
    visitor.ready()
    assert page.locator(".player output").inner_text() == "3 of 10"
    assert page.locator('[data-figure="rounds"] table').is_visible()
    page.evaluate("location.hash = '#pipelines?ranks=2'")
    page.wait_for_selector('[data-figure="a"]')
    page.go_back()
    page.wait_for_selector('[data-figure="rounds"] table')
    assert page.locator(".player output").inner_text() == "3 of 10"


def test_a_mistake_is_one_line_on_the_page(browser: Any, studio: Any) -> None:
    visitor = Visitor(browser, studio)
    for state, line in (
        ("collectives?ranks=99", "ranks=99: give a whole number from 1 to 16"),
        ("pipelines?a=1f1c", "a=1f1c: did you mean 1f1b?"),
        ("memory?model=lama-3-8b", "did you mean llama-3-8b"),
        ("plan?batch=0", "batch=0"),
        ("runs?run=../../etc", "holds no run '../../etc'"),
        ("nothing", "There is no view nothing"),
    ):
        page = visitor.open(state)
        assert line in page.get_by_role("alert").inner_text()
    visitor.problems.clear()  # the browser itself reports the 400
    visitor.close()


def test_what_plays_by_itself_and_what_does_not(browser: Any, studio: Any) -> None:
    moving, still = Visitor(browser, studio), Visitor(browser, studio, reduced_motion="reduce")
    page = moving.open("tokens?_chapter=3")
    moving.until("document.querySelector('[data-figure=product] .player input').value >= 1")
    assert page.get_by_role("button", name="Pause").is_visible()
    page = still.open("collectives?ranks=4")
    assert page.get_by_role("button", name="Next step").is_visible()
    page.wait_for_timeout(300)
    assert page.locator(".player output").inner_text() == "0 of 6"
    page.get_by_role("button", name="Next step").click()
    assert page.locator(".player output").inner_text() == "1 of 6"
    assert page.locator(".sentence").first.inner_text().startswith("Round 1 of 6")
    moving.close()
    still.close()


def test_layers_are_gone_through_by_keys_and_a_collective_opens(visitor: Any, runs: Any) -> None:
    given = STATES["tokens"] | {"a": "tp=4", "b": "dp=4,zero=3"}
    page = visitor.open(address("tokens", given | {"_chapter": "5"}))
    columns = expected("tokens", given, runs)["through"]
    visitor.tab_to('[data-figure="through"] .player input')
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    visitor.until("location.hash.includes('_layer=3')")
    said = page.locator('[data-figure="through"] .sentence').inner_text()
    assert said.startswith(f"Layer 3 of {len(columns['layer'])} is done: A after ") and "B after " in said
    links = page.locator('[data-figure="layer"] p a')
    assert links.count() == 2, "tp sums, and ZeRO-3 gathers"
    links.first.click()
    page.wait_for_selector('[data-figure="rounds"]')
    assert (visitor.given["collective"], visitor.given["ranks"]) == ("all-reduce", "4")


def test_a_slider_keeps_the_focus_and_the_last_value_wins(visitor: Any, runs: Any) -> None:
    page = visitor.open("pipelines?ranks=2&micro=4&_tables=compared")
    visitor.tab_to('[data-control="F"] input')
    for _ in range(6):
        page.keyboard.press("ArrowRight")
    visitor.after(lambda: None)
    assert page.evaluate("document.activeElement.closest('[data-control]').dataset.control") == "F"
    given = {name: value for name, value in visitor.given.items() if not name.startswith("_")}
    assert visitor.table("compared") == expected("pipelines", given, runs)["compared"]


def test_zooming_a_timeline_by_keys_is_in_the_address(visitor: Any) -> None:
    page = visitor.open("pipelines")
    visitor.tab_to('[data-figure="a"] canvas')
    page.keyboard.press("+")
    visitor.until("location.hash.includes('_window')")
    low, high = map(float, visitor.given["_window"].split("~"))
    assert 0 < low < high < 0.33
    page.keyboard.press("0")
    visitor.until("!location.hash.includes('_window')")


def test_numbers_are_written_as_python_writes_them(visitor: Any) -> None:
    from shardwise.report.units import format_bytes, format_count, format_share, format_time

    values = [
        0, 1, 999, 999.6, 1000, 12346, 0.5, 99.95, 9.995, 1e9, 8.5e10, 999.5e9, 3.3e15, 1e-9, 4.2e-7, 0.0123, 59.96,
    ]  # fmt: skip
    values += [3600.0, 86400.0 * 3, 1e-3 * 999.6, -2.5e-3]
    visitor.open("collectives")
    shown = visitor.page.evaluate(
        """async (values) => {
            const format = await import("studio/lib/format");
            return values.map((v) => [format.bytes(v), format.count(v), format.seconds(v), format.share(v / 1000)]);
        }""",
        values,
    )
    python = [[format_bytes(v), format_count(v), format_time(v), format_share(v / 1000)] for v in values]
    assert shown == python


TICKS = table(__file__, "TICKS")
"""Axes whose marks lie over each other, or that have none."""


def test_marks_of_axes_never_collide(visitor: Any) -> None:
    assert visitor.open("collectives?ranks=2").evaluate(TICKS) == []


def test_json_of_the_server_is_the_functions(studio: Any, runs: Any) -> None:
    from urllib.request import Request, urlopen

    asked = Request(
        f"{studio.origin}api/pipelines?ranks=3&micro=5", headers={"Cookie": f"{studio.cookie}={studio.token}"}
    )
    with urlopen(asked) as reply:
        data = json.load(reply)
    found = answer("pipelines", {"ranks": "3", "micro": "5"}, runs)
    assert data["state"] == dict(found.state)
    assert data["tables"]["compared"]["columns"] == plain_columns(found.tables["compared"])


def test_bytes_and_times_are_of_the_same_tokens_and_less_time_is_of_the_longer(visitor: Any) -> None:
    page = visitor.open("pipelines")
    assert "zb-h1 takes 18.2% less time." in page.locator('[data-figure="compared"]').inner_text()
    page = visitor.open(
        "tokens?model=llama-3-8b&cluster=4xH100&a=tp=4&b=dp=4,zero=3&batch=64&output=16&_tables=spent&_chapter=4"
    )
    facts = page.locator("main").inner_text()
    assert facts.count("For a step, one token for each of 64 sequences, ZeRO-3 (dp=4,zero=3) sends ") == 1
    rows = page.evaluate(
        """() => [...document.querySelectorAll("table.metrics tbody tr")].map((row) =>
            [row.cells[0].textContent, ...[...row.cells].slice(1, 4).map((cell) => JSON.parse(cell.dataset.v))])"""
    )
    state = {"model": "llama-3-8b", "cluster": "4xH100", "a": "tp=4", "b": "dp=4,zero=3", "batch": "64", "output": "16"}
    found, later = answer("tokens", state), answer("tokens/spent", state)
    expected = [*found.more["metrics"], *later.more["metrics"]]
    assert rows == [[row["name"], *row["values"], row["ratio"]] for row in expected]
    said = page.locator('[data-figure="spent"] .sentence').inner_text()
    assert said.startswith("After 16 tokens of each of 64 sequences: each device of A has sent ")
    columns = visitor.table("spent")
    # Under ZeRO-3 the weights cross once a step, for however many sequences: 3/4 of 16 GB, 16 times.
    assert columns["B sent so far"][15] == pytest.approx(16 * 3 / 4 * 2 * 8_030_261_248, rel=1e-3)


COVERED = table(__file__, "COVERED")
"""Of the matrices of a side: each part's area, and whether it has the side's hue."""


@pytest.mark.parametrize(
    ("cluster", "a", "b"), [("8xH100", "tp=8", "dp=8,zero=3"), ("2x8xH100", "tp=4,pp=2", "tp=8,pp=2")]
)
def test_a_ranks_share_of_every_matrix_is_drawn_by_area(visitor: Any, runs: Any, cluster: str, a: str, b: str) -> None:
    given = {"cluster": cluster, "a": a, "b": b, "output": "16"}
    page = visitor.open(address("tokens", given))
    found = json.loads(encode(answer("tokens", given, runs)))
    for number, side in enumerate(found["more"]["sides"]):
        for name, boxes in page.evaluate(COVERED, [found, number]):
            assert all(right for _, right in boxes), (side["layout"], name)
            assert sum(area for area, _ in boxes) == pytest.approx(1.0, abs=0.01), name
    # Columns are columns: tensor parallelism cuts the first matrices by column, and the last one by row.
    cuts = {piece["name"]: piece["how"] for piece in found["more"]["sides"][0]["pieces"]}
    assert cuts["mlp.gate_up.up.weight"] == cuts["attention.qkv.q.weight"] == "columns"
    assert cuts["mlp.down.weight"] == cuts["attention.out.weight"] == "rows"
    sizes = {matrix["name"]: (matrix["rows"], matrix["columns"]) for matrix in found["more"]["matrices"]}
    assert sizes["mlp.gate_up.up.weight"] == (8192, 28672) == sizes["mlp.down.weight"][::-1]


@pytest.mark.parametrize("view", ["memory", "plan"])
def test_six_controls_are_beside_the_result(visitor: Any, view: str) -> None:
    page = visitor.open(view)
    page.set_viewport_size({"width": 1280, "height": 720})
    page.wait_for_timeout(150)
    shown = page.locator("[data-control]:visible")
    assert 4 <= shown.count() <= 6 and page.get_by_text("More", exact=True).is_visible()
    boxes = [page.locator(each).first.bounding_box() for each in (".asked", ".facts", ".drawing canvas")]
    assert all(box["y"] + min(box["height"], 100) <= 720 for box in boxes)
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    page.get_by_text("More", exact=True).click()
    assert shown.count() > 6 or view == "plan"
    visitor.until("location.hash.includes('_more=1')")


def test_an_error_offers_the_nearest_names_as_buttons(visitor: Any) -> None:
    page = visitor.open("memory?model=lama-3-8b")
    offered = page.get_by_role("alert").get_by_role("button")
    assert "llama-3-8b" in offered.all_inner_texts()
    visitor.after(offered.get_by_text("llama-3-8b", exact=True).click)
    assert visitor.given["model"] == "llama-3-8b" and not page.get_by_role("alert").is_visible()
    page = visitor.open("pipelines?a=1f1c")
    visitor.after(page.get_by_role("alert").get_by_role("button", name="1f1b", exact=True).click)
    assert visitor.given["a"] == "1f1b"
    visitor.problems.clear()  # the browser itself reports the 400


def test_a_slow_answer_says_its_seconds_and_can_be_cancelled(visitor: Any) -> None:
    page = visitor.open("pipelines?ranks=2")
    held = []
    page.route("**/api/pipelines?*", lambda route: held.append(route))
    page.locator('[data-control="ranks"] input').press("ArrowRight")
    page.get_by_role("button", name="Cancel").click()
    visitor.ready()
    assert page.locator(".waiting").is_hidden()
    page.unroute("**/api/pipelines?*")


def test_a_link_in_error_shows_its_controls(visitor: Any) -> None:
    page = visitor.open("memory?model=tiny-llama&cluster=4xH100&seq=64&tp=3&batch=8")
    assert "tp=3" in page.get_by_role("alert").inner_text()
    assert page.locator('[data-control="model"] input').input_value() == "tiny-llama"
    assert page.locator("section.figure:visible").count() == 0, "no figures of another state"
    page.locator('[data-control="tp"] input').focus()
    visitor.after(lambda: page.keyboard.press("ArrowRight"))
    assert visitor.given["tp"] == "4" and not page.get_by_role("alert").is_visible()
    assert page.locator('[data-figure="devices"]').is_visible()
    # What is drawn when the next mistake comes stays, and is marked; one step further all is well again.
    visitor.after(lambda: page.keyboard.press("ArrowRight"))
    assert page.get_by_role("alert").is_visible() and page.locator("main.stale").count() == 1
    visitor.after(page.get_by_role("link", name="Start this view anew").click)
    assert visitor.given == {} and page.locator("main.stale, main.broken").count() == 0
    assert page.locator('[data-control="model"] input').input_value() == "llama-3-8b"
    visitor.problems.clear()  # the browser itself reports the 400


def test_the_model_and_the_cluster_come_along_to_other_views(visitor: Any) -> None:
    page = visitor.open("memory?seq=64&batch=8")
    box = page.locator('[data-control="model"] input')
    box.fill("tiny-llama")
    visitor.after(lambda: box.press("Enter"))
    page.locator('[data-control="cluster"] input').fill("4xH100")
    visitor.after(lambda: page.locator('[data-control="cluster"] input').press("Enter"))
    for view, words in {
        "Tokens": {"model": "tiny-llama", "cluster": "4xH100"},
        "Experts": {"model": "tiny-llama"},
        "Collectives": {"cluster": "4xH100"},
        "Runs": {}, "Memory": {"model": "tiny-llama", "cluster": "4xH100"},
    }.items():  # fmt: skip
        visitor.after(page.get_by_role("navigation").get_by_role("link", name=view).click)
        page.wait_for_selector(f'nav a[aria-current]:text("{view}")')
        visitor.ready()
        assert visitor.given == words and not page.get_by_role("alert").is_visible()
    left = page.locator('[data-control="model"] details')
    left.locator("summary").click()
    assert "bloom-176b: ALiBi positions" in left.inner_text()


def test_sizes_and_devices_are_changed_by_sliders_and_come_along(visitor: Any, runs: Any) -> None:
    page = visitor.open("tokens?model=tiny-llama&cluster=2xH100&output=16&_how=compared&_tables=compared&_controls=1")
    before = visitor.table("compared")
    visitor.tab_to('[data-control="layers"] input')
    visitor.after(lambda: page.keyboard.press("ArrowRight"))
    layers = int(visitor.given["layers"])
    assert layers > get("tiny-llama").layers and visitor.table("compared") != before
    command = page.locator('[data-figure="compared"] code').inner_text()
    assert command.startswith(f"shardwise generate tiny-llama --set layers={layers} --cluster 2xH100 --compare ")
    visitor.after(lambda: page.locator('[data-control="devices"] input').press("ArrowRight"))
    assert visitor.given["cluster"] == "4xH100"
    visitor.after(page.get_by_role("navigation").get_by_role("link", name="Memory").click)
    page.wait_for_selector('[data-figure="devices"]')
    page.get_by_text("More", exact=True).click()
    exact = page.get_by_label("Layers, exactly")
    assert exact.input_value() == str(layers)
    visitor.after(lambda: (exact.fill("7"), exact.press("Enter")))
    given = {name: value for name, value in visitor.given.items() if not name.startswith("_")}
    assert given == {"model": "tiny-llama", "layers": "7", "cluster": "4xH100"}
    page.locator('[data-figure="devices"] .buttons button').first.click()
    assert visitor.table("devices") == expected("memory", given, runs)["devices"]
    box = page.locator('[data-control="model"] input')
    box.fill("gpt2")
    visitor.after(lambda: box.press("Enter"))
    assert "layers" not in visitor.given and exact.input_value() == str(get("gpt2").layers)


def test_a_layout_opens_in_other_views_and_back_undoes(visitor: Any, runs: Any) -> None:
    state = "tokens?model=tiny-llama&layers=6&cluster=4xH100&output=16&a=pp=2,tp=2&b=dp=4,zero=3&_chapter=10"
    page = visitor.open(state)
    select = page.locator('[data-control="precision"] select')
    visitor.after(lambda: select.select_option("fp32"))
    slider = page.locator('[data-control="batch"] input')
    visitor.after(lambda: [slider.press("ArrowRight") for _ in range(3)])
    assert (visitor.given["precision"], visitor.given["batch"]) == ("fp32", "8")
    visitor.after(page.go_back)
    assert visitor.given["precision"] == "fp32" and "batch" not in visitor.given and slider.input_value() == "0"
    visitor.after(page.go_back)
    assert page.evaluate("location.hash") == f"#{state}" and select.input_value() == "bf16"
    links = page.locator('[data-figure="compared"] .opens a')
    assert links.all_inner_texts() == ["Memory", "Pipelines", "Plan", "Memory", "Plan"]
    visitor.after(links.nth(3).click)
    page.wait_for_selector('[data-figure="devices"]')
    assert visitor.given == {
        "model": "tiny-llama", "layers": "6", "cluster": "4xH100", "dp": "4", "zero": "3"
    }  # fmt: skip
    assert "dp=4,zero=3" in page.locator('[data-figure="devices"] .facts').inner_text()
    visitor.after(page.go_back)
    page.wait_for_selector('[data-figure="compared"]')
    visitor.after(page.locator('[data-figure="compared"] .opens a').nth(1).click)
    page.wait_for_selector('[data-figure="a"]')
    assert (visitor.given["a"], visitor.given["ranks"]) == ("1f1b", "2")


def test_a_step_or_a_window_typed_into_the_open_page_is_shown(visitor: Any) -> None:
    state = "tokens?model=tiny-llama&cluster=2xH100&output=16&_chapter=3"
    page = visitor.open(state)
    page.evaluate("window.untouched = true")
    for step in (3, 1):
        page.evaluate("(hash) => { location.hash = hash; }", f"{state}&_product={step}")
        visitor.until(f"document.querySelector('[data-figure=product] output').textContent === '{step} of 3'")
    drawn = "document.querySelector('[data-figure=through] canvas').toDataURL()"
    page.wait_for_timeout(100)
    before = page.evaluate(drawn)
    page.evaluate("() => { location.hash += '&_window=0~0.00001'; }")
    visitor.until(f"{drawn} !== '{before}'")
    assert page.evaluate("window.untouched")


def test_a_cursor_sweeps_over_both_schedules_and_the_bubble_follows_the_slider(visitor: Visitor, runs: Any) -> None:
    page = visitor.open("pipelines?ranks=3&micro=4&_tables=curve")
    pixels = "['a', 'b', 'events'].map((each) => document.querySelector(`[data-figure=${each}] canvas`).toDataURL())"
    before = page.evaluate(pixels)
    play = page.locator('[data-figure="compared"] .player')
    for _ in range(2):
        play.get_by_role("button", name="Next step").click()
    visitor.until(f"{pixels}.every((each, i) => each !== {json.dumps(before)}[i])")
    assert visitor.given["_time"] == "2"
    assert (
        play.locator(".sentence").inner_text()
        == "After 6.00 ms: 1 of 3 ranks of 1f1b compute, 1 of 3 ranks of zb-h1 compute."
    )
    slider = page.locator('[data-figure="curve"] [data-control="micro"] input')
    visitor.after(lambda: slider.press("ArrowRight"))
    visitor.until("document.querySelector('[data-figure=curve] .behind td')")
    assert (visitor.given["micro"], "_time" in visitor.given) == ("5", False)
    assert visitor.table("curve") == expected("pipelines", {"ranks": "3", "micro": "5"}, runs)["curve"]
    page.mouse.move(5, 5)
    before = page.evaluate(pixels)
    page.locator('[data-figure="a"] canvas').hover(position={"x": 70, "y": 8 + 34 + 17})
    visitor.until(f"{pixels}.every((each, i) => each !== {json.dumps(before)}[i])")


def test_a_bar_beyond_its_axis_is_broken_and_the_peak_is_named(visitor: Visitor) -> None:
    light = """() => {
        const canvas = document.querySelector('[data-figure="devices"] canvas'), wide = canvas.clientWidth;
        const { data } = canvas.getContext("2d").getImageData(wide - 92 - 24, 36, 24, 1);
        const surface = getComputedStyle(document.documentElement).getPropertyValue("--surface").trim();
        const n = parseInt(surface.slice(1), 16), wanted = [n >> 16 & 255, n >> 8 & 255, n & 255].join();
        let found = 0;
        for (let i = 0; i < data.length; i += 4) found += [...data.slice(i, i + 3)].join() === wanted;
        return found;
    }"""
    page = visitor.open("memory?model=llama-3-8b&cluster=8xH100&batch=8&_tables=moments")
    assert page.evaluate(light) == 0
    canvas = page.locator('[data-figure="moments"] canvas')
    canvas.hover(position={"x": 70, "y": canvas.bounding_box()["height"] - 46})
    assert "\nparameters: " in page.locator(".tip:visible").inner_text()
    page = visitor.open("memory?model=llama-3-70b&cluster=8xH100&batch=8")
    assert page.evaluate(light) >= 3


def test_a_sequence_over_context_parallel_ranks(visitor: Any) -> None:
    page = visitor.open("memory?model=llama-3-8b&cluster=8xH100&batch=8&cp=4&_tables=sequence&_how=sequence")
    figure = page.locator('[data-figure="sequence"]')
    assert "1.000 times the mean" in figure.inner_text() and "1.750 times" in figure.inner_text()
    assert "rank r has chunks r and 7 - r" in figure.inner_text()
    columns = visitor.table("sequence")
    assert columns["first chunk from"] == [0, 1024, 2048, 3072]
    canvas = page.locator('[data-figure="sequence"] canvas')
    canvas.hover(position={"x": 200, "y": 24 + 34 + 10})
    assert "cp rank 1: tokens 1,024 to 2,047 and 6,144 to 7,167" in page.locator(".tip:visible").inner_text()
    visitor.open("memory?model=llama-3-8b&cluster=8xH100&batch=8")
    assert not page.locator('[data-figure="sequence"]').is_visible()


def test_no_word_covers_a_slot_of_a_chunk(visitor: Visitor, runs: Any) -> None:
    """The filled area is the same for each slot, however many words the chunks have."""
    masks = answer("collectives", {"ranks": "6"}).more["masks"]
    areas = []
    for round_ in (0, 2, 4):
        page = visitor.open(f"collectives?ranks=6&_round={round_}")
        filled = page.evaluate(
            """() => {
                const canvas = document.querySelector('[data-figure="rounds"] canvas');
                const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
                const blue = 0xffb27200;  // the forward kind, as little-endian RGBA
                return new Uint32Array(data.buffer).filter((pixel) => pixel === blue).length;
            }"""
        )
        areas.append(filled / sum(int(mask).bit_count() for mask in masks[round_]))
    assert max(areas) < 1.03 * min(areas), areas

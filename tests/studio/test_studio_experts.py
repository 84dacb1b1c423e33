import json
from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from studio_visitor import Visitor, plain_columns
from test_studio_chapters import is_told
from test_studio_page import answers_the_pointer, has_room, is_accessible_in_both_themes

from harness.cases import table
from harness.today import some_of
from shardwise.decoder import experts as decoder
from shardwise.errors import UserError
from shardwise.layout import Layout, Mesh, Workload, unit_plan
from shardwise.layout.axes import EDP, ETP
from shardwise.model.catalog import catalog, get
from shardwise.model.config import Experts
from shardwise.predict.traffic.ledger import predict_ledger
from shardwise.report.units import format_bytes
from shardwise.studio.columns import View
from shardwise.studio.data import experts
from shardwise.studio.data.experts_layer import ACTS, ExpertLayer
from shardwise.studio.data.experts_router import LOADS, draw, route, taken

GIVEN = {"model": "mixtral-8x7b", "load": "skewed"}
STATE = "experts?model=mixtral-8x7b&load=skewed"
FIGURES = ({"held"}, {"routed"}, {"loads"}, {"capacity", "dropped"}, {"exchanged"})
"""What each chapter draws."""
SHOWN = """() => [...document.querySelectorAll(".scene [data-figure]")].filter((each) => each.checkVisibility())
    .map((each) => each.dataset.figure)"""


def view(**words: object) -> View:
    return experts.data({name: str(value) for name, value in words.items()})


@settings(max_examples=30, deadline=None)
@given(
    scoring=st.sampled_from(["softmax", "sigmoid"]), groups=st.sampled_from([(1, 1), (4, 2), (2, 1)]),
    active=st.integers(1, 4), group_score=st.sampled_from(["max", "top 2"]), normalized=st.booleans(),
    capacity=st.sampled_from([0.5, 1.0, 1.3]), seed=st.integers(0, 99),
)  # fmt: skip
def test_the_drawn_router_routes_as_the_decoder(
    scoring: Any, groups: tuple[int, int], active: int, group_score: Any, normalized: bool, capacity: float, seed: int
) -> None:
    e = Experts(8, active, 4, scoring=scoring, groups=groups[0], active_groups=groups[1], group_score=group_score,
                normalized=normalized, scale=1.5, capacity=capacity)  # fmt: skip
    logits = np.random.default_rng(seed).normal(size=(24, 8))
    ours, theirs = route(logits, e), decoder.route(torch.from_numpy(logits), None, e)
    assert ours.chosen.tolist() == theirs.chosen.tolist()
    assert ours.weights == pytest.approx(theirs.weights.numpy())
    chosen = ours.chosen.reshape(2, 12, -1)
    assert taken(chosen, e).tolist() == decoder.taken(torch.from_numpy(chosen), e).tolist()


@pytest.mark.parametrize("model", ["mixtral-8x7b", "deepseek-v3"])
@pytest.mark.parametrize(
    ("dp", "tp", "ep", "etp"), [(4, 1, 4, 1), (4, 2, 8, 1), (4, 2, 2, 2), (4, 2, 2, 1), (2, 4, 1, 4)]
)
@pytest.mark.parametrize("load", LOADS)
def test_rows_and_bytes_are_those_of_the_ledger_and_none_is_lost(
    model: str, dp: int, tp: int, ep: int, etp: int, load: str
) -> None:
    found = view(model=model, dp=dp, tp=tp, ep=ep, etp=etp, load=load, tokens=32)
    loads, ranks = found.tables["loads"].columns, found.more["ranks"]
    layout, e = Layout(dp=dp, tp=tp, ep=ep, etp=etp), get(model).experts
    assert e
    parts = dp * (tp if etp == 1 else 1)
    assert {one["tokens"] for one in ranks} == {32 * dp // parts}
    copies = dp * tp // parts
    assert sum(loads["rows"]) == 32 * dp * e.active * copies
    for rank, one in enumerate(ranks):
        assert sum(one["sends"]) == len(one["routes"]) == one["tokens"] * e.active
        for place, other in enumerate(one["group"]):
            assert one["sends"][place] == ranks[other]["receives"][one["place"]]
        assert sum(one["receives"]) == sum(one["loads"]) == loads["rows"][rank]
        away = sum(one["sends"]) - one["sends"][one["place"]]
        assert loads["sends"][rank] == away * get(model).hidden * 2
    assert sum(loads["sends"]) == sum(loads["receives"])
    if ep > 1:
        plan = unit_plan(get(model), layout, Workload(seq=32, batch=dp), backend="nccl")
        rows = {
            row.elements
            for row in predict_ledger(plan)
            if (row.op, row.phase, row.dtype) == ("all_to_all", "forward", "bfloat16")
        }
        assert {nbytes // 2 for nbytes in loads["payload to experts"]} == rows
    busiest = max(loads["rows"])
    assert loads["waits"][loads["rows"].index(busiest)] == 0 and max(loads["waits"]) < 1


@pytest.mark.parametrize(
    ("dp", "tp", "ep", "etp"), [(4, 1, 4, 1), (8, 1, 4, 1), (2, 2, 2, 2), (4, 2, 1, 2), (4, 4, 8, 1)]
)
def test_every_column_of_every_expert_is_there_as_often_as_it_should(dp: int, tp: int, ep: int, etp: int) -> None:
    found = view(model="mixtral-8x7b", dp=dp, tp=tp, ep=ep, etp=etp)
    model, layout = get("mixtral-8x7b"), Layout(dp=dp, tp=tp, ep=ep, etp=etp)
    mesh, times = Mesh.of(layout, model), np.zeros((8, 14336), dtype=int)
    for one in found.more["ranks"]:
        times[slice(*one["experts"]), slice(*one["columns"])] += 1
    assert np.all(times == mesh.size(EDP))
    held = found.tables["held"].columns
    assert [b - a for a, b in zip(held["columns from"], held["to"], strict=True)] == [14336 // mesh.size(ETP)] * dp * tp
    assert held["weights of a layer"][0] == 3 * 8 // ep * 4096 * 14336 // etp * 2


def test_drops_depend_on_sequences_and_not_on_ranks() -> None:
    results = []
    for layout in ({"dp": 4}, {"dp": 4, "ep": 2}, {"dp": 4, "tp": 2, "ep": 8}):
        found = view(load="skewed", capacity=1.25, tokens=64, **layout)
        columns = found.tables["capacity"].columns
        results.append((columns["takes"], columns["drops"]))
        assert sum(columns["chosen by"]) == 4 * 64 * 2
        assert all(n <= 4 * ceil(1.25 * 64 * 2 / 8) for n in columns["takes"])
        at = list(found.tables["dropped"].columns["capacity"]).index(1.25)
        assert found.tables["dropped"].columns["skewed"][at] == sum(columns["drops"]) / (4 * 64 * 2) > 0.1
    assert results[0] == results[1] == results[2]


def test_a_skewed_load_makes_ranks_wait_and_a_capacity_makes_them_wait_less() -> None:
    even, skewed = (view(load=load).more["chapters"][2]["sentences"] for load in LOADS)
    assert even == skewed, "both loads are told, whichever is drawn"
    model, layout = get("mixtral-8x7b"), Layout(dp=4, ep=4)
    assert model.experts
    layers = {load: ExpertLayer(model, layout, draw(256, model.experts, load), 64) for load in LOADS}
    assert layers["balanced"].imbalance < 1.05 < 1.5 < layers["skewed"].imbalance
    assert replace(layers["skewed"], capacity=1.0).imbalance < layers["skewed"].imbalance
    assert f"{layers['skewed'].imbalance:.2f} times the mean" in even[2]
    waits = view(load="skewed").tables["loads"].columns["waits"]
    assert layers["skewed"].waiting == pytest.approx(sum(waits) / 4)


def test_cutting_experts_sends_n_over_k_times_as_much() -> None:
    for name, k, hidden in (("mixtral-8x7b", 2, 4096), ("deepseek-v3", 8, 7168)):
        columns = view(model=name).tables["exchanged"].columns
        for n, spread, cut in zip(*columns.values(), strict=True):
            assert cut is None or cut == 2 * (n - 1) * hidden * 2
            assert spread is None or spread == pytest.approx(2 * k * hidden * 2 * (n - 1) / n)
        at = columns["ranks"].index(8)
        assert columns["experts cut (tp)"][at] / columns["experts spread (ep)"][at] == pytest.approx(8 / k)
    assert view(model="mixtral-8x7b").tables["exchanged"].columns["experts spread (ep)"][3:] == [None] * 3


def test_models_without_experts_get_a_sentence_and_layouts_that_do_not_suit_a_reason() -> None:
    found = view(model="llama-3-8b", ep=4)
    assert found.more["dense"].startswith("llama-3-8b has one feed-forward part per layer")
    assert not found.tables
    assert set(found.more["offered"]) == {name for name, model in catalog().items() if model.experts}
    assert set(found.more["left_out"]) == {name for name, model in catalog().items() if not model.experts}
    for words, line in (
        ({"ep": 3}, "valid ep|must divide"), ({"dp": 16, "tp": 2}, "more than the 16 that are drawn"),
        ({"tp": 4, "etp": 2}, "etp=2 must be 1"), ({"tokens": 5}, "tokens=5"), ({"load": "even"}, "load=even"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=line):
            view(**words)
    for name in found.more["offered"]:
        for dp in view(model=name).choices["dp"]:
            for ep in view(model=name, dp=dp).choices["ep"]:
                assert view(model=name, dp=dp, ep=ep, tokens=8).more["ranks"]


# -- in the browser


def test_chapters_by_mouse_and_by_keys(visitor: Visitor) -> None:
    page, chapters = visitor.open(STATE), experts.data(GIVEN).more["chapters"]
    for number in range(1, 6):
        visitor.tab_to(f".mark:nth-child({number})")
        page.keyboard.press("Enter")
        is_told(page, number, chapters[number - 1], FIGURES[number - 1])
    page.get_by_role("button", name="Chapter 1: Who has which experts").click()
    is_told(page, 1, chapters[0], FIGURES[0])


def test_a_layer_step_by_step(visitor: Visitor) -> None:
    page = visitor.open(f"{STATE}&_chapter=2")
    figure, steps = page.locator('[data-figure="routed"]'), experts.data(GIVEN).more["steps"]
    assert [step["act"] for step in steps] == list(ACTS)
    pixels = "document.querySelector('[data-figure=routed] canvas').toDataURL()"
    for number, step in enumerate(steps):
        assert figure.locator(".sentence").inner_text() == step["sentence"]
        assert figure.locator(".player output").inner_text() == f"{number} of 6"
        before = page.evaluate(pixels)
        if number < 3:
            figure.get_by_role("button", name="Next step").click()
        elif number < 6:
            figure.get_by_role("slider").press("ArrowRight")
        if number < 6:
            visitor.until(f"{pixels} !== {json.dumps(before)}")
            assert visitor.given["_step"] == str(number + 1)
    assert figure.get_by_role("button", name="One step on").is_disabled()


def test_every_rank_of_a_drawing_says_its_rows(visitor: Visitor) -> None:
    page = visitor.open(f"{STATE}&_chapter=2&_step=4")
    loads = experts.data(GIVEN).tables["loads"].columns
    box = page.locator('[data-figure="routed"] canvas').bounding_box()
    for rank, rows in enumerate(loads["rows"]):
        page.mouse.move(box["x"] + box["width"] - 6, box["y"] + 30 + 56 * rank + 12)
        words = page.locator(".tip:visible").inner_text()
        assert f"{rows} rows" in words if rows < max(loads["rows"]) else "expert 1 on rank 0" in words
    page.mouse.move(5, 5)
    page.get_by_role("button", name="Chapter 3: The busiest rank").click()
    page.wait_for_timeout(200)
    box = page.locator('[data-figure="loads"] canvas').bounding_box()
    for rank, (sends, receives) in enumerate(zip(loads["sends"], loads["receives"], strict=True)):
        page.mouse.move(box["x"] + 200, box["y"] + 24 + 36 * rank + 12)
        words = page.locator(".tip:visible").inner_text()
        assert f"sends {format_bytes(sends)}, receives {format_bytes(receives)}" in words


WAITS = table(__file__, "WAITS")
"""Of each rank: the part of the busiest one's bar that its own rows fill."""


def test_the_switch_by_mouse_and_by_keys_changes_bars_and_tables(visitor: Visitor) -> None:
    page = visitor.open("experts?_chapter=3&_tables=loads")
    switch = page.get_by_role("group", name="Load of the experts")
    for load, press in (("skewed", None), ("balanced", "keys"), ("skewed", "mouse")):
        if press == "mouse":
            visitor.after(switch.get_by_role("button", name="Skewed").click)
        elif press == "keys":
            visitor.tab_to('[data-control="load"] [data-value="balanced"]')
            visitor.after(lambda: page.keyboard.press("Space"))
        assert visitor.given.get("load", "skewed") == load
        assert switch.locator("[aria-pressed=true]").inner_text().lower() == load
        columns = plain_columns(view(load=load).tables["loads"])
        assert visitor.table("loads") == columns
        drawn = [rows / max(columns["rows"]) for rows in columns["rows"]]
        assert page.evaluate(WAITS) == pytest.approx(drawn, abs=0.02)
        told = page.locator(".chapter[data-chapter='3'] .sentences p").all_inner_texts()
        assert told == experts.data({"load": load}).more["chapters"][2]["sentences"]


def test_a_model_without_experts_and_the_way_back(visitor: Visitor) -> None:
    page = visitor.open("experts?model=llama-3-8b")
    assert page.locator("main .sentence").first.inner_text() == experts.data({"model": "llama-3-8b"}).more["dense"]
    assert page.evaluate("document.querySelectorAll('.chapter, .player').length > 0")
    assert page.locator(".chapter:visible, [data-control=dp]:visible").count() == 0
    is_accessible_in_both_themes(page)
    visitor.after(page.get_by_role("link", name="deepseek-v3").click)
    visitor.until("document.querySelector('[data-figure=held]').checkVisibility()")
    assert page.locator('[data-control="model"] input').input_value() == "deepseek-v3"
    assert page.locator(".tale").first.inner_text().count("256 experts") == 1


def test_sliders_make_other_layouts(visitor: Visitor) -> None:
    page = visitor.open("experts?_tables=held")
    visitor.after(lambda: page.locator('[data-control="tp"] input').press("ArrowRight"))
    visitor.after(lambda: page.locator('[data-control="etp"] select').select_option("2"))
    assert (visitor.given["tp"], visitor.given["etp"]) == ("2", "2")
    assert visitor.table("held") == plain_columns(view(tp=2, etp=2).tables["held"])
    visitor.after(lambda: page.locator('[data-control="ep"] input').press("Home"))
    assert visitor.table("held") == plain_columns(view(tp=2, etp=2, ep=1).tables["held"])


@pytest.mark.parametrize("number", some_of(range(1, 6), 3, "chapters of experts"))
def test_a_chapter_has_room_and_is_accessible(visitor: Visitor, number: int) -> None:
    page = visitor.open(f"{STATE}&_chapter={number}&_step=4")
    answers_the_pointer(page)
    is_accessible_in_both_themes(page)
    has_room(page, 1440, 390, 320)


def test_a_layer_plays_when_its_chapter_is_come_to(browser: Any, studio: Any) -> None:
    moving = Visitor(browser, studio)
    page = moving.open(STATE)
    page.get_by_role("button", name="Chapter 2: One layer, step by step").click()
    moving.until("document.querySelector('[data-figure=routed] .player input').value >= 2")
    assert page.get_by_role("button", name="Pause").is_visible()
    moving.close()

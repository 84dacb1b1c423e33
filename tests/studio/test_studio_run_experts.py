import json
import os
from pathlib import Path
from typing import Any

import pytest
from studio_visitor import LIMIT, Visitor, expert_load, make_run, plain_columns, serving, step_event
from test_studio_live import begun
from test_studio_page import has_room, is_accessible_in_both_themes

from harness import forked
from harness.today import FOLLOWED, of_some
from shardwise.report.run_directory import RunDirectory
from shardwise.studio.data import runs as run_experts
from shardwise.studio.data.runs import data, events

STEPS = 60
"""Of the real run."""


def test_loads_are_those_of_the_events(tmp_path: Path) -> None:
    make_run(tmp_path / "one", steps=9, experts=True)
    found = data({"run": "one"}, tmp_path)
    loads, columns = found.more["loads"], found.tables["experts"].columns
    assert (loads["steps"], loads["layers"], loads["experts"]) == (list(range(1, 10)), ["blocks.2", "blocks.3"], 4)
    told = [expert_load(step) for step in range(1, 10)]
    assert loads["counts"].tolist() == [n for one in told for row in one["tokens"].values() for n in row]
    assert columns["imbalance"] == [one["imbalance"] for one in told]
    assert columns["dropped"] == [0] * 7 + [1, 2] and columns["balance_loss"] == [0.01] * 9
    table = found.tables["loads"]
    assert table.title.endswith("at step 9") and table.columns["blocks.3"] == told[-1]["tokens"]["blocks.3"]


def test_a_dense_run_has_none_and_other_shapes_are_left_out(tmp_path: Path) -> None:
    make_run(tmp_path / "one", steps=3)
    found = data({"run": "one"}, tmp_path)
    assert "loads" not in found.more and "loads" not in found.tables
    assert found.tables["experts"].columns["step"] == []
    with RunDirectory.open(tmp_path / "one") as run:
        for step, tokens in ((4, {"blocks.1": [1, 2, 3]}), (5, {"blocks.1": [4, 2]}), (6, {"blocks.1": [2, 4]})):
            run.append(step_event(step) | {"experts": {"tokens": tokens, "imbalance": float("nan"), "dropped": 0}})
        run.append(step_event(7) | {"experts": None})
    later = data({"run": "one"}, tmp_path)
    assert later.more["loads"]["steps"] == [5, 6] and later.tables["steps"].columns["step"][-1] == 7
    assert later.tables["experts"].columns == {
        "step": [5, 6], "imbalance": [None, None], "dropped": [0, 0], "balance_loss": [None, None]
    }  # fmt: skip


def test_a_long_run_is_thinned_and_keeps_its_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_experts, "MOST_LOADS", 8 * 10)
    found = run_experts.loads([{"step": step, "experts": expert_load(step)} for step in range(1, 48)])
    assert found and found["steps"] == list(range(2, 48, 5)) and len(found["counts"]) == 8 * len(found["steps"])
    assert found["counts"][-8:].tolist() == [n for row in expert_load(47)["tokens"].values() for n in row]


def test_a_cursor_brings_the_loads_of_new_steps(tmp_path: Path) -> None:
    make_run(tmp_path / "one", steps=3, status="running", experts=True)
    first = events({"run": "one"}, tmp_path)
    assert first["loads"]["steps"] == first["experts"]["step"] == [1, 2, 3]
    assert events({"run": "one", "after": str(first["cursor"])}, tmp_path)["loads"] is None
    with RunDirectory.open(tmp_path / "one") as run:
        run.append(step_event(4) | {"experts": expert_load(4)})
    assert events({"run": "one", "after": str(first["cursor"])}, tmp_path)["loads"]["steps"] == [4]


# -- in the browser


def sentence(step: int) -> str:
    layers = expert_load(step)["tokens"]
    imbalances = {name: max(row) / (sum(row) / len(row)) for name, row in layers.items()}
    name = max(imbalances, key=lambda each: imbalances[each])
    expert = layers[name].index(max(layers[name]))
    return f"Step {step}: expert {expert} of {name} has {imbalances[name]:.2f} times the mean of its layer."


def heat(page: Any) -> Any:
    return page.locator('[data-figure="loads"]')


def test_any_step_by_slider_and_its_numbers(visitor: Visitor, runs: Path) -> None:
    page = visitor.open("runs?run=first&_tables=loads,experts")
    assert visitor.table("loads") == plain_columns(data({"run": "first"}, runs).tables["loads"])
    assert heat(page).locator(".sentence").inner_text() == sentence(12)
    visitor.tab_to('[data-figure="loads"] .player input')
    page.keyboard.press("Home")
    visitor.until("location.hash.includes('_load=0')")
    for step in (1, 2):
        assert heat(page).locator(".sentence").inner_text() == sentence(step)
        rows = expert_load(step)["tokens"]
        assert visitor.table("loads") == {"expert": [0, 1, 2, 3], **rows}
        box = heat(page).locator("canvas").bounding_box()
        wide = (box["width"] - 74 - 58) / 4
        for layer, (name, row) in enumerate(rows.items()):
            for expert, tokens in enumerate(row):
                page.mouse.move(box["x"] + 74 + (expert + 0.5) * wide, box["y"] + 22 + 30 * layer + 15)
                words = page.locator(".tip:visible").inner_text()
                assert words.startswith(f"{name}, expert {expert}: {tokens} tokens\n{tokens / 32:.2f} times")
        if step == 1:
            heat(page).get_by_role("button", name="One step on").click()
    note = page.locator('[data-figure="experts"] .lead').first.inner_text()
    assert note.startswith("At step 12 the busiest expert of a layer has 1.375 times the mean.")
    assert "15 choices in all" in page.locator('[data-figure="dropped"]').inner_text()


@of_some("loads", FOLLOWED, 2)
def test_loads_of_a_running_run_are_followed(browser: Any, tmp_path: Path) -> None:
    make_run(tmp_path / "live", steps=2, status="running")
    with serving(tmp_path) as studio:
        visitor = Visitor(browser, studio, reduced_motion="reduce")
        page = visitor.open("runs?run=live")
        assert not heat(page).is_visible(), "a dense run has no experts"
        with RunDirectory.open(tmp_path / "live") as run:
            run.append(step_event(3) | {"experts": expert_load(3)})
            visitor.until("document.querySelector('[data-figure=loads]').checkVisibility()")
            visitor.until(f"document.querySelector('[data-figure=loads] .sentence').textContent === {sentence(3)!r}")
            assert not page.locator('[data-figure="dropped"]').is_visible()
            pixels = "document.querySelector('[data-figure=experts] canvas').toDataURL()"
            for step in range(4, 10):
                run.append(step_event(step) | {"experts": expert_load(step)})
            before = page.evaluate(pixels)
            visitor.until(f"document.querySelector('[data-figure=loads] .sentence').textContent === {sentence(9)!r}")
            visitor.until(f"{pixels} !== {json.dumps(before)}")
            visitor.until("document.querySelector('[data-figure=dropped]').checkVisibility()")
            # A step that was chosen stays, while the others grow.
            heat(page).get_by_role("slider").press("Home")
            run.append(step_event(10) | {"experts": expert_load(10)})
            visitor.until("document.querySelector('[data-figure=loads] .player output').textContent === '0 of 7'")
            assert heat(page).locator(".sentence").inner_text() == sentence(3)
        visitor.close()


@of_some("loads of a real run", FOLLOWED, 2)
@pytest.mark.usefixtures("leftovers")
def test_the_loads_of_a_real_run_are_followed_to_its_end(browser: Any, tmp_path: Path) -> None:
    """Two processes with two of four experts each: every layer's loads add up to its tokens times its choices."""
    run = training(tmp_path)
    try:
        with serving(tmp_path / "runs") as studio:
            begun(run, tmp_path / "runs" / "moe" / "events.jsonl")
            visitor = Visitor(browser, studio, reduced_motion="reduce")
            page = visitor.open("runs?run=moe&_tables=loads,experts")
            visitor.until("document.querySelector('[data-figure=loads]').checkVisibility()")
            _, errors = run.communicate(3 * LIMIT)
            assert run.returncode == 0, errors
            visitor.until("document.querySelector('.sentence').textContent.includes('finished')")
            visitor.ready()
            found = data({"run": "moe"}, tmp_path / "runs")
            assert found.more["loads"]["steps"] == list(range(1, STEPS + 1))
            counts = found.more["loads"]["counts"].reshape(STEPS, 2, 4)
            assert (counts.sum(-1) == 4 * 32 * 2).all()
            imbalances = (counts.max(-1) / counts.mean(-1)).max(-1)
            assert found.tables["experts"].columns["imbalance"] == pytest.approx(imbalances.tolist())
            for name in ("loads", "experts"):
                assert visitor.table(name) == plain_columns(found.tables[name])
            expert = int(counts[-1].max(0).argmax())
            assert f"Step {STEPS}: expert {expert} of blocks." in heat(page).locator(".sentence").inner_text()
            visitor.close()
    finally:
        run.kill()


def training(folder: Path) -> forked.Started:
    """A small model with experts on two ranks, whose run is `folder`/runs/moe."""
    (folder / "text.txt").write_text("\n".join(f"{number} {number * 7} {number * number}" for number in range(4000)))
    command = (
        f"train tiny-mixtral --vocab 300 --layout dp=2,ep=2,precision=fp32 --seq 32 --batch 4 --steps {STEPS} "
        "--no-tensorboard --set layers=2,hidden=64 --validate-batches 1"
    )
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    words = [*command.split(), "--data", str(folder / "text.txt"), "--out", str(folder / "runs" / "moe")]
    return forked.Started(words, {**clean, "OMP_NUM_THREADS": "1"})


def test_the_heat_strip_has_room_and_is_accessible(visitor: Visitor) -> None:
    page = visitor.open("runs?run=first&_load=3")
    is_accessible_in_both_themes(page)
    has_room(page, 1440, 390, 320)

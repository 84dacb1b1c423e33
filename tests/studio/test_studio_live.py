import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from studio_visitor import LIMIT, Visitor, plain_columns, serving

from harness import forked
from harness.today import EVERYTHING, FOLLOWED, of_some
from shardwise.studio.data.runs import data

pytestmark = pytest.mark.usefixtures("leftovers")
STEPS = 900 if EVERYTHING else 220


def training(folder: Path) -> forked.Started:
    """A small model on four ranks, whose run is `folder`/four."""
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    text = "\n".join(" ".join(words[int(digit)] for digit in str(number)) for number in range(4000))
    (folder / "text.txt").write_text(text)
    command = (
        f"train tiny-llama --vocab 300 --layout dp=2,tp=2,precision=fp32 --seq 32 --batch 4 --steps {STEPS} --report "
        "--no-tensorboard --set layers=2,hidden=64,ffn=96 --validate-batches 1"
    )
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    words = [*command.split(), "--data", str(folder / "text.txt"), "--out", str(folder / "runs" / "four")]
    return forked.Started(words, {**clean, "OMP_NUM_THREADS": "1"})


def begun(run: forked.Started, events: Path) -> None:
    until = time.monotonic() + 2 * LIMIT
    while not (events.is_file() and '"loss"' in events.read_text()):
        assert run.poll() is None and time.monotonic() < until, run.communicate(1)
        time.sleep(0.05)


def step(visitor: Visitor) -> int:
    return int(visitor.page.locator("dl.facts dd").nth(1).inner_text().split("\n")[0])


def further(visitor: Visitor, than: int) -> int:
    """Wait, without doing anything, until the page says a later step; returns it."""
    until = time.monotonic() + LIMIT
    while (now := step(visitor)) <= than:
        assert time.monotonic() < until, f"still at step {now}"
        visitor.page.wait_for_timeout(50)
    return now


@of_some("four processes", FOLLOWED, 2)
def test_the_page_follows_four_processes_through_a_reload_to_their_end(browser: Any, tmp_path: Path) -> None:
    run = training(tmp_path)
    try:
        begun(run, tmp_path / "runs" / "four" / "events.jsonl")
        with serving(tmp_path / "runs") as studio:
            visitor = Visitor(browser, studio, reduced_motion="reduce")
            page = visitor.open("runs?run=four&_tables=memory,ledger,timeline")
            page.evaluate("window.untouched = true")
            seen = further(visitor, further(visitor, step(visitor)))
            assert (
                page.evaluate("window.untouched") and "Training: step" in page.locator(".sentence").first.inner_text()
            )
            page.reload()
            visitor.ready()
            again = step(visitor)
            assert again >= seen and page.evaluate("window.untouched === undefined")
            assert further(visitor, again) > again
            _, errors = run.communicate(3 * LIMIT)
            assert run.returncode == 0, errors
            visitor.until("document.querySelector('.sentence').textContent.includes('finished')")
            visitor.ready()
            assert_whole(visitor, tmp_path / "runs")
            visitor.close()
    finally:
        run.kill()


def assert_whole(visitor: Visitor, runs: Path) -> None:
    """The last step, the report, the ledger and all ranks' timelines are on the page, and what writing them took."""
    assert step(visitor) == STEPS
    view = data({"run": "four"}, runs)
    for name in ("memory", "ledger", "timeline"):
        columns = plain_columns(view.tables[name])
        assert visitor.table(name) == {heading: values[:100] for heading, values in columns.items()}
    assert "✓ Every collective" in visitor.page.locator('[data-figure="ledger"]').inner_text()
    ranks = {row.rpartition(" ")[0] for row in view.more["timeline"]["rows"]}
    assert ranks == {f"rank {rank}" for rank in range(4)}
    result = json.loads((runs / "four" / "result.json").read_text())
    assert 0 < result["writing_share"] < 1
    assert result["writing_share"] == pytest.approx(result["writing_cpu_s"] / result["step_cpu_s"])
    assert "of a step's CPU time" in visitor.page.locator(".sentence").first.inner_text()

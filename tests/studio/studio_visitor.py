"""What tests of the page share: a tab, a run on disk, tables as JSON has them."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.cluster import Cluster
from shardwise.layout import Layout, Workload
from shardwise.model.catalog import get
from shardwise.predict import estimate
from shardwise.report.rank_timelines import Recorded, aligned
from shardwise.report.run_directory import RunDirectory
from shardwise.studio.columns import Table, encode
from shardwise.studio.server import Studio

LIMIT = 90
"""Seconds after which what has not happened is not waited for any more; whoever else uses the machine costs some."""


@contextmanager
def serving(folder: Path) -> Iterator[Studio]:
    with Studio(0, folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def plain_columns(table: Table) -> dict[str, list[Any]]:
    return {name: json.loads(encode(list(values))) for name, values in table.columns.items()}


def make_run(path: Path, steps: int, status: str = "finished", experts: bool = False) -> None:
    """A run on disk with its reports; with experts, every step tells their load."""
    model, layout, workload = get("tiny-llama"), Layout.parse("dp=2,zero=3"), Workload(seq=64, batch=4)
    config = {"model": model.to_json(), "layout": str(layout), "workload": workload.to_json(), "steps": 12}
    with RunDirectory.create(path, {"config": config, "ranks": 2, "status": status}) as run:
        for step in range(1, steps + 1):
            run.append(step_event(step) | ({"experts": expert_load(step)} if experts else {}))
            if step % 5 == 0:
                run.append({"step": step, "validation_loss": 6.5, "unigram_entropy": 5.9})
        predicted = estimate(model, layout, workload, Cluster.parse("1x2xCPU"))
        predicted.write(run.report("predicted"))
        measured = replace(
            predicted, source="measured", time=0.25, roles=(replace(predicted.roles[0], timeline=TIMELINE),)
        )
        measured.write(run.report("measured"))
        recorded = {rank: Recorded("here", 1_000 + DELAY * rank, TIMELINE) for rank in range(2)}
        run.write_timelines(aligned(recorded, 4, 2))


def step_event(step: int) -> dict[str, Any]:
    figures = {"grad_norm": 1.0 / step, "seconds": 0.5, "tokens_per_s": 512.0, "mfu": 0.25, "lr": 1e-3}
    return {"time": 1e9 + step, "step": step, "loss": 7.5 - 0.1 * step} | figures


def expert_load(step: int) -> dict[str, Any]:
    """Load of four experts in two layers: 64 tokens with two choices each; some are dropped from the eighth step on."""
    rows = {"blocks.2": [32, 32, 32, 32], "blocks.3": [20 + 2 * step, 44 - 2 * step, 30, 34]}
    imbalance = max(max(row) / 32 for row in rows.values())
    return {"tokens": rows, "imbalance": imbalance, "dropped": max(0, step - 7), "balance_loss": 0.01}


DELAY = 2_000_000
"""Nanoseconds by which the second rank of the run begins its step later."""

TIMELINE = tuple(
    {"name": name, "stream": stream, "start_s": start, "duration_s": seconds}
    for name, stream, start, seconds in (
        ("forward blocks.0", "compute", 0.0, 0.08),
        ("loss", "compute", 0.08, 0.02),
        ("backward blocks.0", "compute", 0.13, 0.1),
        ("all_gather_into blocks.0", "communication", 0.05, 0.08),
        ("all_gather_into blocks.0", "waiting", 0.1, 0.03),
    )
)


class Visitor:
    """A tab that can reach the server and nothing else; it remembers what went wrong."""

    def __init__(self, browser: Any, studio: Studio, **options: Any) -> None:
        self.studio = studio
        self.context = browser.new_context(**({"viewport": {"width": 1200, "height": 900}} | options))
        self.context.set_default_timeout(1000 * LIMIT)
        self.page = self.context.new_page()
        self.refused: list[str] = []
        self.problems: list[str] = []
        self.context.route("**/*", self._route)
        self.page.on("console", lambda message: self.problems.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))

    def _route(self, route: Any) -> None:
        if route.request.url.startswith((self.studio.origin, "file://")):
            route.continue_()
        else:
            self.refused.append(route.request.url)
            route.abort()

    def open(self, state: str) -> Any:
        self.page.goto("about:blank")
        self.page.goto(f"{self.studio.address}#{state}")
        return self.ready()

    def until(self, expression: str) -> None:
        """Wait until an expression is true; the page's own policy forbids to wait inside it."""
        for _ in range(20 * LIMIT):
            if self.page.evaluate(expression):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never true: {expression}")

    def ready(self) -> Any:
        self.page.wait_for_selector("body[data-ready]")
        return self.page

    def after(self, act: Any) -> Any:
        """Do something that asks the server anew, and wait for its answer."""
        act()
        self.page.wait_for_timeout(130)
        return self.ready()

    @property
    def given(self) -> dict[str, str]:
        words = self.page.evaluate("Object.fromEntries(new URLSearchParams(location.hash.split(/\\?(.*)/s)[1] ?? ''))")
        return dict(words)

    def tab_to(self, selector: str) -> None:
        for _ in range(120):
            if self.page.evaluate("(s) => document.activeElement?.matches(s)", selector):
                return
            self.page.keyboard.press("Tab")
        raise AssertionError(f"no number of Tabs reaches {selector}")

    def table(self, figure: str) -> dict[str, list[Any]]:
        """The table behind a figure: heading -> exact values."""
        head, rows = self.page.evaluate(
            """(name) => {
                const table = document.querySelector(`[data-figure="${name}"] .behind table`);
                const rows = [...table.tBodies[0].rows].map((row) => [...row.cells].map((cell) => cell.dataset.v));
                return [[...table.tHead.rows[0].cells].map((cell) => cell.textContent), rows];
            }""",
            figure,
        )
        return {name: [json.loads(row[i]) for row in rows] for i, name in enumerate(head)}

    def close(self) -> None:
        self.context.close()
        assert self.refused == [], "the page asked for something outside"
        assert self.problems == [], "the page complained"

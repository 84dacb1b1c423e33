"""How fast the page draws: events of a pipeline on 64 ranks in headless Chromium.

For 100,000 and for one million events: the first paint (from the data in the page to the pixels on the canvas), frames
a second while panning and zooming, and the longest time for which the page does not react. Then how long it takes from
`shardwise studio` on the command line to a page that can be used, what the first view weighs and when it is painted in
a fresh browser profile from a fresh server, how long the answer's slider takes to redraw, and what a training run of
four processes spends on writing what the page follows, as the run itself tells. Needs the `test` and `train` extras,
and Debian's chromium.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from shardwise.report.run_directory import RunDirectory
from shardwise.studio.server import Studio

CHROMIUM = "/usr/bin/chromium"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
RANKS = 64

DRAW = """async ([n, ranks, frames]) => {
    const { drawGantt, ganttHeight, prepare } = await import("studio/lib/gantt");
    const kinds = ["forward", "backward", "input", "weight"];
    const make = () => {
        const rank = new Uint16Array(n), start = new Float64Array(n), seconds = new Float64Array(n);
        const kind = new Uint8Array(n), micro = new Int32Array(n), stage = new Uint16Array(n);
        const each = Math.floor(n / ranks);
        for (let i = 0; i < n; i++) {
            rank[i] = Math.min(ranks - 1, Math.floor(i / each));
            const j = i - rank[i] * each;
            start[i] = j * 1e-3 + (j % 7) * 1e-5;
            seconds[i] = 4e-4 + (j % 5) * 1e-4;
            kind[i] = j % 4;
            micro[i] = j % 64;
        }
        return { rank, start, seconds, kind, micro, stage };
    };
    const columns = make(), canvas = document.createElement("canvas");
    document.querySelector("main").replaceChildren(canvas);
    canvas.width = 1200;
    canvas.height = ganttHeight(ranks);
    const context = canvas.getContext("2d"), labels = (row) => `rank ${row}`;
    const painted = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    const before = performance.now(), events = prepare(columns, ranks, kinds);
    drawGantt(context, canvas.width, events, [0, events.latest], { labels });
    const blocked = performance.now() - before;
    await painted();
    const first = performance.now() - before;
    const run = async (window) => {
        const times = [];
        let last = performance.now(), longest = 0;
        for (let i = 0; i < frames; i++) {
            const began = performance.now();
            context.clearRect(0, 0, canvas.width, canvas.height);
            drawGantt(context, canvas.width, events, window(i / frames), { labels });
            longest = Math.max(longest, performance.now() - began);
            await new Promise(requestAnimationFrame);
            times.push(performance.now() - last);
            last = performance.now();
        }
        const fps = 1000 * frames / times.reduce((a, b) => a + b);
        return { fps, worst_ms: Math.max(...times), longest_ms: longest };
    };
    const all = events.latest;
    return { events: n, first_paint_ms: first, blocked_ms: blocked,
        pan: await run((t) => [t * all * 0.5, t * all * 0.5 + all * 0.5]),
        zoom: await run((t) => [all * 0.5 * t * 0.999, all * (1 - 0.5 * t * 0.999)]) };
}"""


REDRAW = """async () => {
    const figure = document.querySelector('[data-figure="spent"]'), slider = figure.querySelector("input[type=range]");
    const canvas = figure.querySelector("canvas"), proto = CanvasRenderingContext2D.prototype, clear = proto.clearRect;
    const times = [];
    for (let token = 10; token < 130; token += 2) {
        const before = performance.now();
        const painted = new Promise((done) => { proto.clearRect = function (...box) {
            clear.apply(this, box);
            if (this.canvas === canvas) queueMicrotask(() => done(performance.now()));
        }; });
        slider.value = token;
        slider.dispatchEvent(new Event("input"));
        times.push(await painted - before);
    }
    proto.clearRect = clear;
    return times.sort((a, b) => a - b);
}"""
"""Milliseconds from a move of the answer's slider to the end of its drawing, sorted."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--repeat", type=int, default=3, metavar="N")
    parser.add_argument("--frames", type=int, default=60, metavar="N")
    args = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        found = {
            "machine": {"platform": platform.platform(), "cpus": os.cpu_count(), "chromium": browser.version},
            "drawing": [drawn(browser, events, args) for events in (100_000, 1_000_000)],
            "served": served(browser, args.repeat),
            "start": [started(browser) for _ in range(args.repeat)],
            "first_view": [first_view(browser) for _ in range(args.repeat)],
            "slider": redrawn(browser),
            "written": written(),
        }
        browser.close()
    for row in found["drawing"]:
        print(
            f"{row['events']:>9,} events on {RANKS} ranks: first paint {row['first_paint_ms']:.0f} ms, "
            f"pan {row['pan']['fps']:.0f} and zoom {row['zoom']['fps']:.0f} frames/s, "
            f"longest stop {max(row['blocked_ms'], row['pan']['longest_ms'], row['zoom']['longest_ms']):.0f} ms"
        )
    print(f"pipelines view with {found['served']['events']:,} events: shown after {found['served']['seconds']:.2f} s")
    print(f"from the command to a usable page: {statistics.median(found['start']):.2f} s (median of {args.repeat})")
    first = found["first_view"]
    paints, drawings = (statistics.median(one[name] for one in first) for name in ("first_paint_ms", "drawn_ms"))
    print(
        f"first view: {first[0]['bytes'] / 1e3:.0f} kB in {first[0]['requests']} requests, "
        f"{first[0]['code'] / 1e3:.0f} kB of it code and style; first paint "
        f"after {paints:.0f} ms, all drawn after {drawings:.0f} ms"
    )
    slider = found["slider"]
    print(f"answer's slider: {slider['median_ms']:.1f} ms a redraw (median), {slider['requests']} requests")
    wrote = found["written"]
    print(
        f"what a run of four processes writes for the page: {1e6 * wrote['writing_cpu_s']:.0f} µs of a step's "
        f"{1e3 * wrote['step_cpu_s']:.0f} ms of CPU time, {wrote['writing_share']:.2%}"
    )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


def drawn(browser: Any, events: int, args: argparse.Namespace) -> dict[str, Any]:
    """Drawing alone, without a server's time: the median run by first paint."""
    with Studio() as studio:
        threading.Thread(target=studio.serve_forever, daemon=True).start()
        page = browser.new_page(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
        page.goto(f"{studio.address}#pipelines?ranks=2&micro=2")
        page.wait_for_selector("body[data-ready]")
        runs = [page.evaluate(DRAW, [events, RANKS, args.frames]) for _ in range(args.repeat)]
        page.close()
        studio.shutdown()
    return sorted(runs, key=lambda run: run["first_paint_ms"])[len(runs) // 2]


def served(browser: Any, repeat: int) -> dict[str, Any]:
    """The view itself with a schedule of about a hundred thousand events: simulated, sent, drawn."""
    times = []
    with Studio() as studio:
        threading.Thread(target=studio.serve_forever, daemon=True).start()
        page = browser.new_page(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
        for i in range(repeat):
            page.goto("about:blank")
            began = time.perf_counter()
            page.goto(f"{studio.address}#pipelines?a=1f1b&b=none&ranks=64&micro={781 + i}")
            page.wait_for_selector("body[data-ready]", timeout=120_000)
            times.append(time.perf_counter() - began)
        page.close()
        studio.shutdown()
    return {"events": 64 * 781 * 2, "seconds": statistics.median(times)}


def started(browser: Any) -> float:
    """Seconds from the command line to a page that is painted and can be used."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "shardwise", "studio", "--no-browser", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        address = json.loads("".join(process.stdout.readline() for _ in range(3)))["address"]
        page = browser.new_page(reduced_motion="reduce")
        page.goto(address)
        page.wait_for_selector("section.figure canvas")
        seconds = time.perf_counter() - began
        page.close()
        process.terminate()
    return seconds


def first_view(browser: Any) -> dict[str, float]:
    """Bytes of all answers until the first view is drawn, and milliseconds from the navigation on. Nothing is cached,
    and the server has just begun."""
    command = [sys.executable, "-m", "shardwise", "studio", "--no-browser", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        address = json.loads("".join(process.stdout.readline() for _ in range(3)))["address"]
        try:
            seen = visited(browser, address)
        finally:
            process.terminate()
    return seen


def visited(browser: Any, address: str) -> dict[str, float]:
    """A first visit: what came, and when it was painted."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, reduced_motion="reduce")
    page = context.new_page()
    answers: list[Any] = []
    page.on("response", lambda answer: answers.append(answer))
    page.goto(address)
    page.wait_for_selector("body[data-ready]")
    drawn = page.evaluate("performance.now()")
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null")
    sizes = {answer.url: len(answer.body()) for answer in answers if answer.url.startswith(address)}
    context.close()
    data = sum(size for url, size in sizes.items() if "/api/" in url)
    whole = sum(sizes.values())
    return {"bytes": whole, "code": whole - data, "requests": len(sizes), "first_paint_ms": paint, "drawn_ms": drawn}


def redrawn(browser: Any) -> dict[str, float]:
    """What a move of the answer's slider costs until its figure is drawn."""
    with Studio() as studio:
        threading.Thread(target=studio.serve_forever, daemon=True).start()
        page = browser.new_page(viewport={"width": 1440, "height": 900}, reduced_motion="reduce")
        page.goto(f"{studio.address}#tokens?_chapter=6")
        page.wait_for_selector("body[data-ready]")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        times = page.evaluate(REDRAW)
        page.close()
        studio.shutdown()
    return {"median_ms": statistics.median(times), "worst_ms": times[-1], "requests": len(asked)}


def written(steps: int = 60) -> dict[str, float]:
    """What a run of four processes says of its writing: CPU seconds of a step, of what it writes a step for whoever
    follows it, and their ratio, all measured inside the process that writes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = f"train tiny-llama --layout dp=2,tp=2,precision=fp32 --seq 128 --batch 8 --steps {steps} --report"
        words = [
            *command.split(),
            "--data",
            "stdlib",
            "--vocab",
            "512",
            "--max-bytes",
            "300000",
            "--no-tensorboard",
            "--out",
            str(out),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-m", "shardwise", *words], check=True, capture_output=True, env=environment)
        result = RunDirectory.open(out).result
    return {name: result[name] for name in ("step_cpu_s", "writing_cpu_s", "writing_share")}


if __name__ == "__main__":
    main()

"""The tour: predict, train a small model on four processes, compare both to the byte, and one page that shows it.

Takes about a minute on two cores. The exit code is 0 when the ledgers are equal, the bytes by class are equal,
the validation loss is below the unigram entropy of the validation text, and the checkpoint has the same loss under
another layout.
"""

from __future__ import annotations

import os
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from shardwise.cli.declare import CommandOptions, arg
from shardwise.cli.output import print_json, show
from shardwise.records import dataclass
from shardwise.report.tables import comparison_tables, zero_table
from shardwise.runtime.installed import require


@dataclass
class DemoOptions(CommandOptions):
    out: Path | None = arg("run directory, new or empty (runs/demo-N)", "DIR")


def run(args: DemoOptions) -> int:
    from shardwise import demo

    require("the tour", "torch", "tokenizers")
    started = time.monotonic()
    out = demo.run_directory(args.out)
    # With --json nothing but the result may reach standard output: progress goes where errors go.
    tell: Callable[..., None] = (lambda *things: None) if args.json else show
    zero = {stage: {gpus: held.total for gpus, held in row.items()} for stage, row in demo.zero_memory().items()}
    table = zero_table(zero, demo.large_title(), capacity=demo.capacity())
    tell(f"1. What {demo.LARGE} would hold on each GPU under ZeRO, in closed form\n", table, "")
    tell(f"2. {demo.SMALL} learns from Python's own library on four processes: {demo.LAYOUT}")
    with _bar("train", demo.STEPS) as watched:
        tour = demo.learn(out, *watched)
    below = tour.validation_loss < tour.unigram_entropy
    loss = f"validation loss {tour.validation_loss:.3f}, {'below' if below else 'not below'} the unigram entropy of "
    loss += f"the validation text, {tour.unigram_entropy:.3f} (nats a token)"
    tell(
        "\n3. What was predicted for that run, and what it measured\n",
        comparison_tables(tour.comparison),
        f"{'✓' if below else '✗'} {loss}",
    )
    tell("\n4. Its checkpoint is independent of the layout: resumed under another")
    with _bar("resume", demo.STEPS + demo.MORE_STEPS) as watched:
        further = tour.resume_under(demo.ELSEWHERE, *watched)
    mark = "✗" if further.failures else "✓"
    tell(
        f"{mark} {further.layout}: validation loss {further.before:.4f} when saved, "
        f"{further.resumed:.4f} when resumed, {further.after:.4f} after {further.steps} more steps"
    )
    page = tour.write_page()
    tell(f"\n5. The studio on prediction and run: {page.absolute().as_uri()}")
    tell(f"   live: shardwise studio 'runs?run={out.name}' --runs {shlex.quote(str(out.parent))}\n")
    failures = [*tour.failures, *further.failures]
    tell(*(f"failed: {sentence}" for sentence in failures), f"took {time.monotonic() - started:.0f} s")
    if args.json:
        print_json(
            {
                "out": str(tour.result.out),
                "page": str(page),
                "zero": {"title": demo.large_title(), "capacity": demo.capacity(), "bytes_per_gpu": zero},
                "training": tour.result.summary,
                "comparison": tour.comparison.to_json(),
                "resumed": [asdict(further)],
                "failures": failures,
            }
        )
    return 1 if failures else 0


@contextmanager
def _bar(doing: str, steps: int) -> Iterator[tuple[int, Callable[[str], None]]]:
    """One bar on standard error for a run of so many steps: the file descriptor for its lines, and a function for lines
    before it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[words]}"), TimeElapsedColumn()
    reading, writing = os.pipe()
    with Progress(*columns, console=Console(stderr=True)) as display, open(reading, errors="replace") as lines:
        task = display.add_task(doing, total=steps, words="")

        def follow() -> None:
            for line in lines:
                if words := re.match(r"step +(\d+)(?:/\d+)? +((?:validation )?loss \S+)", line):
                    display.update(task, completed=int(words[1]), words=f"step {words[1]}/{steps} {words[2]}")

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield writing, lambda line: display.update(task, words=line)
        finally:
            os.close(writing)
            thread.join()

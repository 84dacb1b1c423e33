"""`python -m faults --count N --layouts M --seed S`: draw faults, run them, check what must hold, print a table.

Exit code 0 when all that must hold held, 1 when something did not, 2 for a bad option. Mounts are made in a mount
namespace of this command's own.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from faults import inject, serving
from faults.draw import SERVED, Fault, draw, draw_layouts
from faults.report import Result, table
from faults.trial import Space, Trial

PRIVATE = "FAULTS_PRIVATE_MOUNTS"


def main(words: list[str]) -> int:
    options = _options(words)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    mounts = os.environ.get(PRIVATE) == "1" or _with_mounts(words)
    started = time.monotonic()
    layouts = draw_layouts(options.seed, options.layouts)
    faults = list(draw(options.seed, options.count, layouts, [*inject.KINDS, *serving.KINDS]))
    if options.only is not None:
        faults = [fault for fault in faults if fault.number in options.only]
    folder = Path(options.keep or tempfile.mkdtemp(prefix="faults-"))
    folder.mkdir(exist_ok=True)
    try:
        results = _run(faults, folder, options.jobs, mounts)
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    seconds, results = time.monotonic() - started, sorted(results, key=lambda result: result.fault.number)
    if options.json:
        items = [result.to_json() for result in results]
        print(json.dumps({"seed": options.seed, "seconds": seconds, "layouts": layouts, "faults": items}))
    else:
        for line in table(results):
            print(line)
        print(f"{seconds:.0f} s with {options.jobs} at a time; seed {options.seed}")
    return int(any(result.problems for result in results))


def _options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("--count", type=_positive, default=40, help="faults")
    parser.add_argument("--layouts", type=_positive, default=12, help="layouts of trainings")
    parser.add_argument("--seed", default=time.strftime("%Y%m%d"))
    parser.add_argument("--jobs", type=_positive, default=2, help="faults at a time")
    parser.add_argument(
        "--only", type=int, nargs="+", action="extend", help="numbers of the drawn faults to run, such as a failed one"
    )
    parser.add_argument("--keep", help="folder for the runs, which are removed otherwise")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(words)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def _with_mounts(words: list[str]) -> bool:
    """Start again where mounts are private, and do not return; False where that is not possible."""
    ways = (["unshare", "-m"], ["unshare", "-Urm"])
    for way in ways if shutil.which("unshare") else ():
        if subprocess.run([*way, "true"], capture_output=True).returncode == 0:
            sys.stdout.flush()
            os.execvpe(way[0], [*way, sys.executable, "-m", "faults", *words], {**os.environ, PRIVATE: "1"})
    return False


def _run(faults: list[Fault], folder: Path, jobs: int, mounts: bool) -> list[Result]:
    space, expected = Space(folder), dict[str, list[str]]()
    reasons = {kind: inject.missing(kind, mounts) for kind in {fault.kind for fault in faults}}
    wanted = [fault for fault in faults if not reasons[fault.kind]]
    served = {fault.layout for fault in wanted if fault.kind in serving.KINDS}
    trained = {fault.layout for fault in wanted if fault.kind in inject.KINDS} | ({serving.MODEL} if served else set())
    results = [Result(fault, 0.0, skipped=reasons[fault.kind]) for fault in faults if reasons[fault.kind]]
    plain = [Fault(-1 - SERVED.index(layout), "server undisturbed", layout, "") for layout in sorted(served)]
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for layout in sorted(trained)[:1]:  # it prepares the text that all share
                space.run_undisturbed(layout)
            list(pool.map(space.run_undisturbed, sorted(trained)[1:]))
            answers = pool.map(lambda fault: serving.answers(fault, space), plain)
            expected |= zip((fault.layout for fault in plain), answers, strict=True)
            for future in as_completed([pool.submit(_one, fault, space, expected) for fault in wanted]):
                results.append(future.result())
                _tell(results[-1], len(results), len(faults))
        except BaseException:
            pool.shutdown(cancel_futures=True)  # those under way come to their end
            raise
    return results


def _tell(result: Result, done: int, count: int) -> None:
    said = "; ".join(f"{what}: {text}" for what, text in result.problems) or "passed"
    fault = result.fault
    lines = [f"{done}/{count} fault {fault.number}, {fault.kind} under {fault.layout}, {result.seconds:.1f} s: {said}"]
    print("\n  ".join([*lines, *(result.told if result.problems else ())]), file=sys.stderr, flush=True)


def _one(fault: Fault, space: Space, expected: dict[str, list[str]]) -> Result:
    started = time.monotonic()
    trial = Trial(fault, space)
    try:
        if fault.kind in serving.KINDS:
            serving.KINDS[fault.kind](trial, expected[fault.layout])
        else:
            inject.KINDS[fault.kind](trial)
            trial.compare()
    except Exception:
        trial.problem("unclear", f"this program failed: {traceback.format_exc()}")
    trial.check_leftovers()
    if not trial.problems:
        for path in (trial.folder, *trial.outs):
            shutil.rmtree(path, ignore_errors=True)
    return Result(fault, time.monotonic() - started, tuple(trial.problems), tuple(trial.told))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

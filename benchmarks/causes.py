"""Twelve causes of a slow step, injected into real runs, and what the verdict on each recording says.

    python benchmarks/causes.py [--only "NAME;..."] [--keep DIR] [--json FILE]

Every run is `shardwise train` with several processes and `--report`; what it lacks options for (a slow disk, slow text,
experts that all tokens choose) is patched into its ranks here, not in the package. Slow links are those of
`shardwise lab`, which needs root and iproute2. Printed for each run: the injected cause, the first line of the verdict,
and whether it names the cause. Runs without a cause must get none. Of `--slow rank=1,factor=3` also: the milliseconds
that were injected into the recorded step, and those of the verdict.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "CAUSES_INJECT"
"""Names the patch of a run's ranks."""
TRAIN = "train tiny-llama --vocab 512 --steps 5 --validate-batches 1 --report --no-tensorboard --seq 64"


@dataclass(frozen=True)
class Run:
    """cause: what the verdict shall name; None for a run without. options: of `train`. lab: of `shardwise lab`. inject:
    a function of `INJECTIONS`. crowded: other processes use the run's only core. seconds: that emulated arithmetic of
    rank 1 lasts longer."""

    name: str
    cause: str | None
    options: str
    lab: str = ""
    inject: str = ""
    crowded: bool = False
    seconds: float | None = None


RUNS = (
    Run("slow rank", "slow rank", "--layout dp=4,zero=3 --batch 8 --slow rank=1,factor=3"),
    Run(
        "slow rank, emulated", "slow rank",
        "--layout dp=4,zero=3 --batch 8 --emulate 400ms --slow rank=1,factor=3", seconds=0.8,
    ),
    Run("slow link", "slow link", "--layout dp=2,zero=3 --batch 4", lab="20Mb/s"),
    Run("tiny micro-batches", "tiny micro-batches", "--layout dp=2,zero=1,micro=1 --batch 64 --seq 8"),
    Run("no overlap", "no overlap", "--layout dp=2,zero=3,micro=8 --batch 16 --no-overlap", lab="400Mb/s"),
    Run("recomputation", "recomputation", "--layout dp=2,zero=1,recompute=full,micro=16 --batch 32"),
    Run("uneven stages", "uneven stages", "--layout pp=2,stages=7/1,micro=4 --batch 32 --set layers=8"),
    Run(
        "imbalance of experts", "imbalance of experts",
        "--layout dp=2,ep=2,micro=16 --batch 32 --set ffn=1024", inject="experts",
    ),
    Run("host-bound", "host-bound", "--layout dp=2,zero=1,micro=16 --batch 32", crowded=True),
    Run(
        "slow disk", "slow disk", "--layout dp=2,zero=3,offload=nvme,offload_params=nvme,micro=4 --batch 8",
        inject="disk",
    ),
    Run("slow data", "slow data", "--layout dp=2,zero=1 --batch 8", inject="data"),
    Run("validation", "validation", "--layout dp=2,zero=1 --batch 8 --validate-every 2 --validate-batches 12"),
    Run(
        "many small collectives", "many small collectives",
        "--layout tp=2,micro=4 --batch 8 --seq 16 --set layers=8", lab="1Gb/s,latency=2ms",
    ),
    Run("no cause, dp=2", None, "--layout dp=2,zero=1 --batch 8 --emulate 600ms"),
    Run("no cause, dp=4,zero=3", None, "--layout dp=4,zero=3 --batch 8 --emulate 1500ms"),
    Run("no cause, pp=2", None, "--layout pp=2,micro=4 --batch 16 --emulate 2500ms"),
)  # fmt: skip


# -- inside the ranks


def _slow_disk() -> None:
    """Reads and writes of offloaded state at 20 MB/s."""

    def slowed(call: Callable[..., int]) -> Callable[..., int]:
        def slow(file: int, data: Any, at: int) -> int:
            time.sleep(call_bytes(data) / 20e6)
            return call(file, data, at)

        return slow

    def call_bytes(data: Any) -> int:
        return sum(len(part) for part in data) if isinstance(data, list) else len(data)

    os.preadv, os.pwrite = slowed(os.preadv), slowed(os.pwrite)


def _slow_data() -> None:
    """Text of each step a second late."""
    from shardwise.runtime.job.batches import Batches

    step = Batches.step

    def slow(self: Batches, *args: Any) -> Any:
        time.sleep(1.0)
        return step(self, *args)

    Batches.step = slow  # type: ignore[method-assign]


def _one_sided_experts() -> None:
    """All tokens choose the last experts, which are the last rank's."""
    from shardwise.decoder import experts

    route = experts.route

    def towards_the_last(logits: Any, bias: Any, e: Any, chosen: Any = None) -> Any:
        if chosen is None:
            tokens = len(logits)
            chosen = logits.new_zeros((tokens, e.active), dtype=int) + e.count - 1
            chosen = chosen - chosen.new_tensor(range(e.active))
        return route(logits, bias, e, chosen)

    experts.route = towards_the_last


INJECTIONS: dict[str, Callable[[], None]] = {
    "disk": _slow_disk,
    "data": _slow_data,
    "experts": _one_sided_experts,
}

SITE = f"""import os, sys
if "shardwise.runtime.job.worker" in sys.orig_argv and os.environ.get({VARIABLE!r}):
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    import causes
    causes.INJECTIONS[os.environ[{VARIABLE!r}]]()
"""
"""sitecustomize.py of the ranks."""


# -- outside


@contextmanager
def crowded(run: Run) -> Iterator[list[str]]:
    """Words before a command that put it on one core, which two other processes use, too."""
    if not run.crowded:
        yield []
        return
    core = str(max(os.sched_getaffinity(0)))
    busy = [subprocess.Popen(["taskset", "-c", core, sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        yield ["taskset", "-c", core]
    finally:
        for each in busy:
            each.kill()
            each.wait()


def train(run: Run, out: Path, site: Path, data: Path) -> None:
    """Make a run. Raises `subprocess.CalledProcessError` where it fails."""
    shardwise = [sys.executable, "-m", "shardwise"]
    command = [*shardwise, *TRAIN.split(), "--data", str(data), *run.options.split(), "--out", str(out)]
    if "experts" in run.name:
        command[command.index("tiny-llama")] = "tiny-mixtral"
    if run.lab:
        command = [*shardwise, "lab", "--nodes", "2", "--link", run.lab, "--", *command]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]),
        VARIABLE: run.inject,
    }
    with crowded(run) as before:
        subprocess.run([*before, *command], env=env, check=True, stdout=subprocess.DEVNULL)


def judged(run: Run, out: Path) -> dict[str, Any]:
    """The verdict on a run, and what was injected on rank 1 beside the others."""
    from shardwise.report.run_directory import RunDirectory
    from shardwise.report.verdict import verdict_of

    found = verdict_of(RunDirectory.open(out))
    assert found is not None, "nothing was recorded"
    told = found.to_json()
    injected = {one.rank: one.injected / 1e9 for one in found.parts.ranks}
    more = run.seconds or injected.get(1, 0.0) - min(injected.values())
    return {"run": run.name, "expected": run.cause, "named": told["cause"] == run.cause, "injected_s": more, **told}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of runs, by semicolons")
    parser.add_argument("--keep", type=Path, help="folder for the runs")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    chosen = [run for run in RUNS if args.only is None or run.name in args.only.split(";")]
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        site, data = Path(temporary, "site"), Path(temporary, "text.txt")
        site.mkdir()
        (site / "sitecustomize.py").write_text(SITE)
        data.write_text("".join(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py")))[:150_000])
        for run in chosen:
            out = (args.keep or Path(temporary)) / run.name.replace(" ", "-")
            train(run, out, site, data)
            results.append(result := judged(run, out))
            print(f"{'yes' if result['named'] else 'NO '}  {run.name}: {result['line']}", flush=True)
            if run.cause == "slow rank" and result["findings"]:
                told, injected = result["findings"][0]["seconds"], result["injected_s"]
                print(f"     injected {injected:.3f} s, told {told:.3f} s ({told / injected - 1:+.1%})", flush=True)
    causes = [each for each in results if each["expected"]]
    print(f"{sum(each['named'] for each in causes)} of {len(causes)} runs with a cause were explained by it")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

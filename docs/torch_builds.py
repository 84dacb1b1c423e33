"""Write docs/torch_builds.md: a sample of the tests under other builds of torch, each in an environment of its own.

    python docs/torch_builds.py 2.9.1 2.14.1 [--only compile=block]

Each environment takes up to 7 GB in `build/`, and is left there. A row stands until its version is tested again; with
--only, so do its other columns.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import venv
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "torch_builds.md"
SAMPLES = {
    "layouts against one device": (40, ["tests/runtime/test_layouts.py"]),
    "compile=block": (6, ["tests/runtime/test_compile.py"]),
    "generation": (6, ["tests/serving/test_generation_engine.py"]),
    "checkpoints": (3, ["tests/runtime/test_resume.py", "tests/checkpoint/"]),
}
"""Name -> cases of each test at most, and the tests."""
HEAD = """# torch's builds

A sample of the tests under several builds of torch, on the CPU, as `python docs/torch_builds.py VERSION ...` runs it.
`pip install torch==VERSION '.[test]'` installs each into a new environment.

| torch | date | """
TAIL = """
Under 2.9 and 2.11 `compile=block` with precision=fp64 needs a correction of what torch's compiler knows of fp64
attention on CPUs (`runtime/torch_versions.py`). The tests clip FSDP2's gradients by `get_total_norm` and
`clip_grads_with_norm_`: `clip_grad_norm_` of 2.9 adds its 1e-6 once per rank.
"""


def environment(version: str) -> Path:
    """Its interpreter. Raises `subprocess.CalledProcessError` where pip does not find the version."""
    folder = ROOT / "build" / f"torch-{version}"
    python = folder / "bin" / "python"
    if not (folder / ".made").exists():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run(
            [python, "-m", "pip", "install", "-q", f"torch=={version}", "-e", ".[test]"], cwd=ROOT, check=True
        )
        (folder / ".made").touch()
    return python


def sampled(python: Path, most: int, tests: list[str]) -> str:
    """What pytest says of the tests in the end."""
    more = {"SHARDWISE_ALL": "1", "SHARDWISE_MOST": str(most), "OMP_NUM_THREADS": "1", "PYTHONPATH": "src:tests"}
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=os.environ | more, capture_output=True, text=True, check=False)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr.strip()[-200:]
    if done.returncode:
        sys.stderr.write(done.stdout[-6000:] + done.stderr[-2000:])
    counts = [f"{number} {what}" for number, what in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", last)]
    return f"{', '.join(counts) or last} ({time.monotonic() - started:.0f} s)"


def version_of(python: Path) -> str:
    return subprocess.run(
        [python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=True
    ).stdout.strip()


def rows_of(page: str) -> dict[str, str]:
    """torch's version -> its row."""
    return {line.split("|")[1].strip(): line for line in page.splitlines() if re.match(r"\| \d", line)}


def main() -> None:
    rows = rows_of(PAGE.read_text()) if PAGE.exists() else {}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", metavar="VERSION")
    parser.add_argument("--only", choices=SAMPLES, metavar="NAME")
    args = parser.parse_args()
    for wanted in args.versions:
        try:
            python = environment(wanted)
        except subprocess.CalledProcessError:
            sys.exit(f"torch_builds: error: pip could not install torch {wanted}: see above")
        version = version_of(python)
        before = [cell.strip() for cell in rows.get(version, "").split("|")[3:-1]] or ["not run"] * len(SAMPLES)
        found = dict(zip(SAMPLES, before, strict=True))
        for name in [args.only] if args.only else SAMPLES:
            found[name] = sampled(python, *SAMPLES[name])
            print(json.dumps({"torch": version, "tests": name, "outcome": found[name]}), flush=True)
        rows[version] = f"| {version} | {date.today()} | {' | '.join(found.values())} |"
        ordered = sorted(rows, key=lambda text: [int(n) for n in re.findall(r"\d+", text.split("+")[0])])
        head = f"{HEAD}{' | '.join(SAMPLES)} |\n|{'---|' * (2 + len(SAMPLES))}\n"
        PAGE.write_text(head + "\n".join(rows[version] for version in ordered) + "\n" + TAIL)


if __name__ == "__main__":
    main()

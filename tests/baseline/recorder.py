"""Records what the commands answer, and compares another tree's answers with the recording.

    python tests/baseline/recorder.py record [FILE]     ask all questions, write the recording (about four minutes)
    python tests/baseline/recorder.py compare [FILE]    ask the recorded questions again; exit code 1 when they differ
    ... [--kind estimate|plan|ledger|manifest]          only these; --every N: one of N

Both ask the `shardwise` that Python imports, so PYTHONPATH=<older tree>/src records an older commit:

    git worktree add ../older <commit> && PYTHONPATH=../older/src python tests/baseline/recorder.py record

A recording holds 300 estimates, 30 plans, 60 ledgers of dry runs and 20 checkpoint manifests, each with its command and
its whole JSON. Of manifests, checksums of values are left out: they depend on the machine's arithmetic. A tenth of the
estimates are rejected layouts, compared by exit code. Numbers that differ by rounding only are counted apart.
"""

import argparse
import io
import json
import lzma
import math
import runpy
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from itertools import zip_longest
from pathlib import Path
from typing import Any

import questions

RECORDING = Path(__file__).with_name("recording.jsonl.xz")
COUNTS = {"estimate": 300, "plan": 30, "ledger": 60, "manifest": 20}
REJECTED = {"estimate": 30, "plan": 1, "ledger": 0}
ROUNDING = 1e-12
"""Relative difference below which two floats differ by the order of additions or a vector unit, not by a formula."""

TEXT = "The plan is the program. One layout is priced, executed, mapped and drawn.\n" * 400

Answer = dict[str, Any]
"""kind, command (a list of arguments), code (the exit code) and result (the JSON, None for a rejected command)."""


def ask(command: list[str]) -> tuple[int, Any]:
    """Exit code and JSON of one command, run in this process."""
    output, errors = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["shardwise", *command, "--json"]
    try:
        with redirect_stdout(output), redirect_stderr(errors):
            runpy.run_module("shardwise", run_name="__main__")
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    finally:
        sys.argv = before
    if code not in (0, 2):
        raise SystemExit(f"{' '.join(command)}: exit code {code}\n{errors.getvalue()}")
    return code, json.loads(output.getvalue()) if code == 0 else None


def answered(kind: str, command: list[str]) -> Answer:
    code, result = ask(command)
    return {"kind": kind, "command": command, "code": code, "result": result}


def drawn(kind: str, commands: Iterator[list[str]]) -> Iterator[Answer]:
    """The first answers of endless commands, with as many rejected ones as `REJECTED` allows."""
    rejected, accepted = REJECTED[kind], COUNTS[kind] - REJECTED[kind]
    while rejected or accepted:
        answer = answered(kind, next(commands))
        if answer["code"] == 0 and accepted:
            accepted -= 1
            yield answer
        elif answer["code"] and rejected:
            rejected -= 1
            yield answer


def manifests(wanted: Iterable[int]) -> Iterator[Answer]:
    """Manifests of small checkpoints, each trained for one step in one layout and rewritten for others.

    wanted: places in the order of `questions.TRAINED`, a trained checkpoint before those made from it.
    """
    wanted, place = set(wanted), 0
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_text(TEXT)
        for index, (model, layout, others) in enumerate(questions.TRAINED):
            places = range(place, place := place + 1 + len(others))
            if not wanted & set(places):
                continue
            run, source = Path(folder, f"run-{index}"), ["train", *model, "--layout", layout]
            settings = "--seq 16 --batch 12 --steps 1 --vocab 300 --no-tensorboard --validate-batches 1"
            place_of = ["--data", str(text), "--out", str(run), "--tokenizer", str(tokenizer(Path(folder)))]
            code, _ = ask([*source, *settings.split(), *place_of])
            assert code == 0, f"{' '.join(source)} was rejected"
            for at, other in zip(places, ("", *others), strict=True):
                new = run if not other else Path(folder, f"{index}-{at}")
                command = ["checkpoint", "reshard", str(run), "--layout", other, "--out", str(new)]
                code = ask(command)[0] if other else 0
                if at in wanted:
                    result = None if code else manifest(next(new.rglob("manifest.json")))
                    named = source + (["reshard", other] if other else [])
                    yield {"kind": "manifest", "command": named, "code": code, "result": result}


def tokenizer(folder: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(["<|endoftext|>", *alphabet])}, []))
    made.add_special_tokens(["<|endoftext|>"])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    path = folder / "tokenizer.json"
    made.save(str(path))
    return path


def manifest(path: Path) -> Any:
    content = json.loads(path.read_text())
    for file in content["files"]:
        for piece in file["pieces"]:
            piece["checksums"] = len(piece.pop("crc32"))
    about = {key: content["about"][key] for key in ("model", "layout", "workload")}
    return {key: value for key, value in content.items() if key != "crc32"} | {"about": about}


def record(kinds: Iterable[str]) -> Iterator[Answer]:
    if "estimate" in kinds:
        yield from drawn("estimate", questions.estimates())
    if "plan" in kinds:
        yield from (answered("plan", ["plan", *plan.split()]) for plan in questions.PLANS)
    if "ledger" in kinds:
        yield from drawn("ledger", questions.dry_runs())
    if "manifest" in kinds:
        yield from manifests(range(COUNTS["manifest"]))


def repeat(recorded: list[Answer], every: int) -> Iterator[tuple[Answer, Answer]]:
    """(recorded, today's) for one of `every` answers of each kind."""
    for kind in COUNTS:
        of_kind = [answer for answer in recorded if answer["kind"] == kind]
        if kind == "manifest":
            yield from zip(of_kind[::every], manifests(range(0, len(of_kind), every)), strict=True)
        else:
            yield from ((was, answered(kind, was["command"])) for was in of_kind[::every])


def differences(was: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(path, was, is) of every leaf in which two JSON values differ, rounding included."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in [*was, *(key for key in now if key not in was)]:
            yield from differences(was.get(key, "(absent)"), now.get(key, "(absent)"), f"{path}.{key}".lstrip("."))
        if list(was) != list(now) and was.keys() == now.keys():
            yield f"{path} (order of keys)", list(was), list(now)
    elif isinstance(was, list) and isinstance(now, list):
        for index, (a, b) in enumerate(zip_longest(was, now, fillvalue="(absent)")):
            yield from differences(a, b, f"{path}[{index}]")
    elif type(was) is not type(now) or (was != now and not (was != was and now != now)):
        yield path, was, now


def only_rounding(was: Any, now: Any) -> bool:
    return isinstance(was, float) and isinstance(now, float) and math.isclose(was, now, rel_tol=ROUNDING)


def compare(recorded: list[Answer], every: int) -> int:
    """Print how many answers are identical, and the differences by the place in the JSON. Returns the exit code."""
    counts = {kind: [0, 0, 0] for kind in COUNTS}  # identical, rounding only, different
    places: dict[tuple[str, str], list[tuple[str, str, Any, Any]]] = {}
    for was, now in repeat(recorded, every):
        found = list(differences({k: was[k] for k in ("code", "result")}, {k: now[k] for k in ("code", "result")}))
        real = [row for row in found if not only_rounding(*row[1:])]
        counts[was["kind"]][2 if real else 1 if found else 0] += 1
        for path, a, b in real:
            general = "".join(part.partition("]")[2] or part for part in path.replace("[", "[]\0").split("\0"))
            places.setdefault((was["kind"], general), []).append((" ".join(was["command"]), path, a, b))
    for kind, (identical, rounded, different) in counts.items():
        if identical or rounded or different:
            print(f"{kind:<9} {identical} identical, {rounded} but for rounding, {different} different")
    for (kind, general), rows in sorted(places.items(), key=lambda item: -len(item[1])):
        command, path, a, b = rows[0]
        cases = len({row[0] for row in rows})
        print(f"\n{kind} {general}: {len(rows)} values in {cases} answers, such as\n  {command}")
        print(f"  {path}: was {short(a)}, is {short(b)}")
    return int(bool(places))


def short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:197] + "..."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", nargs="?", type=Path, default=RECORDING)
    parser.add_argument("--kind", choices=COUNTS, action="append", help="only these answers")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="compare one of N answers of each kind")
    args = parser.parse_args()
    kinds = args.kind or list(COUNTS)
    if args.action == "compare":
        lines = lzma.decompress(args.file.read_bytes()).decode().splitlines()
        recorded = [answer for answer in map(json.loads, lines) if answer["kind"] in kinds]
        return compare(recorded, args.every)
    lines = [json.dumps(answer, separators=(",", ":")) for answer in record(kinds)]
    args.file.write_bytes(lzma.compress(("\n".join(lines) + "\n").encode(), preset=9))
    print(f"{len(lines)} answers, {args.file.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())

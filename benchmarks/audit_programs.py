"""Audits of generated programs of other engines, with and without a mistake: what is recovered and what is named.

    python benchmarks/audit_programs.py [--kinds NAME,...] [--mistakes NAME,...] [--first N] [--seeds N] [--sample N]
                                        [--json FILE] [--ledger] [--python PYTHON]

Prints a line per program and a summary: layouts recovered and false alarms of the clean programs; of those with a
mistake, how many were named at the right rank and line, how many "not sure", and how long after the wrong step began.
`--first 12 --seeds 12 --sample 200` are 200 clean programs and 200 with a mistake.
--python is an interpreter that has DeepSpeed, for its kinds, which are skipped elsewhere: torch of the same version.
--ledger prints what the clean programs send in a step beside what this project's runtime would send of the same layout
and model, as a table of Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from harness import audited_programs
from harness.audited_programs import Program, program
from harness.audits import AuditServer
from shardwise.audit.job import AuditedJob
from shardwise.audit.result import audit_of
from shardwise.audit.understanding import understand
from shardwise.layout import Layout

TRAINER = """
import transformers, logging
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, TrainerCallback
config = LlamaConfig(vocab_size=64, hidden_size={width}, intermediate_size=32, num_hidden_layers={layers},
                     num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32)
rows = [dict(input_ids=torch.arange(8), labels=torch.arange(8)) for _ in range(64)]
arguments = TrainingArguments("out", per_device_train_batch_size=2, max_steps={steps}, report_to=[], use_cpu=True,
                              save_strategy="no", logging_strategy="no", disable_tqdm=True)
trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows)
trainer.train()  # MICRO
for step in range({steps}):
    evaluated = model(torch.ones(2, {width})) if (model := net()) else None
"""

ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = net()
model, opt = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
for step in range({steps}):
    for micro in range({micro} - wrong("unequal")):
        accelerator.backward(model(torch.randn(4, {width})).square().mean())  # MICRO
    opt.step()  # STEP
    opt.zero_grad()
"""

DEEPSPEED = """
import deepspeed
model = net()
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), config=dict(
    train_micro_batch_size_per_gpu=4, gradient_accumulation_steps={micro}, steps_per_print=10**9,
    zero_optimization=dict(stage=STAGE, stage3_param_persistence_threshold=0)))
for step in range({steps}):
    for micro in range({micro} - wrong("unequal")):
        engine.backward(engine(torch.randn(4, {width})).square().mean())  # MICRO
        engine.step()  # STEP
"""

STAGES = {f"deepspeed {stage}": stage for stage in (1, 2, 3)}
"""Kind -> its ZeRO stage."""
audited_programs.WHOLE |= {"trainer": (2, "dp=2", TRAINER), "accelerate": (2, "dp=2", ACCELERATE)} | {
    kind: (2, f"dp=2,zero={stage}", DEEPSPEED.replace("STAGE", str(stage))) for kind, stage in STAGES.items()
}
KINDS = (*audited_programs.KINDS, *audited_programs.WHOLE)


def judged(item: Program, job: AuditedJob, ended: float) -> dict[str, Any]:
    """How an audit compares with what is true of its program. ended: seconds of the clock when it said so."""
    row: dict[str, Any] = {"kind": item.name, "mistake": item.mistake, "seconds": job.seconds, "code": job.code}
    found = job.difference
    row["said"] = found.text if found else ""
    if not item.mistake:
        understood = understand(job.recordings)
        expected = Layout.parse(f"{item.layout},precision=fp32")
        row["layout"], row["expected"] = str(understood.layout), str(expected)
        row["recovered"] = understood.layout == expected
        row["alarm"] = found is not None or job.code != 0
        return row
    row["sure"] = bool(found and found.sure)
    row["rank"] = bool(found and found.ranks == (item.wrong,))
    row["line"] = bool(found and found.where.startswith("train.py:") and int(found.where.split(":")[1]) in item.lines)
    row["kind_named"] = found.kind if found else ""
    steps = [
        step.time for one in job.recordings if one.rank == item.wrong for step in one.steps if step.step == item.at
    ]
    row["after"] = ended - steps[0] if steps else None
    return row


def ledger(server: AuditServer, kinds: list[str], seed: int) -> None:
    """Print the rows of clean programs, of parameters, gradients and activations, that differ from ours."""
    print("| program | what | elements | ours | difference |\n|---|---|---:|---:|---|")
    equal = 0
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            audit = audit_of(server.audit(program(kind, seed), Path(folder)), kind)
        for row in audit.traffic:
            if row.due == row.elements and not row.note:
                equal += 1
            elif row.due is not None:
                what = f"{kind}, {audit.understood.layout} | {row.what} {row.phase}, {row.op}"
                print(f"| {what} | {row.elements:,} | {f'{row.due:,}' if row.due else ''} | {row.note} |")
    print(f"{equal} others are equal")


def _drawn(kinds: list[str], mistakes: list[str], seeds: range, sample: int | None) -> list[tuple[str, str, int]]:
    """(kind, mistake, seed) of programs: all of every seed, or a sample that the first seed draws."""
    every = [(kind, mistake, seed) for seed in seeds for kind in kinds for mistake in mistakes]
    every = [one for one in every if (one[1], one[0]) not in audited_programs.NEVER]
    if sample is None:
        return every
    clean, wrong = [one for one in every if not one[1]], [one for one in every if one[1]]
    draw = random.Random(seeds[0])
    return [one for some in (clean, wrong) for one in draw.sample(some, min(sample, len(some)))]


def _imports(python: str, kinds: list[str]) -> list[str]:
    """Modules that the server imports for these kinds; those of DeepSpeed are taken from `kinds` where it is absent."""
    staged = [kind for kind in kinds if kind in STAGES]
    if not staged:
        return []
    code = "import importlib.util, sys; sys.exit(not importlib.util.find_spec('deepspeed'))"
    if not subprocess.run([python, "-c", code]).returncode:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        return ["deepspeed"]
    print(f"skipped: {', '.join(staged)}: {python} has no deepspeed: give --python one that has", flush=True)
    kinds[:] = [kind for kind in kinds if kind not in staged]
    return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--mistakes", default=",".join(("", *audited_programs.MISTAKES)))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--sample", type=int, help="so many clean programs, and so many with a mistake")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ledger", action="store_true")
    parser.add_argument("--python", default=sys.executable)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    home = tempfile.TemporaryDirectory()
    kinds = args.kinds.split(",")
    server = AuditServer(Path(home.name), args.python, _imports(args.python, kinds))
    if args.ledger:
        ledger(server, kinds, args.first)
        server.close()
        return
    drawn = _drawn(kinds, args.mistakes.split(","), range(args.first, args.first + args.seeds), args.sample)
    for kind, mistake, seed in drawn:
        item = program(kind, seed, mistake)
        with tempfile.TemporaryDirectory() as folder:
            job = server.audit(item, Path(folder))
            row = judged(item, job, time.time())
            log = Path(folder, "log").read_text()
        good = row["recovered"] and not row["alarm"] if not mistake else row["sure"] and row["rank"] and row["line"]
        rows.append(row | {"seed": seed, "good": good, "hung": job.hung})
        print(f"{'ok ' if good else 'BAD'} {kind:12} {mistake or 'clean':10} seed {seed} {job.seconds:5.1f} s  "
              f"{row.get('layout', '')} {row['said'][:150]}", flush=True)  # fmt: skip
        if not good:
            print("   ", "expected", row.get("expected", (item.wrong, item.lines)), "exit", job.code)
            print("\n".join("        " + line for line in log.splitlines()[-3:]) if not mistake else "")
    server.close()
    clean, broken = [row for row in rows if not row["mistake"]], [row for row in rows if row["mistake"]]
    print(f"{len(rows)} programs in {time.monotonic() - began:.0f} s")
    print(
        f"clean: {sum(r['recovered'] for r in clean)} of {len(clean)} layouts, {sum(r['alarm'] for r in clean)} alarms"
    )
    named = sum(r["sure"] and r["rank"] and r["line"] for r in broken)
    unsure = sum(not r["sure"] for r in broken)
    print(f"mistakes: {named} of {len(broken)} named at rank and line; {unsure} not sure; "
          f"{len(broken) - named - unsure} wrong")  # fmt: skip
    if after := sorted(r["after"] for r in broken if r["after"] is not None):
        print(f"said after the wrong step began: median {statistics.median(after):.1f} s, longest {after[-1]:.1f} s, "
              f"{sum(seconds <= 10 for seconds in after)} of {len(after)} within 10 s")  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

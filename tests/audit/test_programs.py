"""Programs of other engines that are really run, with and without a mistake, and what an audit says of them.

`benchmarks/audit_programs.py` runs all kinds with all mistakes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.audited_programs import DDP, HEAD, KINDS, MISTAKES, NEVER, Program, program
from harness.forked import shardwise
from harness.today import some_of
from shardwise.audit.job import audited_environment, read_job
from shardwise.audit.reading import read_folder
from shardwise.audit.result import audit_of
from shardwise.errors import UserError
from shardwise.layout import Layout

LIMIT = 120
WRONG = [(kind, mistake) for kind in KINDS for mistake in MISTAKES if (mistake, kind) not in NEVER]


@pytest.mark.parametrize("kind", some_of(KINDS, 3, "audited"))
def test_a_clean_program(kind, audits, tmp_path) -> None:
    """Its layout, no alarm, and every gradient and parameter sent as often as it must be."""
    item = program(kind, 5)
    job = audits.audit(item, tmp_path)
    assert job.code == 0, (tmp_path / "log").read_text()
    audit = audit_of(job, "train.py")
    assert audit.difference is None and audit.exit_code == 0 and audit.recorded == item.ranks
    assert audit.understood.layout == Layout.parse(f"{item.layout},precision=fp32")
    known = [row for row in audit.traffic if row.due is not None]
    assert not any(row.wrong for row in known) and bool(known) == (item.layout[:2] != "pp")
    assert all(row.elements == row.due or row.note for row in known) and audit.beyond == ()
    assert all(row.elements == row.due for row in known if row.what == "gradients")
    assert all(row.elements == row.due for row in known if row.what == "activations" and row.phase == "forward")


@pytest.mark.parametrize(("kind", "mistake"), some_of(WRONG, 3, "mistakes"))
def test_a_mistake_is_named(kind, mistake, audits, tmp_path) -> None:
    item = program(kind, 5, mistake)
    found = (job := audits.audit(item, tmp_path)).difference
    assert found is not None and found.sure, (tmp_path / "log").read_text()
    again = read_job(tmp_path / "recording")
    assert again.difference is not None and (again.difference.text, again.code) == (found.text, job.code)
    assert found.ranks == (item.wrong,) and int(found.where.removeprefix("train.py:")) in item.lines


def test_a_kept_recording_without_its_end(audits, tmp_path) -> None:
    """Where the audit itself was killed, what a rank raised is still there; a damaged end is one line."""
    item = program("ddp", 5, "error")
    live = audits.audit(item, tmp_path).difference
    ended = tmp_path / "recording" / "ended.json"
    ended.unlink()
    again = read_job(tmp_path / "recording").difference
    assert live is not None and again is not None and again.text == live.text
    for text in ("", "7", "[0]", "{}", '{"code": 0, "seconds": 1.0, "hung": false, "interrupted": false, "died": [1]}'):
        ended.write_text(text)
        with pytest.raises(UserError, match=r"ended\.json is damaged"):
            read_job(tmp_path / "recording")


def test_bytes_by_class_are_those_that_the_program_has(audits, tmp_path) -> None:
    item = program("ddp", 5)
    audit = audit_of(audits.audit(item, tmp_path), "train.py")
    (row,) = [row for row in audit.traffic if row.what == "gradients"]
    assert audit.bytes is not None and row.due is not None
    parameters = audit.bytes.parameters
    assert row.due % (parameters // 4) == 0 and audit.bytes.gradients == parameters
    assert 0 < audit.bytes.optimizer - 2 * parameters < 4 * 64  # the step counts of AdamW, 4 bytes a tensor
    assert audit.bytes.saved > 0


def test_frozen_parameters_and_copies_that_are_updated(audits, tmp_path) -> None:
    """Both are bytes: of parameters, and of the optimizer's state, as DeepSpeed's copies are."""
    text = f"""{HEAD.format(mistake="", rank=0, step=0, layers=2, width=8)}{DDP}
model.module[0].requires_grad_(False)
trained = [p for p in model.parameters() if p.requires_grad]
copies = [p.detach().clone() for p in trained]
opt = torch.optim.SGD(copies, lr=1e-3)
for step in range(3):
    model(torch.randn(4, 8)).square().mean().backward()
    for copy, p in zip(copies, trained):
        copy.grad = p.grad
    opt.step()
"""
    held = audit_of(audits.audit(Program("copies", 2, "dp=2", text), tmp_path), "train.py").bytes
    block = 4 * (2 * 8 * 32 + 32 + 8)
    assert held is not None and (held.parameters, held.gradients, held.optimizer) == (2 * block, block, block)


def test_the_command(audits, tmp_path) -> None:
    """Its exit codes and its JSON; a recording that is kept is read again."""
    item = program("ddp", 5)
    script = tmp_path / "train.py"
    script.write_text(item.text)
    words = audits.command(tmp_path, item.ranks, script)

    def run(*options: str) -> tuple[int, dict]:
        done = shardwise("audit", "--json", *options, environment=dict(os.environ), timeout=LIMIT)
        return done.returncode, json.loads(done.stdout)

    kept = str(tmp_path / "kept")
    code, said = run("--out", kept, "--expect", "dp=2,precision=fp32", "--budget", "bytes=1GB", "--", *words)
    assert (code, said["failures"], said["difference"]) == (0, [], None)
    assert said["understood"]["layout"] == "dp=2,precision=fp32" and said["model"] == "Sequential"
    code, said = run(kept, "--expect", "tp=2", "--budget", "memory=1kB,bytes=1kB")
    assert code == 1 and [text.split(":")[0] for text in said["failures"]] == ["layout", "memory", "bytes"]
    there = ("--cluster", "2xH100", "--seq", "8k", "--batch", "64")
    code, said = run(kept, *there, "--model", "llama-3.2-1b")
    assert code == 0 and "times as fast as dp=2,precision=fp32" in said["advice"][0]
    code, said = run(kept, *there)
    assert code == 0 and said["advice"] == [
        "none: the program's model is not known: give --model NAME beside --cluster"
    ]
    done = shardwise("audit", kept, environment={**os.environ, "COLUMNS": "80"}, timeout=LIMIT)
    assert (done.returncode, done.stderr) == (0, "") and max(map(len, done.stdout.splitlines())) <= 80
    assert "calls of all ranks meet" in done.stdout and "layout: dp=2,precision=fp32 (sure)" in done.stdout


def test_a_call_that_ends_while_python_ends(tmp_path: Path) -> None:
    """Its thread is waited for: it would abort the process when it wants the interpreter's lock."""
    (tmp_path / "train.py").write_text(
        "import sys, time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "recorder = sys.modules['shardwise_audit_recorder'].Recorder\n"
        "recorder.ended = lambda self, order: time.sleep(0.3)\n"
        "work = dist.all_reduce(torch.ones(1), async_op=True)\n"
    )
    environment = audited_environment(tmp_path / "recording") | {"GLOO_SOCKET_IFNAME": "lo"}
    assert subprocess.run([sys.executable, tmp_path / "train.py"], env=environment, timeout=LIMIT).returncode == 0


@pytest.mark.parametrize("line", ['["step",1,2.0,null,3,4]', '["end",7,1.0]', "7", "{", '["step"]'])
def test_a_damaged_recording(line, tmp_path: Path) -> None:
    (tmp_path / "0-1.jsonl").write_text(f"{line}\n")
    with pytest.raises(UserError, match="damaged, or of another version of shardwise"):
        read_folder(tmp_path)


def test_the_program_s_own_sitecustomize_runs(tmp_path: Path) -> None:
    """The one of an audit hides no other, leaves the module path, and imports no torch."""
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.own = True\n")
    environment = audited_environment(tmp_path / "recording") | {"SHARDWISE_AUDIT": str(tmp_path)}
    environment["PYTHONPATH"] += os.pathsep + str(tmp_path)
    code = "import sys; print(own, 'torch' in sys.modules, any('injected' in path for path in sys.path))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=LIMIT, check=True
    )
    assert done.stdout == "True False False\n"

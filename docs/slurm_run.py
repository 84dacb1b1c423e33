"""A job of `shardwise launch --slurm` on SLURM itself: two nodes, one is killed, and a job that is cancelled.

PYTHONPATH=src python docs/slurm_run.py   prints the table of docs/launch.md

By hand, as root of a Debian machine with slurmctld, slurmd, slurm-client and munge (`apt-get install`). They run on
this machine, in a folder of their own, and end with the script.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwise.checkpoint import diff, find

LIMIT = 600.0
STEPS, LONG, SAVE_EVERY = 1000, 100_000, 100
CONFIG = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort=26817
AuthType=auth/munge
SlurmUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ReturnToService=2
SlurmdTimeout=10
MpiDefault=none
MinJobAge=36000
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[27001-27002] CPUs=2 RealMemory=1000
PartitionName=lab Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """A running SLURM: daemon's name -> process. SLURM_CONF names its configuration."""
    if missing := [name for name in ("slurmctld", "slurmd", "munged", "sbatch") if shutil.which(name) is None]:
        sys.exit(f"there is no {missing[0]}: apt-get install slurmctld slurmd slurm-client munge")
    host = os.uname().nodename
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(CONFIG.format(host=host, folder=folder))
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    Path("/run/munge").mkdir(exist_ok=True)
    shutil.chown("/run/munge", "munge", "munge")
    subprocess.run(["su", "-s", "/bin/sh", "munge", "-c", "/usr/sbin/munged"], check=False, stderr=subprocess.DEVNULL)
    daemons = {"slurmctld": start(folder, "slurmctld", "-c", "-D")}
    try:
        daemons |= {node: start(folder, "slurmd", "-D", "-N", node) for node in ("n1", "n2")}
        wait_until("both nodes are idle", lambda: shown("sinfo", "-h", "-o", "%D %t") == "2 idle")
        yield daemons
    finally:
        subprocess.run(["scancel", "--partition=lab"], check=False)
        wait_until("no rank is left", lambda: not processes("n1") + processes("n2"))
        for process in daemons.values():
            process.terminate()
            process.wait()


def start(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    with (folder / f"{words[-1]}.out").open("ab") as log:
        return subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)


def shown(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def wait_until(what: str, condition: Callable[[], bool]) -> float:
    """Seconds until a condition holds."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > LIMIT:
            sys.exit(f"it did not happen within {LIMIT:g} s: {what}")
        time.sleep(0.1)
    return time.monotonic() - started


def submit(folder: Path, name: str, *more: str, steps: int = STEPS) -> int:
    """Write and submit a job by the command itself, with more options of the job. Returns its number."""
    words = [
        *(sys.executable, "-m", "shardwise", "launch", "--slurm", "--cluster", "2x1xcpu", "--head", "127.0.0.1"),
        *(
            "--name",
            name,
            *more,
            "--submit",
            "--json",
            "--",
            "train",
            "tiny-llama",
            "--set",
            "layers=2,hidden=128,ffn=192",
        ),
        *("--vocab", "300", "--layout", "dp=2,precision=fp32", "--data", "text.txt", "--seq", "32", "--batch", "4"),
        *("--steps", str(steps), "--save-every", str(SAVE_EVERY), "--no-tensorboard"),
        *("--transport", "gloo", "--out", f"runs/{name}"),
    ]
    done = subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True)
    return int(json.loads(done.stdout)["said"].rpartition(" ")[2])


def events(folder: Path, name: str) -> list[dict[str, object]]:
    path = folder / "runs" / name / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses(folder: Path, name: str) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events(folder, name) if "loss" in event}  # type: ignore[misc]


def state(job: int) -> str:
    found = re.search(r"JobState=(\w+)", shown("scontrol", "show", "job", str(job)))
    return found[1] if found else ""


def processes(node: str) -> list[int]:
    """Ranks on a node, and the daemons of SLURM that watch them."""
    ranks = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            text = path.read_bytes()
        except OSError:
            continue
        pid = int(path.parent.name)
        if f"SLURMD_NODENAME={node}".encode() in text.split(b"\0") and "shardwise" in about(pid, "cmdline"):
            ranks.append(pid)
    parents = {int(stat.rpartition(")")[2].split()[1]) for pid in ranks if (stat := about(pid, "stat"))}
    return [*ranks, *(pid for pid in parents if "slurmstepd" in about(pid, "cmdline"))]


def about(pid: int, what: str) -> str:
    """A file of /proc about a process; empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/{what}").read_text()
    except OSError:
        return ""


def killed_node(folder: Path, daemons: dict[str, subprocess.Popen[bytes]]) -> list[str]:
    """A job whose second node dies: requeued, resumed, and equal to a run that nothing has disturbed."""
    plain = submit(folder, "plain")
    wait_until("the undisturbed job has ended", lambda: state(plain) not in ("PENDING", "RUNNING", "COMPLETING"))
    job = submit(folder, "killed")
    wait_until("it has trained", lambda: len(losses(folder, "killed")) > 4 * SAVE_EVERY)
    for pid in (daemons["n2"].pid, *processes("n2")):
        os.kill(pid, signal.SIGKILL)
    died = max(losses(folder, "killed"))
    waited = wait_until(
        "SLURM has put the job back", lambda: "Restarts=1" in shown("scontrol", "show", "job", str(job))
    )
    daemons["n2"].wait()
    daemons["n2"] = start(folder, "slurmd", "-D", "-N", "n2")
    # SLURM waits two minutes before it starts a job again.
    wait_until("the job has ended", lambda: state(job) not in ("PENDING", "RUNNING", "COMPLETING"))
    ours, theirs = find(folder / "runs" / "killed"), find(folder / "runs" / "plain")
    equal = losses(folder, "killed") == losses(folder, "plain") and len(losses(folder, "plain")) == STEPS
    return [
        f"| undisturbed | {state(plain)} | {STEPS} steps |",
        f"| node n2 killed after step {died} | {state(job)} | back in the queue after {waited:.0f} s, resumed from "
        f"{resumed_from(folder)}; losses {'equal' if equal else 'DIFFER'}, last checkpoint "
        f"{'equal bit by bit' if not diff(ours, theirs) else 'DIFFERS'} |",
    ]


def cancelled(folder: Path) -> str:
    """A job that `scancel` ends."""
    job = submit(folder, "cancelled", steps=LONG)
    wait_until("it has trained", lambda: len(losses(folder, "cancelled")) > 50)
    shown("scancel", str(job))
    waited = wait_until("no rank is left", lambda: not processes("n1") + processes("n2"))
    reached, saved = max(losses(folder, "cancelled")), find(folder / "runs" / "cancelled").manifest.step
    return f"| `scancel` | {state(job)} | ended after {waited:.1f} s at step {reached}, saved at step {saved} |"


def limited(folder: Path) -> str:
    """A job that reaches its time limit, and continues in a new one."""
    job = submit(folder, "limited", "--time", "1", "--signal", "40", "--requeue", steps=LONG)
    wait_until("SLURM has put the job back", lambda: "Restarts=1" in shown("scontrol", "show", "job", str(job)))
    reached, saved = max(losses(folder, "limited")), find(folder / "runs" / "limited").manifest.step
    wait_until("the job has continued", lambda: max(losses(folder, "limited")) > reached)
    again = state(job)
    shown("scancel", str(job))
    wait_until("no rank is left", lambda: not processes("n1") + processes("n2"))
    end = f"stopped after step {reached}, saved at step {saved}; resumed from {resumed_from(folder)}"
    return f"| `--time 1 --signal 40 --requeue` | {again} | {end} |"


def resumed_from(folder: Path) -> str:
    """Name of the checkpoint that the last restart resumed."""
    log = (folder / "logs" / "rank-0.log").read_text()
    return Path(re.findall(r"^restart from (\S+)", log, re.MULTILINE)[-1]).name


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="shardwise-slurm-") as text:
        folder = Path(text)
        (folder / "text.txt").write_text("".join(f"{n} is one more than {n - 1}\n" for n in range(1, 3000)))
        with slurm(folder) as daemons:
            rows = [*killed_node(folder, daemons), cancelled(folder), limited(folder)]
            version = shown("sinfo", "--version")
    print(
        f"Two nodes of one rank each, {version}, `SlurmdTimeout=10`:\n",
        "| job | SLURM's state | what happened |\n|---|---|---|",
        sep="\n",
    )
    print("\n".join(rows))


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(__doc__)
    main()

"""Jobs of `shardwise launch --slurm` on SLURM itself: trainings (one loses a node), a server, and torchrun.

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
import urllib.request
from collections.abc import Callable, Iterator, Sequence
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


def launch(folder: Path, name: str, more: Sequence[str], command: Sequence[str]) -> int:
    """Write and submit a job by the command itself, with more options of the job. Returns its number."""
    words = [sys.executable, "-m", "shardwise", "launch", "--slurm", "--cluster", "2x1xcpu", "--head", "127.0.0.1"]
    words += ["--name", name, "--logs", f"logs-{name}", *more, "--submit", "--json", "--", *command]
    done = subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True)
    return int(json.loads(done.stdout)["said"].rpartition(" ")[2])


def submit(folder: Path, name: str, *more: str, steps: int = STEPS) -> int:
    """A training's job."""
    train = ["train", "tiny-llama", "--set", "layers=2,hidden=128,ffn=192", "--vocab", "300"]
    train += ["--layout", "dp=2,precision=fp32", "--data", "text.txt", "--seq", "32", "--batch", "4"]
    train += ["--steps", str(steps), "--save-every", str(SAVE_EVERY), "--no-tensorboard", "--transport", "gloo"]
    return launch(folder, name, more, [*train, "--out", f"runs/{name}"])


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
        f"{resumed_from(folder, 'killed')}; losses {'equal' if equal else 'DIFFER'}, last checkpoint "
        f"{'equal bit by bit' if not diff(ours, theirs) else 'DIFFERS'} |",
    ]


def cancelled(folder: Path) -> str:
    """A job that `scancel` ends."""
    job = submit(folder, "cancelled", steps=LONG)
    wait_until("it has trained", lambda: len(losses(folder, "cancelled")) > 50)
    shown("scancel", str(job))
    waited = wait_until("no rank is left", lambda: not processes("n1") + processes("n2"))
    wait_until("the job has ended", lambda: state(job) not in ("RUNNING", "COMPLETING"))
    reached, saved = max(losses(folder, "cancelled")), find(folder / "runs" / "cancelled").manifest.step
    return f"| `scancel` | {state(job)} | ended after {waited:.1f} s at step {reached}, saved at step {saved} |"


def limited(folder: Path) -> str:
    """A job that reaches its time limit, and continues in a new one."""
    job = submit(folder, "limited", "--time", "2", "--signal", "60", "--requeue", steps=LONG)
    wait_until("SLURM has put the job back", lambda: "Restarts=1" in shown("scontrol", "show", "job", str(job)))
    reached, saved = max(losses(folder, "limited")), find(folder / "runs" / "limited").manifest.step
    wait_until("the job has continued", lambda: max(losses(folder, "limited")) > reached)
    again = state(job)
    shown("scancel", str(job))
    wait_until("no rank is left", lambda: not processes("n1") + processes("n2"))
    end = f"stopped after step {reached}, saved at step {saved}; resumed from {resumed_from(folder, 'limited')}"
    return f"| `--time 2 --signal 60 --requeue` | {again} | {end} |"


def served(folder: Path) -> str:
    """A server with a stage on each node: asked once, and ended by `scancel`."""
    options = ["--layout", "pp=2,precision=fp32", "--transport", "gloo", "--port", "0"]
    job = launch(folder, "served", [], ["serve", "runs/plain", *options])
    log = folder / "logs-served" / "rank-0.log"
    wait_until("the server is ready", lambda: log.exists() and "is served on" in log.read_text())
    url = re.findall(r"is served on (\S+):", log.read_text())[0]
    body = json.dumps({"model": "plain", "prompt": "12 is one", "max_tokens": 6, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})
    text = json.load(urllib.request.urlopen(request, timeout=LIMIT))["choices"][0]["text"]
    shown("scancel", "--signal=TERM", str(job))
    waited = wait_until("no rank is left", lambda: not processes("n1") + processes("n2"))
    wait_until("the job has ended", lambda: state(job) not in ("RUNNING", "COMPLETING"))
    end = f"`12 is one` is continued by `{' '.join(text.split())}`; ended {waited:.1f} s after `scancel --signal=TERM`"
    return f"| `-- serve runs/plain --layout pp=2` | {state(job)} | {end} |"


def own(folder: Path) -> str:
    """torchrun of the user's own, in a folder whose name has blanks, quotes and a command."""
    odd = folder / "a 'b' \"c\" $(touch x) #d"
    odd.mkdir()
    (odd / "train.py").write_text(
        "import os, sys, torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "x = torch.ones(1) * dist.get_rank()\ndist.all_reduce(x)\n"
        "names = 'SLURM_CPUS_PER_TASK', 'SRUN_CPUS_PER_TASK'\n"
        "cpus = [os.environ[name] for name in names]\n"
        "print(f'{x.item():g} of {dist.get_world_size()}', cpus, sys.argv[1:], flush=True)\n"
    )
    run = [sys.executable, "-m", "torch.distributed.run", "train.py", "$(touch x)", 'a "b"']
    job = launch(odd, "own", ["--sbatch=--cpus-per-task=2", "--interface", "lo"], run)
    wait_until("the job has ended", lambda: state(job) not in ("PENDING", "RUNNING", "COMPLETING"))
    said = {(odd / "logs-own" / f"node-{node}.log").read_text().splitlines()[-1] for node in range(2)}
    whole = said == {"1 of 2 ['2', '2'] ['$(touch x)', 'a \"b\"']"} and not [*folder.rglob("x")]
    end = "both ranks meet, arguments and CPUs per task arrive" if whole else f"NOT as given: {said}"
    return f"| `-- python -m torch.distributed.run train.py` in a folder named `{odd.name}` | {state(job)} | {end} |"


def resumed_from(folder: Path, name: str) -> str:
    """Name of the checkpoint that the last restart resumed."""
    log = (folder / f"logs-{name}" / "rank-0.log").read_text()
    return Path(re.findall(r"^restart from (\S+)", log, re.MULTILINE)[-1]).name


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="shardwise-slurm-") as text:
        folder = Path(text)
        (folder / "text.txt").write_text("".join(f"{n} is one more than {n - 1}\n" for n in range(1, 3000)))
        with slurm(folder) as daemons:
            rows = [*killed_node(folder, daemons), served(folder), own(folder), cancelled(folder), limited(folder)]
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

"""`shardwise launch`: the files for SLURM, Kubernetes and ssh, what the scripts do, and what is an error."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.cli.main import main

SNAPSHOTS = Path(__file__).parent / "snapshots"
TRAIN = ["train", "llama-3-8b", "--layout", "dp=16,zero=3", "--data", "text.txt", "--seq", "4096", "--batch", "16"]
GPUS = ["--cluster", "2x8xH100"]
SYSTEMS = {
    "slurm": ["--slurm", "--time", "1-00:00:00", "--requeue", "--sbatch=--partition=gpu"],
    "ssh": ["--ssh", "user@a,user@b"],
    "k8s": ["--k8s", "--container", "registry/image:1", "--volume", "claim:/data"],
}
LIMIT = 60


def words(system: str, *more: str, out: str = "/data/runs/first", train: list[str] = TRAIN) -> list[str]:
    return ["launch", *SYSTEMS[system], *GPUS, *more, "--", *train, "--out", out]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_file_is_as_recorded(system: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--env", "NCCL_DEBUG=WARN", "--interface", "eth0", "--setup", "module load cuda", "--python", "python3"]
    assert main(words(system, *more, "--name", "job", "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    text = (folder / told["out"]).read_text()
    assert told["text"] == text and told["nodes"] == 2 and told["ranks"] == 16 and not told["submitted"]
    recorded, made = SNAPSHOTS / f"launch-{told['file']}", text.replace(str(folder), "/home/user")
    if os.environ.get("SHARDWISE_SNAPSHOTS") == "write":
        recorded.write_text(made)
    assert made == recorded.read_text()
    if system == "k8s":
        service, job = json.loads(text)["items"]
        assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"] == "job"
        assert job["spec"]["completions"] == 2 and job["spec"]["completionMode"] == "Indexed"
        text = job["spec"]["template"]["spec"]["containers"][0]["args"][0]
    assert "{{" not in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=LIMIT)


CPUS = ["--cluster", "2x8xcpu"]
SMALL = ["train", "tiny-llama", "--layout", "dp=16", "--data", "text.txt", "--seq", "64", "--batch", "16"]


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (words("slurm", train=[*TRAIN[:3], "dp=16", *TRAIN[4:]]), r"needs 137 GB per device.*83.0 GB: `shardwise plan"),
        (words("slurm", train=[*TRAIN[:3], "dp=32,zero=3", *TRAIN[4:-1], "32"]), "= 32 ranks, but there are 16"),
        (["launch", "--slurm", *GPUS, "--", *TRAIN], "the training needs --out"),
        (["launch", "--slurm", *GPUS, "--", "plan", "x"], "name the command: shardwise launch"),
        (["launch", "--slurm", *GPUS], "name the command"),
        (words("slurm", train=[*TRAIN, "--resume", "runs/first"]), "without --resume"),
        (words("slurm", train=[*TRAIN, "--restarts", "2"]), "give them before the --"),
        (words("slurm", "--name", "My Job"), "lower-case letters, digits and hyphens"),
        (words("slurm", "--env", "A B=1"), "give NAME=VALUE"),
        (words("slurm", "--setup", "a\nb"), "give --setup once per line"),
        (words("slurm", "--sbatch=partition"), "give an option of sbatch"),
        (words("slurm", "--volume", "a:/b"), "--volume is of Kubernetes"),
        (words("ssh", "--time", "10"), "are of SLURM"),
        (
            ["launch", "--ssh", "a", *GPUS, "--", *TRAIN, "--out", "x"],
            "--ssh names 1 hosts, and .* fills 2 of 2x8xH100",
        ),
        (["launch", "--ssh", "a,-oProxy", *GPUS, "--", *TRAIN, "--out", "x"], "'-oProxy' is no host"),
        (["launch", "--k8s", *GPUS, "--", *TRAIN, "--out", "x"], "needs an image: add --container"),
        (["launch", "--k8s", "--container", "i", *GPUS, "--", *TRAIN, "--out", "x"], "needs shared storage"),
        (words("k8s", out="/tmp/x"), "--out /tmp/x is not on the shared storage: give a folder under /data"),
        (words("k8s", "--submit"), "start this one with kubectl apply -f shardwise.json"),
        (words("slurm", "--restarts", "-1"), "restarts must be at least 0"),
    ],
)
def test_what_cannot_run_is_one_line(
    command: list[str], line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert re.search(line, said.err), said.err
    assert list(folder.iterdir()) == []


def test_a_command_that_is_not_here_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(folder))
    assert main(words("slurm", "--submit")) == 2
    assert "there is no command sbatch here" in capsys.readouterr().err


# The scripts, with programs that stand for those of the cluster.


def program(folder: Path, name: str, text: str) -> Path:
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


SRUN = """
for rank in 0 1; do
    for last; do :; done
    [[ "$last" == true ]] && continue
    while [[ "$1" == --* ]]; do shift; done
    SLURM_PROCID=$rank SLURM_LOCALID=0 "$@" &
done
code=0
for pid in $(jobs -p); do wait "$pid" || code=$?; done
exit "$code"
"""
RANK = r"""
echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT" \
    "$TORCHELASTIC_RUN_ID $TORCHELASTIC_RESTART_COUNT $*" >>ranks
"""


def slurm_job(folder: Path, rank: str, *more: str) -> Path:
    """The script of a job of two ranks, on a cluster of programs in `bin`."""
    program(folder, "srun", SRUN)
    program(folder, "python", RANK + rank)
    program(folder, "scontrol", 'echo "$*" >>asked; printf "n1\\nn2\\n"')
    program(folder, "scancel", 'echo "$*" >>asked; for pid in $(cat pids); do kill -TERM "$pid"; done')
    small = [*SMALL[:3], "dp=2", *SMALL[4:]]
    python = str(folder / "bin" / "python")
    assert (
        main(["launch", "--slurm", "--cluster", "2x1xcpu", "--python", python, *more, "--", *small, "--out", "run"])
        == 0
    )
    return folder / "shardwise.sbatch"


def environment(folder: Path) -> dict[str, str]:
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}


def test_srun_gives_ranks_what_torchrun_would(folder: Path) -> None:
    script = slurm_job(folder, "exit 0")
    done = subprocess.run(["bash", script], env=environment(folder), timeout=LIMIT)
    assert done.returncode == 0
    ranks = [line.split(maxsplit=7) for line in sorted((folder / "ranks").read_text().splitlines())]
    assert [line[:7] for line in ranks] == [[str(rank), "0", "2", "n1", "10056", "slurm-7", "0"] for rank in (0, 1)]
    assert ranks[0][7].startswith("-m shardwise train tiny-llama --layout dp=2 --data text.txt")


@pytest.mark.parametrize(("code", "attempts"), [(1, 3), (2, 1)])
def test_a_failed_rank_is_started_again_and_a_mistake_is_not(folder: Path, code: int, attempts: int) -> None:
    script = slurm_job(folder, f"exit {code}", "--restarts", "2")
    done = subprocess.run(["bash", script], env=environment(folder), timeout=LIMIT)
    assert done.returncode == code
    counts = [line.split()[6] for line in (folder / "ranks").read_text().splitlines()]
    assert sorted(counts) == sorted(str(count) for count in range(attempts) for _ in range(2))


@pytest.mark.parametrize("status", ["stopped", "finished"])
def test_before_the_time_limit_ranks_stop_and_the_job_continues_in_a_new_one(folder: Path, status: str) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "run.json").write_text(f'{{\n "status": "{status}"\n}}')
    waiting = 'echo $$ >>pids; trap "echo saved >>saved; exit 0" TERM; touch "up-$RANK"; while :; do sleep 0.05; done'
    script = slurm_job(folder, waiting, "--requeue")
    job = subprocess.Popen(["bash", script], env=environment(folder))
    deadline = time.monotonic() + LIMIT
    while not ((folder / "up-0").exists() and (folder / "up-1").exists()):
        assert time.monotonic() < deadline and job.poll() is None
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(LIMIT) == 0
    assert (folder / "saved").read_text() == "saved\n" * 2
    asked = (folder / "asked").read_text()
    assert "--quiet --signal=TERM 7" in asked and ("requeue 7" in asked) == (status == "stopped")


SSH = """
shift 2
echo "$1" >>asked
shift
exec bash -c "$*"
"""


def ssh_job(folder: Path, python: str) -> list[str]:
    program(folder, "ssh", SSH)
    small = [*SMALL[:3], "dp=2", *SMALL[4:]]
    return ["launch", "--ssh", "a,me@b", "--cluster", "2x1xcpu", "--python", python, "--", *small, "--out", "run"]


def test_ssh_starts_torchrun_on_every_host_and_passes_signals_on(folder: Path) -> None:
    python = program(
        folder, "python", 'trap "echo ended >>saved; exit 3" TERM; echo "$*" >>ranks; while :; do sleep 0.05; done'
    )
    assert main(ssh_job(folder, str(python))) == 0
    job = subprocess.Popen(["bash", folder / "shardwise.sh"], env=environment(folder))
    deadline = time.monotonic() + LIMIT
    while not (folder / "ranks").exists() or (folder / "ranks").read_text().count("\n") < 2:
        assert time.monotonic() < deadline and job.poll() is None
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)
    assert job.wait(LIMIT) == 3
    assert (folder / "saved").read_text() == "ended\n" * 2
    first, second = (folder / "ranks").read_text().splitlines()
    assert first.split("--log-dir")[0] == second.split("--log-dir")[0]
    assert "--nnodes 2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d" in first and "a:29500" in first
    assert {*(folder / "asked").read_text().split()} == {"a", "me@b"}


def test_a_host_that_fails_ends_all(folder: Path) -> None:
    text = 'trap "exit 0" TERM; [[ "$*" == *-0\\ --redirects* ]] && exit 5; while :; do sleep 0.05; done'
    assert main(ssh_job(folder, str(program(folder, "python", text)))) == 0
    done = subprocess.run(["bash", folder / "shardwise.sh"], env=environment(folder), timeout=LIMIT)
    assert done.returncode == 5


def test_a_job_over_ssh_trains(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun and ranks as they are; both hosts are this machine."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "text.txt").write_text("".join(f"{n} is one more than {n - 1}\n" for n in range(1, 1500)))
    command = ssh_job(folder, sys.executable)
    at = command.index("--")
    command[at:at] = ["--head", "127.0.0.1", "--port", str(port), "--submit", "--interface", "lo"]
    command += ["--set", "layers=2,hidden=128,ffn=192", "--vocab", "300", "--steps", "2", "--no-tensorboard"]
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    code = main(command)
    logs = "\n".join(path.read_text() for path in (folder / "logs").rglob("*") if path.is_file())
    assert code == 0, logs
    assert json.loads((folder / "run" / "run.json").read_text())["status"] == "finished"
    assert len([*(folder / "logs").rglob("stdout.log")]) == 2

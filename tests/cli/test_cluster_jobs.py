"""`shardwise launch`: the files for SLURM, Kubernetes and ssh, what the scripts do, and what is an error."""

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.cases import table
from harness.today import of_some, some_of
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
REAL = ("train", "torchrun", "serve", "killed")
"""Jobs with ranks as they are: one of them runs each day."""


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


def test_ranks_compute_on_the_cluster_s_devices(folder: Path) -> None:
    assert main(words("slurm")) == 0 and "train --device cuda llama" in (folder / "shardwise.sbatch").read_text()
    assert main(words("slurm", train=[*TRAIN, "--device", "cpu"])) == 0
    assert "--device cuda" not in (folder / "shardwise.sbatch").read_text()
    serve = ["shardwise", "serve", "folder", "--layout", "tp=8"]
    assert main(["launch", "--ssh", "a", "--cluster", "8xH100", "--", *serve]) == 0
    assert "serve --device cuda folder" in (folder / "shardwise.sh").read_text()


SMALL = ["train", "tiny-llama", "--layout", "dp=16", "--data", "text.txt", "--seq", "64", "--batch", "16"]


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


SRUN = table(__file__, "SRUN")
RANK = r"""
echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT" \
    "$TORCHELASTIC_RUN_ID $TORCHELASTIC_RESTART_COUNT $*" >>ranks
[[ $SRUN_CPUS_PER_TASK == 6 ]] || exit 9
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
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_PER_TASK": "6"}
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "ASKED": str(folder / "asked"), **slurm}


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
echo "$1" >>"$ASKED"
shift
exec bash -c "$*"
"""


def ssh_job(folder: Path, python: str, *more: str) -> list[str]:
    program(folder, "ssh", SSH)
    small = [*SMALL[:3], "dp=2", *SMALL[4:]]
    start = ["launch", "--ssh", "a,me@b", "--cluster", "2x1xcpu", "--python", python, *more]
    return [*start, "--", *small, "--out", "run"]


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


@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.parametrize("absolute", [False, True])
def test_a_host_that_fails_ends_all(folder: Path, host: int, absolute: bool) -> None:
    text = f'trap "exit 4" TERM; [[ "$*" == *-{host}\\ --redirects* ]] && exit 5; while :; do sleep 0.05; done'
    logs = ["--logs", str(folder / "other logs" if absolute else "logs")]
    assert main(ssh_job(folder, str(program(folder, "python", text)), *logs)) == 0
    done = subprocess.run(["bash", folder / "shardwise.sh"], env=environment(folder), timeout=LIMIT)
    assert done.returncode == 5
    assert [*folder.rglob("*.pid")] == [*folder.rglob("*.code")] == []


# Programs of the user's own.

OWN = r"""
variables=$(env | grep -E '^(NNODES|NODE_RANK|NPROC|MASTER|PET_|HEADLESS|RANK|WORLD|GREETING)' | sort | tr '\n' ' ')
printf '%s\n' "$variables $(printf '<%s> ' "${0##*/}" "$@")" >>started
"""
STARTS = {"slurm": ["--slurm"], "ssh": ["--ssh", "a,me@b"], "k8s": ["--k8s", "--container", "image"]}


def own_job(folder: Path, system: str, *command: str, more: tuple[str, ...] = (), code: str = "") -> list[list[str]]:
    """Run a job of two nodes of four devices. Returns what each node's program saw: variables, then its words."""
    for name in ("torchrun", "vllm", "accelerate", "train it.sh", "python3"):
        program(folder, name, OWN + code)
    program(folder, "srun", SRUN)
    program(folder, "scontrol", "echo n1; echo n2")
    program(folder, "ssh", SSH)
    flags = ["--cluster", "2x4xcpu", "--port", "1234", "--env", "GREETING=a 'b' $c", "--out", "job", *more]
    assert main(["launch", *STARTS[system], *flags, "--", *command]) == 0
    starts: list[list[str]] = [["bash", "job"]]
    if system == "k8s":
        container = json.loads((folder / "job").read_text())["items"][1]["spec"]["template"]["spec"]["containers"][0]
        (word,) = container["args"]
        variables = [f"{item['name']}={item['value'].replace('$$', '$')}" for item in container["env"]]
        pod = ["env", *variables, *container["command"], word.replace("$$", "$")]
        starts = [["env", f"JOB_COMPLETION_INDEX={node}", *pod] for node in range(2)]
    for start in starts:
        assert subprocess.run(start, env=environment(folder), timeout=LIMIT).returncode == 0
    lines = (folder / "started").read_text().splitlines()
    assert len(lines) == 2 and all("GREETING=a 'b' $c " in line for line in lines)
    lines.sort(key=lambda line: re.findall(r"RANK=(\d)", line)[:1])
    return [re.findall(r"[A-Z_]+=\S*|<[^>]*>", line.replace("GREETING=a 'b' $c ", "")) for line in lines]


@pytest.mark.parametrize("system", STARTS)
def test_torchrun_meets_over_its_variables(folder: Path, system: str) -> None:
    nodes = own_job(folder, system, "torchrun", "train.py", "--name", "a b;c")
    for number, words in enumerate(nodes):
        assert words[-4:] == ["<torchrun>", "<train.py>", "<--name>", "<a b;c>"]
        variables = dict(word.split("=", 1) for word in words[:-4])
        assert variables["PET_NNODES"] == "2" and variables["PET_NPROC_PER_NODE"] == "4"
        assert variables["NODE_RANK"] == variables["PET_NODE_RANK"] == str(number)
        head = {"slurm": "n1", "ssh": "a", "k8s": "shardwise-0.shardwise"}[system]
        assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == (head, "1234")
        if system == "slurm":
            assert (variables["PET_MASTER_ADDR"], variables["PET_MASTER_PORT"]) == (head, "1234")
        else:
            assert variables["PET_RDZV_BACKEND"] == "c10d" and variables["PET_RDZV_ENDPOINT"] == f"{head}:1234"
            assert variables["PET_MAX_RESTARTS"] == "3" and variables["PET_RDZV_ID"].startswith("shardwise")


@pytest.mark.parametrize("system", STARTS)
def test_an_engine_that_reads_flags_gets_those_of_its_node(folder: Path, system: str) -> None:
    first, second = own_job(folder, system, "vllm", "serve", "my model", "--tensor-parallel-size", "4")
    head = {"slurm": "n1", "ssh": "a", "k8s": "shardwise-0.shardwise"}[system]
    for number, words in enumerate((first, second)):
        flags = f"<--nnodes> <2> <--node-rank> <{number}> <--master-addr> <{head}> <--master-port> <1234>".split()
        headless = ["<--headless>"] * number
        assert [word for word in words if word.startswith("<")] == [
            "<vllm>", "<serve>", *flags, *headless, "<my model>", "<--tensor-parallel-size>", "<4>",
        ]  # fmt: skip


def test_flags_of_the_user_s_own_are_left_alone(folder: Path) -> None:
    words = own_job(folder, "ssh", "accelerate", "launch", "--num_machines=2", "--machine_rank", "0", "x.py")[0]
    assert [word for word in words if word.startswith("<")][1:] == [
        "<launch>", "<--num_machines=2>", "<--machine_rank>", "<0>", "<x.py>",
    ]  # fmt: skip


def test_a_program_per_rank(folder: Path) -> None:
    slurm = own_job(folder, "slurm", "train it.sh", "a", more=("--per", "rank"))
    assert [words for words in slurm if "<train it.sh>" in words] == slurm
    assert [word for word in slurm[1] if "RANK" in word or "WORLD" in word] == ["RANK=1", "WORLD_SIZE=8"]
    (folder / "started").unlink()
    ssh = own_job(folder, "ssh", "train it.sh", "a", more=("--per", "rank", "--python", "python3"))
    assert all(words[-3:] == ["<--no-python>", "<train it.sh>", "<a>"] and "<python3>" in words for words in ssh)


@pytest.mark.parametrize(("code", "attempts"), [(1, 3), (2, 1)])
def test_a_program_over_ssh_is_started_again(folder: Path, code: int, attempts: int) -> None:
    program(folder, "ssh", SSH)
    program(
        folder, "engine", f'echo "$NODE_RANK" >>runs; trap "exit 0" TERM; ((NODE_RANK)) && exit {code}; sleep 30 & wait'
    )
    command = ["launch", "--ssh", "a,b", "--cluster", "2x1xcpu", "--restarts", "2", "--", "engine"]
    assert main(command) == 0
    done = subprocess.run(["bash", folder / "shardwise.sh"], env=environment(folder), timeout=LIMIT)
    assert done.returncode == code
    assert (folder / "runs").read_text().count("1\n") == attempts


def test_a_pod_passes_its_signal_on(folder: Path) -> None:
    """The first process of a pod has no signal handlers of its own: without one SIGTERM is lost."""
    program(folder, "engine", 'trap "echo saved >saved; exit 7" TERM; touch up; while :; do sleep 0.05; done')
    assert main(["launch", "--k8s", "--container", "i", "--cluster", "1xcpu", "--out", "job", "--", "engine"]) == 0
    container = json.loads((folder / "job").read_text())["items"][1]["spec"]["template"]["spec"]["containers"][0]
    assert "volumeMounts" in container and [item["name"] for item in container["volumeMounts"]] == ["memory"]
    script = container["args"][0].replace("$$", "$")
    pod = subprocess.Popen(["bash", "-c", script], env=environment(folder) | {"JOB_COMPLETION_INDEX": "0"})
    deadline = time.monotonic() + LIMIT
    while not (folder / "up").exists():
        assert time.monotonic() < deadline and pod.poll() is None
        time.sleep(0.02)
    pod.send_signal(signal.SIGTERM)
    assert pod.wait(LIMIT) == 7 and (folder / "saved").exists()


def test_names_of_services_begin_with_a_letter(folder: Path) -> None:
    for given, name in (("7b-run", "job-7b-run"), ("7" * 47 + "-8", f"job-{'7' * 47}"), ("run-7b", "run-7b")):
        assert main(words("k8s", "--name", given)) == 0
        text = (folder / f"{given}.json").read_text()
        service, job = json.loads(text)["items"]
        assert service["metadata"]["name"] == job["metadata"]["name"] == name
        assert service["spec"]["selector"] == {"job-name": name} and f"--rdzv-endpoint {name}-0.{name}:29500" in text


def test_kubernetes_reads_dollars_once(folder: Path) -> None:
    more = ["--env", "PASS=pa$$word", "--env", "A=$(HOSTNAME)", "--setup", "echo $$"]
    assert main(words("k8s", *more, out="/data/$HOME $(x)")) == 0
    text = (folder / "shardwise.json").read_text()
    container = json.loads(text)["items"][1]["spec"]["template"]["spec"]["containers"][0]
    values = {item["name"]: item["value"] for item in container["env"]}
    assert values["PASS"] == "pa$$$$word" and values["A"] == "$$(HOSTNAME)"
    assert "\necho $$$$\n" in container["args"][0] and "--out '/data/$$HOME $$(x)'" in container["args"][0]


@of_some("train", REAL, 1)
def test_a_job_over_ssh_trains(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun and ranks as they are; both hosts are this machine."""
    (folder / "text.txt").write_text("".join(f"{n} is one more than {n - 1}\n" for n in range(1, 1500)))
    command = ssh_job(folder, sys.executable)
    at = command.index("--")
    command[at:at] = ["--head", "127.0.0.1", "--port", str(free_port()), "--submit", "--interface", "lo"]
    command += ["--set", "layers=2,hidden=128,ffn=192", "--vocab", "300", "--steps", "2", "--no-tensorboard"]
    for name, value in environment(folder).items():
        monkeypatch.setenv(name, value)
    code = main(command)
    logs = "\n".join(path.read_text() for path in (folder / "logs").rglob("*") if path.is_file())
    assert code == 0, logs
    assert json.loads((folder / "run" / "run.json").read_text())["status"] == "finished"
    assert len([*(folder / "logs").rglob("stdout.log")]) == 2


def free_port() -> int:
    """Below those that the system gives to connections, one of which could take it before the job does."""
    while True:
        port = secrets.choice(range(20_000, 30_000))
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


OWN_TRAINING = table(__file__, "OWN_TRAINING")


@of_some("torchrun", REAL, 1)
def test_the_user_s_own_torchrun_starts_its_ranks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program(folder, "ssh", SSH)
    (folder / "train.py").write_text(OWN_TRAINING)
    for name, value in environment(folder).items():
        monkeypatch.setenv(name, value)
    flags = ["--head", "127.0.0.1", "--port", str(free_port()), "--submit", "--interface", "lo"]
    own = [sys.executable, "-m", "torch.distributed.run", "train.py"]
    code = main(["launch", "--ssh", "a,b", "--cluster", "2x1xcpu", *flags, "--", *own])
    logs = "\n".join(path.read_text() for path in (folder / "logs").rglob("*") if path.is_file())
    assert code == 0, logs
    assert [(folder / f"sum-{rank}").read_text() for rank in range(2)] == ["1 of 2"] * 2


@of_some("serve", REAL, 1)
@pytest.mark.parametrize("layout", some_of(["pp=2", "dp=2"], 1, "served jobs"))
def test_a_server_on_two_hosts_answers_and_ends(folder: Path, layout: str) -> None:
    program(folder, "ssh", SSH)
    train_small(folder)
    flags = ["--cluster", "2x1xcpu", "--head", "127.0.0.1", "--port", str(free_port()), "--interface", "lo"]
    served = ["serve", "run", "--layout", f"{layout},precision=fp32", "--port", "0"]
    assert main(["launch", "--ssh", "a,b", *flags, "--restarts", "0", "--", *served]) == 0
    job = subprocess.Popen(["bash", folder / "shardwise.sh"], env=environment(folder))
    try:
        deadline, url = time.monotonic() + LIMIT, None
        while not (url := re.search(r"is served on (\S+):", output(folder))):
            assert time.monotonic() < deadline and job.poll() is None, output(folder)
            time.sleep(0.1)
        request = json.dumps({"model": "run", "prompt": "12 is one", "max_tokens": 4, "temperature": 0}).encode()
        headers = {"Content-Type": "application/json"}
        asked = [urllib.request.Request(f"{url[1]}/completions", request, headers) for _ in range(2)]
        with ThreadPoolExecutor(2) as clients:
            answers = [*clients.map(lambda one: json.load(urllib.request.urlopen(one, timeout=LIMIT)), asked)]
        assert len({answer["choices"][0]["text"] for answer in answers} - {""}) == 1, answers
    finally:
        job.send_signal(signal.SIGTERM)
        job.wait(LIMIT)
    assert "stopped" in output(folder) and "failed" not in output(folder)


def train_small(folder: Path) -> None:
    (folder / "text.txt").write_text("".join(f"{n} is one more than {n - 1}\n" for n in range(1, 1500)))
    small = ["train", "tiny-llama", "--set", "layers=2,hidden=128,ffn=192", "--vocab", "300", "--steps", "1"]
    data = ["--data", "text.txt", "--seq", "32", "--batch", "4", "--no-tensorboard", "--out", "run"]
    assert main([*small, "--layout", "precision=fp32", *data]) == 0


@of_some("killed", REAL, 1)
@pytest.mark.parametrize(("layout", "line"), some_of(
    [("dp=2", "replica 1 has ended"), ("pp=2", "rank 0 failed.*(rank 1 has ended|gloo|Connection)")], 1, "killed ranks"
))  # fmt: skip
def test_a_server_ends_when_a_rank_of_another_host_is_killed(folder: Path, layout: str, line: str) -> None:
    train_small(folder)
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    words = [sys.executable, "-m", "shardwise", "serve", "run", "--layout", f"{layout},precision=fp32", "--port", "0"]
    ranks = []
    for rank in range(2):
        variables = {**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
        with (folder / f"rank-{rank}.log").open("wb") as log:
            ranks.append(subprocess.Popen(words, env=variables, stdout=log, stderr=log))
    try:
        deadline = time.monotonic() + LIMIT
        while "is served on" not in (said := (folder / "rank-0.log").read_text()):
            assert time.monotonic() < deadline and ranks[0].poll() is None, said
            time.sleep(0.1)
        ranks[1].kill()
        assert ranks[0].wait(LIMIT) == 1
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert re.search(line, (folder / "rank-0.log").read_text())


def output(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted((folder / "logs").rglob("*.log")) if path.is_file())

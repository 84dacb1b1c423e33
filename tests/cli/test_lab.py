"""`shardwise lab`: where commands run, their exit codes, their end, and mistakes."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.command_line import mistake
from harness.hosts import namespaces
from harness.processes import alive
from shardwise.lab.job import is_shardwise
from shardwise.lab.network import remove_abandoned

pytestmark = pytest.mark.usefixtures("leftovers")
LIMIT = 60
Command = Callable[..., tuple[int, str, str]]


def started(*words: str) -> subprocess.Popen[str]:
    lab = [sys.executable, "-m", "shardwise", "lab", "--link", "100Mb/s", *words]
    return subprocess.Popen(lab, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(file: Path) -> int:
    deadline = time.monotonic() + LIMIT
    while not (file.exists() and file.read_text().strip()):
        assert time.monotonic() < deadline, f"no {file}"
        time.sleep(0.02)
    return int(file.read_text())


@pytest.mark.usefixtures("several_hosts")
def test_other_commands_run_once_on_each_host_with_the_words_of_torchrun(command: Command, tmp_path: Path) -> None:
    script = (
        f'echo $PET_NNODES $PET_MASTER_ADDR $GLOO_SOCKET_IFNAME $(ip -br -4 addr show eth0) > "{tmp_path}/$NODE_RANK"'
    )
    code, out, err = command("lab", "--nodes", 3, "--link", "1Gb/s", "--json", "--", "sh", "-c", script)
    assert (code, err) == (0, "")
    reported = json.loads(out)
    assert [host["host"] for host in reported["hosts"]] == [0, 1, 2] and reported["forwarded_by"] == "kernel"
    for node in range(3):
        words = (tmp_path / str(node)).read_text().split()
        assert words[:3] == ["3", "10.77.0.1", "eth0"] and words[-1] == f"10.77.0.{node + 1}/24"


@pytest.mark.usefixtures("several_hosts")
def test_the_exit_code_is_that_of_the_command(command: Command) -> None:
    failing = 'if [ "$NODE_RANK" = 1 ]; then exit 7; fi'
    code, out, err = command("lab", "--link", "1Gb/s", "--", "sh", "-c", failing)
    assert (code, out) == (7, "") and "host 1  1Gb/s  sent" in err
    assert command("lab", "--", "no-such-command")[0] == 2
    assert namespaces() == []


@pytest.mark.usefixtures("several_hosts")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_command_and_removes_the_hosts(number: int, tmp_path: Path, heeded: None) -> None:
    lab = started("--", "sh", "-c", f'echo $$ > "{tmp_path}/$NODE_RANK"; exec sleep 100')
    pids = [wait_for(tmp_path / str(node)) for node in range(2)]
    lab.send_signal(number)
    _, err = lab.communicate(timeout=LIMIT)
    assert lab.returncode == 128 + number and "Traceback" not in err
    assert not any(map(alive, pids)) and namespaces(lab.pid) == []


@pytest.mark.usefixtures("several_hosts")
def test_the_command_ends_with_a_killed_lab(tmp_path: Path) -> None:
    lab = started("--", "sh", "-c", f'echo $$ > "{tmp_path}/$NODE_RANK"; exec sleep 100')
    pids = [wait_for(tmp_path / str(node)) for node in range(2)]
    lab.kill()
    lab.communicate(timeout=LIMIT)
    deadline = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(alive, pids))
    remove_abandoned()
    assert namespaces(lab.pid) == []


def test_which_commands_are_ours() -> None:
    assert is_shardwise(["shardwise", "train"]) and is_shardwise(["/bin/python3", "-m", "shardwise", "train"])
    assert not is_shardwise(["torchrun", "-m", "shardwise"]) and not is_shardwise(["python", "train.py"])


def test_without_rights_one_line_says_what_is_needed(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.lab.network.os.geteuid", lambda: 1000)
    monkeypatch.setattr("shardwise.lab.network.shutil.which", lambda name: name)
    mistake(command("lab", "--", "true"), "needs root", "sudo")
    monkeypatch.setattr("shardwise.lab.network.shutil.which", lambda name: None)
    mistake(command("lab", "--", "true"), "install iproute2")

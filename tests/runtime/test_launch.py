"""The launcher with small commands in place of training: who failed first is named, and nobody is left behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

import shardwise
from harness.cases import from_table, table
from harness.processes import launch
from shardwise.errors import UserError
from shardwise.report.run_directory import LOCK, occupied
from shardwise.runtime.job.launch import Failure
from shardwise.runtime.job.locks import run_lock, temporary_folder
from shardwise.runtime.job.output import tolerant_output

pytestmark = pytest.mark.usefixtures("leftovers")
SOURCES = str(Path(shardwise.__file__).parents[1])

PRELUDE = table(__file__, "PRELUDE")


def command(body: str) -> list[str]:
    return [sys.executable, "-c", PRELUDE + textwrap.dedent(body)]


class Launched:
    """What came of a launch: exit code, lines, and the processes that it started."""

    def __init__(self, folder: Path, body: str, ranks: int, **options) -> None:
        env = {"TEST_FOLDER": str(folder), "PYTHONPATH": SOURCES}
        self.lines: list[str] = []
        self.code = launch(command(body), ranks, env=env, echo=self.lines.append, **options)
        assert [rank for rank in alive(folder) if rank < 10] == []
        # What a rank had started is not the launcher's child: it was killed too, but nobody waits for its last moment.
        assert wait_until(lambda: not alive(folder), 5)


def alive(folder: Path) -> list[int]:
    """Ranks of the folder whose process still runs (a zombie that init has not reaped yet does not run)."""
    running = []
    for file in folder.glob("pid-*"):
        try:
            state = Path(f"/proc/{file.read_text()}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            running.append(int(file.name.removeprefix("pid-")))
    return running


def wait_until(condition, seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_ranks_find_their_place_in_the_environment(tmp_path):
    done = Launched(
        tmp_path,
        """
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME",
                 "SHARDWISE_RENDEZVOUS", "SHARDWISE_PARENT"]
        (here / f"env-{rank}").write_text(json.dumps({name: os.environ.get(name) for name in names}))
        """,
        3,
        threads=2,
    )
    assert (done.code, done.lines) == (0, [])
    found = [json.loads((tmp_path / f"env-{rank}").read_text()) for rank in range(3)]
    for rank, env in enumerate(found):
        assert (env["RANK"], env["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("3", "3")
        assert (env["OMP_NUM_THREADS"], env["GLOO_SOCKET_IFNAME"]) == ("2", "lo")
        assert env["SHARDWISE_PARENT"] == str(os.getpid())
    assert len({env["SHARDWISE_RENDEZVOUS"] for env in found}) == 1
    store = found[0]["SHARDWISE_RENDEZVOUS"]
    assert store.startswith("file:///") and not Path(store.removeprefix("file://")).parent.exists()


def test_output_of_rank_0_alone_passes(tmp_path, capfd):
    assert Launched(tmp_path, "print(f'hello from {rank}')", 3).code == 0
    assert capfd.readouterr().out == "hello from 0\n"


ENDS: dict[str, tuple[int, int, str, str]] = {
    "a killed rank is named, though others report broken connections": (
        4, 1, "rank 2 was killed by SIGKILL; the other 3 were stopped", """
        all_started()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        other = int((here / "pid-2").read_text())
        while "Z" not in Path(f"/proc/{other}/stat").read_text().rpartition(")")[2].split()[0]:
            time.sleep(0.005)
        fail("error", "RuntimeError: connection closed by peer", step=7)
        """),
    "an exception on one rank stops a rank that hangs": (
        2, 1, "rank 1 failed at step 3: ZeroDivisionError: division by zero; the other rank was stopped", """
        all_started()
        if rank == 1:
            fail("error", "ZeroDivisionError: division by zero", step=3)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
        """),
    "who dies speechless is quoted from its log": (
        2, 1, "rank 1 exited with code 1: no such thing; the other rank was stopped",
        "all_started(); sys.exit('no such thing') if rank else time.sleep(600)"),
    "a single rank has no others": (1, 1, "rank 0 exited with code 7", "sys.exit(7)"),
    "a mistake that every rank reports is printed once": (
        3, 2, "the data is empty; give more", "fail('user', 'the data is empty; give more', code=2)"),
    "the rank that reported first is the cause": (
        2, 2, "the cause", """
        all_started()
        if rank == 1:
            Failure("user", 1, None, "the cause").write(here / "told")
            Failure("user", 1, None, "the cause").write(Path(os.environ["SHARDWISE_ERROR_FILE"]))
            time.sleep(0.2)
            sys.exit(2)
        while not (here / "told").exists():
            time.sleep(0.005)
        time.sleep(0.05)
        fail("error", "a consequence")
        """),
}  # fmt: skip
"""What happens -> (ranks, exit code, the line, what each rank does)."""


@pytest.mark.parametrize("end", ENDS)
def test_how_ranks_end_is_one_line(tmp_path, end):
    ranks, code, line, body = ENDS[end]
    done = Launched(tmp_path, body, ranks)
    assert (done.code, done.lines) == (code, [line])


def test_children_of_a_rank_do_not_survive_it(tmp_path):
    body = """
    if os.fork() == 0:
        started(10 + rank)
        time.sleep(600)
    while len(list(here.glob("pid-1?"))) < 2:
        time.sleep(0.01)
    sys.exit(rank)
    """
    assert Launched(tmp_path, body, 2).code == 1


def test_a_port_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(UserError, match="port 70000 does not exist"):
        Launched(tmp_path, "", 2, port=70000)


def test_a_free_port_is_handed_to_the_ranks(tmp_path):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    body = """
    (here / "env").write_text(" ".join(os.environ[n] for n in ("SHARDWISE_RENDEZVOUS", "MASTER_ADDR", "MASTER_PORT")))
    """
    assert Launched(tmp_path, body, 1, port=port).code == 0
    assert (tmp_path / "env").read_text() == f"env:// 127.0.0.1 {port}"


LAUNCHER = table(__file__, "LAUNCHER")


def start_launcher(folder: Path, body: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": SOURCES, "TEST_FOLDER": str(folder)}
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, command(body)[-1]], env=env, stderr=subprocess.PIPE, text=True
    )
    assert wait_until(lambda: len(list(folder.glob("ready-*"))) == 3), "the ranks did not start"
    return launcher


SLEEP = "(here / f'ready-{rank}').touch(); time.sleep(600)"


def test_no_rank_survives_a_launcher_that_is_killed(tmp_path):
    launcher = start_launcher(tmp_path, SLEEP)
    assert sorted(alive(tmp_path)) == [0, 1, 2]
    launcher.kill()
    launcher.communicate()
    assert wait_until(lambda: not alive(tmp_path), 10)


def test_the_folder_of_a_launcher_that_was_killed_goes_with_the_next_start(tmp_path, monkeypatch):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    (temporary / "shardwise-foreign").mkdir()
    launcher = start_launcher(tmp_path, SLEEP)
    (left,) = (path for path in temporary.glob("shardwise-*") if path.name != "shardwise-foreign")
    with temporary_folder():
        assert left.exists(), "that of a launcher at work stays"
    launcher.kill()
    launcher.communicate()
    assert left.exists()
    with temporary_folder() as folder:
        assert sorted(temporary.iterdir()) == sorted([folder, temporary / "shardwise-foreign"])


def test_a_rank_that_is_suspended_in_a_collective_is_named(tmp_path: Path) -> None:
    """It looks like those that wait for it."""
    body = """
        from shardwise.runtime.job.pulse import Pulse, memory
        signs = Pulse(memory(Path(os.environ["SHARDWISE_PULSE"])))
        signs.step(1)
        signs.wait("all_reduce over dp")
        all_started()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
    """
    done = Launched(tmp_path, body, 3, hang=2.0)
    assert done.code == 1
    assert re.fullmatch(
        r"no rank made progress for \d s: each waits for others, ranks 0, 1 and 2 at step 1 in all_reduce over dp; "
        r"rank 1 is suspended by a signal, such as SIGSTOP; the other 2 were stopped",
        done.lines[-1],
    ), done.lines


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("deaf", [False, True], ids=["obeying", "deaf"])
def test_signals_end_the_launcher_and_all_ranks(tmp_path, number, deaf):
    ignore = "[signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)]; " if deaf else ""
    launcher = start_launcher(tmp_path, ignore + SLEEP)
    launcher.send_signal(number)
    _, errors = launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + number
    assert alive(tmp_path) == []
    assert errors.splitlines()[-1] == f"stopped by {signal.Signals(number).name}: all 3 ranks have ended"


LISTENING = """
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
(here / f"ready-{rank}").touch()
while not asked:
    time.sleep(0.01)
"""


@from_table
def test_a_rank_that_fails_while_it_ends_in_order_is_named(tmp_path, ends, why):
    """The others, which miss it, are not; nor is anybody where a rank was ended before it could listen."""
    last = f"signal.signal(signal.SIGTERM, signal.SIG_DFL); {ends}"
    body = f"{LISTENING}if rank == 1:\n    {last}\ntime.sleep(0.3)\nfail('peer', 'lost a peer')"
    launcher = start_launcher(tmp_path, body)
    launcher.send_signal(signal.SIGTERM)
    _, errors = launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + signal.SIGTERM
    line = errors.splitlines()[-1]
    assert line.startswith(f"stopped, without saving: {why}" if why else "stopped by SIGTERM: all 3 ranks have ended")


def test_a_mistake_that_shows_while_it_ends_is_the_user_s(tmp_path):
    body = f"{LISTENING}fail('user', 'the folder has gone', code=2)"
    launcher = start_launcher(tmp_path, body)
    launcher.send_signal(signal.SIGTERM)
    _, errors = launcher.communicate(timeout=30)
    assert (launcher.returncode, errors.splitlines()[-1]) == (2, "the folder has gone")


HOLDER = table(__file__, "HOLDER")


def test_a_lock_is_free_when_its_holder_was_killed(tmp_path):
    """Its file is still there then, and is no reason to refuse the folder."""
    env = {**os.environ, "PYTHONPATH": SOURCES}
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], env=env, stdout=subprocess.PIPE)
    holder.stdout.readline()
    with pytest.raises(UserError, match=f"process {holder.pid} on"), run_lock(tmp_path):
        pass
    holder.kill()
    holder.communicate()
    assert (tmp_path / LOCK).exists() and not occupied(tmp_path)
    with run_lock(tmp_path):
        pass
    assert not (tmp_path / LOCK).exists()


def test_without_locks_nobody_is_held_back(tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", lambda *_: (_ for _ in ()).throw(OSError("no locks")))
    with run_lock(tmp_path), run_lock(tmp_path):
        pass


def test_lost_output_is_said_once_and_raises_nothing(monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    lost: list[str] = []
    with os.fdopen(writing, "w", buffering=1) as broken, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", broken)
        patch.setattr(sys, "stderr", None)
        with pytest.raises(BrokenPipeError):
            print("heard by nobody", flush=True)
        with tolerant_output(lost.append):
            for _ in range(3):
                print("heard by nobody", flush=True)
            assert not sys.stdout.isatty() and sys.stderr is None
        assert sys.stdout is broken
        print("and now it is lost in order", flush=True)
    assert lost == ["Broken pipe"]


def test_signal_handlers_are_put_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    Launched(tmp_path, "", 1)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_torn_report_counts_as_none(tmp_path):
    file = tmp_path / "report.json"
    Failure("error", 1, 2, "three").write(file)
    assert Failure.read(file) == Failure("error", 1, 2, "three", Failure.read(file).time)
    file.write_text(file.read_text()[:-5])
    assert Failure.read(file) is None


def test_a_command_that_does_not_exist_leaves_nothing(tmp_path):
    with pytest.raises(OSError):
        launch([str(tmp_path / "missing")], 2)

"""`shardwise studio`: the address, the export, and mistakes in one line."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest

from shardwise.cli.main import main


@contextmanager
def _killed(process: subprocess.Popen[str]) -> Iterator[None]:
    """Whatever a test finds, the process ends with it."""
    try:
        yield
    finally:
        process.kill()


COMMAND = [sys.executable, "-m", "shardwise", "studio", "--no-browser", "--json"]


def test_it_serves_until_it_is_interrupted_without_torch(tmp_path: Path) -> None:
    hidden = tmp_path / "torch.py"
    hidden.write_text("raise ImportError('the page needs no torch')\n")
    with (
        subprocess.Popen(
            [*COMMAND, "--view", "memory?zero=1", "--runs", str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": f"{tmp_path}:{':'.join(path for path in sys.path if path)}"},
            # A shell that runs the tests in its background has them ignore SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as process,
        _killed(process),
    ):
        assert process.stdout and process.stderr
        address = json.loads("".join(process.stdout.readline() for _ in range(3)))["address"]
        assert address.startswith("http://127.0.0.1:") and address.endswith("/#memory?zero=1")
        base = address.partition("#")[0]
        with urlopen(base, timeout=30) as reply:
            assert b"shardwise studio" in reply.read()
        for view in ("tokens", "memory", "collectives", "pipelines", "runs"):
            with urlopen(f"{base}api/{view}", timeout=60) as reply:
                assert json.load(reply)["tables"]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0
        assert process.stderr.read() == ""


def test_export_writes_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.html"
    assert main(["studio", "--out", str(path), "--view", "pipelines?ranks=2&micro=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"written": str(path)}
    assert '"ranks": "2"' in path.read_text()

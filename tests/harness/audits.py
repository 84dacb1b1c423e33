"""Audits of programs whose ranks are forked from a process that has imported torch."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from harness import audited_launcher
from harness.audited_programs import Program
from shardwise.audit.job import AuditedJob, audited_environment, run_audited

LAUNCHER = str(audited_launcher.__file__)


class AuditServer:
    """A process that has imported torch with the recorder; it ends at `close`. python: its interpreter. modules: others
    that it imports before it forks ranks."""

    def __init__(self, folder: Path, python: str = sys.executable, modules: Sequence[str] = ()) -> None:
        self.path = folder / "socket"
        environment = audited_environment(folder / "unused")
        self._process = subprocess.Popen([python, LAUNCHER, "serve", str(self.path), *modules], env=environment)
        deadline = time.monotonic() + 300
        while not self.path.exists():
            assert self._process.poll() is None and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.05)

    def command(self, folder: Path, ranks: int, script: Path) -> list[str]:
        """The command line of a program, which ends within a minute."""
        words = (sys.executable, "-S", LAUNCHER, "run", self.path, folder / "log", ranks, script)
        return ["timeout", "60", *map(str, words)]

    def audit(self, program: Program, folder: Path, hang: float = 3.0) -> AuditedJob:
        """Audit a program in an empty folder."""
        script = folder / "train.py"
        script.write_text(program.text)
        (folder / "recording").mkdir()
        command = self.command(folder, program.ranks, script)
        return run_audited(command, folder / "recording", hang, [], lambda line: None)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

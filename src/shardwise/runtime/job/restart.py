"""Runs that survive: started again from their last good checkpoint, after a rank has died or got stuck.

`until_done` does so around the launcher. Under torchrun, which starts the ranks again itself, each rank asks
`continued` where its run stands. Imports no torch.
"""

import json
import os
import shlex
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.errors import DivergedError, UserError
from shardwise.layout import fewer_ranks
from shardwise.layout.modules import check_run
from shardwise.report.run_directory import ERRORS, RunDirectory, occupied
from shardwise.runtime.job.config import LaunchConfig, TrainConfig
from shardwise.runtime.job.launch import DIVERGED, RANK_FAILED, USER_MISTAKE, Ending, supervise
from shardwise.runtime.job.locks import temporary_folder
from shardwise.runtime.job.output import clear_line


def until_done(config: TrainConfig, launch: LaunchConfig) -> tuple[Ending, TrainConfig]:
    """Run the ranks of a configuration, again after a rank died or got stuck, at most `launch.restarts` times.

    An elastic launch leaves out as many ranks as were killed, when dp can shrink. Returns how the last attempt ended,
    and its configuration.
    """
    first, began, restart, progress = config.resume, time.time(), 0, launch.progress
    while True:
        ending = _attempt(config, launch)
        if launch.restarts and ending.code == USER_MISTAKE and (damaged := _set_damaged_aside(config, first)):
            config = continued(replace(config, resume=first), restart, progress)
            # say from where a run resumes whose newest checkpoint is damaged, and note it in the run's events
            where = f"from {config.resume}" if config.resume else "from the beginning"
            progress(f"{damaged}; resuming {where}")
            _note(config, {"damaged": damaged, "from": config.resume})
            continue
        if ending.code != RANK_FAILED or restart == launch.restarts:
            break
        restart += 1
        smaller = None
        if launch.elastic and ending.lost:
            left = config.layout.ranks - len(ending.lost)
            smaller = fewer_ranks(config.layout, config.model, config.workload, left, check_run)
        config = continued(replace(config, resume=first, layout=smaller or config.layout), restart, progress)
        _report_restart(config, ending, launch, shrunk=smaller is not None)
    out = Path(config.out)
    if ending.code and _finished(out, began):
        ending = replace(ending, line=f"{ending.line}. The run had finished before")
    elif ending.code:
        # let the run's directory say how a run ended that did not finish
        # What cannot be written here could not be written before, and that has been said.
        with suppress(UserError):
            known = {RANK_FAILED: "failed", USER_MISTAKE: "failed", DIVERGED: "diverged"}
            RunDirectory.open(out).update(status=known.get(ending.code, "stopped"))
        if ending.code not in (USER_MISTAKE, DIVERGED) or (ending.code == USER_MISTAKE and _has_saved(config)):
            ending = replace(ending, line=f"{ending.line}. {way_on(out)}")
    return ending, config


def _attempt(config: TrainConfig, launch: LaunchConfig) -> Ending:
    """One launch of a configuration. The terminal's line is empty afterwards."""
    with temporary_folder() as folder:
        file = folder / "config.json"
        config.write(file)
        ending = supervise(
            [*launch.worker, str(file)],
            config.layout.ranks,
            port=launch.port,
            threads=config.threads,
            loopback=config.device == "cpu",
            rank0_stdout=launch.rank0_stdout,
            hang=config.hang,
        )
    if ending.code:
        clear_line(1 if launch.rank0_stdout is None else launch.rank0_stdout)
    return _with_stack(ending, Path(config.out))


def _set_damaged_aside(config: TrainConfig, first: str | None) -> str:
    """Set a run's own checkpoint aside that an attempt could not resume because its bytes are wrong.

    first: the checkpoint that the run's first attempt resumed. Returns a line about the damage; empty when the
    checkpoint is sound or another run's, and when there is nothing else to resume.
    """
    from shardwise.checkpoint import Checkpoint, DamagedError, set_aside, with_older

    checkpoints = (Path(config.out) / "checkpoints").resolve()

    def local(checkpoint: str | None) -> bool:
        return checkpoint is not None and Path(checkpoint).resolve().parent == checkpoints

    folder = Path(config.resume or "")
    if not local(config.resume):
        return ""
    try:
        Checkpoint.open(folder).verify()
    except DamagedError as error:
        if local(first) and with_older(error, folder) is error:
            return ""
        aside = set_aside(folder)
        return f"{error} (set aside as {aside.name})" if aside else ""
    except UserError:
        pass
    return ""


def continued(config: TrainConfig, restart: int, warn: Callable[[str], object]) -> TrainConfig:
    """The configuration that resumes a run after a failure: from its newest good checkpoint, or as it began."""
    from shardwise.checkpoint import latest

    newest = latest(Path(config.out) / "checkpoints", warn)
    again = replace(config, restart=restart, resume=str(newest.folder) if newest else config.resume)
    if config.corpus:
        return again
    # The text may have changed since the run began.
    begun = RunDirectory.open(config.out).run.get("config", {})
    corpus, fingerprint = (str(begun.get(name, "")) for name in ("corpus", "corpus_fingerprint"))
    return replace(again, corpus=corpus, corpus_fingerprint=fingerprint, former_corpus=None)


def torchrun_restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def last_attempt() -> bool:
    return torchrun_restarts() >= int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def begun_by_this_job(config: TrainConfig) -> bool:
    """Whether the run in the configuration's directory is one that this torchrun job has begun, with the same words."""
    try:
        run = RunDirectory.open(config.out).run
    except UserError:
        return False
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    # An agent whose own workers did not fail counts no restart; without a name of its own a job is known by that alone.
    if run.get("job") != job or (job in (None, "none") and not torchrun_restarts()):
        return False
    changes = ("resume", "restart", "layout", "corpus", "corpus_fingerprint", "former_corpus")
    before, now = run.get("config"), json.loads(json.dumps(config.to_json()))
    return isinstance(before, dict) and all(before.get(key) == now[key] for key in now if key not in changes)


def check_not_diverged(config: TrainConfig) -> None:
    """Raise `DivergedError` when the run has diverged: it would again."""
    if RunDirectory.open(config.out).run.get("status") == "diverged":
        raise DivergedError(f"{config.out} has diverged: it is not started again")


def _report_restart(again: TrainConfig, ending: Ending, launch: LaunchConfig, *, shrunk: bool) -> None:
    where = f"from {again.resume}" if again.resume else "from the beginning, because there is no checkpoint yet"
    how = ""
    if shrunk:
        how = f", on {again.layout.ranks} ranks as {again.layout}"
    elif launch.elastic and ending.lost:
        how = ", on as many ranks as before, because dp cannot shrink"
    launch.progress(f"restart {again.restart} of {launch.restarts} {where}{how}: {ending.line}")
    event = {"restart": again.restart, "from": again.resume, "layout": str(again.layout), "because": ending.line}
    _note(again, event)


def _note(again: TrainConfig, event: dict[str, Any]) -> None:
    if (Path(again.out) / "run.json").exists():
        with RunDirectory.open(again.out) as run:
            run.append({"time": time.time(), **event})


def _with_stack(ending: Ending, out: Path) -> Ending:
    """Keep where a stuck rank stood beside the tracebacks of others, and name the file."""
    if not ending.stack:
        return ending
    file = out / ERRORS / f"rank-{ending.stuck}.txt"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(ending.stack)
    except OSError:
        return ending
    return replace(ending, line=f"{ending.line}; its stack is in {file}")


def way_on(out: Path) -> str:
    """Saved state of an unfinished run, and how to continue."""
    from shardwise.checkpoint import latest

    if newest := latest(out / "checkpoints"):
        command = f"shardwise train --resume {shlex.quote(str(out))}"
        return f"The run is saved up to step {newest.manifest.step}; resume with: {command}"
    if occupied(out):
        return "The run has no checkpoint yet: start it again with another --out, and with --save-every N to keep some"
    return "The run had not begun: start it again"


def _has_saved(config: TrainConfig) -> bool:
    """Whether a run has saved more than it began with: what then stopped it, such as a full disk, is no mistake in its
    command, which can be resumed."""
    from shardwise.checkpoint import latest

    newest = latest(Path(config.out) / "checkpoints")
    return newest is not None and (config.resume is None or newest.folder.resolve() != Path(config.resume).resolve())


def _finished(out: Path, began: float) -> bool:
    """Whether the run in a directory has done its last step since `began`: a signal may come too late to stop it."""
    with suppress(UserError):
        run = RunDirectory.open(out).run
        return run.get("status") == "finished" and run.get("finished", 0.0) >= began
    return False

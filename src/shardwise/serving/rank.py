"""One rank of an engine: `python -m shardwise.serving.rank FOLDER`, of which `Service` starts as many as it needs.

FOLDER is the service's own: the job, and for the first rank of each replica the socket to talk to it. A rank that
another launcher has started learns both from rank 0, and has no FOLDER unless it is rank 0 (`remote.py`).
"""

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from shardwise.layout import Mesh
from shardwise.layout.axes import CP, DP, PP, TP
from shardwise.layout.serving import lockstep_axes
from shardwise.model.parameters import Model
from shardwise.report.step_report import Bytes, Phase
from shardwise.runtime.allocator import release_freed_memory
from shardwise.runtime.job import pulse
from shardwise.runtime.job import rank as process
from shardwise.runtime.job.launch import FORWARDED, USER_MISTAKE
from shardwise.runtime.job.meeting import meet
from shardwise.runtime.job.output import say
from shardwise.runtime.job.setup import cuda_device, make_comms, sharing
from shardwise.runtime.job.signals import handled
from shardwise.serving.engine import TokenGenerator
from shardwise.serving.job import Loading, Ready, ServingJob, weights_in
from shardwise.serving.lockstep import Lockstep, Receive, StepResult
from shardwise.serving.messages import Command, Drain, ReplicaLoad
from shardwise.serving.recording import StepRecord, notes_file
from shardwise.serving.remote import MEETING, MessageChannel, RankMeeting, launched_ranks
from shardwise.serving.service import JOB, connect

TICK = 0.5
"""Seconds after which a replica without work goes through an engine step all the same: a sign of life."""
_LONGEST = 86400.0
"""Seconds that ranks wait for each other at the beginning and at the end."""
_GIVE_BACK = 60.0
"""Seconds of work after which a rank gives the memory back that it has freed. The blocks of compiled products come and
go in ever new sizes, and without that its memory grows for many minutes."""
_PROGRESS = 0.2
"""Seconds between two words about loading."""


class EngineChannel:
    """The first rank's end of the socket to the service. A thread listens, so that a step never waits for it."""

    def __init__(self, connection: Connection | MessageChannel, replica: int) -> None:
        self._connection, self.replica = connection, replica
        self._heard: queue.SimpleQueue[list[Command]] = queue.SimpleQueue()
        self._load = ReplicaLoad(0, 0, 0, 0)
        self._told = 0.0
        threading.Thread(target=self._listen, name="way", daemon=True).start()

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self._heard.put(self._connection.recv())
        self._heard.put([Drain()])  # nobody is there any more

    def receive(self, idle: bool) -> list[Command]:
        found: list[Command] = []
        with suppress(queue.Empty):
            if idle:
                found += self._heard.get(timeout=TICK)
            while True:
                found += self._heard.get_nowait()
        return found

    def send(self, answers: list[object]) -> None:
        with suppress(OSError):  # the service has gone: the launcher ends this process
            self._connection.send(answers)

    def after(self, done: StepResult, load: ReplicaLoad) -> None:
        """Give an engine step's answers, and now and then say how much there is to do."""
        answers: list[object] = list(done.answers)
        now = time.monotonic()
        if load != self._load and (answers or now - self._told > TICK):
            answers.append(load)
            self._load, self._told = load, now
        if answers:
            self.send(answers)

    def loading(self, done: int, of: int) -> None:
        now = time.monotonic()
        if now - self._told > _PROGRESS:
            self._told = now
            self.send([Loading(self.replica, done, of)])


class StepRecorder:
    """Records of a rank's engine steps, where a report was requested."""

    def __init__(self, generator: TokenGenerator, folder: Path) -> None:
        self._generator, self._comms = generator, generator.comms
        self._file: IO[str] = notes_file(folder, generator.rank).open("w", buffering=1)
        held = generator.engine.storages()
        slots = sum(tensor.nbytes for tensor in held["comm"])
        self._bytes = Bytes(parameters=generator.parameter_bytes, comm=slots, cache=generator.cache_bytes)
        self._number = 0

    def begin(self) -> None:
        self._comms.start_recording()
        self._began = time.monotonic()

    def timed(self, receive: Receive) -> Receive:
        """`receive`, timed: an engine step begins when its commands have arrived, not with the wait for them."""

        def timed_receive(idle: bool) -> list[Command]:
            commands = receive(idle)
            self._began = time.monotonic()
            return commands

        return timed_receive

    def end(self, done: StepResult, load: ReplicaLoad) -> None:
        """The engine step is over, in which somebody had something to do."""
        seconds = time.monotonic() - self._began
        self._comms.stop_recording()
        self._number += 1
        ledger, transport = self._comms.ledger(), self._comms.transport()
        phase: Phase = "prefill" if done.step.prefill else "decode"
        cached = self._generator.cache_bytes * load.pages // load.of_pages
        rows = tuple(replace(row, phase=phase) for row in ledger)
        note = StepRecord(
            self._number, phase, done.step.tokens, len(done.step.wanted), seconds, self._began, cached, self._bytes,
            rows, transport,
        )  # fmt: skip
        self._file.write(json.dumps(note.to_json()) + "\n")


Connect = Callable[[int], "Connection | MessageChannel"]
"""Replica -> the way of its first rank to the service."""


def run(
    rank: int,
    job: ServingJob,
    connect: Connect,
    signs: pulse.Pulse,
    stage: type[TokenGenerator] = TokenGenerator,
    *,
    joined: bool = False,
) -> None:
    """Load, answer until the last client is done, and end. joined: another launcher has started the ranks."""
    started = time.monotonic()
    device = torch.device("cpu") if job.device == "cpu" else cuda_device(process.local_number())
    mesh = Mesh.of(job.layout, job.model)
    replica = mesh.index(DP, rank)
    together = dist.new_group(
        sorted(mesh.group(lockstep_axes(job.layout) + PP, rank)),
        timeout=timedelta(seconds=_LONGEST),
        use_local_synchronization=True,
    )
    first = mesh.index(CP + TP + PP, rank) == 0 and replica < job.replicas
    way = EngineChannel(connect(replica), replica) if first else None
    weights: Any = weights_in(job.weights)[1]
    subject: Model = job.model
    make: Callable[..., Any] = stage
    if job.model.counted:
        from shardwise.serving.class_engine import ClassGenerator, divided

        split = divided(job)
        subject, make = split.described.blueprint, partial(ClassGenerator, split=split)
    comms = make_comms(
        job.layout, subject, rank,
        timeout=job.hang + pulse.MARGIN, transport=job.transport, device=device, pulse=signs,
    )  # fmt: skip
    generator: TokenGenerator = make(job, comms, rank, device)
    generator.load(weights, way.loading if way else lambda done, of: None)
    hop = generator.hop()
    _wait_for_all("the start of the replica", together, signs)
    _warn_of_nonfinite(generator, together, way is not None)
    if way:
        way.send([Ready(
            way.replica, job.context, job.pages, job.page, generator.parameter_bytes, generator.cache_bytes,
            comms.backend, time.monotonic() - started, hop,
        )])  # fmt: skip
    # That launcher signals all its processes: the front end is the one that ends the ranks.
    with handled(FORWARDED if joined else (), signal.SIG_IGN):
        serve(generator, way, signs)
    _wait_for_all("the end of the replica", together, signs)
    signs.idle()
    comms.close()


def _wait_for_all(words: str, together: Any, signs: pulse.Pulse) -> None:
    """Meet the ranks in step with this one, however long their disks take: the launcher knows who makes no progress."""
    signs.wait(words)
    dist.barrier(together)
    signs.work("its first turn")


def _warn_of_nonfinite(generator: TokenGenerator, together: Any, first: bool) -> None:
    ranks = torch.tensor(bool(generator.nonfinite), dtype=torch.int64, device=generator.device)
    dist.all_reduce(ranks, group=together)
    if first and int(ranks):
        which = f", the first being {generator.nonfinite}" if generator.nonfinite else ""
        say(f"shardwise: warning: weights in {generator.job.weights} are NaN or infinite{which}: answers mean nothing")


def serve(generator: TokenGenerator, way: EngineChannel | None, signs: pulse.Pulse) -> None:
    """Engine steps, until the service wants no more."""
    notes = StepRecorder(generator, Path(generator.job.report)) if generator.job.report else None
    receive = None if way is None else way.receive if notes is None else notes.timed(way.receive)
    lockstep = Lockstep(generator, receive)
    more, number = True, 0
    worked, given = False, time.monotonic()
    while more:
        number += 1
        signs.step(number)
        if notes:
            notes.begin()
        done = lockstep.step()
        more, load = done.more, lockstep.scheduler.load
        if notes and lockstep.active:
            notes.end(done, load)
        if way:
            way.after(done, load)
        worked = worked or lockstep.active
        if worked and (not lockstep.active or time.monotonic() - given > _GIVE_BACK):
            release_freed_memory()
            worked, given = False, time.monotonic()
    lockstep.finish()


def join(job: ServingJob, store: dist.Store | None = None) -> int:
    """Meet the other ranks; returns this one's number. Raises `UserError` where a GPU is needed and there is none.

    store: of the launcher that has started them.
    """
    timeout = job.hang + pulse.MARGIN
    if job.device == "cpu":
        return process.join(timeout, store=store)
    device = cuda_device(process.local_number())
    if notice := sharing(device):
        if process.number() == 0:
            say(notice)
        return process.join(timeout, store=store)
    return process.join(timeout, device, store)


def main(argv: list[str], stage: type[TokenGenerator] = TokenGenerator) -> int:
    """Run one rank. stage: what computes. Returns the exit code."""
    process.bind()

    def work() -> None:
        signs = pulse.Pulse(pulse.from_environment())
        signs.work("its preparation")
        folder = Path(argv[0]) if argv else None
        if folder is None or (folder / MEETING).exists():
            _run_joined(folder, signs, stage)
        else:
            job = ServingJob.read(folder / JOB)
            run(join(job), job, partial(connect, folder), signs, stage)

    return process.guarded(work)


def _run_joined(folder: Path | None, signs: pulse.Pulse, stage: type[TokenGenerator]) -> None:
    """Be a rank that another launcher has started. folder: the service's, on rank 0."""
    words = (folder / MEETING).read_text() if folder else ""
    store, words = meet(process.number(), int(os.environ["WORLD_SIZE"]), words, pulse.STARTING)
    meeting = RankMeeting.from_json(json.loads(words))
    os.environ["OMP_NUM_THREADS"] = str(meeting.job.threads)
    rank = join(meeting.job, store)

    run(rank, meeting.job, meeting.connect, signs, stage, joined=True)


if __name__ == "__main__":
    if len(sys.argv) != 2 and not (len(sys.argv) == 1 and launched_ranks()):
        sys.exit(USER_MISTAKE)
    process.leave(main(sys.argv[1:]), at_once=True)

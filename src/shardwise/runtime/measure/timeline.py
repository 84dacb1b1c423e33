"""The timeline of one step: what a rank computes when, which collectives are under way meanwhile, when it stands still.

Three streams (`report/exposure.py` has their names). "compute" and "waiting" divide the step between them: the rank
either works on a part of the step or stands still for a collective, which is seen where the program visits a part and
where it waits. "communication" holds every collective from its issue to its completion, which gloo's own thread tells.
A collective that is waited for at once has the rank stand still from its issue on. Copies of what is offloaded are in
streams of their own, "host" and "disk".

On CPU the clock is the host's. On CUDA it is the device's: host code runs ahead there, and events in the streams tell
when their turn came. Compute spans then include gaps in which the device had nothing to do.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardwise.report.exposure import COMMUNICATION, COMPUTE, DATA, DISK, EMULATED, INJECTED, WAITING
from shardwise.report.rank_timelines import Recorded
from shardwise.report.step_report import DTYPE_BYTES, LedgerRow, TransportRow
from shardwise.runtime.measure.parts import PartWatcher
from shardwise.runtime.transport.comms import Key, Timing

if TYPE_CHECKING:
    from shardwise.runtime.pipeline.step import TrainProgram

Event = dict[str, Any]

SHORT = 20_000
"""Nanoseconds without a core that are not noted."""


class _HostClock:
    """Moments are nanoseconds of the monotonic clock."""

    def now(self) -> int:
        return time.perf_counter_ns()

    def between(self, start: int, moment: int) -> int:
        """Nanoseconds."""
        return moment - start


class _DeviceClock:
    """Moments are CUDA events in the stream that is current where `now` is called; read them when all have happened.

    What it rests on is what torch documents. A collective's future runs its callbacks in a
    stream that waits for the collective, so an event recorded there happens at the collective's completion; and
    waiting for a work lets the current stream wait, so events on either side of it enclose the time that it stood.
    """

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: torch.cuda.Event, moment: torch.cuda.Event) -> int:
        """Nanoseconds."""
        moment.synchronize()
        return round(start.elapsed_time(moment) * 1e6)


@dataclass
class TimelineCollective:
    """One collective under way; `Comms` and `PendingCollective` tell it what happens. Moments are those of the
    timeline's clock.

    issued, waited, back: when it was issued, when the rank began to stand still for it, and went on. done: when it was
    complete, as the transport tells, in whichever thread; None from a transport that does not, as gloo of messages
    between stages: such a one counts until the rank has waited for it.
    """

    timeline: TimelineRecorder
    key: Key
    issued: Any
    waited: Any = None
    back: Any = None
    done: Any = None

    @property
    def name(self) -> str:
        return f"{self.key[1]} {self.key[3]}"

    def follow(self, works: list[Any]) -> None:
        """Have the moment noted at which the last of `works` is complete."""
        for work in works:
            try:
                future = work.get_future()
            except (AttributeError, RuntimeError):
                continue  # shared memory's works have none, and gloo's messages raise
            future.add_done_callback(self._complete)

    def _complete(self, _: Any) -> None:
        self.done = self.timeline.now()

    def awaited(self) -> None:
        """The rank stands still for it from now on, if it does not already."""
        if self.waited is None:
            self.waited = self.timeline.mark(WAITING, f"for {self.name}")

    def arrived(self) -> None:
        self.back = self.timeline.resume()

    def times(self, end: int) -> tuple[int, int, int]:
        """(issued, done, how long the rank stood still before it was done) in nanoseconds; end: of the step."""
        read = self.timeline.since_start
        # A receive is posted long before its message is sent: it counts from when it is waited for.
        begun = self.waited if self.key[1] == "recv" and self.waited is not None else self.issued
        issued, back = read(begun), end if self.back is None else read(self.back)
        # The thread that tells may come late: what has been waited for is complete.
        done = max(issued, back if self.done is None else min(read(self.done), back))
        return issued, done, 0 if self.waited is None else max(0, done - read(self.waited))


class TimelineRecorder:
    """Context manager around one `program.step`: afterwards `events` are its timeline.

    Entering it waits for the other ranks, so that all begin about together, unless each goes its own way (parameter
    servers); times count from there. It also records the ledger, and `transport` gives its rows' times.
    """

    def __init__(self, program: TrainProgram) -> None:
        self._program = program
        self._clock: Any = _DeviceClock() if program.device.type == "cuda" else _HostClock()
        self._marks: list[tuple[Any, str, str]] = []
        self._core_waits: list[int] = []
        """Nanoseconds for which this thread had waited for a core at each mark."""
        self._loaded: dict[str, int] = {}
        self._flights: list[TimelineCollective] = []
        self._copies: list[Event] = []
        self._parts = PartWatcher(program, self._begin_part)
        self._doing = "start of the step"
        self._began = 0
        self._schedstat: int | None = None

    def __enter__(self) -> TimelineRecorder:
        comms = self._program.comms
        if not self._program.plan.layout.served:
            comms.pulse.collective("the barrier before a recorded step")
            comms.pulse.wait()
            dist.barrier()
            comms.pulse.work()
        self._parts.start()
        with suppress(OSError):
            self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        comms.start_recording()
        comms.timeline = self
        self._began = time.perf_counter_ns()
        self.resume()
        return self

    def __exit__(self, *error: Any) -> None:
        self._end = self.now()
        self._core_waits.append(self._core_wait())
        if self._schedstat is not None:
            os.close(self._schedstat)
            self._schedstat = None
        comms = self._program.comms
        comms.timeline = None
        comms.stop_recording()
        self._parts.stop()

    # -- what happens

    def now(self) -> Any:
        return self._clock.now()

    def since_start(self, moment: Any) -> int:
        """Nanoseconds from the start of the step."""
        return int(self._clock.between(self._marks[0][0], moment))

    def mark(self, stream: str, name: str) -> Any:
        """From now on the rank does this; returns the moment."""
        moment = self.now()
        self._marks.append((moment, stream, name))
        self._core_waits.append(self._core_wait())
        return moment

    def _core_wait(self) -> int:
        """Nanoseconds for which this thread was ready to run and had no core, as Linux counts them; else 0."""
        return int(os.pread(self._schedstat, 80, 0).split()[1]) if self._schedstat is not None else 0

    @contextmanager
    def loading(self) -> Iterator[Callable[[int, int], None]]:
        """The rank loads its text inside the context, and gives the number of micro-batches and of their tokens."""
        self.mark(DATA, "loading text")
        yield lambda micro_batches, tokens: self._loaded.update(micro_batches=micro_batches, tokens=tokens)
        self.resume()

    @contextmanager
    def for_disk(self) -> Iterator[None]:
        self.mark(WAITING, f"for {DISK}")
        yield
        self.resume()

    def injected(self, spans: Sequence[tuple[int, int]], emulated: bool) -> None:
        """`--slow` or `--emulate` let the rank wait in these spans, nanoseconds of the monotonic clock."""
        self._apart(EMULATED if emulated else INJECTED, "injected waiting", spans)

    def resume(self) -> Any:
        """From now on the rank computes what it last computed; returns the moment."""
        return self.mark(COMPUTE, self._doing)

    def _begin_part(self, part: str) -> None:
        self._doing = part
        self.resume()

    def issue(self, key: Key, at_once: bool) -> TimelineCollective:
        """A collective is about to be issued. at_once: the rank will stand still until it is complete."""
        flight = TimelineCollective(self, key, None)
        if at_once:
            flight.awaited()
        flight.issued = flight.waited if at_once else self.now()
        self._flights.append(flight)
        return flight

    def copied(self, op: tuple[str, str], unit: str, spans: Sequence[tuple[int, int]]) -> None:
        """A copy between homes ran in these spans; each home beside the device has a stream of its own."""
        self._apart(op[1], f"{op[0]} {unit}", spans)

    def _apart(self, stream: str, name: str, spans: Sequence[tuple[int, int]]) -> None:
        began = self._began
        self._copies += [_event(name, stream, start - began, stop - began) for start, stop in spans]

    # -- what was seen

    def events(self) -> tuple[Event, ...]:
        """The timeline, as `Role.timeline` holds it: stream by stream, each in order."""
        end = self.since_start(self._end)
        starts = [self.since_start(moment) for moment, _, _ in self._marks]
        marked: dict[str, list[Event]] = {COMPUTE: [], WAITING: [], DATA: []}
        waits = [after - before for before, after in pairwise(self._core_waits)]
        for (_, stream, name), start, stop, wait in zip(self._marks, starts, [*starts[1:], end], waits, strict=True):
            if start < stop:
                more = {"core_wait_s": wait / 1e9} if wait > SHORT and stream == COMPUTE else {}
                marked[stream].append(
                    _event(name, stream, start, stop, more or (self._loaded if stream == DATA else {}))
                )
        copies = sorted(self._copies, key=lambda event: (event["stream"], event["start_s"]))
        calls = (self._collective(flight, end) for flight in self._flights)
        return (*marked[COMPUTE], *calls, *marked[WAITING], *marked[DATA], *copies)

    def recorded(self) -> Recorded:
        """The timeline, and where it lies on the clock of this host."""
        return Recorded(_host(), self._began, self.events())

    def _collective(self, flight: TimelineCollective, end: int) -> Event:
        phase, op, axes, unit, dtype, elements = flight.key
        issued, done, _ = flight.times(end)
        about = {"op": op, "axes": axes, "unit": unit, "phase": phase, "bytes": elements * DTYPE_BYTES[dtype]}
        if timing := self._program.comms.timings.get(flight.key):
            about |= {"algorithm": timing.algorithm, "ranks": list(timing.ranks)}
        return _event(flight.name, COMMUNICATION, issued, done, about)

    def transport(self, ledger: Sequence[LedgerRow]) -> tuple[TransportRow, ...]:
        """The transport rows of a ledger, timed to the collectives' completion, whenever they were waited for.

        What a rank does with a result, such as the sum of a reduce-scatter over gloo, counts as its computation.
        ledger: of a step that did the same. Exchanges of experts differ from step to step in their elements: they count
        with the first row that differs in nothing else.
        """
        end = self.since_start(self._end)
        timings = self._program.comms.timings
        rows = {astuple(row)[:-1]: index for index, row in enumerate(ledger)}
        by_key = {astuple(row)[:-2]: index for index, row in reversed(list(enumerate(ledger)))}
        places = {key: rows.get(key, by_key.get(key[:-1])) for key in timings}
        sums: dict[Key, list[int]] = {key: [0, 0] for key in timings}
        for flight in self._flights:
            issued, done, still = flight.times(end)
            sums[flight.key][0] += done - issued
            sums[flight.key][1] += still
        found: dict[int, list[tuple[Timing, list[int]]]] = {}
        for key, place in places.items():
            if place is not None:
                found.setdefault(place, []).append((timings[key], sums[key]))
        return tuple(_transport_row(place, found[place]) for place in sorted(found))


def _transport_row(place: int, parts: Sequence[tuple[Timing, list[int]]]) -> TransportRow:
    """One row of entries with their nanoseconds, in all and standing still."""
    total, still = (sum(times[i] for _, times in parts) / 1e9 for i in (0, 1))
    whole = Timing(parts[0][0].key, parts[0][0].algorithm)
    for timing, _ in parts:
        if timing.moved is not None:
            whole.add(timing.moved)
    return TransportRow(place, whole.algorithm, *whole.sent, total, still)


def _event(name: str, stream: str, start: int, stop: int, args: Event | None = None) -> Event:
    event = {"name": name, "stream": stream, "start_s": start / 1e9, "duration_s": (stop - start) / 1e9}
    return event | ({"args": args} if args else {})


def _host() -> str:
    """A word for the machine whose monotonic clock this is: its boot, which containers on it share; else its name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()

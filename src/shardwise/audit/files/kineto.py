"""Kineto's Chrome traces, as `torch.profiler` exports them (torch 1.8 and later).

On a device a collective is its NCCL or RCCL kernel, named by its arguments or, before torch 2.3, by the `nccl:`
annotation around its launch. On the host it is the backend's annotation (`gloo:all_reduce`), which names no group.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.audit.calls import Call
from shardwise.audit.files import recording
from shardwise.audit.files.recording import KERNEL, Interval, Recording, dtype_of, operation, ranks_of
from shardwise.report.exposure import overlap, union, without

_DEVICE = {"kernel": "compute", "gpu_memcpy": "copies", "memcpy": "copies", "gpu_memset": "copies", "memset": "copies"}
_RUNTIME = {"cuda_runtime", "cuda_driver", "runtime", "hip_runtime", "mtia_runtime", "privateuse1_runtime"}
_HOST = {"cpu_op", "operator", *_RUNTIME}
_KNOWN = {"user_annotation", "gpu_user_annotation", "python_function", "cuda_sync", "overhead"}
_BLOCKED = ("Synchronize", "wait_tensor")
"""Of host operations that wait for a device or a collective."""
_BACKENDS = ("nccl:", "gloo:", "mpi:", "ucc:", "xccl:", "hccl:")
_CALLS = ("c10d", "_c10d", "record_param_comms")
"""Beginnings of host operations that start a collective or wait for one."""
_STEP = "ProfilerStep#"
_MARKS = ("user_annotation", "cpu_op", "operator")
"""Categories of ranges that a program or torch marks."""


class _Event:
    """A complete event. begin and end are nanoseconds of the host's clock."""

    __slots__ = ("args", "begin", "category", "end", "name", "thread")

    def __init__(self, data: Mapping[str, Any], base: int) -> None:
        begin, duration = data["ts"], data.get("dur", 0)
        self.begin = base + round(begin * 1000)
        self.end = self.begin + round(duration * 1000)
        if not 0 <= self.begin <= self.end < 1 << 63:
            raise ValueError("an event with a negative time")
        self.name, self.category = str(data.get("name", "")), str(data.get("cat", "")).lower()
        self.thread, self.args = (data.get("pid"), data.get("tid")), data.get("args") or {}

    @property
    def span(self) -> Interval:
        return self.begin, self.end


def read_trace(data: Mapping[str, Any], path: str) -> Recording:
    """One rank's trace. Raises what damaged events raise."""
    about = data.get("distributedInfo") or {}
    rank = int(about["rank"]) if "rank" in about else recording.rank_in_name(path)
    base = int(data.get("baseTimeNanoseconds") or 0)
    complete = [item for item in data["traceEvents"] if isinstance(item, dict) and item.get("ph") == "X"]
    events = [_Event(item, base) for item in complete if item.get("cat") != "Trace"]
    events.sort(key=lambda event: event.begin)
    device = any(event.category in _DEVICE for event in events)
    groups = {str(group["pg_name"]): ranks_of(group.get("ranks")) for group in about.get("pg_config") or ()}
    rows = list(_collectives(events, groups, device))
    if not device:  # gloo has several threads, which begin calls in another order than that of the program
        rows.sort(key=lambda row: int(row[0].args.get("Record function id", 0)))
    times = [{"begin": event.begin / 1e9, "end": event.end / 1e9} for event, _ in rows]
    calls = tuple(replace(call, rank=rank, order=at, **times[at]) for at, (_, call) in enumerate(rows))
    unknown = ["lines of the program"]
    strange = sorted({event.category for event in events} - _KNOWN - _HOST - _DEVICE.keys())
    unknown += [f"what {category} are" for category in strange if category.endswith("events")]
    if any(call.group == () for call in calls):
        unknown.append("groups of collectives")
    spans = _device_spans(events) if device else _host_spans(events)
    marked = [event for event in events if event.name.startswith(_STEP) and event.category in _MARKS]
    steps = tuple((event.name, event.span) for event in marked)
    return Recording(
        rank, calls, int(about.get("world_size") or 0), host=str(data.get("host_name", "")), path=path, kind="Kineto",
        groups=len(groups), spans=spans, windows=steps, device=device, unknown=tuple(unknown),
    )  # fmt: skip


def _collectives(
    events: Sequence[_Event], groups: Mapping[str, tuple[int, ...]], device: bool
) -> Iterable[tuple[_Event, Call]]:
    """Events of collectives, and what they are, without rank and times."""
    launches = {event.args.get("correlation"): event for event in events if event.category in _RUNTIME}
    annotations: dict[Any, list[_Event]] = defaultdict(list)
    for event in events:
        if event.name.startswith(_BACKENDS) and not event.category.startswith("gpu"):
            annotations[event.thread].append(event)
            if not device and (op := operation(event.name)):
                yield event, _by_annotation(event, op, groups)
    for event in events:
        if event.category != "kernel" or not KERNEL.match(event.name):
            continue
        launch = launches.get(event.args.get("correlation"))
        around = None
        if launch and (before := annotations[launch.thread]):
            # The last one that began before the launch, if it had not ended.
            i = bisect_right(before, launch.begin, key=lambda event: event.begin)
            around = before[i - 1] if i and before[i - 1].end >= launch.begin else None
        if "Collective name" in event.args:
            yield event, _by_arguments(event, groups)
        else:
            op = operation(around.name if around else event.name)
            yield event, _by_annotation(around, op or "collective", groups)


def _by_arguments(event: _Event, groups: Mapping[str, tuple[int, ...]]) -> Call:
    about = event.args
    name = str(about.get("Process Group Name", ""))
    members = groups.get(name) or ranks_of(about.get("Process Group Ranks"))
    dtype, size = dtype_of(about.get("dtype", ""))
    sent, received = (int(about.get(f"{way} msg nelems", 0)) for way in ("In", "Out"))
    op = operation(str(about["Collective name"])) or operation(event.name) or "collective"
    peer = about.get("Dst Rank" if op == "send" else "Src Rank") if op in ("send", "recv") else None
    return Call(0, 0, op, members, dtype, (sent,), sent * size, received * size, peer, comm=name)


def _by_annotation(around: _Event | None, op: str, groups: Mapping[str, tuple[int, ...]]) -> Call:
    """By "Input Dims" and "Input type", which only traces with record_shapes have; the group where there is one."""
    about = around.args if around else {}
    shapes, types = about.get("Input Dims") or [], about.get("Input type") or []
    dtype = dtype_of(types[0])[0] if types else ""
    shape = tuple(map(int, shapes[0])) if shapes else ()
    members = set(groups.values())
    group = members.pop() if len(members) == 1 else ()
    return Call(0, 0, op, group, dtype, shape, recording.nbytes(shapes[:1], types[:1]))


def _device_spans(events: Iterable[_Event]) -> dict[str, Sequence[Interval]]:
    spans: dict[str, list[Interval]] = defaultdict(list)
    for event in events:
        if event.category in _DEVICE and not KERNEL.match(event.name):
            spans[_DEVICE[event.category]].append(event.span)
        elif event.category in _HOST and not any(word in event.name for word in _BLOCKED):
            spans["loading" if _loads(event) else "host"].append(event.span)
        elif _loads(event):
            spans["loading"].append(event.span)
    return {name: union(intervals) for name, intervals in spans.items()}


def _host_spans(events: Iterable[_Event]) -> Mapping[str, Sequence[Interval]]:
    """Without a device the operations of the host are the computing."""
    spans: dict[str, list[Interval]] = defaultdict(list)
    for event in events:
        if _loads(event):
            spans["loading"].append(event.span)
        elif event.category in ("cpu_op", "operator") and not event.name.startswith(_BACKENDS):
            spans["calls" if event.name.startswith(_CALLS) else "compute"].append(event.span)
    joined = {name: union(intervals) for name, intervals in spans.items()}
    calls, compute = joined.pop("calls", []), joined.get("compute", [])
    # An operation around a call, such as a backward function, does not compute meanwhile.
    return joined | {"compute": without(compute, overlap(compute, calls))}


def _loads(event: _Event) -> bool:
    return "DataLoader" in event.name and event.category in _MARKS

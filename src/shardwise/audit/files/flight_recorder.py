"""Dumps of PyTorch's Flight Recorder: the pickle of `_dump_fr_trace` and `_dump_nccl_trace`, and their JSON.

Versions 1.0 (torch 2.2, a list of entries with `seq_id`) to 2.10 (torch 2.13). Times at which the watchdog noticed an
end are no ends of calls, and are left out. A gloo entry stays "scheduled": it has ended when it is retired.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwise.audit.calls import MESSAGES, Call, State
from shardwise.audit.files.recording import Recording, dtype_of, nbytes, operation, rank_in_name, ranks_of, user_line

_PEERS = re.compile(r"(send|recv)\w* (\d+)(->|<-)(\d+)")


def is_dump(data: Any) -> bool:
    """Whether a pickle or JSON is a dump."""
    entries = data.get("entries") if isinstance(data, dict) else data
    return isinstance(entries, list) and all(isinstance(e, dict) and "profiling_name" in e for e in entries)


def read_dump(data: Any, path: str) -> Recording:
    """A rank's dump. Raises what damaged entries raise."""
    rank = rank_in_name(path)
    entries = sorted(data["entries"] if isinstance(data, dict) else data, key=lambda e: int(e.get("record_id", 0)))
    config = data.get("pg_config") or {} if isinstance(data, dict) else {}
    groups = {str(name): ranks_of(about.get("ranks")) for name, about in config.items()}
    calls: list[Call] = []
    for entry in entries:
        group, description = ([*map(str, entry.get("process_group") or ("0",)), ""])[:2]
        members = groups.get(group) or (groups.get("", ()) if description == WORLD else ())  # gloo's has no name
        name = WORLD if description == WORLD else group
        if call := _call(entry, rank, int(entry.get("record_id", len(calls))), members):
            number = int(entry.get("collective_seq_id", entry.get("seq_id", 0)))
            calls.append(replace(call, comm=name, number=number if call.op not in MESSAGES else 0))
    unknown = ["when calls end, so how much is exposed"]
    if calls and not any(call.where for call in calls):
        unknown.append("lines of the program (the dump has no stacks)")
    if calls and not any(call.dtype for call in calls):
        unknown.append("dtypes and bytes (of this version)")
    if calls and calls[0].order > 0:
        unknown.append(f"the first {calls[0].order} calls, which the ring buffer no longer has")
    return Recording(rank, tuple(calls), path=path, kind="Flight Recorder", unknown=tuple(unknown))


WORLD = "default_pg"
"""Description of the group of all ranks."""


def _call(entry: Mapping[str, Any], rank: int, order: int, group: tuple[int, ...]) -> Call | None:
    name = str(entry["profiling_name"])
    op, frames = operation(name), entry.get("frames") or ()
    backward = str(entry.get("thread_name")).startswith("pt_autograd") or any("backward" in str(f) for f in frames)
    if not op:  # "coalesced": the end of calls that are entries themselves
        return None
    dtypes = entry.get("input_dtypes") or entry.get("output_dtypes") or []
    shapes = entry.get("input_sizes") or []
    inputs = nbytes(shapes, dtypes)
    outputs = nbytes(entry.get("output_sizes") or [], entry.get("output_dtypes") or dtypes)
    if op in MESSAGES:  # either list may have the message
        inputs = outputs = max(inputs, outputs)
    peers = _PEERS.search(name)
    peer = int(peers[4]) if peers else None
    ended = entry.get("state") == "completed" or (name.startswith("gloo:") and entry.get("retired"))
    state: State = "completed" if ended else "started" if entry.get("state") == "started" else "scheduled"
    begin = float(entry["time_created_ns"]) / 1e9 if entry.get("time_created_ns") else None
    return Call(
        rank, order, op, group, dtype_of(dtypes[0])[0] if dtypes else "", tuple(map(int, shapes[0])) if shapes else (),
        inputs, outputs, group[peer] if peer is not None and peer < len(group) else peer, user_line(frames),
        "backward" if backward else "", begin, state=state,
    )  # fmt: skip

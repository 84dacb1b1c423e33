"""Files and folders to `Recording`s. Whatever is in a file, nothing of it runs."""

import json
import math
import stat
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.audit.files.chakra import read_execution_trace, read_graph
from shardwise.audit.files.flight_recorder import WORLD, is_dump, read_dump
from shardwise.audit.files.kineto import read_trace
from shardwise.audit.files.recording import UNRANKED, Recording
from shardwise.checkpoint.foreign.pickles import load_plain
from shardwise.errors import UserError, os_errors

MOST = 1 << 30
"""Bytes of the longest file that is read, unpacked."""

_KINDS = "a Flight Recorder dump, a Kineto trace, an execution trace or a Chakra graph"
_OTHERS = {
    b"SQLite format 3": "an SQLite database, such as Nsight Systems exports",
    b"PK\x03\x04": "an archive",
    b"\x1f\x8b": "compressed twice",
}


def read_files(paths: Sequence[Path]) -> tuple[list[Recording], list[str]]:
    """(recordings by kind and rank, what was not read and why) of files and the files directly in folders.

    Raises `UserError` for a named file that is not read, a folder without any that is, and files of different jobs.
    """
    recordings: list[Recording] = []
    refused: list[str] = []
    for path in paths:
        before = len(recordings)
        with os_errors(f"read {path}", typed=path):
            inside = [file for file in path.iterdir() if not file.is_dir()] if path.is_dir() else [path]
        for file in sorted(file for file in inside if not file.name.startswith(".") or file == path):
            try:
                recordings += _read(file)
            except UserError as error:
                if file == path:
                    raise
                refused.append(str(error))
        if path.is_dir() and len(recordings) == before:
            raise UserError(refused[0] if len(refused) == 1 else f"{path} has no file that is {_KINDS}")
    first: dict[tuple[str, int], Recording] = {}
    for one in _ranked(recordings):
        kept = first.setdefault((one.kind, one.rank), one)
        if kept is not one:
            refused.append(f"{one.path}: rank {one.rank} is already read, from {kept.path}")
    ordered = [first[key] for key in sorted(first)]
    _check_one_job(ordered)
    return _with_groups(ordered), refused


def _ranked(recordings: Sequence[Recording]) -> Iterable[Recording]:
    """A file without a rank is rank 0 where it is the only one of its kind."""
    for one in recordings:
        if one.rank == UNRANKED:
            if any(other.kind == one.kind for other in recordings if other is not one):
                raise UserError(f"{one.path} does not say which rank's it is: name it such as trace_rank_0.json")
            calls = tuple(replace(call, rank=0) for call in one.calls)
            one = replace(one, rank=0, calls=calls, unknown=("which rank it is", *one.unknown))
        yield one


def _read(path: Path) -> list[Recording]:
    data, where = _content(path), str(path)
    try:
        return _recordings(data, path, where)
    except UserError:
        raise
    except RecursionError:
        raise UserError(f"{where} is nested too deeply") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        why = f": {error.args[0]}" if type(error) is ValueError and error.args else ""
        raise UserError(f"{where} is damaged, or not {_KINDS}{why if len(why) < 60 else ''}") from None


def _recordings(data: bytes, path: Path, where: str) -> list[Recording]:
    if data[:1] == b"\x80":
        dump = load_plain(data, where, "a Flight Recorder dump")
        if _expanded(dump, {}) > MOST // 8:
            raise UserError(f"{where} is no Flight Recorder dump: it contains lists inside themselves, or too often")
        if not is_dump(dump):
            raise UserError(f"{where} is a pickle, but no Flight Recorder dump")
        return [read_dump(dump, where)]
    if data.lstrip()[:1] in (b"{", b"["):
        return _from_json(json.loads(data, strict=False), where)
    if path.suffix == ".et":
        return [read_graph(data, where)]
    other = next((words for start, words in _OTHERS.items() if data.startswith(start)), "")
    raise UserError(f"{where} is {other or 'empty' if not data else other or 'something else'}, not {_KINDS}")


def _expanded(value: Any, known: dict[int, float]) -> float:
    """Values in a pickle, those that are in several places as often; without end for a list inside itself."""
    if not isinstance(value, (list, tuple, dict)):
        return 1
    if id(value) not in known:
        known[id(value)] = math.inf
        items = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_expanded(item, known) for item in items)
    return known[id(value)]


def _from_json(data: Any, where: str) -> list[Recording]:
    if is_dump(data) and data:
        return [read_dump(data, where)]
    if isinstance(data, list) and any(isinstance(item, dict) and "ph" in item for item in data):
        data = {"traceEvents": data}  # the format's short form
    if isinstance(data, dict) and isinstance(data.get("traceEvents"), list):
        about = data.get("otherData")
        if isinstance(about, dict) and "layout" in about:
            raise UserError(f"{where} is a trace of shardwise: its run is for shardwise compare and shardwise studio")
        return [read_trace(data, where)]
    if isinstance(data, dict) and "schema" in data and isinstance(data.get("nodes"), list):
        return [read_execution_trace(data, where)]
    if isinstance(data, dict) and "workload_graph" in data:
        raise UserError(f"{where} is Chakra's JSON, which has no sizes and no groups: give the .et file")
    raise UserError(f"{where} is JSON, but not {_KINDS}")


def _content(path: Path) -> bytes:
    """All bytes of a regular file, unpacked where it is gzip. Raises `UserError`, also above `MOST` bytes."""
    with os_errors(f"read {path}"):
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):  # a pipe would make its reader wait
            raise UserError(f"cannot read {path}: it is not a regular file")
        size = about.st_size
        data = path.read_bytes() if size <= MOST else b""
    if data[:2] == b"\x1f\x8b":
        unpacker = zlib.decompressobj(wbits=31)
        try:
            data, size = unpacker.decompress(data, MOST), MOST + 1 if unpacker.unconsumed_tail else 0
        except zlib.error:
            raise UserError(f"{path} is damaged: it is no gzip file") from None
        if not size and not unpacker.eof:
            raise UserError(f"{path} is damaged: the gzip file is cut off")
    if size > MOST:
        raise UserError(f"{path} is longer than {MOST >> 30} GiB: record fewer steps")
    return data


def _check_one_job(recordings: Iterable[Recording]) -> None:
    worlds: dict[int, str] = {}
    for one in recordings:
        for size in [one.world] if one.world else []:
            worlds.setdefault(size, one.path)
            if one.rank >= size:
                raise UserError(f"{one.path}: rank {one.rank} is not one of {size} ranks")
    if len(worlds) > 1:
        (a, first), (b, second) = sorted(worlds.items())[:2]
        raise UserError(f"files of different jobs: {first} is of {a} ranks, {second} of {b}")


def _with_groups(recordings: Sequence[Recording]) -> list[Recording]:
    """Groups that a file names without their ranks: the ranks whose files name them, of the default group all ranks."""
    members: dict[tuple[str, str], set[int]] = {}
    for one in recordings:
        for name in {WORLD, *(call.comm for call in one.calls)}:
            members.setdefault((one.kind, name), set()).add(one.rank)
    results = []
    for one in recordings:
        known = (c.group or tuple(sorted(members[one.kind, c.comm])) for c in one.calls)
        calls = tuple(replace(call, group=group) for call, group in zip(one.calls, known, strict=True))
        results.append(replace(one, calls=calls) if one.kind == "Flight Recorder" else one)
    return results

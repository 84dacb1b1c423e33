"""Small recordings as other software writes them, with times that a test chooses."""

import gzip
import json
import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def entry(
    op: str, number: int, *, group: str = "0", size: int = 8, state: str = "completed", backend: str = "nccl",
    at: float = 0.0, line: int = 10, dtype: str = "Float", **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """An entry of a Flight Recorder. at: seconds."""
    return {
        "record_id": number, "process_group": (group, "default_pg" if group == "0" else "undefined"),
        "collective_seq_id": number + 1, "profiling_name": f"{backend}:{op}", "input_sizes": [[size]],
        "input_dtypes": [dtype], "output_sizes": [[size]], "output_dtypes": [dtype], "state": state,
        "time_created_ns": int(1.7e18 + at * 1e9), "retired": state == "completed",
        "frames": [
            {"name": "all_reduce", "filename": "/x/site-packages/torch/distributed/c10d.py", "line": 3},
            {"name": "main", "filename": "/home/me/train.py", "line": line},
        ],
    } | more  # fmt: skip


def dumps(folder: Path, ranks: Sequence[Iterable[dict[str, Any]]], groups: dict[str, list[int]] | None = None) -> Path:
    """A folder of pickles, as NCCL's watchdog writes them. groups: name -> ranks, as far as the dump has them."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, entries in enumerate(ranks):
        config = {name: {"name": name, "desc": "", "ranks": str(members)} for name, members in (groups or {}).items()}
        data = {"version": "2.10", "pg_config": config, "entries": list(entries)}
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(data, 2))
    return folder


def span(name: str, category: str, begin: float, duration: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    """A complete event; milliseconds."""
    about = {"ph": "X", "name": name, "cat": category, "pid": 1, "tid": tid, "args": args}
    return about | {"ts": begin * 1000, "dur": duration * 1000}


def kernel(op: str, begin: float, duration: float, size: int = 1000, **more: Any) -> dict[str, Any]:
    """A kernel of NCCL with its arguments; milliseconds."""
    about = {"Collective name": op, "In msg nelems": size, "Out msg nelems": size, "dtype": "Float"}
    about |= {"Process Group Name": "0"} | more
    return span(f"ncclDevKernel_{op}_Sum_f32_RING_LL(ncclDevKernelArgs)", "kernel", begin, duration, 7, **about)


def trace(
    path: Path, rank: int, events: Iterable[dict[str, Any]], world: int = 2, host: str = "", base: int = 0
) -> Path:
    """A Kineto trace, packed where the name ends in .gz."""
    config = [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": world, "ranks": list(range(world))}]
    info = {"backend": "nccl", "rank": rank, "world_size": world, "pg_config": config}
    data = {"schemaVersion": 1, "distributedInfo": info, "host_name": host, "baseTimeNanoseconds": base}
    text = json.dumps(data | {"traceEvents": list(events)}).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def graph(path: Path, nodes: Sequence[tuple[str, int, dict[str, int]]]) -> Path:
    """A Chakra graph. nodes: (name, type, attributes)."""
    messages = [_text(1, "0.0.4")]
    for number, (name, kind, about) in enumerate(nodes):
        attributes = b"".join(_bytes(10, _text(1, key) + b"\x48" + _varint(value)) for key, value in about.items())
        messages.append(b"\x08" + _varint(number) + _text(2, name) + b"\x18" + _varint(kind) + attributes)
    path.write_bytes(b"".join(_varint(len(message)) + message for message in messages))
    return path


def _text(number: int, text: str) -> bytes:
    return _bytes(number, text.encode())


def _bytes(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    data = b""
    while value > 0x7F:
        data, value = data + bytes([value & 0x7F | 0x80]), value >> 7
    return data + bytes([value])

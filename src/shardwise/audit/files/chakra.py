"""Execution traces of torch's `ExecutionTraceObserver` (JSON, schemas 1.0 and 1.1) and Chakra graphs (protobuf `.et`).

Protobuf is read by its wire format (protobuf.dev/programming-guides/encoding): lengths in front of messages, fields as
(number, wire type, value). Field numbers are those of mlcommons/chakra's et_def.proto.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardwise.audit.calls import Call
from shardwise.audit.files.recording import UNRANKED, Recording, dtype_of, operation, rank_in_name, ranks_of
from shardwise.errors import UserError

_COMMS = "record_param_comms"


def read_execution_trace(data: Mapping[str, Any], path: str) -> Recording:
    """A rank's execution trace: its collectives in order, without times."""
    groups: dict[str, tuple[int, ...]] = {}
    nodes = sorted(data["nodes"], key=lambda node: int(node["id"]))
    recorded = any(node["name"] == _COMMS for node in nodes)
    calls: list[Call] = []
    rank = rank_in_name(path)
    for node in nodes:
        name, values = str(node["name"]), _values(node, "inputs")
        if "process_group:init" in name and values and isinstance(values[0], str):
            for group in json.loads(values[0]):  # without a list it is the first `group_size` ranks
                everyone = tuple(range(int(group.get("group_size", 0))))
                groups[str(group["pg_name"])] = ranks_of(group.get("ranks")) or everyone
        elif name == _COMMS if recorded else name.startswith("gloo:"):
            rank, call, group_name = _call(node, values, groups, rank)
            if call.op:
                calls.append(replace(call, order=len(calls), comm=group_name))
    unknown = ["times", "lines of the program"] + (["groups"] if calls and not any(call.comm for call in calls) else [])
    ranked = tuple(replace(call, rank=rank) for call in calls)
    return Recording(rank, ranked, path=path, kind="execution trace", unknown=tuple(unknown))


def _values(node: Mapping[str, Any], side: str) -> list[Any]:
    """Of "inputs" or "outputs"; lists before schema 1.0.2."""
    values = node.get(side, [])
    return list(values["values"] if isinstance(values, dict) else values)


def _call(
    node: Mapping[str, Any], values: list[Any], groups: Mapping[str, tuple[int, ...]], rank: int
) -> tuple[int, Call, str]:
    """(rank, call, its group's name) of a node: by its attributes or, before schema 1.1, its inputs. An operation that
    is "" is no collective. A `gloo:` node names no group."""
    about = {item["name"]: item["value"] for item in node.get("attrs", ())}
    place = next((i for i, value in enumerate(values) if isinstance(value, str) and i > 1), None)
    name = str(node["name"])
    if name == _COMMS:
        name = str(about.get("collective_name", values[place] if place is not None else ""))
        if rank == UNRANKED and place is not None and isinstance(values[place - 1], int):
            rank = values[place - 1]
    pair = values[place - 2] if place is not None else ""  # [name, description] since schema 1.0.3
    group = str(about.get("pg_name", pair[0] if isinstance(pair, list) and pair else ""))
    start, stride, size = (int(about.get(key, 0)) for key in ("global_rank_start", "global_rank_stride", "pg_size"))
    if place is not None and len(last := [value for value in values[place:] if type(value) is int]) == 3:
        start, stride, size = last
    members = groups.get(group) or (tuple(range(start, start + stride * size, stride)) if stride else ())
    inputs, shape = _tensors(values if node["name"] != _COMMS else values[:1])
    outputs, _ = _tensors(_values(node, "outputs"))
    dtype, size = dtype_of(about.get("dtype", ""))
    if dtype:
        inputs, outputs = (int(about.get(f"{way}_msg_nelems", 0)) * size for way in ("in", "out"))
    return rank, Call(0, 0, operation(name), members, dtype, shape, inputs, outputs), group


def _tensors(value: Any) -> tuple[int, tuple[int, ...]]:
    """(bytes, elements of the first) of nested tensors [id, storage, offset, elements, bytes of one, device]."""
    if not isinstance(value, list):
        return 0, ()
    if len(value) == 6 and isinstance(value[5], str) and all(type(item) is int for item in value[:5]):
        return value[3] * value[4], (value[3],)
    parts = [_tensors(item) for item in value]
    return sum(size for size, _ in parts), next((shape for _, shape in parts if shape), ())


# -- Protobuf

_SEND, _RECV, _COLLECTIVE = 5, 6, 7
_COLLECTIVES = (
    "all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast", "all_to_all", "reduce_scatter",
    "reduce_scatter", "barrier",
)  # fmt: skip


def read_graph(data: bytes, path: str) -> Recording:
    """A rank's Chakra graph. Raises `UserError` for bytes that are none."""
    try:
        messages = list(_messages(data))
        nodes: list[dict[Any, Any]] = [
            dict(_fields(message)) | {"attr": _attributes(message)} for message in messages[1:]
        ]
        # The host's operation that starts a collective is such a node too, without the attribute.
        if not nodes:
            raise ValueError("no nodes")
        nodes = [node for node in nodes if node.get(3) in (_SEND, _RECV, _COLLECTIVE) and "comm_type" in node["attr"]]
        nodes.sort(key=lambda node: int(node.get(1, 0)))
        rank = rank_in_name(path)
        calls: list[Call] = []
        for node in nodes:
            about, kind = node["attr"], node[3]
            op = {_SEND: "send", _RECV: "recv"}.get(kind) or _COLLECTIVES[about["comm_type"]]
            peer = about.get({_SEND: "comm_dst", _RECV: "comm_src"}.get(kind))
            calls.append(Call(rank, len(calls), op, (), inputs=int(about.get("comm_size", 0)), peer=peer,
                              comm=str(about.get("pg_name", ""))))  # fmt: skip
    except (ValueError, KeyError, IndexError, TypeError, struct.error):
        raise UserError(f"{path} is no Chakra graph") from None
    named = any(call.comm for call in calls)
    unknown = ["when calls begin", "lines of the program", "dtypes"] + ([] if named else ["groups"])
    return Recording(rank, tuple(calls), path=path, kind="Chakra", unknown=tuple(unknown))


def _attributes(message: bytes) -> dict[str, Any]:
    """Name -> number or text of a node's attributes."""
    about = {}
    for number, value in _fields(message):
        if number == 10:
            (_, name), *rest = list(_fields(value))
            item = next((of for key, of in rest if key != 2), 0)
            about[name.decode()] = item.decode() if isinstance(item, bytes) else item
    return about


def _messages(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        size, at = _varint(data, at)
        if at + size > len(data):
            raise ValueError("a message is cut off")
        yield data[at : at + size]
        at += size


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(wire, 0)
        if wire == 2:
            size, at = _varint(message, at)
        if wire not in (1, 2, 5) or at + size > len(message):
            raise ValueError("a field is cut off")
        piece = message[at : at + size]
        yield key >> 3, piece if wire == 2 else struct.unpack("<q" if wire == 1 else "<i", piece)[0]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError("a number is too long")

"""Execution traces of torch's `ExecutionTraceObserver` (JSON, schemas 1.0 and 1.1) and Chakra graphs (protobuf `.et`).

Protobuf is read by its wire format (protobuf.dev/programming-guides/encoding): lengths in front of messages, fields as
(number, wire type, value). Field numbers are those of mlcommons/chakra's et_def.proto.
"""

import json
import struct
from collections.abc import Iterator, Mapping
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
    rank, names = rank_in_name(path), []
    for node in nodes:
        name, values = str(node["name"]), _inputs(node)
        if "process_group:init" in name and values and isinstance(values[0], str):
            groups |= _groups(json.loads(values[0]))
        if name == _COMMS if recorded else name.startswith("gloo:"):
            call, group, own = _recorded(node, values, groups) if recorded else (_annotated(node, values), "", None)
            rank = own if rank is None else rank
            if call:
                calls.append(call)
                names.append(group)
    rank = UNRANKED if rank is None else rank
    numbered = tuple(_at(call, rank, order) for order, call in enumerate(calls))
    unknown = ["times", "lines of the program"] + (["groups"] if numbered and not any(names) else [])
    return Recording(path, "execution trace", rank, numbered, tuple(names), unknown=tuple(unknown))


def _at(call: Call, rank: int, order: int) -> Call:
    return Call(**{name: getattr(call, name) for name in Call.__slots__} | {"rank": rank, "order": order})


def _inputs(node: Mapping[str, Any]) -> list[Any]:
    inputs = node.get("inputs", [])
    return list(inputs["values"] if isinstance(inputs, dict) else inputs)


def _groups(config: list[Mapping[str, Any]]) -> dict[str, tuple[int, ...]]:
    """Name -> ranks; a group without a list is the first `group_size` ranks."""
    return {
        str(group["pg_name"]): ranks_of(group.get("ranks")) or tuple(range(int(group.get("group_size", 0))))
        for group in config
    }


def _recorded(
    node: Mapping[str, Any], values: list[Any], groups: Mapping[str, tuple[int, ...]]
) -> tuple[Call | None, str, int | None]:
    """(call, group's name, rank) of a `record_param_comms` node, by its attributes or, before 1.1, its inputs."""
    about = {item["name"]: item["value"] for item in node.get("attrs", ())}
    place = next((i for i, value in enumerate(values) if isinstance(value, str) and i > 1), None)
    op = operation(str(about.get("collective_name", values[place] if place is not None else "")))
    rank = values[place - 1] if place is not None and isinstance(values[place - 1], int) else None
    if not op:
        return None, "", rank
    name = str(about.get("pg_name", ""))
    start, stride, size = (int(about.get(key, 0)) for key in ("global_rank_start", "global_rank_stride", "pg_size"))
    members = groups.get(name) or (tuple(range(start, start + stride * size, stride)) if stride else ())
    dtype, inputs, shape = _tensors(values[0] if values else [])
    output = _tensors(_outputs(node))[1]
    if "dtype" in about:
        dtype, size = dtype_of(about["dtype"])
        inputs = int(about.get("in_msg_nelems", 0)) * size
        output = int(about.get("out_msg_nelems", 0)) * size
    return Call(0, 0, op, members, dtype, shape, inputs, output), name, rank


def _annotated(node: Mapping[str, Any], values: list[Any]) -> Call | None:
    """The call of a `gloo:` node, which names no group."""
    dtype, inputs, shape = _tensors(values)
    op = operation(str(node["name"]))
    return Call(0, 0, op, (), dtype, shape, inputs) if op else None


def _outputs(node: Mapping[str, Any]) -> Any:
    outputs = node.get("outputs", [])
    return outputs["values"] if isinstance(outputs, dict) else outputs


def _tensors(value: Any) -> tuple[str, int, tuple[int, ...]]:
    """(dtype, bytes, elements) of tensors [id, storage, offset, elements, bytes of one, device], however nested. Only
    sizes are there: the dtype stays empty."""
    if not isinstance(value, list):
        return "", 0, ()
    if len(value) == 6 and isinstance(value[5], str) and all(type(item) is int for item in value[:5]):
        return "", value[3] * value[4], (value[3],)
    parts = [_tensors(item) for item in value]
    return "", sum(part[1] for part in parts), next((part[2] for part in parts if part[2]), ())


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
        calls = [node for node in nodes if node.get(3) in (_SEND, _RECV, _COLLECTIVE) and "comm_type" in node["attr"]]
        calls.sort(key=lambda node: node.get(1, 0))
        rank = rank_in_name(path)
        rank = UNRANKED if rank is None else rank
        if not nodes:
            raise ValueError("no nodes")
        numbered = tuple(_graph_call(node, rank, order) for order, node in enumerate(calls))
    except (ValueError, KeyError, IndexError, TypeError, struct.error, UnicodeDecodeError, AttributeError):
        raise UserError(f"{path} is no Chakra graph") from None
    names = tuple(str(node["attr"].get("pg_name", "")) for node in calls)
    unknown = ["when calls begin", "lines of the program", "dtypes"] + ([] if any(names) else ["groups"])
    return Recording(path, "Chakra", rank, numbered, names, unknown=tuple(unknown))


def _graph_call(node: Mapping[Any, Any], rank: int, order: int) -> Call:
    about, kind = node["attr"], node[3]
    op = {_SEND: "send", _RECV: "recv"}.get(kind) or _COLLECTIVES[int(about.get("comm_type", 0))]
    peer = about.get("comm_dst" if kind == _SEND else "comm_src") if kind != _COLLECTIVE else None
    return Call(rank, order, op, (), inputs=int(about.get("comm_size", 0)), peer=None if peer is None else int(peer))


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

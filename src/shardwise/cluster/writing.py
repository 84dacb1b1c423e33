"""A cluster as the text of a TOML file, which `Cluster.parse` reads back."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.cluster import catalog
from shardwise.cluster.catalog import Accelerator
from shardwise.cluster.cluster import Cluster
from shardwise.cluster.device import HOST_FIELDS, Device, Host, Link, Speed
from shardwise.cluster.paths import NodePaths, named_link


def to_toml(cluster: Cluster, header: Sequence[str] = (), remarks: Mapping[str, str] | None = None) -> str:
    """The file's text. header: lines of comment that stand first. remarks: a comment for a field, by its name, such as
    "intra.alpha", or "intra.speeds.0" for the first row of a link's speeds."""
    remarks = remarks or {}
    lines = [*(f"# {line}" for line in header)]
    lines += [f"nodes = {cluster.nodes}", f"devices_per_node = {cluster.devices_per_node}"]
    lines += [f"nics = {cluster.nics}"] if cluster.nics else []
    known = {name.lower() for name in catalog.names()}
    entry = catalog.lookup(cluster.device.name) if cluster.device.name.lower() in known else None
    usual = entry if entry and entry.device == cluster.device else None
    if cluster.paths:
        lines += ["paths = [", *(f"    {json.dumps(' '.join(row))}," for row in cluster.paths.names), "]"]
    lines += [f"device = {json.dumps(cluster.device.name)}"] if usual else _device(cluster.device)
    for name, link in (("intra", cluster.intra), ("inter", cluster.inter)):
        if name == "intra" and cluster.paths:
            lines += _pairs(cluster.paths, usual)
            continue
        if not (usual and link == getattr(usual, name)) and link != Link(None, None):
            # A device of the catalog brings its links' kinds.
            lines += ["", f"[{name}]", *_link(link, f"{name}.", remarks, ["kind"] if usual else [])]
    if cluster.host != (usual.host_of(cluster.devices_per_node) if usual else Host()):
        given = [(name, getattr(cluster.host, name)) for name in HOST_FIELDS]
        lines += ["", "[host]", *(f"{name} = {_value(value)}" for name, value in given if value not in (None, ""))]
    return "\n".join(lines) + "\n"


def _pairs(paths: NodePaths, usual: Accelerator | None) -> list[str]:
    """Links of pairs that the device's ports do not say."""
    lines: list[str] = []
    for name, link in paths.links:
        if usual is None or link != named_link(name, usual):
            lines += ["", f"[links.{_key(name)}]", *_link(link, f"links.{name}.", {}, [])]
    return lines


def _value(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_value, value))}]"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _device(device: Device) -> list[str]:
    fields = ("name", "kind", "memory_bytes", "memory_bandwidth", "watts", "source")
    given = [(name, getattr(device, name)) for name in fields]
    peaks = ", ".join(f"{dtype} = {_value(flops)}" for dtype, flops in device.peak_flops.items())
    lines = [f"{name} = {_value(value)}" for name, value in given if value is not None]
    measured = _tables("device.time", device.measured) if device.measured else []
    return ["", "[device]", *lines, *([f"peak_flops = {{ {peaks} }}"] if peaks else []), *measured]


def _tables(name: str, table: Mapping[str, Any]) -> list[str]:
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    lines = ["", f"[{name}]", *(f"{_key(key)} = {_value(value)}" for key, value in plain.items())]
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines += _tables(f"{name}.{_key(key)}", value)
    return lines


def _key(key: str) -> str:
    return key if key.replace("_", "").isalnum() and key.isascii() else json.dumps(key)


def _link(link: Link, prefix: str, remarks: Mapping[str, str], always: Sequence[str]) -> list[str]:
    def line(name: str, text: str) -> str:
        remark = remarks.get(prefix + name)
        return f"{text}  # {remark}" if remark else text

    fields = ("name", "alpha", "bandwidth", "kind", "startup", "copy_alpha", "reads", "source")
    given = [(name, getattr(link, name)) for name in fields]
    # Most of what is zero, false or empty is so, too, when it is left out; an alpha would not be known.
    kept = [(name, value) for name, value in given if value or (name, value) == ("alpha", 0.0) or name in always]
    lines = [line(name, f"{name} = {_value(value)}") for name, value in kept]
    if link.speeds:
        rows = [line(f"speeds.{i}", f"    {_row(speed)},") for i, speed in enumerate(link.speeds)]
        lines += ["speeds = [", *rows, "]"]
    return lines


def _row(speed: Speed) -> str:
    names = ("bandwidth", "again", "addition", "copy")
    given = [("bytes", speed.nbytes), *((name, getattr(speed, name)) for name in names)]
    return "{ " + ", ".join(f"{name} = {_value(value)}" for name, value in given if value is not None) + " }"

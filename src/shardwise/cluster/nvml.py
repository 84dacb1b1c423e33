"""The topology of this host, asked of NVIDIA's driver through NVML."""

from __future__ import annotations

from typing import Any

from shardwise.cluster.topology import Topology
from shardwise.errors import UserError

_LEVELS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""NVML's common ancestors of two devices -> what nvidia-smi calls them."""

_SWITCH, _LINKS = 2, 18
"""NVML's device type for a switch at the other end of a link; the most NVLinks of a device."""


def ask() -> Topology:
    """This host's GPUs, without its NICs. Raises `UserError` where pynvml is not there, or finds no driver or GPU."""
    try:
        import pynvml
    except ImportError:
        raise UserError(
            "no file is given, and pynvml is not there to ask the driver: install nvidia-ml-py, or pipe "
            "nvidia-smi topo -m into calibrate topology -"
        ) from None
    try:
        pynvml.nvmlInit()
        try:
            return _found(pynvml)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise UserError(f"NVML: {error}; give a file with the output of nvidia-smi topo -m") from None


def _found(nvml: Any) -> Topology:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    if not handles:
        raise UserError("NVML finds no GPU on this host")
    names = {_text(nvml.nvmlDeviceGetName(handle)) for handle in handles}
    if len(names) > 1:
        raise UserError(f"this node has different GPUs ({', '.join(sorted(names))}); a cluster has one kind of device")
    gpus = tuple(f"GPU{index}" for index in range(len(handles)))
    buses = [_text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower() for handle in handles]
    ends = [_ends(nvml, handle) for handle in handles]
    paths = {}
    for i, one in enumerate(handles):
        for j, other in enumerate(handles):
            # Both ends count: a link that only one of them reports is not up.
            links = min(ends[i].count("") + ends[i].count(buses[j]), ends[j].count("") + ends[j].count(buses[i]))
            level = "X" if i == j else _LEVELS.get(nvml.nvmlDeviceGetTopologyCommonAncestor(one, other), "SYS")
            paths[gpus[i], gpus[j]] = f"NV{links}" if links and i != j else level
    return Topology(gpus, (), paths, names.pop())


def _ends(nvml: Any, handle: Any) -> list[str]:
    """The bus of the device at the other end of each NVLink that is up; empty for a switch."""
    found = []
    for link in range(_LINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(handle, link):
                continue
            if nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link) == _SWITCH:
                found.append("")
            else:
                found.append(_text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId).lower())
        except nvml.NVMLError:
            # Devices without that link, or without any.
            continue
    return found


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value

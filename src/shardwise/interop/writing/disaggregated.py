"""Prefill and decoding apart: a script that starts the instances of both, and the router before them.

After vLLM's guide to the NIXL connector (docs/features/nixl_connector_usage.md) and SGLang's to PD disaggregation
(docs/advanced_features/pd_disaggregation.md). Neither has been run here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwise.errors import UserError, did_you_mean
from shardwise.interop.writing.request import EngineFile, WriteRequest
from shardwise.interop.writing.writer import write
from shardwise.layout import Layout

PORT, SIDE, ROUTER = 8100, 5600, 8000
"""First port of the instances of a node, of their handshakes, and the router's port."""


@dataclass(frozen=True)
class RoleFlags:
    """An engine's words for the two roles of instances."""

    prefill: str
    decode: str
    side: str = ""
    """Variables of a handshake's host and port."""


_KV = """--kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'"""
ENGINES = {
    "vllm": RoleFlags(_KV, _KV, "VLLM_NIXL_SIDE_CHANNEL_HOST={host} VLLM_NIXL_SIDE_CHANNEL_PORT={side} "),
    "sglang": RoleFlags(
        "--disaggregation-mode prefill --disaggregation-transfer-backend nixl --disaggregation-bootstrap-port PORT",
        "--disaggregation-mode decode --disaggregation-transfer-backend nixl",
    ),
}


@dataclass(frozen=True)
class _Instance:
    role: str
    layout: Layout
    node: int
    first: int
    """Its first device on the node."""

    @property
    def host(self) -> str:
        return f"$HOST{self.node}"

    @property
    def port(self) -> int:
        return PORT + self.first


def write_apart(engine: str, request: WriteRequest, prefill: Layout, decode: Layout, batch: int) -> EngineFile:
    """The script of an engine. request: of a server on the whole cluster. prefill, decode: all instances of a role,
    which are its replicas. batch: sequences of an instance that decodes. Raises `UserError` for another engine, and
    where an instance needs more devices than a node has."""
    if engine not in ENGINES:
        raise UserError(
            f"{engine} has no prefill and decoding apart here; {did_you_mean(engine, ENGINES, 'there are')}"
        )
    assert request.cluster and request.served
    placed = list(_placed(request.cluster.devices_per_node, prefill, decode))
    lines: list[str] = []
    files: list[EngineFile] = []
    for one in placed:
        sequences = batch if one.role == "decode" else request.served.sequences
        served = replace(request.served, sequences=sequences)
        files.append(write(engine, replace(request, layout=one.layout, served=served)))
        lines += _instance(engine, one, files[-1].text)
    nodes = 1 + max(one.node for one in placed)
    hosts = [f"HOST{node}=127.0.0.1  # of node {node}: its address" for node in range(nodes)]
    first = files[0]
    title = f"# {engine}, not run here: {_count(placed, 'prefill')} for prefill, {_count(placed, 'decode')} to decode"
    start = "# start all commands of a node there, then the router" if nodes > 1 else ""
    head = ["#!/usr/bin/env bash", title, *(f"# {comment}" for comment in first.comments), *filter(None, [start])]
    text = "\n".join([*head, *hosts, *lines, "", _router(engine, placed), ""])
    return replace(first, layout=decode, text=text, file=f"{engine}-disaggregated.sh")


def _placed(per_node: int, prefill: Layout, decode: Layout) -> Iterator[_Instance]:
    """The instances on nodes, one after the other, none on two nodes."""
    node = first = 0
    for role, layout in (("prefill", prefill), ("decode", decode)):
        count = layout.dp // max(1, layout.ep // layout.tp)
        one = replace(layout, dp=layout.dp // count)
        if one.ranks > per_node:
            raise UserError(f"an instance of {one.ranks} devices spans nodes of {per_node}: start those by hand")
        for _ in range(count):
            if first + one.ranks > per_node:
                node, first = node + 1, 0
            yield _Instance(role, one, node, first)
            first += one.ranks


def _instance(engine: str, one: _Instance, script: str) -> Iterator[str]:
    """The command of an instance in the background."""
    flags, devices = ENGINES[engine], range(one.first, one.first + one.layout.ranks)
    command = "\n".join(line for line in script.splitlines() if not line.startswith("#"))
    side = flags.side.format(host=one.host, side=SIDE + one.first)
    yield f"\n# {one.role} on node {one.node}: {one.layout}"
    yield f"CUDA_VISIBLE_DEVICES={','.join(map(str, devices))} {side}\\"
    role = flags.prefill if one.role == "prefill" else flags.decode
    # The bootstrap's port of an SGLang instance that reads prompts is one of its node's, too.
    port = (
        f" --disaggregation-bootstrap-port {SIDE + one.first}" if engine == "sglang" and one.role == "prefill" else ""
    )
    yield f"{command} \\\n    --host 0.0.0.0 --port {one.port} \\\n    {role}{port} &"


def _router(engine: str, placed: list[_Instance]) -> str:
    roles = {role: [one for one in placed if one.role == role] for role in ("prefill", "decode")}
    if engine == "sglang":
        reading = (f"--prefill http://{one.host}:{one.port} {SIDE + one.first}" for one in roles["prefill"])
        decoding = (f"--decode http://{one.host}:{one.port}" for one in roles["decode"])
        words = ["python -m sglang_router.launch_router --pd-disaggregation", *reading, *decoding]
        return " \\\n    ".join([*words, f"--host 0.0.0.0 --port {ROUTER}"])
    words = ["python tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"]
    for role, name in (("prefill", "prefiller"), ("decode", "decoder")):
        words.append(f"--{name}-hosts {' '.join(one.host for one in roles[role])}")
        words.append(f"--{name}-ports {' '.join(str(one.port) for one in roles[role])}")
    note = "# the router of vLLM's repository; for production llm-d, NVIDIA Dynamo and others have theirs\n"
    return note + " \\\n    ".join([*words, f"--port {ROUTER}"])


def _count(placed: list[_Instance], role: str) -> str:
    layouts = [one.layout for one in placed if one.role == role]
    return f"{len(layouts)} x {layouts[0]}"

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

PORT, SIDE, ROUTER, MEETING = 8100, 5600, 8000, 20_000
"""First port of the instances of a node, and of their handshakes; the router's, and where an instance's nodes meet."""


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
        "--disaggregation-mode prefill --disaggregation-transfer-backend nixl",
        "--disaggregation-mode decode --disaggregation-transfer-backend nixl",
    ),
}


@dataclass(frozen=True)
class _Instance:
    role: str
    layout: Layout
    node: int
    """The first of its nodes."""
    first: int
    """Its first device on the node."""
    nodes: int

    @property
    def host(self) -> str:
        return f"$HOST{self.node}"

    @property
    def port(self) -> int:
        return PORT + self.first


def write_apart(engine: str, request: WriteRequest, prefill: Layout, decode: Layout, batch: int) -> EngineFile:
    """The script of an engine. request: of a server on the whole cluster. prefill, decode: all instances of a role,
    which are its replicas. batch: sequences of an instance that decodes. Raises `UserError` for another engine, and
    for an instance on several nodes that its replicas do not divide."""
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
        for number in range(one.nodes):
            lines += _instance(engine, one, number, files[-1].text)
    nodes = max(one.node + one.nodes for one in placed)
    hosts = [f"HOST{node}=127.0.0.1  # of node {node}: its address" for node in range(nodes)]
    first = files[0]
    title = f"# {engine}, not run here: {_count(placed, 'prefill')} for prefill, {_count(placed, 'decode')} to decode"
    start = "# start all commands of a node there, then the router" if nodes > 1 else ""
    # Ray, or variables of a node, are for one server alone.
    comments = [f"# {comment}" for comment in first.comments if "every node" not in comment]
    head = ["#!/usr/bin/env bash", title, *comments, *filter(None, [start])]
    text = "\n".join([*head, *hosts, *lines, "", _router(engine, placed), ""])
    return replace(first, layout=decode, text=text, file=f"{engine}-disaggregated.sh")


def _placed(per_node: int, prefill: Layout, decode: Layout) -> Iterator[_Instance]:
    """The instances on nodes, one after the other; one that exceeds a node begins a new one."""
    node = first = 0
    for role, layout in (("prefill", prefill), ("decode", decode)):
        count = layout.dp // max(1, layout.ep // layout.tp)
        one = replace(layout, dp=layout.dp // count)
        nodes = -(-one.ranks // per_node)
        for _ in range(count):
            if first and first + one.ranks > per_node:
                node, first = node + 1, 0
            yield _Instance(role, one, node, first, nodes)
            node, first = (node, first + one.ranks) if nodes == 1 else (node + nodes, 0)


def _instance(engine: str, one: _Instance, number: int, script: str) -> Iterator[str]:
    """The command of an instance in the background, on the node of this number among the instance's."""
    flags, devices = ENGINES[engine], range(one.first, one.first + one.layout.ranks // one.nodes)
    command = "\n".join(line for line in script.splitlines() if not line.startswith("#"))
    if one.nodes > 1:
        command = _spanning(engine, one, number, command)
    side = flags.side.format(host=f"$HOST{one.node + number}", side=SIDE + one.first)
    yield f"\n# {one.role} on node {one.node + number}: {one.layout}"
    yield f"CUDA_VISIBLE_DEVICES={','.join(map(str, devices))} {side}\\"
    role = flags.prefill if one.role == "prefill" else flags.decode
    # The bootstrap's port of an SGLang instance that reads prompts is one of its node's, too.
    port = (
        f" --disaggregation-bootstrap-port {SIDE + one.first}" if engine == "sglang" and one.role == "prefill" else ""
    )
    served = "" if "--headless" in command else f"    --host 0.0.0.0 --port {one.port} \\\n"
    yield f"{command} \\\n{served}    {role}{port} &"


def _spanning(engine: str, one: _Instance, number: int, command: str) -> str:
    """A command with what an engine needs to know of an instance's nodes: how many, which, and where they meet."""
    if engine == "sglang":
        return command.replace('"$NODE_RANK"', f"{number}").replace("$HEAD_ADDRESS", one.host)
    layout, headless = one.layout, "--headless " if number else ""
    command = command.replace("-backend ray", "-backend mp")  # of executors, and of replicas
    if layout.dp == 1:
        meeting = f"--master-addr {one.host} --master-port {MEETING}"
        return f"{command} \\\n    {headless}--nnodes {one.nodes} --node-rank {number} {meeting}"
    local, rest = divmod(layout.dp, one.nodes)
    if rest:
        raise UserError(f"dp={layout.dp} of an instance does not divide into its {one.nodes} nodes: start it by hand")
    meeting = f"--data-parallel-address {one.host} --data-parallel-rpc-port {MEETING}"
    start = f" --data-parallel-start-rank {number * local}" if number else ""
    return f"{command} \\\n    {headless}--data-parallel-size-local {local}{start} {meeting}"


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

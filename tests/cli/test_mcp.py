"""Tools for coding agents: their schemas are the commands' declarations, their answers the commands' --json."""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from harness.cases import from_table
from harness.documents import ENVIRONMENT
from shardwise.cli.declare import CommandOptions, command_of, declared, help_of
from shardwise.cli.mcp import TOOLS, answer, argv_of, tool_of

LIMIT = 120
STEP = {"model": "llama-3-8b", "layout": "dp=8,zero=2", "cluster": "8xH100", "seq": "4k", "batch": 8.0}


def test_json_prints_the_tools(command: Callable[..., Any]) -> None:
    code, out, err = command("mcp", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["tools"] == [tool_of(name) for name in TOOLS]


@pytest.mark.parametrize("name", ["estimate", "explain", "compare"])
def test_a_schema_has_every_option_of_the_command(name: str) -> None:
    kind = command_of(name)[0]
    options = [item for key, item in declared(kind).items() if key not in declared(CommandOptions)]
    schema = tool_of(name)["inputSchema"]
    assert len(schema["properties"]) == len(options)
    for item, said in zip(options, schema["properties"].values(), strict=True):
        assert said["description"].endswith(help_of(item, declared(kind)))


def test_training_and_serving_are_two_tools_of_one_command() -> None:
    train, serve = (tool_of(name)["inputSchema"]["properties"] for name in ("plan", "plan_serving"))
    assert {"seq", "batch", "fix", "find"} <= train.keys() - serve.keys()
    assert {"prompt", "output", "concurrency", "weights"} == serve.keys() - train.keys() - {
        "kv_cache", "rate", "ttft", "tpot", "disaggregated"
    }  # fmt: skip
    assert train["by"]["enum"] == ["throughput", "fastest", "memory", "cost", "pareto"]
    assert train["set"]["type"] == "array" and train["links"]["type"] == "boolean"
    assert train["seq"]["type"] == ["string", "number"] and train["top"]["type"] == "integer"
    assert tool_of("emit")["inputSchema"]["required"] == ["model", "for"]


@from_table
def test_arguments_become_a_command_line(name: str, arguments: dict[str, Any], line: str) -> None:
    assert " ".join(argv_of(name, arguments)) == line


def test_answers_are_those_of_the_commands(command: Callable[..., Any]) -> None:
    words = ["--layout", "dp=8,zero=2", "--cluster", "8xH100", "--seq", "4k", "--batch", "8"]
    text, failed = answer("estimate", STEP)
    assert not failed and json.loads(text) == json.loads(command("estimate", "llama-3-8b", *words, "--json")[1])
    assert answer("plan", {"help": True})[0].startswith("usage: shardwise plan")


@from_table
def test_errors_are_one_line(name: str, arguments: dict[str, Any], words: str) -> None:
    text, failed = answer(name, arguments)
    assert failed and words in text and "\n" not in text


def test_an_option_holds_for_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    before = dict(os.environ)
    assert not answer("list_models", {"models": ["gpt2"], "offline": True})[1]
    assert dict(os.environ) == before


def test_without_the_package_one_line_says_what_to_install(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.runtime.installed.find_spec", lambda name: None)
    line = "shardwise: error: the MCP server needs mcp: pip install 'shardwise[mcp]'\n"
    assert command("mcp") == (2, "", line)
    monkeypatch.undo()
    monkeypatch.setattr("shardwise.cli.mcp.version", lambda name: "1.28.1")
    monkeypatch.setattr("shardwise.runtime.installed.find_spec", lambda name: name)
    code, out, err = command("mcp")
    assert (code, out) == (2, "") and "needs mcp 2, not 1.28.1" in err


def test_a_client_over_standard_input_and_output() -> None:
    """The protocol's own client against `shardwise mcp` as a process."""
    from mcp.client.client import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client

    program = StdioServerParameters(command=sys.executable, args=["-m", "shardwise", "mcp"], env=ENVIRONMENT)

    async def talk() -> tuple[Any, ...]:
        async with Client(stdio_client(program)) as client:
            tools = (await client.list_tools()).tools
            asked = [("estimate", STEP), ("estimate", {"laout": "dp=8"}), ("list_devices", {})]
            several = await asyncio.gather(*(client.call_tool(name, given) for name, given in asked))
            return client.instructions, tools, *several

    instructions, tools, estimate, wrong, devices = asyncio.run(asyncio.wait_for(talk(), LIMIT))
    assert "--json prints" in instructions
    assert [(tool.name, tool.description, tool.input_schema) for tool in tools] == [
        tuple(tool_of(name).values()) for name in TOOLS
    ]
    assert not estimate.is_error and estimate.content[0].text == answer("estimate", STEP)[0]
    assert wrong.is_error and "did you mean --layout?" in wrong.content[0].text
    assert "H100-80GB-SXM" in {row["name"] for row in json.loads(devices.content[0].text)}

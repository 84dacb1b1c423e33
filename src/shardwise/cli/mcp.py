"""Answer coding agents over the Model Context Protocol, on standard input and output.

A tool is a command, so one help serves both. Its arguments are the command's options, without dashes. Its result is
the JSON that --json prints, and its error is the command's one line, which names what to change.

Sizes are in bytes, times in seconds, counts of parameters and tokens are whole. A time is an estimate: low and high, or
a field that ends in _range, bound it. What a question left open is in assumed, or in notes that begin with assumed;
what limits an answer is in notes, warnings, room.why and not_runnable. A link with "assumed": true is the usual one of
its device: network names another.

The package is the extra mcp: pip install 'shardwise[mcp]'. An agent's configuration names the command, shardwise, and
its one argument, mcp. --json prints the tools with their schemas instead, and needs no package.
"""

import io
import json
import os
import signal
import sys
from contextlib import redirect_stdout
from importlib import import_module
from importlib.metadata import version
from inspect import cleandoc
from pathlib import Path
from typing import Any

from shardwise import __version__
from shardwise.cli.declare import (
    HIDDEN,
    CommandOptions,
    Declared,
    command_of,
    declared,
    help_of,
    is_required,
    summary_of,
    typed,
)
from shardwise.cli.output import print_json
from shardwise.errors import UserError, did_you_mean
from shardwise.runtime.installed import require

TOOLS = {
    "list_models": "list models",
    "list_devices": "list devices",
    "estimate": "estimate",
    "plan": "plan",
    "plan_serving": "plan --serve",
    "explain": "explain",
    "emit": "emit",
    "compare": "compare",
}
"""Tool -> command, with its action, or with the option that makes it another question."""
TYPES = {int: "integer", float: "number", str: "string", Path: "string"}


def run(args: CommandOptions) -> int:
    if args.json:
        print_json({"instructions": cleandoc(__doc__), "tools": [tool_of(name) for name in TOOLS]})
        return 0
    require("the MCP server", "mcp", extra="mcp")
    if int(version("mcp").partition(".")[0]) < 2:
        raise UserError(f"the MCP server needs mcp 2, not {version('mcp')}: pip install 'shardwise[mcp]'")
    import anyio

    # The thread that waits for standard input would keep a process that only raises KeyboardInterrupt.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.stdin.isatty():
        print("shardwise mcp waits for an agent on standard input (Ctrl-D ends it)", file=sys.stderr)
    anyio.run(_serve)
    return 0


async def _serve() -> None:
    from anyio import CapacityLimiter, to_thread
    from mcp import types
    from mcp.server.lowlevel import Server
    from mcp.server.stdio import stdio_server

    one = CapacityLimiter(1)  # a command prints on the process's standard output

    async def tools(context: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[types.Tool.model_validate(tool_of(name)) for name in TOOLS])

    async def call(context: Any, params: Any) -> types.CallToolResult:
        text, failed = await to_thread.run_sync(answer, params.name, params.arguments or {}, limiter=one)
        return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=failed)

    server = Server(
        "shardwise", version=__version__, instructions=cleandoc(__doc__ or ""), on_list_tools=tools, on_call_tool=call
    )
    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())


def answer(name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
    """(JSON of the command, False), or (its one line of error, True)."""
    from shardwise.cli.main import main

    if name not in TOOLS:
        return f"unknown tool {name!r}; {did_you_mean(name, TOOLS, 'tools:')}", True
    printed, environment = io.StringIO(), dict(os.environ)
    try:
        with redirect_stdout(printed):
            code = main(argv_of(name, arguments))
    finally:
        # An option such as --offline sets a variable, which is not for the next call.
        os.environ.clear()
        os.environ.update(environment)
    text = printed.getvalue()
    if not text.startswith(("{", "[")):  # --help
        return text, bool(code)
    data = json.loads(text)
    failed = isinstance(data, dict) and data.keys() == {"error", "exit_code"}
    return (data["error"] if failed else json.dumps(data, separators=(",", ":"))), failed


def argv_of(name: str, arguments: dict[str, Any]) -> list[str]:
    """The command line of a tool's arguments. What the tool has no argument for becomes an option of that name, which
    the command rejects with the nearest one."""
    items = arguments_of(name)
    words: dict[str, list[str]] = {}
    flags: list[str] = []
    for key, value in arguments.items():
        item, flag = items.get(key), f"--{key.strip('-').replace('_', '-')}"
        # 8192.0 of JSON is 8192.
        values = value if isinstance(value, list) else [value]
        texts = [str(int(each) if isinstance(each, float) and each.is_integer() else each) for each in values]
        if value is None or value is False:
            continue
        if item and item.option.positional:
            words[key] = texts
        elif value is True:
            flags.append(flag)
        elif item and _is_list(item):
            flags += [f"{flag}={text}" for text in texts]
        else:
            flags.append(f"{flag}={','.join(texts)}")
    positional = [text for key in items for text in words.get(key, ())]
    return [*TOOLS[name].split(), *flags, "--json", *(["--", *positional] if positional else [])]


def tool_of(name: str) -> dict[str, Any]:
    """A tool as the protocol describes it: name, description, and the schema of its arguments."""
    items, (kind, mode) = arguments_of(name), _asked(name)
    command, *words = TOOLS[name].split()
    text = cleandoc(import_module(f"shardwise.cli.{command}").__doc__ or "")
    if words:
        text = f"{declared(kind)[mode].option.help}\n\n{text}" if mode else summary_of(kind)
    schema = {
        "type": "object",
        "properties": {key: schema_of(item, kind) for key, item in items.items()},
        "required": [key for key, item in items.items() if is_required(item)],
        "additionalProperties": False,
    }
    return {"name": name, "description": text, "inputSchema": schema}


def arguments_of(name: str) -> dict[str, Declared]:
    """Argument -> option of the tool's command. An option that makes another question leaves out what it excludes; the
    tool without it leaves out what needs it."""
    kind, mode = _asked(name)
    items = declared(kind)
    out = {*declared(CommandOptions), *(key for key, item in items.items() if item.option.help is HIDDEN)}
    for other in {_asked(tool)[1] for tool in TOOLS if _asked(tool)[0] is kind} - {""}:
        needing = (key for key, item in items.items() if other in item.option.needs.split())
        out |= {other, *(items[other].option.excludes.split() if other == mode else needing)}
    shown = (item for key, item in items.items() if key not in out)
    return {item.name if item.option.positional else item.flag[2:].replace("-", "_"): item for item in shown}


def _asked(name: str) -> tuple[type[CommandOptions], str]:
    """(options of the tool's command, the option that makes it another question)."""
    command, word = [*TOOLS[name].split(), ""][:2]
    mode = word.removeprefix("--") if word.startswith("--") else ""
    return command_of(command, None if mode else word or None)[0], mode


def schema_of(item: Declared, kind: type[CommandOptions]) -> dict[str, Any]:
    """JSON schema of an argument. What a command reads from a text, such as 8k or 80GB, may be a number, too."""
    form, shown = typed(item), " ".join(filter(None, (item.flag, item.option.metavar)))
    about = {"description": f"{item.name if item.option.positional else shown}: {help_of(item, declared(kind))}"}
    if "const" in form:
        return {"type": "boolean"} | about
    one = {"type": TYPES.get(form["type"], ["string", "number"])}
    one |= {"enum": list(form["choices"])} if "choices" in form else {}
    return ({"type": "array", "items": one} if _is_list(item) else one) | about


def _is_list(item: Declared) -> bool:
    return typed(item).get("action") == "append" or typed(item).get("nargs") in ("+", "*")

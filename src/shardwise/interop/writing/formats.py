"""Texts with their comments: tables as JSON, YAML and TOML, and shell scripts."""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.interop.reading.arguments import dashed
from shardwise.interop.writing.request import WriteRequest, nodes_for

_PORT = 29500
"""torchrun's usual port."""
COMMENT = "_comment"
"""Key of comments in JSON, which has none: engines ignore it."""


def tables(kind: str, values: Mapping[str, Any], comments: Sequence[str]) -> str:
    """Text of a file. kind: json, yaml or toml. values: dotted key -> value; None leaves one out."""
    data: dict[str, Any] = {}
    for path, value in values.items():
        *outer, key = path.split(".")
        table = data
        for name in outer if value is not None else ():
            table = table.setdefault(name, {})
        if value is not None:
            table[key] = value
    if kind == "json":
        return json.dumps({COMMENT: list(comments), **data}, indent=2) + "\n"
    return commented(comments) + (_yaml(data) if kind == "yaml" else _toml(data))


def _yaml(data: Mapping[str, Any], indent: str = "") -> str:
    lines = []
    for key, value in data.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{key}:\n{_yaml(value, indent + '  ')}")
        else:
            # A bare no is false.
            text = str(value).lower() if isinstance(value, bool) else "'no'" if value == "no" else str(value)
            lines.append(f"{indent}{key}: {text}\n")
    return "".join(lines)


def _toml(data: Mapping[str, Mapping[str, Any]]) -> str:
    lines = []
    for name, table in data.items():
        lines.append(f"\n[{name}]")
        for key, value in table.items():
            text = f'"{value}"' if isinstance(value, str) else str(value).lower()
            lines.append(f"{key} = {text}")
    return "\n".join(lines) + "\n"


def with_comments(text: str, comments: Sequence[str]) -> str:
    """A script with its comments on top."""
    return f"#!/usr/bin/env bash\n{commented(comments)}{text}"


def commented(comments: Sequence[str]) -> str:
    """Comments of a script, TOML or YAML. A model's name may have line breaks, a comment must not."""
    return "".join(f"# {' '.join(line.split())}\n" for line in comments)


def program(text: str, values: Mapping[str, Any]) -> str:
    """A program of Python with its table of settings."""
    shown = {key: json.dumps(value) if isinstance(value, str) else repr(value) for key, value in values.items()}
    rows = "".join(f'    "{key}": {value},\n' for key, value in shown.items() if value != "None")
    return text.replace("SETTINGS = {}\n", f"SETTINGS = {{\n{rows}}}\n")


def torchrun(request: WriteRequest) -> list[str]:
    """torchrun's words, before the program. Every node runs the same line; HEAD_ADDRESS is the first node's."""
    nodes, ranks = nodes_for(request.layout, request.cluster)
    if request.launched:
        return ["torchrun"]
    if nodes == 1:
        return ["torchrun", "--standalone", f"--nproc-per-node {ranks}"]
    return [
        "torchrun", f"--nnodes {nodes}", f"--nproc-per-node {ranks}", "--rdzv-backend c10d", "--rdzv-id shardwise",
        f'--rdzv-endpoint "$HEAD_ADDRESS:{_PORT}"',
    ]  # fmt: skip


def flag_words(flags: Mapping[str, Any], dashes: bool = True) -> list[str]:
    """Each flag as it is typed: True stands alone, None and False are left out. dashes: in place of underscores."""
    shown = dashed if dashes else "--{}".format
    return [
        shown(name) if value is True else f"{shown(name)} {_quoted(f'{value}')}"
        for name, value in flags.items()
        if value is not None and value is not False
    ]


def _quoted(text: str) -> str:
    # A variable has its quotes.
    return text if text.startswith('"$') else shlex.quote(text)


def job_words(text: str) -> tuple[list[str], list[str]]:
    """(Words of a script's command, variables that it exports as NAME=VALUE), for a job; arguments of the script itself
    are left out."""
    lines = [shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines()]
    exports = [line[1] for line in lines if line[:1] == ["export"]]
    return [word for line in lines if line[:1] != ["export"] for word in line if word != "$@"], exports


def command(words: Sequence[str]) -> str:
    """One command, a flag per line."""
    return " \\\n    ".join(words) + "\n"

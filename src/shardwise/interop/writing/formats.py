"""Tables as JSON, YAML and TOML, and scripts, with their comments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

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

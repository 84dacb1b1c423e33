"""Optional dependencies of this room, imported when they are needed."""

from importlib import import_module
from typing import Any

from shardwise.errors import UserError


def require(module: str, extra: str, purpose: str) -> Any:
    """Import `module`. Raises `UserError` naming the extra of shardwise that brings it when it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise UserError(f"{purpose} needs {package}: pip install 'shardwise[{extra}]'") from None

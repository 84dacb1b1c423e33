"""Commands that have actions of their own, such as `checkpoint verify`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

FLAGS = {
    "--json": "print one JSON object instead of tables",
    "--traceback": "show where an unexpected error came from",
}
"""Options of every command and every action, with their help."""


Run = Callable[[argparse.Namespace], int]
"""Runs a command or an action. Returns the exit code."""


def actions(
    parser: argparse.ArgumentParser, required: bool = True
) -> Callable[[str, str, Run], argparse.ArgumentParser]:
    """A function (name, help text, what runs it) -> parser that gives `parser` one action after the other."""
    added_to = parser.add_subparsers(dest="action", metavar="ACTION", required=required)

    def action(name: str, summary: str, run: Run) -> argparse.ArgumentParser:
        added = added_to.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        added.set_defaults(run=run)
        # Left out, they must not overwrite what stands before the action.
        for flag, text in FLAGS.items():
            added.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=text)
        return added

    return action

"""Commands that have actions of their own, such as `checkpoint verify`."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def actions(parser: argparse.ArgumentParser) -> Callable[[str, str], argparse.ArgumentParser]:
    """A function (name, help text) -> parser that gives `parser` one action after the other."""
    added_to = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def action(name: str, text: str) -> argparse.ArgumentParser:
        added = added_to.add_parser(name, help=text, description=text, allow_abbrev=False)
        # Left out, they must not overwrite what stands before the action.
        for flag in ("--json", "--traceback"):
            added.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        return added

    return action

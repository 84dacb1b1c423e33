"""The tour: predict, train a small model on four processes, compare both to the byte, and one page that shows it."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="DIR", help="run directory, new or empty (runs/demo-N)")


def run(args: argparse.Namespace) -> int:
    from shardwise.demo import main

    return main(out=args.out, as_json=args.json)

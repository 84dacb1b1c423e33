"""Open the page: collectives, pipelines, memory, plans and runs, drawn in a browser; on this machine, offline.

With --out, write views into a file that opens without a server.
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path

from shardwise.cli.output import print_json, working
from shardwise.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=0, metavar="N", help="left out, one that is free")
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where the runs are (runs)")
    parser.add_argument("--no-browser", action="store_true", help="print the address and open nothing")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write one self-contained page instead")
    parser.add_argument("--view", action="append", default=[], metavar="VIEW", help="what to open or export: "
                        "collectives, or pipelines?ranks=8&micro=16; a file may show several")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    if args.runs.exists() and not args.runs.is_dir():
        raise UserError(f"--runs {args.runs}: that is a file; name the folder that holds runs")
    return _export(args) if args.out else _serve(args)


def _export(args: argparse.Namespace) -> int:
    from shardwise.studio.page import write_export

    with working("drawing"):
        write_export(args.out, *(args.view or [""]), runs=args.runs)
    if args.json:
        print_json({"written": str(args.out)})
    else:
        print(f"wrote {args.out}")
    return 0


def _serve(args: argparse.Namespace) -> int:
    from shardwise.studio.data.registry import VIEWS
    from shardwise.studio.page import parse_view
    from shardwise.studio.server import Studio

    state = "".join(args.view[:1])
    view, _ = parse_view(state)
    if view not in VIEWS:
        raise UserError(f"--view {state}: there are {', '.join(VIEWS)}")
    if len(args.view) > 1:
        raise UserError("a browser opens one view: give one --view, or write several with --out FILE")
    with Studio(args.port, args.runs) as studio:
        address = studio.address + (f"#{state.removeprefix('#')}" if state else "")
        if args.json:
            print_json({"address": address})
        else:
            print(f"shardwise studio: {address}  (Ctrl-C ends it)")
        _open(address, args.no_browser)
        studio.warm(view)
        with suppress(KeyboardInterrupt):
            studio.serve_forever()
    return 0


def _open(address: str, no_browser: bool) -> None:
    import sys

    sys.stdout.flush()
    if not no_browser:
        import threading
        import webbrowser

        # Some browsers hold the caller until they close.
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()

"""Open the page: collectives, pipelines, memory, plans and runs, drawn in a browser; on this machine, offline.

With --out, write views into a file that opens without a server.
"""

import sys
import threading
from contextlib import suppress
from pathlib import Path

from shardwise.cli.declare import CommandOptions, arg
from shardwise.cli.output import print_json, working
from shardwise.errors import UserError, did_you_mean
from shardwise.records import dataclass


@dataclass
class StudioOptions(CommandOptions):
    port: int = arg("left out, one that is free", "N", 0, shown="")
    runs: Path = arg("where the runs are", "DIR", Path("runs"))
    no_browser: bool = arg("print the address and open nothing")
    out: Path | None = arg("write one self-contained page instead", "FILE")
    view: tuple[str, ...] = arg(
        "what to open or export: collectives, or pipelines?ranks=8&micro=16; a file may show several", "VIEW", ()
    )


def run(args: StudioOptions) -> int:
    if args.runs.exists() and not args.runs.is_dir():
        raise UserError(f"--runs {args.runs}: that is a file; name the folder that holds runs")
    return _export(args, args.out) if args.out else _serve(args)


def _export(args: StudioOptions, out: Path) -> int:
    from shardwise.studio.page import write_export

    with working("drawing"):
        write_export(out, *(args.view or ("",)), runs=args.runs)
    if args.json:
        print_json({"written": str(out)})
    else:
        print(f"wrote {out}")
    return 0


def _serve(args: StudioOptions) -> int:
    from shardwise.studio.data.registry import VIEWS
    from shardwise.studio.page import parse_view
    from shardwise.studio.server import Studio

    state = "".join(args.view[:1])
    view, _ = parse_view(state)
    if view not in VIEWS:
        raise UserError(f"--view {state}: no such view; {did_you_mean(view, VIEWS, 'there are')}")
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
    sys.stdout.flush()
    if not no_browser:
        import webbrowser

        # Some browsers hold the caller until they close.
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()

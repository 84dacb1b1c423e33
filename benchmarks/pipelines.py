"""Pipeline schedules on processes of this host, with timed waits for arithmetic, beside their simulation.

    python benchmarks/pipelines.py [--ranks 4 8] [--micro 8 32] [--emulate F=20ms,I=20ms,W=20ms] [--steps 3]
                                   [--transport auto] [--json FILE]

For each number of ranks and micro-batches, `shardwise pipeline run --all` runs every schedule that is legal for them,
by turns in one set of processes. Messages are real, and the simulation gives each the time that one to the next rank
was measured to take while all hand one over. A rank waits the given times for each micro-batch, whatever number of
chunks shares them. Printed are makespans, measured (median over steps) and simulated, with their ratio; how many are
within 5%; and how many pairs of schedules whose simulated makespans differ by more than 5% were measured in that
order. Any other load on the machine shows: a rank must get a core when its wait is over.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

CLOSE = 0.05
"""How far a makespan may be from the simulation's."""
_OF_A_MODEL = ("model", "parameters")


def measure(ranks: int, micro: int, pretend: str, steps: int, more: list[str]) -> dict[str, Any]:
    """What one command found, without the figures of each rank.

    Ends the program with the command's own words where it fails.
    """
    command = [sys.executable, "-m", "shardwise", "pipeline", "run", "--all", "--json", "--ranks", str(ranks)]
    command += ["--micro", str(micro), "--emulate", pretend, "--steps", str(steps), *more]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    found = json.loads(done.stdout)
    rows = [
        {
            "schedule": each["schedule"],
            "virtual": each["virtual"],
            "makespans_s": each["makespans_s"],
            "measured_s": each["measured"]["makespan_s"],
            "simulated_s": each["simulated"]["makespan_s"],
            "ratio": each["ratio"],
        }
        for each in found["schedules"]
    ]
    kept = ("message_bytes", "transport", "hop_s", "left_out", "order")
    return {"ranks": ranks, "micro": micro, **{key: found[key] for key in kept}, "rows": rows}


def far(result: dict[str, Any]) -> list[str]:
    """The schedules whose makespan is not what was simulated."""
    return [row["schedule"] for row in result["rows"] if abs(row["ratio"] - 1) > CLOSE]


def describe(result: dict[str, Any]) -> str:
    """The figures of one number of ranks and micro-batches."""
    from shardwise.report.units import format_time

    rows, order = result["rows"], result["order"]
    hop = format_time(result["hop_s"])
    lines = [f"{result['ranks']} ranks, {result['micro']} micro-batches; a message takes {hop}; measured / simulated"]
    for row in rows:
        name = row["schedule"] + (f" v={row['virtual']}" if row["virtual"] > 1 else "")
        both = f"{format_time(row['measured_s'])} / {format_time(row['simulated_s'])}"
        lines.append(f"  {name:<18} {both:>20}   {row['ratio']:.3f}")
    lines.append(
        f"  within {CLOSE:.0%}: {len(rows) - len(far(result))} of {len(rows)}; {', '.join(far(result)) or 'all'}"
    )
    wrong = "; ".join(f"{slow} before {quick}" for quick, slow in order["wrong"])
    lines.append(f"  in order: {order['pairs'] - len(order['wrong'])} of {order['pairs']} pairs {wrong}".rstrip())
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--micro", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--emulate", default="F=20ms,I=20ms,W=20ms")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--transport", choices=("auto", "shared", "gloo"), default="auto")
    parser.add_argument("--json", type=Path, help="write makespans, ratios, machine and date here")
    args = parser.parse_args()

    import train_step

    results = []
    for ranks in args.ranks:
        for micro in args.micro:
            results.append(measure(ranks, micro, args.pretend, args.steps, ["--transport", args.transport]))
            print(describe(results[-1]) + "\n", flush=True)
    if args.json:
        about = {key: value for key, value in train_step.header("pipelines").items() if key not in _OF_A_MODEL}
        train_step.write_json(args.json, about | {"rounds": args.steps, "pretend": args.pretend, "results": results})


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)

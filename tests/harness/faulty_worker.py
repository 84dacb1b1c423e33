"""A rank that gets into trouble on purpose: `python faulty_worker.py FAULT CONFIG.json`, a worker for the launcher.

FAULT is JSON. what: what goes wrong, a key of `TROUBLES` or `POISONS`, or "file limit". rank, step (from 1), where:
whose, and when. calls: of the calls at this place and step, the one before which it comes, from 1. once: a file; while
it exists, it has come already and does not come again (again: it does). pids: a folder in which each rank leaves its
process id. The program itself knows nothing of all this.
"""

import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Fault = dict[str, Any]


def main(fault: Fault, argv: list[str]) -> int:
    from shardwise.ops import llama_halves
    from shardwise.report import json_lines
    from shardwise.runtime import checkpointing
    from shardwise.runtime.job import batches, pulse, worker
    from shardwise.runtime.offload import file
    from shardwise.runtime.zero import engine, optimizer

    (Path(fault["pids"]) / str(os.getpid())).touch()
    if int(os.environ["RANK"]) != fault["rank"]:
        return worker.main(argv)
    if fault["what"] == "file limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault["bytes"], fault["bytes"]))
        return worker.main(argv)
    if fault["what"] in POISONS:
        _poison(fault)
        return worker.main(argv)
    step = calls = 0

    def note(_: Any, number: int) -> None:
        nonlocal step, calls
        step, calls = number, 0

    def trouble(*_: Any) -> None:
        nonlocal calls
        once = Path(fault["once"])
        calls += 1
        if calls < fault.get("calls", 1):
            return
        if step == fault["step"] and (fault.get("again") or not once.exists()):
            once.write_text(str(time.time()))
            if fault.get("unlink"):
                shutil.rmtree(fault["folder"])
            TROUBLES[fault["what"]](fault, argv)

    before(pulse.Pulse, "step", note)
    places: dict[str, tuple[Any, str]] = {
        "data": (batches.Batches, "step"),
        "forward": (llama_halves, "rms_norm"),
        "backward": (engine.Engine, "finish_backward"),
        "optimizer": (optimizer.Optimizer, "_update"),
        "save": (checkpointing, "write_part"),
        "write of state": (file.OffloadFile, "_write_load"),
        "commit of state": (file.OffloadFile, "commit"),
        "event": (json_lines.JsonLines, "append"),
    }
    before(*places[fault["where"]], trouble)
    return worker.main(argv)


def before(owner: Any, name: str, act: Callable[..., object]) -> None:
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        act(*args)
        return original(*args, **kwargs)

    setattr(owner, name, call)


def _poison(fault: Fault) -> None:
    """In the steps of `fault["step"]`, one or a list, the rank's loss or its gradient is not finite."""
    import torch

    from shardwise.runtime.job import pulse
    from shardwise.runtime.pipeline.stages import StageRunner

    step, plain = 0, StageRunner.loss
    given = fault["step"]
    steps = given if isinstance(given, list) else [given]

    def note(_: Any, number: int) -> None:
        nonlocal step
        step = number

    def loss(self: StageRunner, logits: Any, targets: Any) -> Any:
        found = plain(self, logits, targets)
        return POISONS[fault["what"]](found) if step in steps and torch.is_grad_enabled() else found

    before(pulse.Pulse, "step", note)
    StageRunner.loss = loss  # type: ignore[method-assign]


def _with_gradient(loss: Any, factor: float) -> Any:
    loss = loss * 1.0
    loss.register_hook(lambda gradient: gradient * factor)
    return loss


def _raise(fault: Fault, argv: list[str]) -> None:
    raise ZeroDivisionError("on purpose")


def _refuse(fault: Fault, argv: list[str]) -> None:
    from shardwise.errors import UserError

    raise UserError("cannot write this: No space left on device")


def _damage(fault: Fault, argv: list[str]) -> None:
    """The newest checkpoint loses a part, and the rank its life."""
    folder = Path(json.loads(Path(argv[0]).read_text())["out"]) / "checkpoints"
    newest = max(folder.iterdir(), key=lambda path: int(path.name.removeprefix("step-")))
    next(newest.glob("*.safetensors")).unlink()
    os.kill(os.getpid(), signal.SIGKILL)


def _flip(fault: Fault, argv: list[str]) -> None:
    """A bit of the newest checkpoint changes, and the rank loses its life."""
    folder = Path(json.loads(Path(argv[0]).read_text())["out"]) / "checkpoints"
    newest = max(folder.iterdir(), key=lambda path: int(path.name.removeprefix("step-")))
    part = next(newest.glob("*.safetensors"))
    data = bytearray(part.read_bytes())
    data[-8] ^= 1
    part.write_bytes(data)
    os.kill(os.getpid(), signal.SIGKILL)


def _truncate(fault: Fault, argv: list[str]) -> None:
    for file in Path(fault["folder"]).rglob("*.bin"):
        os.truncate(file, 0)


POISONS: dict[str, Callable[[Any], Any]] = {
    "infinite loss": lambda loss: loss + float("inf"),
    "nan gradient": lambda loss: _with_gradient(loss, float("nan")),
    "infinite gradient": lambda loss: _with_gradient(loss, float("inf")),
}
TROUBLES: dict[str, Callable[[Fault, list[str]], object]] = {
    "hang": lambda fault, argv: time.sleep(3600),
    "freeze": lambda fault, argv: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": lambda fault, argv: os.kill(os.getpid(), signal.SIGKILL),
    "raise": _raise,
    "refuse": _refuse,
    "damage": _damage,
    "flip": _flip,
    "unlink": lambda fault, argv: shutil.rmtree(fault["folder"]),
    "truncate": _truncate,
}


if __name__ == "__main__":
    from shardwise.runtime.job.rank import leave

    leave(main(json.loads(sys.argv[1]), sys.argv[2:]))

"""A launcher of programs that are audited, which imports torch once for many of them and forks their ranks.

    python audited_launcher.py serve SOCKET [MODULE...]
    python -S audited_launcher.py run SOCKET LOG RANKS PROGRAM

As torchrun does, it ends the other ranks when one fails, and returns its exit code. The server must have been started
in the environment of an audit, so that its torch has the recorder; each program has the environment of its `run`.
"""

import importlib
import json
import os
import runpy
import signal
import socket
import sys
from contextlib import suppress


def serve(path: str, *modules: str) -> None:
    sys.path.pop(0)  # this folder has modules with names of others
    import torch
    import torch.distributed.fsdp
    import torch.distributed.optim
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel

    for module in modules:
        importlib.import_module(module)
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        while True:
            connection, _ = server.accept()
            if not os.fork():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _answer(connection)
            connection.close()


def _answer(connection: socket.socket) -> None:
    """Run what was asked for in this process and its children, and never return."""
    request = json.loads(connection.makefile().readline())
    os.setsid()
    out = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.clear()
    os.environ.update(request["environment"])
    connection.sendall(b"%d\n" % launch(request["ranks"], request["words"]))
    os._exit(0)


def launch(ranks: int, words: list[str]) -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    children = {}
    for rank in range(ranks):
        child = os.fork()
        if not child:
            _rank(rank, ranks, port, words)
        children[child] = rank
    code = 0
    while children:
        child, status = os.wait()
        children.pop(child)
        if status and not code:
            code = os.waitstatus_to_exitcode(status) & 255
            for other in children:
                with suppress(ProcessLookupError):
                    os.kill(other, signal.SIGTERM)
    return code


def _rank(rank: int, ranks: int, port: int, words: list[str]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    sys.argv = words
    code = 0
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = int(bool(end.code))
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    import atexit

    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(path: str, log: str, ranks: str, *words: str) -> int:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        request = {"log": log, "ranks": int(ranks), "words": list(words), "environment": dict(os.environ)}
        connection.sendall(json.dumps(request).encode() + b"\n")
        return int(connection.makefile().readline() or 1)


if __name__ == "__main__":
    action, *rest = sys.argv[1:]
    sys.exit(serve(*rest) if action == "serve" else run(*rest))  # type: ignore[func-returns-value]

"""Functions as Python calls them: messages in Python's words, and in a notebook what runs, and for how long."""

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from numbers import Number
from typing import Any, ParamSpec, TypeVar

from shardwise.errors import UserError

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE = 1.0
"""Seconds of a call before anything is shown, and between two updates."""


def _display() -> Any:
    """IPython's `display` in a notebook's kernel; elsewhere None."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return sys.modules["IPython"].display.display if type(shell).__name__ == "ZMQInteractiveShell" else None


@contextmanager
def running(doing: str) -> Iterator[None]:
    """In a notebook, show under the cell what runs and for how many seconds; nothing of it stays."""
    display = _display() if threading.current_thread() is threading.main_thread() else None
    if display is None:
        yield
        return
    done, began = threading.Event(), time.monotonic()

    def tick() -> None:
        handle = None
        while not done.wait(PATIENCE):
            text = {"text/plain": f"{doing}: {time.monotonic() - began:.0f} s"}
            if handle is None:
                handle = display(text, raw=True, display_id=True)
            else:
                handle.update(text, raw=True)
        if handle is not None:
            handle.update({"text/plain": ""}, raw=True)

    clock = threading.Thread(target=tick, daemon=True)
    clock.start()
    try:
        yield
    finally:
        done.set()
        clock.join()


_FLAG = re.compile(
    r"\b(?:torchrun|shardwise|pip|python) [^;,()]*|--([a-z][a-z-]*)(?: (?=[\d.]+(?:\b|$))| (?=[A-Z]+\b))?"
)


def in_python(text: str) -> str:
    """A message in Python's words: `--host-memory SIZE` is `host_memory=SIZE`. A command to be typed stays as it
    is."""

    def named(flag: re.Match[str]) -> str:
        return flag[0] if flag[1] is None else flag[1].replace("-", "_") + "=" * flag[0].endswith(" ")

    return _FLAG.sub(named, text)


def _checked(
    function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, numpy's numbers as Python's. Raises `UserError` for one of another type than the
    function declares."""
    import inspect  # a command's help does without

    from shardwise.options import check_type

    try:
        given = inspect.signature(function).bind(*args, **named)
    except TypeError:
        return args, named  # the call says what is wrong
    for name, value in given.arguments.items():
        if isinstance(value, Number) and hasattr(value, "item"):
            given.arguments[name] = value.item()
        kind = function.__annotations__.get(name, Any)
        with suppress(NameError):  # known to type checkers alone
            kind = eval(kind, function.__globals__) if isinstance(kind, str) else kind  # type: ignore[attr-defined]
            check_type(name, given.arguments[name], kind)
    return given.args, given.kwargs


def speaks_python(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, which says where an argument has the wrong type, and whose `UserError`s name its arguments as
    Python does; in a notebook it shows that it runs."""

    @wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> T:
        try:
            plain, others = _checked(function, args, named)
            with running(function.__name__):
                return function(*plain, **others)
        except UserError as error:
            error.args = (in_python(str(error)), *error.args[1:])
            raise

    return call

"""The one exception that a user's mistake raises: the command line prints its message as one line and exits with 2."""

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class UserError(ValueError):
    """Input that cannot be used. The message is one line: what is wrong, and what to do instead."""


class LayoutError(UserError):
    """A layout that is illegal, or that cannot run here. The message names the reason and the nearest legal values."""


class DivergedError(RuntimeError):
    """Training whose loss, gradients or weights are not finite. The message is one line: where, and what was kept."""


class NotFiniteError(UserError):
    """Weights or optimizer state that are not finite, and so were not saved."""


_FLAG = re.compile(
    r"\b(?:torchrun|shardwise|pip|python) [^;,()]*|--([a-z][a-z-]*)(?: (?=[\d.]+(?:\b|$))| (?=[A-Z]+\b))?"
)


def in_python(text: str) -> str:
    """A message in Python's words: `--host-memory SIZE` is `host_memory=SIZE`. A command to be typed stays as it
    is."""

    def named(flag: re.Match[str]) -> str:
        return flag[0] if flag[1] is None else flag[1].replace("-", "_") + "=" * flag[0].endswith(" ")

    return _FLAG.sub(named, text)


def speaks_python(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, whose `UserError`s name its arguments as Python does; in a notebook it shows that it runs."""
    from shardwise.notebook import running

    @wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> T:
        try:
            with running(function.__name__):
                return function(*args, **named)
        except UserError as error:
            error.args = (in_python(str(error)), *error.args[1:])
            raise

    return call


def file_limit(error: BaseException) -> str:
    """The line for an error that is a limit on open files, whichever library met it; empty for any other."""
    text = "Too many open files"
    if text not in str(error) and text not in str(error.__cause__ or error.__context__ or ""):
        return ""
    try:
        import resource
    except ImportError:
        return "too many open files: close other programs"
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"too many open files: a process may open {most} here (ulimit -n): allow more, such as ulimit -n 1024"


@contextmanager
def os_errors(doing: str, instead: str = "") -> Iterator[None]:
    """Raise the `UserError` "cannot DOING: reason" for an `OSError`. instead: what to do, after the reason."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot {doing}: {error.strerror}{instead}") from None


def did_you_mean(name: str, known: Collection[str], otherwise: str, most: int = 1, cutoff: float = 0.6) -> str:
    """The hint of a message about an unknown name: the nearest known ones, `most` of them, or after `otherwise` all."""
    import difflib

    near = difflib.get_close_matches(name, known, n=most, cutoff=cutoff)
    return f"did you mean {' or '.join(near)}?" if near else f"{otherwise} {', '.join(known)}"

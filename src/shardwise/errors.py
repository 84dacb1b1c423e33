"""The one exception that a user's mistake raises: the command line prints its message as one line and exits with 2."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class UserError(ValueError):
    """Input that cannot be used. The message is one line: what is wrong, and what to do instead."""


class LayoutError(UserError):
    """A layout that is illegal, or that cannot run here. The message names the reason and the nearest legal values."""


class DivergedError(RuntimeError):
    """Training whose loss, gradients or weights are not finite. The message is one line: where, and what was kept."""


class NotFiniteError(UserError):
    """Weights or optimizer state that are not finite, and so were not saved."""


def brief(error: BaseException, most: int = 240) -> str:
    """Another library's error as one line of at most `most` characters, cut between words."""
    from textwrap import shorten

    line = shorten(str(error), most, placeholder=" ...")
    return str(error)[:most] if line == "..." else line or type(error).__name__


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
def os_errors(doing: str, instead: str = "", typed: Path | str = "", damaged: str = "") -> Iterator[None]:
    """Raise the `UserError` "cannot DOING: reason" for an `OSError`. instead: what to do. typed: the user's path.
    damaged: message for contents that are not what they should be; behind a colon comes the reason."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot {doing}: {error.strerror or error}{(typed and near_path(typed)) or instead}") from None
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        if not damaged:
            raise
        raise UserError(f"{damaged} {error}" if damaged.endswith(":") else damaged) from None


def nearest(name: str, known: Collection[str], most: int = 1, cutoff: float = 0.6) -> list[str]:
    """The `most` known names nearest to an unknown one; of equally near ones by letters, then by beginning."""
    import difflib

    if same := [one for one in known if one.lower() == name.lower()]:
        return same[:most]

    def distance(one: str) -> tuple[float, bool, int]:
        begun = next((at for at, (a, b) in enumerate(zip(one, name, strict=False)) if a != b), len(name))
        return -difflib.SequenceMatcher(None, one, name).ratio(), sorted(one) != sorted(name), -begun

    return sorted(difflib.get_close_matches(name, known, most + 3, cutoff), key=distance)[:most]


def did_you_mean(name: str, known: Collection[str], otherwise: str, most: int = 1, cutoff: float = 0.6) -> str:
    """The hint of a message about an unknown name: the nearest known ones, `most` of them, or after `otherwise` all."""
    near = nearest(name, known, most, cutoff)
    return f"did you mean {' or '.join(near)}?" if near else f"{otherwise} {', '.join(known)}"


def near_path(path: Path | str, folder: bool = False) -> str:
    """The hint "; did you mean PATH?" for a missing path, by its first part that is missing; empty if none is near.
    folder: whether it must be one."""
    with suppress(OSError, ValueError, RuntimeError):
        full = Path(path).expanduser()
        missing = next(part for part in (full, *full.parents) if part.parent.is_dir())
        there = (one for one in missing.parent.iterdir() if one.is_dir() or not folder)
        others = sorted(there, key=lambda one: one.suffix == missing.suffix)
        names = {one.stem: one.name for one in others if missing.name.startswith(".") or not one.name.startswith(".")}
        if not full.exists() and (near := nearest(missing.stem, names, cutoff=0.7)):
            meant = missing.with_name(names[near[0]])
            return f"; did you mean {whole if (whole := meant / full.relative_to(missing)).exists() else meant}?"
    return ""

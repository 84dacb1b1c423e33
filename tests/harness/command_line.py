"""What holds of every command line that a user has got wrong."""

from __future__ import annotations


def mistake(outcome: tuple[int, str, str], *words: str) -> None:
    """Exit code 2, nothing on standard output, one line with all `words` on standard error."""
    code, out, err = outcome
    assert (code, out) == (2, "")
    assert err.startswith("shardwise: error: ") and err.count("\n") == 1 and err.endswith("\n"), err
    assert all(word in err for word in words), err

"""What holds of every command line that a user has got wrong."""

import json


def mistake(outcome: tuple[int, str, str], *words: str) -> None:
    """Exit code 2, one line with all `words` on standard error, nothing on standard output but, with --json, that line
    as an object."""
    code, out, err = outcome
    assert code == 2
    assert not out or json.loads(out) == {"error": err.removeprefix("shardwise: error: ").rstrip("\n"), "exit_code": 2}
    assert err.startswith("shardwise: error: ") and err.count("\n") == 1 and err.endswith("\n"), err
    assert all(word in err for word in words), err

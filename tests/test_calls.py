"""A call in a notebook shows that it runs, and for how long; nothing of it stays, and elsewhere nothing is shown."""

import sys
import time
from types import SimpleNamespace

import pytest

from shardwise import calls
from shardwise.calls import speaks_python


class ZMQInteractiveShell:
    """What a notebook's kernel runs."""


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []

    def display(text: dict[str, str], raw: bool, display_id: bool = True) -> SimpleNamespace:
        texts.append(text["text/plain"])
        return SimpleNamespace(update=display)

    fake = SimpleNamespace(get_ipython=ZMQInteractiveShell, display=SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython", fake)
    monkeypatch.setattr(calls, "PATIENCE", 0.01)
    return texts


def test_a_long_call_is_shown_and_nothing_of_it_stays(shown: list[str]) -> None:
    @speaks_python
    def planning() -> str:
        while len(shown) < 3:
            time.sleep(0.01)
        return "planned"

    assert planning() == "planned"
    assert shown[0].startswith("planning: ") and shown[-1] == ""


@speaks_python
def short() -> int:
    return 1


def test_a_short_call_shows_nothing(shown: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "PATIENCE", 60.0)
    assert short() == 1 and not shown


def test_outside_of_a_notebook_nothing_is_shown(shown: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: None)
    assert short() == 1 and not shown

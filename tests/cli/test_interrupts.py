"""Signals that end a command in order, before it has ranks that are told."""

import signal
import threading
from pathlib import Path

import pytest

from shardwise.cli.interrupts import ended_as_interrupted
from shardwise.data.corpus import _Preparation


@pytest.fixture(autouse=True)
def handlers():
    """Signals would end the tests: an `AssertionError` instead, and afterwards what was before."""

    def unheard(number: int, frame: object) -> None:
        raise AssertionError(f"nobody listened to {signal.Signals(number).name}")

    before = {number: signal.signal(number, unheard) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_an_interruption_that_is_named(number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt, match=f"stopped by {number.name}"), ended_as_interrupted():
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_what_is_ignored_remains_so():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with ended_as_interrupted():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_another_thread_leaves_signals_alone():
    seen: list[object] = []

    def work() -> None:
        with ended_as_interrupted():
            seen.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


def test_a_training_whose_text_is_prepared_ends_with_a_line_and_leaves_nothing(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    Path("text.txt").write_text("some words to learn from\n" * 100)
    monkeypatch.setattr(_Preparation, "write", lambda *_: signal.raise_signal(signal.SIGTERM))
    code, out, err = command("train", "tiny-llama", "--data", "text.txt", "--seq", 8, "--batch", 2, "--out", "runs/a")
    assert (code, out) == (143, "") and err.splitlines()[-1] == "shardwise: stopped by SIGTERM"
    assert [path.name for path in Path("runs").rglob("*")] == ["corpora", ".lock"]

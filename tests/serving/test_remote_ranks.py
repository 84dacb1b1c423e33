"""Messages between a front end and the ranks of another launcher, and who may be one."""

import json
import math
import threading
from pathlib import Path

import pytest

from shardwise.errors import UserError
from shardwise.layout import Layout
from shardwise.model.catalog import get
from shardwise.serving import remote
from shardwise.serving.job import Loading, Ready, ServingJob
from shardwise.serving.messages import Cancel, Drain, Finished, ReplicaLoad, Request, Sampling, Token

MESSAGES = [
    Request(1, (3, 4), Sampling(max_tokens=2, stop_tokens=(5, 6))),
    Cancel(1),
    Drain(),
    Token(1, 7, -0.5),
    Finished(1, "length", reused=3),
    ReplicaLoad(1, 2, 3, 4),
    Loading(1, 5, 6),
    Ready(1, 64, 8, 16, 100, 200, "gloo", 1.5),
]


def job_of(layout: str = "dp=2") -> ServingJob:
    return ServingJob(get("tiny-llama"), Layout.parse(layout), "folder")


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[remote.MessageChannel, remote.MessageChannel]:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    listener = remote.MessageListener(tmp_path, job_of(), b"k" * 32)
    meeting = remote.RankMeeting.from_json(json.loads((tmp_path / remote.MEETING).read_text()))
    assert meeting.job == job_of()
    taken: list[remote.MessageChannel] = []
    front = threading.Thread(target=lambda: taken.append(listener.accept()))
    front.start()
    rank = meeting.connect(1)
    front.join(10)
    listener.close()
    assert taken[0].recv() == 1
    return taken[0], rank


def test_messages_arrive_as_they_were(ends: tuple[remote.MessageChannel, remote.MessageChannel]) -> None:
    front, rank = ends
    rank.send(MESSAGES)
    assert front.recv() == MESSAGES
    rank.send([Token(1, 2, math.nan)])
    (token,) = front.recv()
    assert math.isnan(token.logprob)


@pytest.mark.parametrize(
    "data", [b"\x80\x04N.", b'[["os.system", {"id": 1}]]', b"[[]]", b'[["Cancel", {"x": 1}]]', b"{}x", b"[1]"]
)
def test_what_is_no_message_ends_the_channel(
    ends: tuple[remote.MessageChannel, remote.MessageChannel], data: bytes
) -> None:
    front, rank = ends
    rank._connection.send_bytes(data)
    with pytest.raises(EOFError):
        front.recv()


def test_closing_ends_a_wait(ends: tuple[remote.MessageChannel, remote.MessageChannel]) -> None:
    front, rank = ends
    heard: list[type] = []

    def wait() -> None:
        try:
            front.recv()
        except (EOFError, OSError) as error:
            heard.append(type(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    front.close()
    front.close()
    waiting.join(10)
    assert len(heard) == 1
    with pytest.raises(EOFError):
        rank.recv()


def test_a_launcher_starts_as_many_ranks_as_the_layout_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert remote.launched_ranks() is None
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    remote.check_ranks(job_of("pp=2"))
    with pytest.raises(UserError, match=r"has started 2 ranks, and dp=1.* has 1: start as many"):
        remote.check_ranks(job_of("dp=1"))

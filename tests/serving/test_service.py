import os
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from harness.huggingface import pretrained
from shardwise.errors import UserError
from shardwise.layout import Layout
from shardwise.runtime.job.launch import RunFailed
from shardwise.serving.job import ServingJob, weights_in
from shardwise.serving.messages import Finished, Sampling, Token
from shardwise.serving.service import Service

LIMIT = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("service") / "tiny"
    pretrained("llama", max_position_embeddings=512).save_pretrained(path)
    return path


def job_of(folder: Path, layout: str, **options: Any) -> ServingJob:
    model, _ = weights_in(folder)
    return ServingJob(model, Layout.parse(f"{layout},precision=fp32"), str(folder), page=4, **options)


class Collected:
    """A sink: tokens as they come, and the end."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.finished: Finished | None = None
        self.over, self.begun = threading.Event(), threading.Event()

    def __call__(self, answer: Token | Finished) -> None:
        if isinstance(answer, Token):
            assert not self.over.is_set()
            self.tokens.append(answer.token)
        else:
            self.finished = answer
            self.over.set()
        self.begun.set()

    def end(self) -> Finished:
        assert self.over.wait(LIMIT) and self.finished is not None
        return self.finished


def children() -> set[str]:
    found = subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "shardwise.serving.rank"], capture_output=True)
    return set(found.stdout.decode().split())


def test_requests_cancels_and_the_end_on_two_replicas(folder: Path) -> None:
    lines: list[str] = []
    job = job_of(folder, "dp=2", batch=2, context=300)
    with Service(job, echo=lines.append) as service:
        ready = service.start()
        assert ready.context == 300 and ready.page_tokens == 4 and lines
        prompts = [[1 + n, 2, 3] for n in range(6)]
        answers = [Collected() for _ in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            service.submit(prompt, Sampling(max_tokens=12), answer)
        assert [answer.end().reason for answer in answers] == ["length"] * 6
        long = Collected()
        number = service.submit([4, 5], Sampling(max_tokens=290), long)
        assert long.begun.wait(LIMIT)
        service.cancel(number)
        assert long.end().reason == "cancelled" and len(long.tokens) < 290
        service.cancel(number)
        alone = Collected()
        service.submit(prompts[0], Sampling(max_tokens=12), alone)
        alone.end()
        assert alone.tokens == answers[0].tokens
        with pytest.raises(UserError, match="at most 288 tokens of prompt"):
            service.submit([1] * 289, Sampling(max_tokens=12), alone)
        with pytest.raises(UserError, match="token 53 does not exist"):
            service.submit([53], Sampling(), alone)
        with pytest.raises(UserError, match="empty prompt"):
            service.submit([], Sampling(), alone)
        last = Collected()
        service.submit(prompts[1], Sampling(max_tokens=12), last)
        service.drain()
        assert last.tokens == answers[1].tokens, "what was asked before the end is answered"
        with pytest.raises(RunFailed):
            service.submit([1], Sampling(), alone)
    assert service.failure is None and not children()


def test_a_rank_that_is_killed_ends_every_request_with_one_line(folder: Path) -> None:
    with Service(job_of(folder, "tp=2", context=500)) as service:
        service.start()
        answers = [Collected() for _ in range(3)]
        for answer in answers:
            service.submit([1, 2, 3], Sampling(max_tokens=490), answer)
        assert answers[0].begun.wait(LIMIT)
        second = sorted(children(), key=int)[1]
        killed = time.monotonic()
        os.kill(int(second), signal.SIGKILL)
        ends = [answer.end() for answer in answers]
        assert time.monotonic() - killed < 5
        assert {end.reason for end in ends} == {"error"}
        assert service.failure is not None and "rank 1 was killed by SIGKILL" in service.failure
        assert all(end.error == service.failure and "\n" not in end.error for end in ends)
        with pytest.raises(RunFailed, match="rank 1"):
            service.submit([1], Sampling(), answers[0])
    assert not children()


def test_signals_do_not_break_off_the_end(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The folder with the socket's key goes, and so do the ranks."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    service, heard = Service(job_of(folder, "tp=2")), []
    service.start()

    def insist() -> None:
        while not service._closing:
            time.sleep(0.001)
        for number in numbers:
            os.kill(os.getpid(), number)

    insisting = threading.Thread(target=insist)
    before = {number: signal.signal(number, lambda number, _: heard.append(number)) for number in numbers}
    try:
        insisting.start()
        service.close()
        insisting.join()
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]  # the one after the end
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert not list(tmp_path.glob("shardwise-*"))


def test_what_cannot_be_loaded_is_one_line_and_nothing_is_left(folder: Path, tmp_path: Path) -> None:
    job = job_of(folder, "tp=2")
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "model.safetensors"):
        (broken / name).write_bytes((folder / name).read_bytes())
    with (broken / "model.safetensors").open("r+b") as file:
        file.truncate(2000)
    with pytest.raises(UserError, match="cut short"):
        weights_in(broken)
    later = ServingJob.from_json(job.to_json() | {"weights": str(broken)})
    with Service(later) as service, pytest.raises(UserError, match="cut short"):
        service.start()
    with Service(job) as service:
        # Closed before it was started, or while it is: nothing remains either.
        pass
    assert not children()


def test_jobs_that_no_engine_can_have(folder: Path, tmp_path: Path) -> None:
    for options, words in (
        ({"context": 513}, "knows 512 positions"),
        ({"context": 100, "pages": 20}, "the largest that does: 80"),
        ({"chunk": 0}, "chunk must be at least 1"),
        ({"quantize": "int3"}, "quantize must be one of none, int8"),
    ):
        with pytest.raises(UserError, match=words):
            job_of(folder, "dp=1", **options)
    for layout, words in (
        ("tp=3", "valid tp: 1, 2, 4"), ("dp=2,zero=1", "use zero=0"), ("tp=2,sp", "leave sp out"),
        ("dp=2,pp=2,zero=3", "use dp=4,zero=3,precision=fp32 or dp=2,pp=2"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            job_of(folder, layout)
    dropping = tmp_path / "gpt2"
    pretrained("gpt2", attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1).save_pretrained(dropping)
    assert job_of(dropping, "tp=2").model.attention_dropout == 0, "nothing is dropped, so that sdpa will do"
    job = job_of(folder, "dp=2", pages=9)
    assert job.context == 36 and ServingJob.from_json(job.to_json()) == job

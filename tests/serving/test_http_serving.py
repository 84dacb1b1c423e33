"""`shardwise serve` as its users run it: a small model on two ranks, the official client, and every way it can end."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from described_requests import ASKED, changed, is_described, values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness import forked
from harness.dialogues import turn, write_records, write_tokenizer
from harness.today import EVERYTHING
from shardwise.serving.service import PRIMITIVES

SRC = Path(__file__).parents[2] / "src"
WORDS, CONTEXT = 290, 256
GROWTH = 4 << 20
"""Bytes by which a process may grow while it serves 64 clients, be it for seconds or for a minute."""
HELLO = [{"role": "user", "content": "w1 w2"}]


def write_model(folder: Path) -> Path:
    """A Llama with random weights, and a tokenizer whose tokens are words: w0, w1, ..."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    from harness.huggingface import pretrained

    pretrained("llama", vocab_size=WORDS + 2, max_position_embeddings=CONTEXT).save_pretrained(folder)
    words = {f"w{number}": number for number in range(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("<user>", special=True), AddedToken("<assistant>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}<assistant>"
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny-llama"))


@dataclass
class Served:
    """A command that serves. said: its line of JSON."""

    process: subprocess.Popen[str]
    said: dict[str, Any]
    tmp: Path

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.said["url"], api_key="any", max_retries=0, timeout=60)

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(self.said["url"].removesuffix("/v1") + "/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    def ranks(self) -> list[int]:
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(word) for task in tasks for word in task.read_text().split()]

    def end(self) -> tuple[int, str]:
        """Wait for its end: (exit code, standard error)."""
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, err


@contextmanager
def serve(model: Path, tmp: Path, *arguments: str, **variables: str) -> Iterator[Served]:
    """`shardwise serve`, ready; its temporary files go to `tmp`."""
    command = [sys.executable, "-m", "shardwise", "serve", str(model), "--port", "0", "--precision", "fp32", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp), **variables}
    process = subprocess.Popen(
        [*command, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            pytest.fail(process.communicate()[1])
        yield Served(process, json.loads(line), tmp)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    # Products of so many shapes are kept that it takes minutes to meet them all, which would hide a leak.
    few = dict.fromkeys(PRIMITIVES, "16")
    tmp = tmp_path_factory.mktemp("tmp")
    with serve(model, tmp, "--layout", "tp=2", "--batch", "16", "--queue", "64", **few) as one:
        yield one


def test_it_says_what_it_serves_and_what_would_fit(served):
    said = served.said
    assert said["url"].startswith("http://127.0.0.1:") and said["context"] == CONTEXT
    assert said["layout"] == "tp=2,precision=fp32" and said["valid"]["tp"] == [1, 2, 4]
    assert said["room"]["fits"] is True and said["room"]["context"] == CONTEXT
    assert said["held"]["cache"] == 2 * 2 * 1 * 6 * 4 * CONTEXT * 16


def test_the_official_client_chats_streams_and_cancels(served):
    with served.client as client:
        name = client.models.list().data[0].id
        asked: dict[str, Any] = {"model": name, "messages": HELLO, "temperature": 0, "max_tokens": 12}
        whole = client.chat.completions.create(**asked)
        text = whole.choices[0].message.content
        assert len(text.split()) == whole.usage.completion_tokens == 12 and whole.usage.prompt_tokens == 4
        parts = list(client.chat.completions.create(**asked, stream=True))
        assert "".join(part.choices[0].delta.content or "" for part in parts) == text
        assert sum(bool(part.choices[0].delta.content) for part in parts) > 6, "tokens come as they are made"
        stopped = client.chat.completions.create(**asked, stop=text.split()[5])
        assert stopped.choices[0].finish_reason == "stop" and text.startswith(stopped.choices[0].message.content)
        drawn = [client.chat.completions.create(**{**asked, "temperature": 1.5, "seed": seed}) for seed in (1, 1, 2)]
        texts = [answer.choices[0].message.content for answer in drawn]
        assert texts[0] == texts[1] != texts[2]
        with client.completions.create(model=name, prompt="w5", max_tokens=250, stream=True) as stream:
            next(iter(stream))
    settled(served)


def test_log_likelihoods_are_those_of_transformers(served, model):
    """The requests of evaluation harnesses: several choices after a context, and a text from its first token on."""
    import torch
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(model).eval()
    with torch.no_grad():
        best = int(theirs(torch.tensor([[1, 2, 3]])).logits[0, -1].argmax())
    asked = [([1, 2, 3], [best]), ([1, 2, 3], [6, 7, 8]), ([0], [*range(5, 130)])]
    with served.client as client:
        scored: dict[str, Any] = {
            "model": client.models.list().data[0].id,
            "temperature": 0,
            "logprobs": 1,
            "seed": 1234,
        }
        prompts = [context + continuation for context, continuation in asked]
        told = client.completions.create(**scored, prompt=prompts, max_tokens=1, echo=True).choices
        alone = client.completions.create(**scored, prompt=prompts, max_tokens=0, echo=True).choices
    for (context, continuation), whole, one in zip(asked, told, alone, strict=True):
        with torch.no_grad():
            rows = theirs(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1].log_softmax(-1)
        expected = float(rows.gather(1, torch.tensor(continuation)[:, None]).sum())
        greedy = rows.argmax(-1).tolist() == continuation
        for known, end in ((whole.logprobs, -1), (one.logprobs, None)):
            logprobs = known.token_logprobs[len(context) : end]
            likeliest = [max(top.values()) for top in known.top_logprobs[len(context) : end]]
            assert abs(sum(logprobs) - expected) < 1e-3 and (logprobs == likeliest) == greedy
    settled(served)


def test_a_cache_cut_over_context_parallel_ranks_gives_the_same_answers(served, model, tmp_path):
    prompts = [" ".join(f"w{(7 * n + i) % 40}" for i in range(n)) for n in (1, 3, 16, 17, 40, 90, 2, 31)]

    def answers(client: Any) -> list[str]:
        name = client.models.list().data[0].id

        def ask(prompt: str) -> str:
            text: str = (
                client.completions.create(model=name, prompt=prompt, max_tokens=20, temperature=0).choices[0].text
            )
            return text

        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(ask, prompts))

    with serve(model, tmp_path, "--layout", "cp=2", "--batch", "4") as cut:
        assert cut.said["layout"] == "cp=2,precision=fp32"
        assert cut.said["held"]["cache"] == 2 * 2 * 2 * 6 * 4 * CONTEXT * 4 // 2
        with served.client as one, cut.client as other:
            assert answers(other) == answers(one)


def settled(served: Served) -> None:
    """Nothing runs, nothing waits and no page is held, of what clients have left."""
    busy = ("sequences_running", "sequences_waiting", 'pages_used{replica="0"}')
    deadline = time.monotonic() + 30
    while any((found := served.metrics())[f"shardwise_{name}"] for name in busy):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


@pytest.mark.parametrize("path", ASKED)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_requests_from_the_description_get_no_5xx(served, path, data):
    body = data.draw(values(ASKED[path]) | changed(path))
    if isinstance(body, dict):
        # Without it a chat goes on to the end of the context.
        body["max_tokens"] = 2
        body.pop("max_completion_tokens", None)
    url = served.said["url"].removesuffix("/v1") + path
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            is_described(answer.status, answer.read(), path)
    except urllib.error.HTTPError as refused:
        is_described(refused.code, json.loads(refused.read()), path)


@dataclass
class Crowd:
    """Clients that stream greedy answers to the same few prompts, and often leave before the end."""

    served: Served
    chance: random.Random
    length: int = 24

    def __post_init__(self) -> None:
        lengths = [self.chance.randrange(1, 60) for _ in range(8)]
        self.prompts = [[self.chance.randrange(WORDS) for _ in range(length)] for length in lengths]
        self.whole: list[str] = []
        self.left = 0

    async def stream(self, client: openai.AsyncOpenAI, prompt: list[int], leave: int | None) -> str:
        """The text of an answer, up to its end or to so many pieces."""
        text, pieces = "", 0
        stream = await client.completions.create(
            model=self.served.said["model"], prompt=prompt, max_tokens=self.length, temperature=0, stream=True
        )
        async with stream:
            async for chunk in stream:
                text += chunk.choices[0].text
                pieces += 1
                if pieces == leave:
                    self.left += 1
                    break
        return text

    async def member(self, client: openai.AsyncOpenAI, until: float) -> None:
        while True:
            number, leave = self.chance.randrange(8), self.chance.choice([None, None, 1, 5, 12])
            text, whole = await self.stream(client, self.prompts[number], leave), self.whole[number]
            assert text == whole if leave is None else text and whole.startswith(text)
            if time.monotonic() >= until:
                return

    async def gather(self, seconds: float) -> None:
        client = openai.AsyncOpenAI(base_url=self.served.said["url"], api_key="any", max_retries=0, timeout=120)
        async with client:
            self.whole = self.whole or [await self.stream(client, prompt, None) for prompt in self.prompts]
            assert len(set(self.whole)) == len(self.prompts)
            until = time.monotonic() + seconds
            await asyncio.gather(*(self.member(client, until) for _ in range(64)))


def resident(served: Served) -> dict[int, int]:
    """Bytes of memory of the command and its ranks."""
    pids = [served.process.pid, *served.ranks()]
    page = os.sysconf("SC_PAGE_SIZE")
    return {pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page for pid in pids}


def grew(before: dict[int, int], after: dict[int, int]) -> bool:
    return any(after[pid] >= before[pid] + GROWTH for pid in before)


def test_64_streams_with_cancels_neither_lose_nor_cross_tokens(served):
    crowd, cancelled = Crowd(served, random.Random(3)), 'shardwise_sequences_finished_total{reason="cancelled"}'
    so_far = served.metrics().get(cancelled, 0)
    asyncio.run(crowd.gather(seconds=0))
    settled(served)
    # Not enough to warm up when other programs have the cores: later rounds then are without growth, unless it leaks.
    warm, long, rounds = (30, 60, 3) if EVERYTHING else (1, 2, 4)
    asyncio.run(crowd.gather(warm))
    settled(served)
    readings = [resident(served)]
    while len(readings) == 1 or grew(*readings[-2:]):
        assert len(readings) <= rounds, readings
        asyncio.run(crowd.gather(long))
        settled(served)
        readings.append(resident(served))
    found = served.metrics()
    assert 0 < found[cancelled] - so_far <= crowd.left
    assert not any(value for name, value in found.items() if 'reason="error"' in name)


# The last test on the shared server: it ends it.
def test_a_killed_rank_ends_every_request_with_an_error_and_the_command(served):
    client, name = served.client, served.said["model"]
    streams = [
        iter(client.completions.create(model=name, prompt=[word], max_tokens=250, stream=True)) for word in range(5)
    ]
    for stream in streams:
        next(stream)
    os.kill(served.ranks()[-1], signal.SIGKILL)
    for stream in streams:
        with pytest.raises(openai.APIError, match="SIGKILL"):
            list(stream)
    code, err = served.end()
    assert code == 1
    last = err.splitlines()[-1]
    assert last.startswith("shardwise: error: rank ") and "SIGKILL" in last and "Traceback" not in err
    assert not served.ranks() and not list(served.tmp.iterdir()), "something is left"


def test_a_signal_lets_running_answers_finish_and_refuses_new_ones(model, tmp_path):
    with serve(model, tmp_path, SHARDWISE_API_KEY="any") as served, served.client as client:
        name = served.said["model"]
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="other").models.list()
        counted = {"include_usage": True}
        stream = iter(
            client.completions.create(model=name, prompt=[1], max_tokens=255, stream=True, stream_options=counted)
        )
        next(stream)
        served.process.send_signal(signal.SIGTERM)
        refused = None
        rest = []
        for chunk in stream:
            rest.append(chunk)
            if refused is None:
                with pytest.raises((urllib.error.HTTPError, urllib.error.URLError)) as caught:
                    for _ in range(1000):
                        urllib.request.urlopen(served.said["url"].removesuffix("/v1") + "/health", timeout=30).close()
                refused = caught.value
        assert rest[-2].choices[0].finish_reason == "length" and rest[-1].usage.completion_tokens == 255
        assert isinstance(refused, urllib.error.HTTPError) and refused.code == 503
        code, err = served.end()
    assert code == 0 and "SIGTERM: 1 running request(s)" in err and err.endswith("stopped\n")
    assert not list(tmp_path.iterdir()), "something is left"


def test_a_model_answers_in_the_format_that_it_has_learned(tmp_path: Path) -> None:
    """Trained on dialogues, served from its run with the tokenizer's template."""
    colors = {"sky": "blue", "grass": "green", "coal": "black", "snow": "white"}
    asked = {thing: [turn("user", f"What color is {thing}?")] for thing in colors}
    records = [{"messages": [*asked[k], turn("assistant", json.dumps({"color": v}))]} for k, v in colors.items()] * 20
    write_tokenizer(tmp_path / "tok", records)
    write_records(tmp_path / "format.jsonl", records)
    words = ["--data", "format.jsonl", "--tokenizer", "tok", "--vocab", "304", "--seq", "128", "--batch", "8"]
    small = "layers=2,hidden=64,heads=4,kv_heads=2,ffn=128"
    settings = ["--set", small, "--steps", "60", "--lr", "1e-2", "--layout", "dp=2", "--no-tensorboard"]
    done = forked.shardwise("train", "llama-3-8b", *words, *settings, "--out", "run",
                            environment={"OMP_NUM_THREADS": "1"}, timeout=240, folder=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    with serve(tmp_path / "run", tmp_path) as served:
        for thing, color in colors.items():
            made = served.client.chat.completions.create(
                model="run", messages=asked[thing], temperature=0, max_tokens=24
            )
            assert made.choices[0].finish_reason == "stop"
            assert json.loads(made.choices[0].message.content) == {"color": color}

"""The official `openai` client, unchanged, against the HTTP interface on a double of the engine."""

from collections.abc import Iterator

import openai
import pytest
from serving_double import MODEL, Running, serving

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("openai"), slots=2, queue=2, pause=0.001, api_key="key") as running:
        yield running


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0, timeout=30) as one:
        yield one


def test_it_chats(client):
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_completion_tokens=8, user="somebody")
    assert answer.choices[0].message.content == "[-user-]" and answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8 and answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    talk = [*HELLO, answer.choices[0].message, {"role": "user", "content": "go on"}]
    assert client.chat.completions.create(model=MODEL, messages=talk, max_tokens=1).choices[0].message.content == "["


def test_it_completes(client):
    answer = client.completions.create(model=MODEL, prompt=["ab", "c"], max_tokens=3, logprobs=0, temperature=0)
    assert [choice.text for choice in answer.choices] == ["aba", "ccc"]
    assert answer.choices[0].logprobs.token_logprobs == [-0.5] * 3


def test_it_streams_with_counts(client):
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8, stream=True, stream_options=options)
    )
    *chunks, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "[-user-]"
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason == "length"
    assert last.usage.completion_tokens == 8 and not last.choices
    texts = [chunk.choices[0].text for chunk in client.completions.create(model=MODEL, prompt="ab", stream=True)]
    assert "".join(texts) == "ab" * 8


def test_the_stream_helper_of_the_client_gathers_a_whole_answer(client):
    with client.chat.completions.stream(model=MODEL, messages=HELLO, stop="er-", logprobs=True) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "[-us"
    assert [entry.token for entry in final.choices[0].logprobs.content] == list("[-us")


def test_a_closed_stream_cancels_the_request(client, server):
    before = len(server.engine.cancels)
    with client.completions.create(model=MODEL, prompt="ab", max_tokens=190, stream=True) as stream:
        next(iter(stream))
    number = server.engine.submitted[-1].id
    deadline = 1000
    while server.front.open and deadline:
        deadline -= 1
        client.models.list()
    assert number in server.engine.cancels[before:] and server.front.open == 0


def test_it_lists_the_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "shardwise"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_its_exceptions_are_the_ones_it_has_for_each_mistake(client, server):
    with pytest.raises(openai.BadRequestError, match="at most 2") as caught:
        client.completions.create(model=MODEL, prompt="a", temperature=3)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-9", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError, match="tools are not supported"):
        client.chat.completions.create(model=MODEL, messages=HELLO, tools=[{"type": "function"}])


def test_a_full_queue_is_its_rate_limit_and_it_comes_back(client, server):
    server.engine.hold = True
    try:
        streams = [client.completions.create(model=MODEL, prompt="ab", max_tokens=2, stream=True) for _ in range(4)]
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model=MODEL, prompt="ab", max_tokens=2)
        assert int(caught.value.response.headers["retry-after"]) >= 1
    finally:
        server.engine.hold = False
    assert ["".join(chunk.choices[0].text for chunk in stream) for stream in streams] == ["ab"] * 4


def test_an_engine_that_fails_in_a_stream_raises(tmp_path):
    with (
        serving(tmp_path, pause=0.01) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client,
    ):
        stream = iter(client.chat.completions.create(model=MODEL, messages=HELLO, stream=True))
        next(stream)
        server.engine.fail("rank 0 was killed by SIGKILL")
        with pytest.raises(openai.APIError, match="SIGKILL"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="SIGKILL"):
            client.chat.completions.create(model=MODEL, messages=HELLO)

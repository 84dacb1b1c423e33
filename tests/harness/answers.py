"""Requests for tests of generation, and what their answers and logits must be."""

import random
from typing import Any

import torch

from harness.generation import Seen
from shardwise.serving.messages import Cancel, Command, Finished, Request, Sampling, Token

CLOSE, MARGIN = 1e-4, 2e-4
CANCELLED = 5


def requests(count: int, draw: random.Random, replicas: int) -> dict[int, dict[int, list[Command]]]:
    """Replica -> turn -> what arrives."""
    common = [draw.randrange(53) for _ in range(11)]
    asked: dict[int, dict[int, list[Command]]] = {replica: {} for replica in range(replicas)}
    for number in range(1, count + 1):
        own = tuple(draw.randrange(53) for _ in range(draw.randint(1, 14)))
        prompt = (*common, *own) if number % 2 else own
        request = Request(number, prompt, Sampling(max_tokens=draw.randint(1, 9)))
        turn = 0 if count == 1 else draw.randrange(18)
        replica = number % replicas
        asked[replica].setdefault(turn, []).append(request)
        if number == CANCELLED:
            asked[replica].setdefault(turn + 3, []).append(Cancel(number))
    return asked


def check(
    model: Any, asked: dict[int, dict[int, list[Command]]], ranks: list[Seen], reuse: bool, close: float = CLOSE
) -> None:
    """Every logit is the model's, to `close`, and every token the likeliest one."""
    prompts = {r.id: r for turns in asked.values() for each in turns.values() for r in each if isinstance(r, Request)}
    answers: dict[int, list[int]] = {number: [] for number in prompts}
    finished: dict[int, Finished] = {}
    logits: dict[int, dict[int, torch.Tensor]] = {}
    for rank in ranks:
        assert rank.used == 0, "pages are lost"
        for number, kept in rank.logits.items():
            logits.setdefault(number, {}).update(kept)
    for rank in ranks:
        finished |= {answer.id: answer for answer in rank.answers if isinstance(answer, Finished)}
        mine: dict[int, list[int]] = {}
        for answer in rank.answers:
            if isinstance(answer, Token):
                mine.setdefault(answer.id, []).append(answer.token)
        for number, tokens in mine.items():
            assert answers[number] in ([], tokens), "ranks of a replica disagree"
            answers[number] = tokens
    assert finished.keys() == prompts.keys()
    for number, request in prompts.items():
        tokens = answers[number]
        if number == CANCELLED and finished[number].reason == "cancelled":
            assert len(tokens) < request.sampling.max_tokens
        else:
            assert finished[number].reason == "length" and len(tokens) == request.sampling.max_tokens
        whole = [*request.prompt, *tokens]
        with torch.no_grad():
            expected = model(torch.tensor([whole])).logits[0]
        found = logits.get(number, {})
        first = finished[number].reused
        if not first:
            assert tokens == [] or found.keys() >= set(range(len(whole) - 1))
        for place, row in found.items():
            if place < len(whole):
                assert float((row - expected[place]).abs().max()) < close, (number, place)
        for place, token in enumerate(tokens, len(request.prompt)):
            best = expected[place - 1]
            second = best.topk(2).values
            if second[0] - second[1] > MARGIN:
                assert token == int(best.argmax()), (number, place)
    reused = sum(each.reused for each in finished.values())
    assert (reused > 0) == (reuse and len(prompts) > 1)

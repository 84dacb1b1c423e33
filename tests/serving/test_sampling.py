import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.cases import from_table
from shardwise.serving.messages import NOTHING, Sampling
from shardwise.serving.sampling import choose, uniform

PROBABILITIES = torch.tensor([0.05, 0.4, 0.2, 0.25, 0.1], dtype=torch.float64)
DRAWS = 1200


def _drawn(sampling: Sampling, logits: torch.Tensor) -> dict[int, float]:
    tokens, _ = choose(logits.expand(DRAWS, -1), [sampling] * DRAWS, list(range(DRAWS)))
    return {int(token): count / DRAWS for token, count in Counter(tokens.int().tolist()).items()}


@from_table
def test_frequencies(options: dict[str, float], expected: list[float]) -> None:
    sampling = Sampling(**{"temperature": 1.0, "seed": 11, **options})
    found = _drawn(sampling, PROBABILITIES.log() + 3)
    for token, probability in enumerate(expected):
        spread = math.sqrt(probability * (1 - probability) / DRAWS)
        assert abs(found.get(token, 0.0) - probability) <= 4.5 * spread


def test_a_wide_vocabulary_is_cut_as_a_narrow_one() -> None:
    """More tokens than are sorted at first, whose share lies beyond those."""
    logits = torch.zeros(3000, dtype=torch.float64)
    logits[7] = 1.0
    found = _drawn(Sampling(temperature=1.0, top_p=0.9, seed=2), logits)
    assert 0.8 * 0.9 * 3000 * (1 - math.exp(-DRAWS / 2700)) < len(found) <= 2702
    assert len(_drawn(Sampling(temperature=1.0, top_k=800, seed=2), logits)) <= 800
    assert len(_drawn(Sampling(temperature=1.0, seed=2), logits)) > 800


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.9}])
@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-30])
def test_next_to_no_temperature_takes_the_likeliest(temperature: float, options: dict[str, float]) -> None:
    logits = 40 * PROBABILITIES.log().float()
    assert _drawn(Sampling(temperature=temperature, seed=3, **options), logits) == {1: 1.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_of_what_are_no_numbers_there_is_no_token(dtype: torch.dtype, temperature: float) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, math.nan, -1.0], [math.nan] * 3], dtype=dtype)
    tokens, _ = choose(logits, [Sampling(temperature=temperature, top_k=1)] * 3, [0, 0, 0])
    assert tokens.tolist() == [1, NOTHING, NOTHING]


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.9}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_of_what_is_infinite_there_is_no_token(temperature: float, options: dict[str, float]) -> None:
    logits = torch.tensor([[1.0, math.inf, 2.0], [-math.inf] * 3, [-math.inf, 3.0, -math.inf]])
    tokens, _ = choose(logits, [Sampling(temperature=temperature, **options)] * 3, [0, 0, 0])
    assert tokens.tolist() == [NOTHING, NOTHING, 1]


def test_greedy_takes_the_first_of_the_likeliest_and_tells_its_probability() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, -1.0, -2.0]])
    tokens, logprobs = choose(logits, [Sampling(), Sampling()], [0, 0])
    assert tokens.tolist() == [1, 0]
    assert torch.allclose(logprobs, torch.log_softmax(logits.double(), -1).gather(1, tokens.long()[:, None])[:, 0])


def test_probabilities_are_told_to_those_who_want_them() -> None:
    logits = torch.tensor([[1.0, 3.0], [0.0, -1.0], [2.0, 0.5]]).log_softmax(-1)
    tokens, logprobs = choose(logits, [Sampling(logprobs=False), Sampling(), Sampling(logprobs=False)], [0] * 3)
    assert tokens.tolist() == [1, 0, 0] and logprobs.isnan().tolist() == [True, False, True]
    assert math.isclose(logprobs[1], logits[1, 0], rel_tol=1e-6)


def test_a_target_is_scored_and_the_likeliest_are_told() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, -1.0, 5.0], [math.nan] * 3])
    samplings = [Sampling(temperature=2.0, top_logprobs=2, prompt_logprobs=True), Sampling(top_logprobs=1), Sampling()]
    told = torch.stack(choose(logits, samplings, [1, 2, 3], targets={0: 0, 2: 1}, top=4))
    expected = logits.double().log_softmax(-1)
    assert told.shape == (10, 3) and told[0].tolist() == [0, 2, NOTHING]
    assert torch.allclose(told[1, :2], expected[[0, 1], [0, 2]])
    assert told[2:6, 0].tolist() == [1, 2, 0, NOTHING] and told[2:4, 1].tolist() == [2, 0]
    assert torch.allclose(told[6:9, 0], expected[0, [1, 2, 0]])


def test_banned_tokens_are_not_chosen_and_change_no_probability() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0]])
    for temperature in (0.0, 1e-9):
        tokens, logprobs = choose(logits, [Sampling(temperature=temperature)] * 2, [0, 0], banned={0: (1, 99)})
        assert tokens.tolist() == [2, 1] and torch.allclose(logprobs, logits.double().log_softmax(-1)[0, [2, 1]])
    assert logits[0, 1] == 3


@given(st.lists(st.lists(st.floats(-9, 9, width=16), min_size=3, max_size=3), min_size=1, max_size=4))
def test_greedy_takes_the_greatest_in_bf16(rows: list[list[float]]) -> None:
    logits = torch.tensor(rows).bfloat16()
    tokens, _ = choose(logits, [Sampling(logprobs=False)] * len(rows), [0] * len(rows))
    assert torch.equal(logits.gather(1, tokens.long()[:, None])[:, 0], logits.amax(-1))


@given(st.integers(-(2**63), 2**63), st.integers(0, 10**6), st.integers(0, 5))
def test_a_token_depends_on_its_own_request_alone(seed: int, place: int, others: int) -> None:
    assert 0 <= uniform(seed, place) < 1 and uniform(seed, place) == uniform(seed, place)
    logits = torch.linspace(-1, 1, 40).sin()[None]
    mine = Sampling(temperature=1.3, top_p=0.9, seed=seed)
    alone, _ = choose(logits, [mine], [place])
    among, _ = choose(
        logits.expand(others + 1, -1), [Sampling(temperature=1.0)] * others + [mine], [9] * others + [place]
    )
    assert alone[0] == among[-1]


def test_seeds_and_places_give_different_numbers() -> None:
    numbers = {uniform(seed, place) for seed in range(30) for place in range(30)}
    assert len(numbers) == 900 and abs(sum(numbers) / 900 - 0.5) < 0.05

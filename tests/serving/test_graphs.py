"""Decode steps with static shapes, on the CPU: the logits and tokens of the eager form, whatever joins and leaves."""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.decode_steps import Twice, with_kernels
from harness.generation import Script, generated, job_of
from harness.huggingface import pretrained
from harness.pool import run_ranks
from harness.triton import needs_interpreter
from shardwise.layout import Layout
from shardwise.ops.paged import DecodeRows
from shardwise.serving.graphs import DecodeShape, DecodeSteps, StaticInputs, capturable, decodes, padded_batch
from shardwise.serving.job import ServingJob, weights_in
from shardwise.serving.messages import Cancel, Command, Request, Sampling, Token
from shardwise.serving.scheduler import Chunk, EngineStep, Sequence

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 3}, "gpt2": {"n_layer": 3}, "gemma2": {"num_hidden_layers": 3},
    "qwen3": {"num_hidden_layers": 3}, "olmo2": {"num_hidden_layers": 2}, "qwen2": {"num_hidden_layers": 2},
    "deepseek_v3": {}, "mixtral": {},
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("models")

    @cache
    def folder(name: str) -> Path:
        pretrained(name, **FAMILIES[name]).save_pretrained(root / name)
        return root / name

    return folder


def twice(folder: Path, asked: dict[int, list[Command]], **options: Any) -> Twice:
    job = job_of(folder, "dp=1", "fp64", context=40, **options)
    result: Twice = run_ranks("harness.decode_steps:compare", 1, Script(job, {0: asked}))[0]
    return result


def arrivals(draw: random.Random) -> dict[int, list[Command]]:
    """Turn -> requests with answers longer than prompts, so that most steps are decode steps; one is cancelled."""
    common = tuple(draw.randrange(53) for _ in range(9))
    asked: dict[int, list[Command]] = {}
    for number in range(1, 13):
        own = tuple(draw.randrange(53) for _ in range(draw.randint(1, 8)))
        prompt = (*common, *own) if number % 2 else own
        asked.setdefault(draw.randrange(60), []).append(
            Request(number, prompt, Sampling(max_tokens=draw.randint(8, 22)))
        )
    asked.setdefault(30, []).append(Cancel(5))
    return asked


@pytest.mark.parametrize("family", FAMILIES)
def test_static_steps_compute_what_eager_ones_do(folders: Any, family: str) -> None:
    """Twelve requests at random turns, some with the same beginning, one cancelled, with too few pages for all."""
    draw = random.Random(family)
    result = twice(folders(family), arrivals(draw), page=4, pages=16, chunk=5, batch=8, reuse=family != "gpt2")
    assert result.seen.used == 0 and result.wrong == 0
    assert len(result.errors) > 20 and max(result.errors) < 1e-9
    assert len(set(result.rows)) > 2, "batches grow and shrink"
    assert len(result.buckets) > 3 and all(rows in (1, 2, 4, 8) for rows, _ in result.buckets)


@pytest.mark.parametrize("page", [1, 8])
def test_sequences_that_gave_their_pages_back(folders: Any, page: int) -> None:
    """Pages of other sequences come to a row that had one of the same number before."""
    asked: dict[int, list[Command]] = {0: [Request(n, (n, 2, 3), Sampling(max_tokens=20)) for n in range(11, 22)]}
    result = twice(folders("llama"), asked, page=page, pages=160 // page, chunk=33, batch=11, reuse=False)
    assert result.seen.preempted
    assert result.wrong == 0 and max(result.errors) < 1e-9
    assert max(result.rows) > 8, "more rows than the last power of two"


def test_sampled_tokens_and_probabilities_are_those_of_eager_steps(folders: Any) -> None:
    sampled = Sampling(max_tokens=12, temperature=1.0, top_p=0.9, seed=3, logprobs=True)
    asked: dict[int, list[Command]] = {0: [Request(1, (5, 6), sampled), Request(2, (7,), Sampling(max_tokens=12))]}
    folder = folders("llama")
    static = twice(folder, asked, page=4).seen
    (eager,) = generated(job_of(folder, "dp=1", "fp64", context=40), {0: asked}, score=False)
    for one, other in zip(static.answers, eager.answers, strict=True):
        assert type(one) is type(other)
        if isinstance(one, Token):
            assert (one.id, one.token) == (other.id, other.token)
            assert one.logprob == pytest.approx(other.logprob, abs=1e-9, nan_ok=True)


@needs_interpreter
@pytest.mark.parametrize(("family", "quantize"), [("llama", "none"), ("qwen3", "none"), ("gemma2", "none"),
                                                  ("qwen2", "none"), ("llama", "int8")])  # fmt: skip
def test_kernels_compute_what_plain_forms_do(folders: Any, family: str, quantize: str) -> None:
    """In Triton's interpreter, in fp32; int8 beside the same matrices in int8."""
    first: list[Command] = [Request(n, tuple(range(n, 3 * n)), Sampling(max_tokens=7 - n)) for n in range(1, 4)]
    folder = folders(family)
    job = ServingJob(
        weights_in(folder)[0], Layout.parse("precision=fp32"), str(folder), context=20, page=4, quantize=quantize
    )
    asked: dict[int, list[Command]] = {0: first}
    result = with_kernels(Script(job, {0: asked}))
    assert not result.notices and result.wrong == 0
    assert len(result.errors) > 3 and max(result.errors) < 1e-4
    assert result.shapes <= 5, "queries, keys and values are one matrix, and so are gate and up"
    assert {rows for rows, _ in result.buckets} == {1, 2, 4} and {pages for _, pages in result.buckets} == {5}


def test_buckets() -> None:
    assert [padded_batch(n) for n in (1, 2, 3, 4, 5, 8, 9, 16, 17, 33)] == [1, 2, 4, 4, 8, 8, 16, 16, 24, 40]
    gathers = DecodeShape(size=4, spare=9, most=6, gathers=True)
    held = [gathers.pages(step([length])) for length in (1, 4, 5, 8, 9, 17, 24)]
    assert held == [1, 1, 2, 2, 4, 6, 6]
    assert replace(gathers, gathers=False).pages(step([1])) == 6


def step(lengths: list[int], pages: list[list[int]] | None = None) -> EngineStep:
    chunks = []
    for number, length in enumerate(lengths):
        sequence = Sequence(Request(number, (1,), Sampling()), number, list(range(100, 100 + length)))
        sequence.pages = pages[number] if pages else list(range(length))
        chunks.append(Chunk(sequence, length - 1, length, True))
    return EngineStep(tuple(chunks))


def test_padding_rows_write_to_the_spare_page() -> None:
    inputs = StaticInputs(4, 2, DecodeShape(size=4, spare=9, most=6, gathers=True), torch.device("cpu"))
    inputs.fill(step([5, 8, 3], [[3, 1], [5, 0], [2]]))
    inputs.fill(step([5, 2], [[4, 8], [7]]))
    rows = inputs.rows()
    assert rows.ids.tolist() == [[104, 101, 0, 0]] and rows.positions.tolist() == [[4, 1, 0, 0]]
    assert rows.slots.tolist() == [8 * 4, 7 * 4 + 1, 36, 36] and rows.lengths.tolist() == [5, 2, 1, 1]
    assert rows.begun is not None and rows.begun.tolist() == [8, 9, 9, 9]
    assert rows.table.tolist() == [[4, 8], [7, 9], [9, 9], [9, 9]]


def test_steps_without_a_static_form() -> None:
    whole = step([4])
    assert decodes(whole) and not decodes(EngineStep(()))
    chunk = whole.chunks[0]
    assert not decodes(EngineStep((replace(chunk, start=0),))) and not decodes(
        EngineStep((replace(chunk, wanted=False),))
    )


@pytest.mark.parametrize("layout", ["tp=2", "pp=2", "cp=2", "dp=2,zero=3"])
def test_ranks_that_communicate_capture_nothing(folders: Any, layout: str) -> None:
    model = weights_in(folders("llama"))[0]
    assert capturable(Layout.parse("dp=2"), model) and not capturable(Layout.parse(layout), model)


def test_mixtures_of_experts_are_not_captured(folders: Any) -> None:
    assert not capturable(Layout(), weights_in(folders("mixtral"))[0])


def test_a_failed_step_leaves_the_eager_form(folders: Any) -> None:
    def fail(rows: DecodeRows) -> torch.Tensor:
        raise RuntimeError("out of memory\nand more")

    steps = DecodeSteps(fail, DecodeShape(4, 9, 6, gathers=True), torch.device("cpu"), capture=False)
    with pytest.raises(RuntimeError, match="out of memory"):
        steps.run(step([3]))

"""Matrices as they are kept: packed ones multiply as plain ones do, and 8-bit ones as near as 8 bits allow."""

import ctypes
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from harness.decode_steps import Twice, with_kernels
from harness.generation import Script
from harness.huggingface import pretrained
from harness.pool import run_ranks
from harness.triton import needs_interpreter
from shardwise.layout import Layout
from shardwise.ops import products
from shardwise.ops.cpu.products import FbgemmInt8, Packed, _laid_out
from shardwise.ops.paged import DecodeRows
from shardwise.ops.products import Int8, Plain, quantise
from shardwise.serving.graphs import DecodeShape, DecodeSteps, StaticInputs, capturable, decodes, padded_batch
from shardwise.serving.job import ServingJob, weights_in
from shardwise.serving.messages import Cancel, Command, Request, Sampling, Token
from shardwise.serving.scheduler import Chunk, EngineStep, Sequence

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 3, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_the_matrix(dtype: torch.dtype, rows: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(53, 72, generator=generator).to(dtype)
    offset = torch.randn(53, generator=generator).to(dtype) if bias else None
    x = torch.randn(1, rows, 72, generator=generator).to(dtype)
    exact = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
    close = 1e-4 if dtype == torch.float32 else 0.15
    makes = [Plain(), *([Packed()] if Packed.serves(dtype, CPU) else [])]
    for make in makes:
        assert float((make(weight, offset)(x).double() - exact).abs().max()) < close
    numbers, scales = quantise(weight)
    rounded = numbers.double() * scales.double()[:, None]
    exact = F.linear(x.double(), rounded, None if offset is None else offset.double())
    assert float((Int8()(weight, offset)(x).double() - exact).abs().max()) < 2 * close


@pytest.mark.skipif(not FbgemmInt8.serves(torch.bfloat16, CPU), reason="this CPU has no instructions for bytes")
@pytest.mark.parametrize("rows", [1, 2, 64, 65, 130])
@pytest.mark.parametrize(("outputs", "inputs"), [(53, 72), (1, 3), (130, 257)])
def test_products_of_bytes_lose_nothing_that_bf16_keeps(rows: int, outputs: int, inputs: int) -> None:
    """Rows of very different sizes, none of which depends on the others, to within bf16's rounding of the result and
    16 bits of a row's largest number."""
    generator = torch.Generator().manual_seed(rows)
    weight, x = (torch.randn(n, inputs, generator=generator).bfloat16() for n in (outputs, rows))
    x *= torch.logspace(-9, 9, rows)[:, None].bfloat16()
    numbers, scales = quantise(weight)
    rounded = numbers.double() * scales.double()[:, None]
    exact = x.double() @ rounded.t()
    product = FbgemmInt8()(weight, None)
    y = product(x)
    assert y.dtype == torch.bfloat16
    step = x.double().abs().amax(1, keepdim=True) / (127 * 254) / 2
    assert bool(((y.double() - exact).abs() <= exact.abs() / 250 + step * rounded.abs().sum(1)).all())
    apart = torch.cat([product(x[n : n + 2]) for n in range(0, rows, 2)])
    assert bool(((y - apart).abs() <= y.abs() / 64 + step).all())


@pytest.mark.skipif(not FbgemmInt8.serves(torch.bfloat16, CPU), reason="this CPU has no instructions for bytes")
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (53, 600), (2304, 768), (768, 2048)])
def test_matrices_take_what_is_counted(outputs: int, inputs: int) -> None:
    """In tiles with what stands beside rows, asked of malloc; oneDNN says so itself, of sizes that it need not fill
    up."""
    weight = torch.ones(outputs, inputs).bfloat16()
    numbers, scales = quantise(weight)
    many = 20
    kept = [_laid_out(numbers, scales)]  # one before: for what stays of the first time
    before = _allocated()
    kept += [_laid_out(numbers, scales) for _ in range(many)]
    assert (_allocated() - before) / many == pytest.approx(FbgemmInt8().nbytes(weight), abs=2048)
    if outputs % 64 == inputs % 64 == 0:
        packed = torch.ops.mkldnn._reorder_linear_weight.default(weight, 8)
        assert torch.ops.mkldnn._nbytes(packed) == Packed().nbytes(weight)


def _allocated() -> int:
    """Bytes that malloc has given to anybody."""

    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"

    class Told(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Told
    told = libc.mallinfo2()
    return told.uordblks + told.hblkhd


@pytest.mark.skipif(not FbgemmInt8.serves(torch.bfloat16, CPU), reason="this CPU has no instructions for bytes")
@pytest.mark.parametrize("rows", [1, 3])
def test_products_of_bytes_round_to_the_nearest(rows: int) -> None:
    """Numbers and their opposites cancel out but for ties; cut off, each of 500 pairs would leave one step."""
    x = torch.rand(rows, 500).bfloat16()
    assert float(FbgemmInt8()(torch.ones(1, 1000).bfloat16(), None)(torch.cat((x, -x), 1)).abs().max()) < 50 / (
        127 * 254
    )


@pytest.mark.skipif(not FbgemmInt8.serves(torch.bfloat16, CPU), reason="this CPU has no instructions for bytes")
@pytest.mark.parametrize("rows", [1, 3])
def test_products_of_bytes_pass_on_what_is_no_number(rows: int) -> None:
    product = FbgemmInt8()(torch.randn(5, 8).bfloat16(), None)
    assert not product(torch.zeros(rows, 8).bfloat16()).any()
    for bad in (float("nan"), float("inf")):
        x = torch.ones(rows, 8).bfloat16()
        x[0, 3] = bad
        y = product(x)
        assert not y[0].isfinite().any() and bool(y[1:].isfinite().all())


def test_wide_matrices_are_turned_back_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "WIDE_OUTPUTS", 16)
    x, numbers = torch.randn(40, 32), torch.randint(-127, 128, (53, 32), dtype=torch.int8)
    assert float((products.widened(x, numbers) - x @ numbers.float().t()).abs().max()) < 1e-2


def test_eight_bits_are_the_nearest() -> None:
    weight = torch.cat([torch.randn(6, 50) * torch.logspace(-3, 3, 6)[:, None], torch.zeros(1, 50)])
    numbers, scales = quantise(weight)
    assert numbers.dtype == torch.int8 and scales.shape == (7,)
    assert bool(((numbers * scales[:, None] - weight).abs() <= scales[:, None] / 2 + 1e-6).all())
    assert bool((numbers[:6].abs().amax(1) == 127).all()) and not numbers[6].any()


@pytest.mark.parametrize("layout", ["dp=1", "tp=2", "pp=2"])
def test_the_matrices_of_an_engine_are_kept_in_eight_bits(tmp_path: Path, layout: str) -> None:
    """Its logits are those of `transformers` with rounded weights, and its weights take about a quarter of fp32's."""
    model = pretrained("llama", hidden_size=64, intermediate_size=96, num_attention_heads=4)
    model.save_pretrained(tmp_path)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            if layout == "tp=2" and name.endswith(("o_proj", "down_proj")):
                # Each rank has half of the columns, and scales of its own.
                halves = [quantise(half) for half in module.weight.detach().chunk(2, 1)]
                module.weight.data = torch.cat([numbers * scales[:, None] for numbers, scales in halves], 1)
            else:
                numbers, scales = quantise(module.weight.detach())
                module.weight.data = numbers * scales[:, None]
    draw = random.Random(1)
    prompts = {n: tuple(draw.randrange(53) for _ in range(5 + 9 * n)) for n in range(1, 5)}
    asked: list[Command] = [Request(n, prompt, Sampling(max_tokens=4)) for n, prompt in prompts.items()]
    job = ServingJob(
        weights_in(tmp_path)[0], Layout.parse(f"{layout},precision=fp32"), str(tmp_path), quantize="int8", page=4
    )
    ranks = run_ranks("harness.generation:generate", job.layout.ranks, Script(job, {0: {0: asked}}))
    answers: dict[int, list[int]] = {n: [] for n in prompts}
    for answer in ranks[0].answers:
        if isinstance(answer, Token):
            answers[answer.id].append(answer.token)
    for number, prompt in prompts.items():
        with torch.no_grad():
            expected = model(torch.tensor([[*prompt, *answers[number]]])).logits[0]
        kept = ranks[-1].logits[number]
        assert len(kept) == len(prompt) + 3
        for place, row in kept.items():
            assert float((row - expected[place]).abs().max()) < 1e-4
    plain = sum(p.numel() for name, p in model.named_parameters() if "embed" not in name) * 4
    table = sum(p.numel() for name, p in model.named_parameters() if "embed" in name) * 4
    held = sum(rank.share for rank in ranks) - table
    assert 0.25 * plain < held < 0.4 * plain


# -- Loading holds little more than a rank's own share of the weights, whatever layout trained them


MOST = 1.3
SLACK = 4096
"""Bytes of small tables (rotary frequencies, numbers that steer)."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a run on four ranks."""
    root = tmp_path_factory.mktemp("loading")
    pretrained("llama", num_hidden_layers=8).save_pretrained(root / "source")
    model, _ = weights_in(root / "source")
    layout = Layout.parse("dp=2,tp=2,zero=3,precision=fp32")
    run_ranks("harness.huggingface:load_train_save", 4, (root / "source", model, layout, root / "run"))
    return root / "run"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["tp=4", "pp=2", "dp=1", "dp=2,zero=3"])
def test_tensors_take_less_than_one_and_a_third_of_the_share(trained: Path, layout: str, precision: str) -> None:
    model, _ = weights_in(trained)
    job = ServingJob(model, Layout.parse(f"{layout},precision={precision}"), str(trained), context=16, batch=1)
    for rank in run_ranks("harness.loading:load", job.layout.ranks, job):
        assert rank.share <= rank.left
        if job.layout.stage < 3:
            assert rank.left <= rank.share + SLACK
        assert rank.peak < MOST * rank.left, (rank.peak / rank.share, rank)


# -- Decode steps with static shapes, on the CPU: the logits and tokens of the eager form, whatever joins and leaves


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
    job = ServingJob(weights_in(folder)[0], Layout.parse("precision=fp64"), str(folder), context=40, **options)
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
    job = ServingJob(weights_in(folder)[0], Layout.parse("precision=fp64"), str(folder), context=40, page=4)
    static = run_ranks("harness.decode_steps:compare", 1, Script(job, {0: asked}))[0].seen
    eager = run_ranks("harness.generation:generate", 1, Script(job, {0: asked}, score=False))[0]
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

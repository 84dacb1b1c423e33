"""Matrices as they are kept: packed ones multiply as plain ones do, and 8-bit ones as near as 8 bits allow."""

import ctypes
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from harness.generation import generated, job_of
from harness.huggingface import pretrained
from harness.pool import run_ranks
from shardwise.layout import Layout
from shardwise.ops import products
from shardwise.ops.cpu.products import FbgemmInt8, Packed, _laid_out
from shardwise.ops.products import Int8, Plain, quantise
from shardwise.serving.job import weights_in
from shardwise.serving.messages import Command, Request, Sampling, Token

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
    ranks = generated(job_of(tmp_path, layout, quantize="int8"), {0: {0: asked}})
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
    root = tmp_path_factory.mktemp("loading")
    pretrained("llama", num_hidden_layers=8).save_pretrained(root / "source")
    model, _ = weights_in(root / "source")
    layout = Layout.parse("dp=2,tp=2,zero=3,precision=fp32")
    run_ranks("harness.huggingface:load_train_save", 4, (root / "source", model, layout, root / "run"))
    return root / "run"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["tp=4", "pp=2", "dp=1", "dp=2,zero=3"])
def test_tensors_take_less_than_one_and_a_third_of_the_share(trained: Path, layout: str, precision: str) -> None:
    job = job_of(trained, layout, precision, context=16, batch=1)
    for rank in run_ranks("harness.loading:load", job.layout.ranks, job):
        assert rank.share <= rank.left
        if job.layout.stage < 3:
            assert rank.left <= rank.share + SLACK
        assert rank.peak < MOST * rank.left, (rank.peak / rank.share, rank)

"""Triton's kernels on the CPU, in Triton's interpreter: what they compute is what the plain forms compute."""

import json
import os
import subprocess
import sys
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.triton import needs_interpreter

pytestmark = needs_interpreter
os.environ.setdefault("TRITON_INTERPRET", "1")

from shardwise.ops.blockwise import ScoreRule  # noqa: E402
from shardwise.ops.cache_shape import CacheShape  # noqa: E402
from shardwise.ops.cuda import launch  # noqa: E402
from shardwise.ops.cuda.cross_entropy import ONE_PASS  # noqa: E402
from shardwise.ops.cuda.launch import FusedOps, HeadShape, Stored, Tile  # noqa: E402
from shardwise.ops.cuda.products import Chooser, CudaProducts, Matrix  # noqa: E402
from shardwise.ops.paged import DecodeRows, PagedCache  # noqa: E402
from shardwise.ops.products import quantise  # noqa: E402

CPU = torch.device("cpu")


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def stored(outputs: int, inputs: int, int8: bool, bias: bool) -> tuple[Stored, Tensor]:
    """A matrix as it is kept, and its numbers in fp32."""
    weight, offset = random(outputs, inputs), random(outputs + 1)[:-1] if bias else None
    if not int8:
        return Stored(weight, None, offset), weight
    numbers, scales = quantise(weight)
    return Stored(numbers, scales, offset), numbers * scales[:, None]


@pytest.mark.parametrize(("int8", "bias", "gate"), list(product([False, True], [False, True], [0, 1, 2])))
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 64), (26, 71)])
def test_a_product_with_one_row(int8: bool, bias: bool, gate: int, outputs: int, inputs: int) -> None:
    """Norm before, bias, gate and sum after it; tiles that divide the matrix, and others."""
    matrix, weight = stored(outputs, inputs, int8, bias)
    x, gain, residual = random(1, inputs), random(inputs), random(1, outputs // 2 if gate else outputs)
    y = launch.one_row(x, matrix, FusedOps(gain, 1e-5, gate, residual), Tile(8, 32, 4, 1))
    expected = F.linear(F.rms_norm(x, (inputs,), gain, 1e-5), weight, matrix.bias)
    if gate:
        act, up = expected.chunk(2, -1)
        expected = (F.silu(act) if gate == 1 else F.gelu(act, approximate="tanh")) * up
    torch.testing.assert_close(y, expected + residual, atol=2e-4, rtol=1e-4)
    plain = launch.one_row(x, matrix, FusedOps(), Tile(4, 64, 4, 1))
    torch.testing.assert_close(plain, F.linear(x, weight, matrix.bias), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("int8", "bias", "rows"), list(product([False, True], [False, True], [2, 16, 20])))
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 64), (26, 71)])
def test_a_product_with_few_rows(int8: bool, bias: bool, rows: int, outputs: int, inputs: int) -> None:
    matrix, weight = stored(outputs, inputs, int8, bias)
    x, residual = random(rows, inputs), random(rows, outputs)
    expected = F.linear(x, weight, matrix.bias)
    for tile in (Tile(16, 32, 4, 2), Tile(16, 16, 4, 2, parts=3)):
        y, added = (launch.few_rows(x, matrix, each, tile) for each in (None, residual))
        torch.testing.assert_close(y, expected, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(added, expected + residual, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [37, 4096, 9001])
def test_the_loss(columns: int, dtype: torch.dtype) -> None:
    """Rows narrower than a block, as wide, and of several; the logits are overwritten by their gradient."""
    rows, factor = (9 * random(4, columns)).to(dtype), torch.tensor([1.0, 0.0, -2.5, 0.25])
    targets, wide = torch.tensor([[0], [columns - 1], [5], [36]]), rows.float()
    sums = ONE_PASS.log_sums(rows, targets, torch.float32)
    torch.testing.assert_close(sums, torch.logsumexp(wide, -1), atol=0, rtol=1e-6)
    expected = (torch.softmax(wide, -1) * factor[:, None]).scatter_add_(1, targets, -factor[:, None])
    ONE_PASS.differentiate(rows, sums, factor, targets, -factor[:, None])
    torch.testing.assert_close(rows.float(), expected, atol=1e-6, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5)


def test_norms_and_gates() -> None:
    x, gain = random(3, 70), random(70)
    torch.testing.assert_close(launch.normed(x, gain, 1e-5), F.rms_norm(x, (70,), gain, 1e-5), atol=1e-5, rtol=1e-5)
    act, up = x.chunk(2, -1)
    torch.testing.assert_close(launch.gated(x, 1), F.silu(act) * up, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(launch.gated(x, 2), F.gelu(act, approximate="tanh") * up, atol=1e-5, rtol=1e-5)


def rows_of(lengths: list[int], size: int, pages: int) -> DecodeRows:
    """The newest tokens of sequences of these lengths, whose pages are in no order."""
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(3))
    most = -(-max(lengths) // size)
    table = order[: len(lengths) * most].view(len(lengths), most)
    ends = torch.tensor(lengths)
    slots = table[torch.arange(len(lengths)), (ends - 1) // size] * size + (ends - 1) % size
    begun = torch.where((ends - 1) % size == 0, slots // size, pages)
    places = (ends - 1)[None]
    return DecodeRows(
        places, places, places, None, places, places, slots=slots, table=table, lengths=ends, begun=begun
    )  # fmt: skip


@pytest.mark.parametrize("rule", [ScoreRule(0.3, 0.0, 0), ScoreRule(0.3, 2.0, 0), ScoreRule(0.3, 0.0, 7)])
@pytest.mark.parametrize(("heads", "kv", "width"), [(4, 2, 16), (3, 3, 10), (6, 1, 8)])
@pytest.mark.parametrize("lengths", [[37], [5, 1, 64, 33], [9, 40]])
def test_attention_over_pages(rule: ScoreRule, heads: int, kv: int, width: int, lengths: list[int]) -> None:
    """Soft caps, windows, shared keys, widths that are no power of two; a page that begins is cleared."""
    size, pages = 4, 70
    plain, ours = (PagedCache(CacheShape(2, kv, width, width), pages + 1, size, torch.float32, CPU) for _ in range(2))
    plain.tensor.copy_(random(*plain.tensor.shape))
    ours.tensor.copy_(plain.tensor)
    rows, shape = rows_of(lengths, size, pages), HeadShape(heads, kv, width)
    y = random(len(lengths), heads + 2 * kv, width)
    expected = plain.attend(y, rows, rule)
    queries = launch.turn_and_store(y, shape, None, None, 0.0, ours.tensor, size, rows)
    torch.testing.assert_close(queries, y[:, :heads])
    result = launch.attend(queries, shape, ours.tensor, size, rows.fresh(), rule)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
    held = slice(0, pages * size)  # the plain form also clears the spare page
    assert torch.equal(ours.tensor[:, :, held], plain.tensor[:, :, held])


@pytest.mark.parametrize("half", [4, 8])
def test_rotation_after_the_norm(half: int) -> None:
    """All numbers of a head, or the first ones alone."""
    heads, kv, width, size = 4, 2, 16, 4
    rows = rows_of([3, 6], size, 8)
    y, angles = random(2, heads + 2 * kv, width), random(2, half)
    gains = random(width), random(width + 1)[1:]
    cache = torch.zeros(2, kv, 9 * size, width)
    queries = launch.turn_and_store(
        y, HeadShape(heads, kv, width), (angles.cos(), angles.sin()), gains, 1e-5, cache, size, rows
    )
    q = F.rms_norm(y[:, :heads], (width,), gains[0], 1e-5)
    k = F.rms_norm(y[:, heads : heads + kv], (width,), gains[1], 1e-5)

    def turned(x: Tensor) -> Tensor:
        one, two, rest = x.split([half, half, width - 2 * half], -1)
        c, s = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat((one * c - two * s, two * c + one * s, rest), -1)

    torch.testing.assert_close(queries, turned(q), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache[0][:, rows.slots].transpose(0, 1), turned(k), atol=1e-5, rtol=1e-5)
    assert torch.equal(cache[1][:, rows.slots].transpose(0, 1), y[:, heads + kv :])


@pytest.mark.parametrize("int8", [False, True])
def test_the_fastest_form_is_chosen(int8: bool) -> None:
    """By a clock that finds the library slow for one row and quick for more."""
    chooser = Chooser(kernels=True)
    make = CudaProducts(chooser, torch.float32, int8=int8)
    matrix: Any = make(random(32, 1024), None)
    assert isinstance(matrix, Matrix)
    calls: list[float] = []

    def clock(run: Any) -> float:
        run()
        calls.append(0.0)
        return 2.0 - len(calls) * 0.1

    chooser.choose(1, clock)
    tiles = chooser.candidates(matrix.shape, 1)
    assert chooser.tile(matrix, 1) == tiles[-1] and len(calls) == 1 + len(tiles)
    assert chooser.report[-1].startswith("1 x 1024 by 32") and not chooser.failures
    x = random(1, 1024)
    library = matrix.product(x, None)
    torch.testing.assert_close(matrix(x), library, atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(matrix.decode(x, FusedOps(residual=library.clone())), 2 * library, atol=2e-3, rtol=1e-3)
    chooser.kernels = False
    assert chooser.tile(matrix, 1) is None


def test_a_kernel_that_fails_leaves_the_library() -> None:
    chooser = Chooser(kernels=True)
    CudaProducts(chooser, torch.float32, int8=True)(random(32, 64), None)

    def clock(run: Any) -> float:
        if len(chooser.failures) < 6 and run.args[-1] is not None:
            raise ValueError("no such tile")
        return 1.0

    chooser.choose(1, clock)
    assert chooser.failures and "library" in chooser.report[-1]


def test_kernels_for_hopper() -> None:
    """They compile. A product with one row moves nothing between threads in its loop, and converts int8 without
    conversion instructions; only steps with one row have programmatic dependent launch, and their kernels all wait."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", "harness.hopper_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    one_row = [each for each in compiled if each["kernel"] == "one_row"]
    assert [each["int8"] for each in one_row] == [True, True, False, False]
    assert not any(each["conversions"] for each in one_row)
    for each in one_row:
        assert ("prmt.b32" in each["ptx"]) == each["int8"] and "cvt.rn.f32.s16" not in each["ptx"]
    dependent = {each["kernel"] for each in compiled if "griddepcontrol.launch_dependents" in each["ptx"]}
    assert dependent == {"one_row", "turn_and_store", "attend_part", "attend_join"}
    assert dependent == {each["kernel"] for each in compiled if "griddepcontrol.wait" in each["ptx"]}

import pytest
import torch

from shardwise.ops.experts import KERNEL, grouped_product, one_by_one, one_kernel


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 0, 0], [0, 9, 0, 0]])
@pytest.mark.parametrize("transposed", [False, True])
def test_one_kernel_and_a_loop_give_the_same(counts: list[int], transposed: bool) -> None:
    generator = torch.Generator().manual_seed(sum(counts))
    ends = torch.tensor(counts).cumsum(0).tolist()
    rows = torch.randn(sum(counts), 16, generator=generator)
    weights = torch.randn(4, 16, 24, generator=generator)
    if transposed:
        weights = weights.transpose(1, 2).contiguous().transpose(1, 2)
    loop = one_by_one(rows, weights, ends)
    assert torch.equal(loop, grouped_product(rows, weights, ends)), "on a CPU the loop is taken"
    expected = torch.cat([rows[a:b] @ w for a, b, w in zip([0, *ends], ends, weights, strict=False)])
    torch.testing.assert_close(loop, expected)
    if KERNEL is None:
        pytest.skip("this torch has no grouped product")
    torch.testing.assert_close(one_kernel(rows, weights, ends), expected)

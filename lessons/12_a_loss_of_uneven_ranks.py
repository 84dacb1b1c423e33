# %% [markdown]
# # 12. The mean of means: a trainer that is wrong without an error
# Two data-parallel ranks; one has 3 labels that count, the other 1. Each divides its loss by its own labels, and the
# all-reduce takes the mean of the two. Losses fall, nothing warns, and every gradient is wrong.

# %%
import torch

losses = torch.tensor([1.0, 1.0, 1.0, 5.0], requires_grad=True)  # of four labels, and so are gradients
right = losses.mean()
wrong = (losses[:3].mean() + losses[3:].mean()) / 2
print("mean over labels", right.item(), "mean of ranks' means", wrong.item())
(gradient,) = torch.autograd.grad(wrong, losses)
print("weights of the labels:", [round(x, 3) for x in gradient.tolist()], "in place of 0.25 each")
assert torch.allclose(gradient, torch.tensor([1 / 6, 1 / 6, 1 / 6, 1 / 2]))

# %% [markdown]
# A label of the rank with few counts three times as much as the others. torchtitan had this mistake until pull request
# 2206. `certify` finds it in a trainer: here DDP, and the loss that every tutorial writes.

# %%
import tempfile
from pathlib import Path

from shardwise.cli.main import main as shardwise

ADAPTER = """
from torch import nn
from torch.nn.parallel import DistributedDataParallel

name, axes, data, space = "my trainer", ("dp",), ("dp",), {"dp": (1, 2)}
variants = ("plain", "uneven")


def parallelize(model, layout):
    return DistributedDataParallel(model)


def backward(run, ids, labels, tokens):
    logits = run.logits(run.engine, ids).flatten(0, 1)
    summed = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    mine = max(1, int((labels != -100).sum()))
    (summed / mine).backward()  # right: (summed / tokens * ranks).backward()
    return summed.item() / tokens
"""
folder = Path(tempfile.mkdtemp())
(folder / "trainer.py").write_text(ADAPTER)
code = shardwise(["certify", str(folder / "trainer.py"), "dp=2", "--out", str(folder / "out")])
assert code == 1
report = (folder / "out" / "certificate.md").read_text()
assert "mean over ranks in place of tokens" in report

# %% [markdown]
# With equal counts all columns say yes: the mistake shows under `uneven` alone. `wrong-1.py` in the folder reproduces
# it without shardwise.
#
# **Recall.** Why does the norm of the gradients not show it? <details><summary>Answer</summary>It is the norm of
# another sum of the same terms, of about the same length; only the right sum tells.</details>

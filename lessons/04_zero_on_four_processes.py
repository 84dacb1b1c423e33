# %% [markdown]
# # 4. ZeRO stages on four local processes
# The same small Llama under ZeRO-0 to ZeRO-3, each for a few steps on four processes of this machine. The losses are
# equal within rounding, the memory is not, and every byte was predicted.
#
# ![The fullest device under every stage](../docs/screenshots/zero-stages-light.png)

# %%
from pathlib import Path
from tempfile import mkdtemp

from shardwise import Workload, compare, estimate, train

folder, losses = Path(mkdtemp()), {}
for stage in range(4):
    layout = f"dp=4,zero={stage},precision=fp32"
    predicted = estimate("tiny-llama", layout, Workload(seq=64, batch=4), "4xcpu")
    run = train(
        "tiny-llama",
        layout,
        Workload(seq=64, batch=4),
        "stdlib",
        max_bytes=300_000,
        steps=4,
        report=True,
        out=folder / f"zero-{stage}",
    )
    held, outcome = run.report.roles[0].bytes, compare(predicted, run.report)
    losses[stage] = run.losses
    print(
        f"ZeRO-{stage}: weights {held.parameters / 1e6:5.2f} MB, gradients {held.gradients / 1e6:5.2f} MB, "
        f"optimizer {held.optimizer / 1e6:5.2f} MB, loss {run.losses[-1]:.4f}, "
        f"prediction equal: {outcome.exact_classes_equal and outcome.equal_ledger}"
    )
    assert outcome.exact_classes_equal and outcome.equal_ledger

# %%
for stage in (1, 2, 3):
    assert max(abs(a - b) for a, b in zip(losses[0], losses[stage])) < 1e-3

# %% [markdown]
# The ledger says what each stage sends: one all-reduce, or a reduce-scatter and gathers.

# %%
for stage in (0, 3):
    report = estimate("tiny-llama", f"dp=4,zero={stage},precision=fp32", Workload(seq=64, batch=4), "4xcpu")
    rows = [row for row in report.roles[0].ledger if row.axes == "dp" and row.elements > 1]
    # An all-reduce moves its buffer twice, as a reduce-scatter and an all-gather.
    sent = sum(row.payload_bytes * (2 if row.op == "all_reduce" else 1) for row in rows) * 3 / 4
    print(f"ZeRO-{stage}: {sorted({row.op for row in rows})}, a rank sends {sent / 1e6:.1f} MB")

# %% [markdown]
# **Recall.** Why does ZeRO-3 send half as much again as ZeRO-1? <details><summary>Answer</summary>An all-reduce is a
# reduce-scatter and an all-gather, as ZeRO-1 has them. ZeRO-3 gathers the weights once more, for the backward pass;
# all but the last block, which is still there.</details>

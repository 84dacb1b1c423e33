# %% [markdown]
# # 3. Bubbles of a pipeline, for P = 4 and P = 8
# With P stages and M micro-batches, GPipe and 1F1B keep every stage idle for P - 1 forward and backward passes. Of
# the whole step that is (P - 1) / (M + P - 1).
#
# ![GPipe and 1F1B on four stages](../docs/screenshots/gpipe-light.png)
#
# ![Their bubble against the number of micro-batches](../docs/screenshots/bubble-light.png)

# %%
def bubble(p: int, m: int) -> float:
    return (p - 1) / (m + p - 1)


for p in (4, 8):
    for m in (4, 8, 16, 32, 64):
        share = bubble(p, m)
        print(f"P={p} M={m:2}  {share:5.1%}  {'#' * round(60 * share)}")
assert round(bubble(4, 12), 2) == 0.2

# %% [markdown]
# The simulator draws the same, for every schedule that shardwise can run. Interleaving divides the bubble by the
# number of chunks per rank; zero-bubble schedules fill it with gradients of weights.

# %%
from shardwise.cli.main import main as shardwise

shardwise("pipeline show 1f1b --ranks 4 --micro 8".split())
shardwise("pipeline bubble gpipe 1f1b interleaved zb-h1 --ranks 4 --micro 4,8,16,32".split())
shardwise("pipeline bubble 1f1b interleaved zb-h1 --ranks 8 --micro 8,16,32,64".split())

# %% [markdown]
# What 1F1B changes is memory: the first stage holds P micro-batches' activations in place of all M.

# %%
shardwise("pipeline simulate gpipe --ranks 4 --micro 16".split())
shardwise("pipeline simulate 1f1b --ranks 4 --micro 16".split())

# %% [markdown]
# **Recall.** How many micro-batches bring the bubble of eight stages below 10%? <details><summary>Answer</summary>7 /
# (M + 7) < 0.1: 64. Interleaved with four chunks per rank: 16.</details>

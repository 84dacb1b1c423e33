# %% [markdown]
# # 2. A ring all-reduce, step by step
# Four ranks add up a vector. It is cut into four chunks; in each of the first three steps a rank sends one chunk to
# its right neighbor, which adds it to its own (reduce-scatter). In three more steps the sums travel on (all-gather).
#
# ![The ring of four ranks after three rounds](../docs/screenshots/ring-of-four-light.png)

# %%
ranks = 4
vectors = [[10 * rank + chunk for chunk in range(ranks)] for rank in range(ranks)]
expected = [sum(column) for column in zip(*vectors)]

sent = 0
for step in range(ranks - 1):  # reduce-scatter
    moving = [(rank, (rank - step) % ranks) for rank in range(ranks)]
    values = [vectors[rank][chunk] for rank, chunk in moving]
    for (rank, chunk), value in zip(moving, values):
        vectors[(rank + 1) % ranks][chunk] += value
        sent += 1
    print("added up:", vectors)
for step in range(ranks - 1):  # all-gather
    moving = [(rank, (rank + 1 - step) % ranks) for rank in range(ranks)]
    values = [vectors[rank][chunk] for rank, chunk in moving]
    for (rank, chunk), value in zip(moving, values):
        vectors[(rank + 1) % ranks][chunk] = value
        sent += 1
assert all(vector == expected for vector in vectors)

# %% [markdown]
# Each rank has sent 2 (N - 1) / N of the vector, almost independent of N. That is the least possible.

# %%
per_rank = sent / ranks / ranks
print(f"a rank sends {per_rank} of the vector")
assert per_rank == 2 * (ranks - 1) / ranks

# %% [markdown]
# shardwise has the same schedule as data, proves it for any number of ranks, and draws it:

# %%
from shardwise.cli.main import main as shardwise

shardwise("collective show all-reduce ring --ranks 4".split())
shardwise("collective verify all-reduce ring --ranks 1-16".split())

# %% [markdown]
# For small messages the 2 (N - 1) steps of latency count, and a tree wins:

# %%
shardwise("collective cost all-reduce --bytes 64KB --ranks 64 --cluster 8x8xH100".split())

# %% [markdown]
# **Recall.** How much more does a rank send with 64 ranks than with 4? <details><summary>Answer</summary>2 x 63/64 =
# 1.97 beside 1.5 vectors.</details>

# %% [markdown]
# # 5. Updates that vanish in bf16, and the fp32 master that keeps them
# bf16 has 8 significant bits: near 1.0 its next number is 1.0078. An update of 0.001 is rounded away, every time.

# %%
import torch

weight = torch.tensor(1.0, dtype=torch.bfloat16)
for _ in range(1000):
    weight += 0.001
print("bf16 after 1,000 updates of 0.001:", weight.item())
assert weight.item() == 1.0

# %% [markdown]
# With a master weight in fp32 the updates add up, and the bf16 weight is its rounded copy:

# %%
master = torch.tensor(1.0)
for _ in range(1000):
    master += 0.001
weight = master.bfloat16()
print("fp32 master:", master.item(), "and its bf16 copy:", weight.item())
assert abs(weight.item() - 2.0) < 0.01

# %% [markdown]
# That is why mixed precision keeps 4 more bytes per parameter. shardwise keeps masters under every layout with
# `precision=bf16`; under ZeRO they are part of the sharded optimizer state.
#
# **Recall.** From which update on does bf16 move a weight of 1.0? <details><summary>Answer</summary>From half the
# spacing, 2^-8 = 0.0039: smaller ones round to nothing.</details>

# %% [markdown]
# # 10. Why ZeRO-3 is not for serving
# One token of Llama 3 70B on eight H100. Tensor parallelism sends activations of one token; ZeRO-3 gathers all
# weights.
#
# ![One layer on one clock](../docs/screenshots/one-clock-light.png)

# %%
from shardwise.cli.main import main as shardwise

shardwise(["generate", "llama-3-70b", "--compare", "tp=8", "zero=3,dp=8", "pp=8", "--cluster", "8xH100"])

# %% [markdown]
# By hand: a token's hidden state has 8,192 numbers. Tensor parallelism adds it up twice in each of 80 blocks.

# %%
hidden, layers, ranks, parameters = 8192, 80, 8, 70.6e9
ring = 2 * (ranks - 1) / ranks
tensor = ring * 2 * layers * hidden * 2
gathering = (ranks - 1) / ranks * parameters * 2
print(f"tensor parallel {tensor / 1e6:.1f} MB per token, ZeRO-3 {gathering / 1e9:.0f} GB")
print(f"{gathering / tensor:,.0f} times as much")
assert gathering / tensor > 20_000

# %% [markdown]
# **Recall.** When does ZeRO-3 pay in training and not here? <details><summary>Answer</summary>A training step gathers
# the weights for thousands of tokens, a decoding step for one per sequence.</details>

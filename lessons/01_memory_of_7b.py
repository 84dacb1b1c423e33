# %% [markdown]
# # 1. The memory of a 7B model, by hand and by `estimate`
# Mixed precision with AdamW keeps 16 bytes per parameter: weights (2) and gradients (2) in bf16, and in fp32 a master
# weight (4) and two moments (4 + 4).
#
# ![16 bytes for each weight, by ZeRO stage](../docs/screenshots/zero-bytes-light.png)

# %%
parameters = 7e9
bytes_per_parameter = {"weights": 2, "gradients": 2, "master weights": 4, "first moment": 4, "second moment": 4}
total = parameters * sum(bytes_per_parameter.values())
print(f"{total / 1e9:.0f} GB before any activation: no GPU of 80 GB can train it alone")
assert total == 112e9

# %% [markdown]
# ZeRO stages keep 1/N of the optimizer state (1), of the gradients, too (2), and of the weights (3) on each of N
# ranks.


# %%
def zero(stage: int, n: int) -> float:
    """Bytes per GPU of weights, gradients and optimizer state."""
    shares = [1 / n if stage >= least else 1 for least in (3, 2, 1)]
    return parameters * sum(size * share for size, share in zip((2, 2, 12), shares))


for stage in range(4):
    print(f"ZeRO-{stage}:", *(f"{zero(stage, n) / 1e9:6.1f} GB on {n}" for n in (1, 2, 4, 8, 16)), sep="  ")
assert zero(3, 8) == 14e9

# %% [markdown]
# The same table by the command, and then a real model, Llama 2 7B, event by event: activations and buffers are there,
# too. At stage 3 this runtime keeps the fp32 masters as the only copy of the weights: 14 bytes in place of 16.

# %%
from shardwise.cli.main import main as shardwise

shardwise("estimate --params 7e9 --zero-table 1,2,4,8,16".split())

# %%
from shardwise import Workload, estimate

report = estimate("llama-2-7b", "dp=8,zero=3,recompute=full", Workload(seq=2048, batch=8), "8xH100")
held = report.roles[0].bytes
model_state = held.parameters + held.gradients + held.optimizer
print(f"weights, gradients and optimizer state {model_state / 1e9:.1f} GB, peak {held.total / 1e9:.1f} GB")
assert abs(model_state / (6.74e9 * 14 / 8) - 1) < 0.01

# %% [markdown]
# **Recall.** Why does ZeRO-1 save more than ZeRO-2 adds? <details><summary>Answer</summary>The optimizer's 12 bytes
# are three quarters of the 16; gradients are 2.</details>
#
# **Interview.** What does SGD with momentum keep? <details><summary>Answer</summary>A master weight and one moment: 8
# bytes beside the 4 of weights and gradients, 12 in all. Plain SGD keeps 8.</details>

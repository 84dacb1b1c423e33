# %% [markdown]
# # 7. Data against model parallelism, side by side
# Llama 3 8B on eight H100, 64 sequences of 4,096 tokens: four ways to split one step.
#
# ![Where the time of a step goes, for the best layouts](../docs/screenshots/step-time-light.png)

# %%
from shardwise import Workload, estimate
from shardwise.report.units import format_bytes, format_time

workload = Workload(seq=4096, batch=64)
layouts = ("dp=8,zero=1,recompute=full", "dp=8,zero=3,recompute=full", "tp=8,sp,recompute=full", "pp=8,recompute=full")
sent = {}
for layout in layouts:
    report = estimate("llama-3-8b", layout, workload, "8xH100")
    rank = report.roles[0]
    sent[layout] = sum(row.payload_bytes for row in rank.ledger)
    print(
        f"{layout:28} peak {format_bytes(rank.peak_bytes):>8}  payload {format_bytes(sent[layout]):>8}  "
        f"step {format_time(report.time)}"
    )

# %% [markdown]
# - Data parallelism sends gradients once per step, whatever the batch. Tensor parallelism sends activations in every
#   block, for every token. A pipeline sends activations only between stages.
# - ZeRO-3 and tensor parallelism both keep 1/8 of the weights. ZeRO-3 moves weights to the data, tensor parallelism
#   data to the weights.

# %%
assert sent["pp=8,recompute=full"] < sent["dp=8,zero=1,recompute=full"] < sent["tp=8,sp,recompute=full"]

# %% [markdown]
# **Interview.** When does ZeRO-3 send less than tensor parallelism? <details><summary>Answer</summary>When a rank has
# many tokens: its traffic is that of the parameters, whatever the number of tokens.</details>

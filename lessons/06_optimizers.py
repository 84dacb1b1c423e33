# %% [markdown]
# # 6. Adam against SGD, in bytes
# AdamW keeps two moments per parameter, SGD with momentum one, plain SGD none.
#
# ![AdamW's state beside weights and gradients](../docs/screenshots/zero-bytes-light.png)

# %%
from shardwise import Workload, estimate

held = {}
for optimizer in ("adamw", "momentum", "sgd"):
    workload = Workload(seq=2048, batch=1, optimizer=optimizer)
    held[optimizer] = estimate("llama-3.2-1b", "dp=1,recompute=full", workload, "1xH100").roles[0].bytes
    state, peak = held[optimizer].optimizer, held[optimizer].total
    print(f"{optimizer:8} optimizer state {state / 1e9:5.2f} GB, peak {peak / 1e9:5.2f} GB")

# %%
parameters = held["sgd"].optimizer / 4
assert held["adamw"].optimizer / parameters == 12 and held["momentum"].optimizer / parameters == 8

# %% [markdown]
# **Recall.** Which part of plain SGD's state is left? <details><summary>Answer</summary>The fp32 master weights, 4
# bytes per parameter.</details>

# %% [markdown]
# # 8. Recomputation, in bytes and in time
# The backward pass needs what the forward pass computed. It is saved, or computed again.
#
# ![A step that saves everything](../docs/screenshots/step-memory-light.png)
#
# ![The same step with recompute=full](../docs/screenshots/recompute-light.png)

# %%
from shardwise import Workload, estimate
from shardwise.report.units import format_bytes, format_time

workload = Workload(seq=4096, batch=32)
times, saved = {}, {}
for mode in ("none", "selective", "full"):
    report = estimate("llama-3-8b", f"dp=8,zero=2,attention=math,recompute={mode}", workload, "8xH100")
    times[mode], saved[mode] = report.time, report.roles[0].bytes.saved
    print(f"{mode:10} saved activations {format_bytes(saved[mode]):>8}  step {format_time(times[mode])}")

# %% [markdown]
# With explicit attention (`attention=math`) scores are most of what is saved, and `selective` drops them for little
# arithmetic. `full` repeats the whole forward pass: about a third more arithmetic.

# %%
assert saved["none"] > saved["selective"] > saved["full"]
assert 1.1 < times["full"] / times["none"] < 1.45

# %% [markdown]
# **Recall.** Why does `full` cost a third and not a half? <details><summary>Answer</summary>A backward pass is twice
# a forward pass: 4 passes in place of 3.</details>

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
# What the two moments are: m is a running mean of the gradient, v of its square. Both start at zero, too small at
# first: v after one step is a thousandth of the square. Dividing by 1 - beta^t corrects that (dashed), so the first
# update is already lr x g / |g|. Here the gradient is 1, with a ripple:

# %%
from math import sin

beta1, beta2, m, v = 0.9, 0.999, 0.0, 0.0
lines = {"m": [], "m corrected": [], "v": [], "v corrected": []}
for step in range(1, 101):
    gradient = 1 + 0.3 * sin(step)
    m, v = beta1 * m + (1 - beta1) * gradient, beta2 * v + (1 - beta2) * gradient**2
    for line, value in zip(lines.values(), (m, m / (1 - beta1**step), v, v / (1 - beta2**step))):
        line.append(value)
assert abs(lines["v"][0] - 0.001 * (1 + 0.3 * sin(1)) ** 2) < 1e-12 and lines["m corrected"][0] == 1 + 0.3 * sin(1)


def drawn(name: str, color: str, dash: str) -> str:
    """One of the lines, with its name at its end."""
    points = [(10 + 4.6 * step, 190 - 115 * value) for step, value in enumerate(lines[name])]
    text = " ".join(f"{x:.0f},{y:.0f}" for x, y in points)
    lower = {"m": 8, "m corrected": 22, "v corrected": -6}.get(name, -4)
    end = f'<text x="475" y="{points[-1][1] + lower:.0f}" fill="{color}" font-size="12">{name}</text>'
    return f'<polyline points="{text}" fill="none" stroke="{color}" stroke-width="2"{dash}/>{end}'


dashed = ' stroke-dasharray="6 4"'
shapes = (drawn(name, "#3949ab" if name[0] == "m" else "#c2410c", dashed if " " in name else "") for name in lines)
print(f'<svg viewBox="0 0 580 200" role="img" aria-label="Moments of Adam over 100 steps">{"".join(shapes)}</svg>')

# %% [markdown]
# **Recall.** Which part of plain SGD's state is left? <details><summary>Answer</summary>The fp32 master weights, 4
# bytes per parameter.</details>

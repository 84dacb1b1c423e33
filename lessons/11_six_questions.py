# %% [markdown]
# # 11. Six questions about splitting a model, answered live
# Each answer is computed here: change a number, and run the cell again.

# %%
from shardwise import Workload, estimate
from shardwise.cluster import Cluster
from shardwise.layout import Layout
from shardwise.model.catalog import get
from shardwise.planner.strategies import Asked, compare
from shardwise.report.units import format_bytes, format_time

LLAMA = get("llama-3-70b")


def token_seconds(layout: str, cluster: str) -> float:
    """Seconds per token of one answer of 256 tokens to a prompt of 1,024."""
    asked = Asked(prompt=1024, output=256, batch=1)
    return compare(LLAMA, [Layout.parse(layout)], Cluster.parse(cluster), asked).strategies[0].middle.seconds


# %% [markdown]
# **1. A 70B model in 16 bits on four A100 with NVLink: how do you serve it?** Its 141 GB fit no single card. Cut every
# matrix in four (tp=4): a card holds 35 GB and has the rest of its 80 GB for the cache. A pipeline holds as much per
# card, but a token passes the four stages one after the other.

# %%
for layout in ("tp=4", "pp=4"):
    print(f"{layout}: a token takes {format_time(token_seconds(layout, '4xA100-80GB'))}")
assert token_seconds("tp=4", "4xA100-80GB") < token_seconds("pp=4", "4xA100-80GB") / 2

# %% [markdown]
# **2. Why one sum per MLP?** The first matrix is cut by columns: each rank has some outputs, complete, and applies the
# activation to them. The second is cut by rows, and needs as inputs just these outputs. Only its result is partial.
# Attention is such a pair, too: two sums per block forward, two backward.

# %%
report = estimate("llama-3-8b", "tp=8", Workload(seq=2048, batch=1), "8xH100")
sums = [row for row in report.roles[0].ledger if row.axes == "tp" and row.op == "all_reduce"]
blocks = get("llama-3-8b").layers
print(f"{sum(row.count for row in sums)} sums over tp in a step of {blocks} blocks")

# %% [markdown]
# **3. What is a pipeline's bubble?** With P stages and M micro-batches of equal time a rank waits (P-1) of (M+P-1)
# slots. One micro-batch over four stages leaves 75% idle; 27 leave 10%.

# %%
from shardwise.schedule.pipeline import build
from shardwise.schedule.pipeline.simulate import simulate
from shardwise.schedule.pipeline.times import Times

idle = {}
for micro in (1, 4, 12, 27):
    schedule = build("gpipe", 4, micro, 1)
    idle[micro] = simulate(schedule, Times.equal(schedule.stages, 1.0, 0.5, 0.5)).bubble_of_total
    print(f"4 stages, {micro:2} micro-batches: {idle[micro]:.1%} idle in the simulation")
    assert abs(idle[micro] - 3 / (micro + 3)) < 1e-9

# %% [markdown]
# **4. Why tensor parallelism for answers, pipelines for training?** A step of decoding has few tokens: too few for a
# pipeline, and small enough that two sums per block cost microseconds on NVLink. Over PCIe they cost more:

# %%
for cluster in ("4xA100-80GB", "4xA100-80GB-PCIe"):
    print(f"{cluster}: a token takes {format_time(token_seconds('tp=4', cluster))}")
assert token_seconds("tp=4", "4xA100-80GB") < token_seconds("tp=4", "4xA100-80GB-PCIe")

# %% [markdown]
# **5. When do you need tensor, pipeline and data parallelism together?** When the model exceeds a node: tp fills the
# node's NVLink, pp spans nodes, dp multiplies what holds the model once. Llama 3 405B in bf16 has 812 GB; a node of
# eight 80 GB cards has 640.

# %%
whole = 2 * 405.9e9
print(f"{format_bytes(whole)} of weights, {format_bytes(8 * 80e9)} in a node: {-(-whole // (8 * 80e9)):.0f} nodes")

# %% [markdown]
# **6. How do experts differ?** Under tensor parallelism every rank works on every token and sums. Under expert
# parallelism a token travels to the ranks that have its experts, and back: two all-to-alls per block.

# %%
report = estimate("mixtral-8x7b", "dp=8,ep=8,zero=1,recompute=full", Workload(seq=4096, batch=8), "8xH100")
print(sorted({(row.op, row.axes) for row in report.roles[0].ledger if "ep" in row.axes}))
assert any(row.op.startswith("all_to_all") for row in report.roles[0].ledger)

# %% [markdown]
# **The decision tree.** Ask in this order, and let `plan` compare what is left:
#
# 1. Do weights (serving) or 16 bytes per parameter (training) fit one device? Then use replicas: `dp=N`.
# 2. Do they fit the devices of one node together? Serving: `tp` over the node, if NVLink joins it; over PCIe fewer bits
#    on fewer cards, or `pp`. Training: ZeRO over the node first, `tp` where the batch is small.
# 3. Do they need several nodes? `tp` inside a node, `pp` across nodes, `dp` for what is left.
# 4. Are there experts? `ep` spreads them over the ranks of dp and tp.
# 5. Is one sequence too long for a device's activations? `cp`, or recomputation.


# %%
def tree(model: str, cluster: str, bytes_per_parameter: float) -> str:
    """The answer of questions 1 to 4."""
    config, devices = get(model), Cluster.parse(cluster)
    size = count(config) * bytes_per_parameter / (0.85 * devices.device.memory_bytes)
    many = "dp" if size <= 1 else "zero or tp" if size <= devices.devices_per_node else "tp, pp and dp"
    return f"{many}{' with ep' if config.experts else ''}"


from shardwise import plan
from shardwise.model.parameters import count

for model, cluster in (("llama-3.2-1b", "8xH100"), ("llama-3-8b", "8xH100"), ("llama-3-70b", "8x8xH100")):
    best = plan(model, cluster, seq="8k", batch=256, top=1).ranked[0].layout
    print(f"{model} on {cluster}: the tree says {tree(model, cluster, 16)}; plan says {best}")
assert tree("llama-3-70b", "8xH100", 2) == "zero or tp" and tree("llama-3.2-1b", "1xH100", 16) == "dp"

# %% [markdown]
# The tree names what is usual. On a fast network ZeRO-3 over all devices may beat it, as in the last row.
#
# **Recall.** Why is `pp` the axis between nodes? <details><summary>Answer</summary>It sends one activation per
# micro-batch and stage, where tp sums two per block.</details>

# %% [markdown]
# # 9. Tensor parallelism by columns and by rows
# Two ranks, one pair of linear maps. Cut by columns each rank makes some outputs; cut by rows, a partial sum of all.
#
# ![A product cut by column, then by row, with numbers](../docs/screenshots/product-light.png)

# %%
import torch

torch.manual_seed(0)
x, a, b = torch.randn(4, 6), torch.randn(6, 8), torch.randn(8, 6)
whole = torch.relu(x @ a) @ b

columns, rows = a.chunk(2, dim=1), b.chunk(2, dim=0)
partial = [torch.relu(x @ columns[rank]) @ rows[rank] for rank in range(2)]
print("a rank's partial sum is not the result:", torch.allclose(partial[0], whole))
assert torch.allclose(partial[0] + partial[1], whole, atol=1e-5)  # one all-reduce

# %% [markdown]
# The nonlinearity between the maps needs no communication, since each rank has whole columns of its input. The older
# form cuts both maps by columns, and gathers the output of the first:

# %%
gathered = torch.cat([torch.relu(x @ column) for column in columns], dim=1)  # an all-gather of 4 x 8
outputs = [gathered @ column for column in b.chunk(2, dim=1)]  # and another of 4 x 6
assert torch.allclose(torch.cat(outputs, dim=1), whole, atol=1e-5)

# %% [markdown]
# Y gathered against Y reduced: the bytes of both forms for one step of Llama 3 8B.

# %%
from shardwise import Workload, estimate
from shardwise.report.units import format_bytes

for kind in ("megatron", "gathered"):
    report = estimate("llama-3-8b", f"tp=2,tpkind={kind},recompute=none", Workload(seq=2048, batch=1), "2xH100")
    rows_of = [row for row in report.roles[0].ledger if row.unit.startswith("blocks") and row.elements > 1_000_000]
    print(f"{kind:9} {sorted({row.op for row in rows_of})}, {format_bytes(sum(row.payload_bytes for row in rows_of))}")

# %% [markdown]
# **Recall.** Why is the second map cut by rows? <details><summary>Answer</summary>Its input is already cut that way:
# nothing has to be gathered in between.</details>

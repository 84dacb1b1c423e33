# %% [markdown]
# # 13. Find a hang, then a superfluous collective
# A program on two processes stops in its third step. `shardwise audit` runs it as it is, and names the rank, the call
# and the line. The repaired program shows a second mistake: it sends more than its layout must.

# %%
import json
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp

PROGRAM = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
for layer in (model[0], model[2], model):
    fully_shard(layer)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(6):
    outputs = model(torch.randn(8, 64) / (1 + 9 * rank * (step == 2)))
    loss = outputs.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    CONDITION
        dist.all_reduce(outputs.detach())
        dist.all_reduce(loss.detach())
dist.destroy_process_group()
"""
folder = Path(mkdtemp())


def audit(name: str, condition: str) -> tuple[dict, list[str]]:
    """The audit of the program, and the program's lines."""
    path = folder / name
    path.write_text(PROGRAM.strip().replace("CONDITION", condition))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
    command = [sys.executable, "-m", "shardwise", "audit", "--json", "--hang", "3", "--", *launch]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=folder)
    return json.loads(done.stdout), path.read_text().splitlines()


# %% [markdown]
# Each rank decides by its own loss whether it reports. In step 2 rank 1 has small inputs, and so a small loss.

# %%
hung, lines = audit("hangs.py", "if loss > 0.01:")
difference = hung["difference"]
name, number = difference["where"].split(":")
print(hung["cause"])
print(f"{name}, line {number}: {lines[int(number) - 1].strip()}")
assert hung["hung"] and hung["exit_code"] == 1
assert difference["ranks"] == [1] and difference["step"] == 3
assert lines[int(number) - 1].strip() == "dist.all_reduce(outputs.detach())"

# %% [markdown]
# A collective must be made by all ranks of its group or by none, so the condition may depend on nothing that differs
# between ranks: `step` is fine, the rank's loss is not.

# %%
clean, lines = audit("reports.py", "if step % 2 == 1:")
print(clean["cause"].split(",")[0], clean["understood"]["layout"])
assert clean["ended"] and clean["difference"] is None
assert clean["understood"]["layout"] == "dp=2,zero=3,precision=fp32"
for row in clean["traffic"]:
    print(f"{row['what']:10} {row['op']:10} {row['elements']:6} elements at {row['where']}  {row['note'] or ''}")

# %% [markdown]
# Parameters are gathered and gradients scattered, as ZeRO-3 must. One call is in no plan of this layout: the outputs
# are all-reduced in every second step, and nothing reads them. The loss is one number, and costs a latency alone.

# %%
(extra,) = [row for row in clean["traffic"] if row["note"] == "in no plan of the layout"]
number = int(extra["where"].split(":")[1])
print(f"remove line {number}: {lines[number - 1].strip()}, {extra['bytes']} bytes per step")
assert extra["elements"] == 8 * 64
assert lines[number - 1].strip() == "dist.all_reduce(outputs.detach())"

# %% [markdown]
# **Recall.** Why does the audit name rank 1, although rank 0 waits? <details><summary>Answer</summary>Rank 0 waits in a
# call that it has made in every step. Rank 1 left that call out and went on to the next step's gradients, which rank 0
# can never join: the one that differs is the one that skipped.</details>

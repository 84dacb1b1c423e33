"""Files of `shardwise emit` run by their engines: DeepSpeed and accelerate train a small model on 2 CPU ranks, and the
bytes of each rank's tensors are compared with the prediction for the layout.

PYTHONPATH=src python docs/emit_runs.py deepspeed accelerate   prints rows of docs/emit_runs.md

By hand, in an environment that has them: pip install -c constraints.txt -e '.[train]' deepspeed==0.19.8 ninja
accelerate. DeepSpeed compiles its operators on the first run, which takes minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from shardwise.interop import WriteRequest, write
from shardwise.layout import Layout, Workload
from shardwise.model.catalog import get
from shardwise.model.huggingface import to_huggingface
from shardwise.predict import estimate

MODEL, SEQ, STEPS, LIMIT = "tiny-llama", 32, 5, 900
LAYOUTS = {
    "deepspeed": ("dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=2,zero=1,precision=fp32"),
    "accelerate": ("dp=2,precision=fp32", "dp=2,zero=2,grads=fp32", "dp=2,zero=3,grads=fp32"),
}
CLASSES = ("parameters", "gradients", "optimizer")


def predicted(layout: str) -> dict[str, int]:
    """Class -> bytes of a rank in one step of one micro-batch."""
    parsed = Layout.parse(layout)
    roles = estimate(get(MODEL), parsed, Workload(SEQ, parsed.dp * parsed.micro), "2xH100").roles
    return {name: getattr(roles[0].bytes, name) for name in CLASSES}


def run_emitted(engine: str, layout: str) -> dict[str, Any]:
    """Train with the emitted file. Returns each rank's bytes by class, and its losses."""
    parsed = Layout.parse(layout)
    file = write(engine, WriteRequest(get(MODEL), parsed, Workload(SEQ, parsed.dp * parsed.micro)))
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / file.file, Path(folder) / "out.json"
        path.write_text(file.text)
        start = {
            "deepspeed": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
            "accelerate": [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path)],
        }[engine]
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run(
            [*start, __file__, "rank", engine, str(path), str(out)],
            check=True, timeout=LIMIT, env=environment, stdout=sys.stderr,
        )  # fmt: skip
        return json.loads(out.read_text())


# What a rank does.


def rank_main(engine: str, config: Path, out: Path) -> None:
    """Train, and write what every rank has between the last backward pass and its update."""
    torch = import_module("torch")
    dist = import_module("torch.distributed")
    torch.manual_seed(0)
    described = {key: value for key, value in to_huggingface(get(MODEL)).items() if key != "architectures"}
    llama = import_module("transformers")
    model = llama.LlamaForCausalLM(llama.LlamaConfig(**described))
    ids = torch.randint(get(MODEL).vocab, (1, SEQ + 1), generator=torch.Generator().manual_seed(1))
    losses, held = {"deepspeed": train_deepspeed, "accelerate": train_accelerate}[engine](model, config, ids)
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, held)
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"ranks": ranks, "losses": losses}))
    dist.barrier()
    # gloo's threads abort the interpreter's own end now and then.
    os._exit(0)


def loss_of(model: Any, ids: Any) -> Any:
    torch = import_module("torch")
    logits = model(input_ids=ids[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def train_deepspeed(model: Any, config: Path, ids: Any) -> tuple[list[float], dict[str, int]]:
    deepspeed = import_module("deepspeed")
    deepspeed.init_distributed(dist_backend="gloo")
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=json.loads(config.read_text())
    )
    losses: list[float] = []
    held: dict[str, int] = {}
    for _ in range(STEPS):
        loss = loss_of(engine, ids)
        engine.backward(loss)
        held = held_by_deepspeed(engine)
        engine.step()
        losses.append(loss.item())
    return losses, held


def held_by_deepspeed(engine: Any) -> dict[str, int]:
    """Bytes of the tensors that DeepSpeed's engine and optimizer name as weights, gradients and optimizer state."""
    zero = engine.optimizer
    weights = [getattr(p, "ds_tensor", p) for p in engine.module.parameters()]
    masters = [*tensors(zero, "fp32_groups_flat"), *tensors(zero, "single_partition_of_fp32_groups"),
               *tensors(zero, "fp32_partitioned_groups_flat"),
               *tensors(zero, "fp32_groups_flat_partition")]  # fmt: skip
    grads = [*tensors(zero, "averaged_gradients"), *tensors(zero, "fp32_groups_gradients_flat")]
    grads = grads or [p.grad for p in engine.module.parameters() if p.grad is not None]
    inner = getattr(zero, "optimizer", zero)
    state = [item for entry in inner.state.values() for item in entry.values() if hasattr(item, "numel")]
    return {"parameters": size(weights), "gradients": size(grads), "optimizer": size([*masters, *state])}


def tensors(owner: Any, name: str) -> list[Any]:
    """Tensors of an attribute: a list, or a dictionary of lists; none where there is no such attribute."""
    value = getattr(owner, name, None) or []
    lists: Iterable[Any] = value.values() if isinstance(value, dict) else [value]
    return [item for items in lists if items is not None for item in items if hasattr(item, "numel")]


def train_accelerate(model: Any, config: Path, ids: Any) -> tuple[list[float], dict[str, int]]:
    torch = import_module("torch")
    sharded = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if sharded:
        treat_cpu_as_gpu()
    accelerator = import_module("accelerate").Accelerator(cpu=not sharded)
    model, adam = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses: list[float] = []
    held: dict[str, int] = {}
    for _ in range(STEPS):
        loss = loss_of(model, ids)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        parameters = [local(p) for p in model.parameters()]
        grads = [local(p.grad) for p in model.parameters() if p.grad is not None]
        adam.step()
        state = [local(item) for entry in adam.state.values() for item in entry.values() if hasattr(item, "numel")]
        held = {"parameters": size(parameters), "gradients": size(grads), "optimizer": size(state)}
        adam.zero_grad()
        losses.append(loss.item())
    return losses, held


def treat_cpu_as_gpu() -> None:
    """Let accelerate shard on a CPU over gloo: it reads its FSDP settings where there are GPUs alone."""
    state = import_module("accelerate.state")
    cpu = import_module("torch").device("cpu")
    state.PartialState._prepare_backend = lambda *_, **__: ("gloo", state.DistributedType.MULTI_GPU)
    state.PartialState.set_device = lambda self: setattr(self, "device", cpu)


def local(tensor: Any) -> Any:
    """This rank's part of a DTensor; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def size(tensors: Iterable[Any]) -> int:
    """Bytes of tensors, without the step counters."""
    return sum(t.numel() * t.element_size() for t in tensors if t.numel() > 1)


def row(engine: str, layout: str) -> str:
    """A line of the page: for each class what every rank has, and what is predicted."""
    result, ours = run_emitted(engine, layout), predicted(layout)
    assert len(result["losses"]) == STEPS and result["losses"][-1] < result["losses"][0]
    cells = []
    for name in CLASSES:
        theirs = sorted({rank[name] for rank in result["ranks"]})
        shown = " and ".join(f"{value:,}" for value in theirs)
        cells.append(f"{shown} ({'=' if theirs == [ours[name]] else f'{ours[name]:,}'})")
    return f"| {engine} {metadata.version(engine)} | `{layout}` | {' | '.join(cells)} |"


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank_main(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
        sys.exit()
    if not sys.argv[1:] or {*sys.argv[1:]} - set(LAYOUTS):
        sys.exit(__doc__)
    for word in sys.argv[1:]:
        for text in LAYOUTS[word]:
            print(row(word, text), flush=True)

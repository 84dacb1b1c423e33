# FSDP2: llama-3-8b, layout dp=16,zero=3,grads=fp32, 16 ranks
# assumed --seq 8192: the context length of llama-3-8b
# assumed --batch 256: 2,097,152 tokens per step, usual for this size
# grads=fp32 in place of bf16: FSDP2 has no other
# torchrun train_fsdp2.py --corpus FOLDER
import argparse
import json
import math

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

SETTINGS = {
    "model": "llama-3-8b",
    "micro_batch": 1,
    "accumulation_steps": 16,
    "seq_length": 8192,
    "mixed_precision": True,
    "attn_implementation": "sdpa",
    "optimizer": "adamw",
    "dp_replicate_size": 1,
    "dp_shard_size": 16,
    "tp_size": 1,
    "reshard_after_forward": True,
}


def window(index, count):
    """Which of `count` windows of tokens is sample `index`: each epoch in its own order, that of `shardwise train`."""

    def mix(x):  # SplitMix64
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    epoch, found = divmod(index, count)
    half, base = max(1, -(-(count - 1).bit_length() // 2)), mix(mix(0) ^ epoch)
    while True:
        left, right = found >> half, found % 2**half
        for number in range(6):  # a Feistel network, again until it ends below `count`
            left, right = right, left ^ mix(right ^ mix((base + number) % 2**64)) % 2**half
        if (found := left << half | right) < count:
            return found


def learning_rate(step, steps, peak):
    """Linear warm-up over 10 steps, then a cosine down to a tenth of the peak."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, (step - 10) / max(1, steps - 10))))
    return peak * ((step + 1) / 10 if step < 10 else 0.1 + 0.9 * cosine)


def split(model, device):
    """Split the model over all ranks. Returns it with its blocks."""
    blocks = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    sizes = [SETTINGS[name] for name in ("dp_replicate_size", "dp_shard_size", "tp_size")]
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard", "tp"))
    options = {"mesh": mesh["shard"]}
    options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in blocks:
        # Backward begins with the last block.
        fully_shard(block, reshard_after_forward=block is not blocks[-1], **options)
    fully_shard(model, reshard_after_forward=False, **options)
    return model, blocks


def clip_gradients(model, most):
    """Scale gradients so that their norm over all ranks is at most `most`."""
    gradients = [parameter.grad for parameter in model.parameters()]
    total = sum(one.to_local().double().square().sum() for one in gradients) / SETTINGS["dp_replicate_size"]
    dist.all_reduce(total)
    for gradient in gradients:
        gradient.mul_(min(1.0, most / (total.item() ** 0.5 + 1e-6)))


def main():
    parser = argparse.ArgumentParser(description="Train with plain PyTorch, under torchrun.")
    parser.add_argument("--weights", default=SETTINGS["model"], help="Hugging Face folder or name to start from")
    parser.add_argument("--corpus", required=True, help="folder with tokens: train.bin, their type in corpus.json")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--save", help="folder for the trained weights")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if cuda else torch.device("cpu")
    torch.get_device_module(device).set_device(device)
    kind = SETTINGS["attn_implementation"]
    model = AutoModelForCausalLM.from_pretrained(args.weights, dtype=torch.float32, attn_implementation=kind)
    model, blocks = split(model.train().to(device), device)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), eps=1e-8)
    micro, steps, seq = (SETTINGS[name] for name in ("micro_batch", "accumulation_steps", "seq_length"))
    with open(f"{args.corpus}/corpus.json") as described:
        tokens = np.memmap(f"{args.corpus}/train.bin", json.load(described)["dtype"], mode="r")
    replicas, replica = (number // SETTINGS["tp_size"] for number in (dist.get_world_size(), dist.get_rank()))
    for step in range(args.steps):
        totals = torch.zeros(2, dtype=torch.float64, device=device)
        for number in range(steps):
            last = number + 1 == steps
            first = ((step * replicas + replica) * steps + number) * micro
            places = [window(index, (len(tokens) - 1) // seq) * seq for index in range(first, first + micro)]
            rows = np.array([tokens[place : place + seq + 1] for place in places], np.int64)
            rows = torch.from_numpy(rows).to(device)
            ids, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
            # The next micro-batch begins with the block that backward ends with.
            blocks[0].set_reshard_after_backward(last)
            logits = model(input_ids=ids, use_cache=False).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            (loss / steps).backward()
            totals += torch.tensor([loss.item() * targets.numel(), targets.numel()], device=device)
        clip_gradients(model, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(totals)
        if dist.get_rank() == 0:
            print(f"step {step + 1}/{args.steps}  loss {totals[0].item() / totals[1].item():.9f}", flush=True)
    if args.save:
        weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            getattr(model, "module", model).save_pretrained(args.save, state_dict=weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

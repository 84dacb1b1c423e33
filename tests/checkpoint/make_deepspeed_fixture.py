"""Makes tests/checkpoint/data/deepspeed.tar.xz: checkpoints that DeepSpeed itself wrote, and what it says they hold.

Made with DeepSpeed 0.19.8, transformers 5.23.0 and torch 2.13.0 (CPU), by

    DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed==0.19.8
    DS_ACCELERATOR=cpu python tests/checkpoint/make_deepspeed_fixture.py tests/checkpoint/data/deepspeed.tar.xz

A small Llama of `transformers` is trained for 3 steps (AdamW, no clipping) on 2 ranks under ZeRO-1, 2 and 3 and on 3
ranks under ZeRO-3, where no parameter divides evenly; under bf16 for ZeRO-2. Each folder gets `expected.safetensors`:
weights and moments as DeepSpeed's own `safe_get_full_*` functions give them in the live engine, and
`continuation.json`: the tokens of the next 3 steps and the losses that DeepSpeed goes on with. Two of them also go
through DeepSpeed's `ds_to_universal`.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

MODEL = {
    "vocab_size": 23, "hidden_size": 8, "intermediate_size": 11, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 16, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "rope_theta": 10000.0,
}  # fmt: skip
CASES = {"zero1": (1, 2, False), "zero2-bf16": (2, 2, True), "zero3": (3, 2, False), "zero3-odd": (3, 3, False)}
"""name -> (stage, ranks, bf16)."""
UNIVERSAL = {"universal-from-zero2": "zero2-bf16", "universal-from-zero3": "zero3-odd"}
STEPS, BATCH, SEQ = 3, 6, 7


def tokens(step: int):
    import torch

    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(MODEL["vocab_size"], (BATCH, SEQ + 1), generator=generator)


def rank_main(rank: int, name: str, out: str, port: int) -> None:
    stage, world, bf16 = CASES[name]
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    import deepspeed
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = LlamaForCausalLM(LlamaConfig(**MODEL))
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) is decay], "weight_decay": 0.1 * decay}
        for decay in (True, False)
    ]
    config = {
        "train_batch_size": BATCH,
        "gradient_clipping": 0,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage, "sub_group_size": 150, "stage3_param_persistence_threshold": 9},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    adam = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=config)
    share = BATCH // world
    losses = []
    for step in range(2 * STEPS):
        mine = tokens(step)[rank * share : (rank + 1) * share]
        logits = engine(input_ids=mine[:, :-1].contiguous()).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), mine[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / world)
        if step + 1 == STEPS:
            engine.save_checkpoint(out, tag="step3")
            held = _held(engine)
            if rank == 0:
                save_file(held, f"{out}/expected.safetensors")
    if rank == 0:
        later = {"losses": losses[STEPS:], "tokens": [tokens(step).tolist() for step in range(STEPS, 2 * STEPS)]}
        Path(out, "continuation.json").write_text(json.dumps(later))
    torch.distributed.destroy_process_group()


def _held(engine):
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        # Up to stage 2 the functions below see moments that torch's AdamW made after the start only when told again.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    held = {}
    for name, parameter in engine.module.named_parameters():
        held[f"model/{name}"] = safe_get_full_fp32_param(parameter).clone()
        held[f"first/{name}"] = safe_get_full_optimizer_state(parameter, "exp_avg").clone()
        held[f"second/{name}"] = safe_get_full_optimizer_state(parameter, "exp_avg_sq").clone()
    return {name: tensor.detach().cpu().contiguous() for name, tensor in held.items()}


def main(target: Path) -> None:
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for index, name in enumerate(CASES):
            torch.multiprocessing.spawn(rank_main, (name, str(root / name), 29530 + index), nprocs=CASES[name][1])
            for script in (root / name).glob("*.py"):
                script.unlink()
        for name, source in UNIVERSAL.items():
            command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--num_extract_workers", "1"]
            command += ["--num_merge_workers", "1", "--inject_missing_state"]
            folders = ["--input_folder", str(root / source / "step3"), "--output_folder", str(root / name)]
            subprocess.run([*command, *folders], check=True, stdout=subprocess.DEVNULL)
        with tarfile.open(target, "w:xz", preset=9) as archive:
            for path in sorted(root.rglob("*")):
                archive.add(path, path.relative_to(root), recursive=False, filter=_nobody)


def _nobody(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    main(Path(sys.argv[1]))

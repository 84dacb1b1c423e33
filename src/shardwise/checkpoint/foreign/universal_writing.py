"""A universal checkpoint of DeepSpeed, which any number of its ranks load under ZeRO-1, 2 or 3.

As `ds_to_universal` of DeepSpeed 0.19 leaves it: a folder per parameter under `zero/`, with one file per array of
state; AdamW's settings for each stage under the keys where its loader looks for them; and the run's counters.
"""

import os
from pathlib import Path
from typing import Any

from shardwise.checkpoint.foreign.state import WrittenState, torch_for_writing
from shardwise.checkpoint.writer import sync_folder

VERSION = "0.19.8"
"""DeepSpeed whose files these are like: its loader asks for a version."""
_FILES = {"model": "fp32", "first": "exp_avg", "second": "exp_avg_sq"}


def write_universal(state: WrittenState, folder: Path) -> None:
    """Write a state to an empty folder, one tensor in memory at a time. `latest_universal` comes last."""
    tag = f"step{state.step}"
    zero = folder / tag / "zero"
    zero.mkdir(parents=True)
    for name in state.decays:
        (zero / name).mkdir()
        _save(torch_for_writing().tensor(float(state.updates)), zero / name / "step.pt")
    for kind in state.kinds:
        for tensor in state.tensors[kind]:
            _save({"param": tensor.load(), "cat_dim": 0}, zero / tensor.name / f"{_FILES[kind]}.pt")
    _save(_optimizer(state), zero / "optimizer_state.pt")
    # The counters' file, by the name that stages 1 and 2 look for, and stage 3.
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        _save(_model(state), folder / tag / name)
    for path in (*zero.iterdir(), zero, folder / tag):
        if path.is_dir():
            sync_folder(path)
    (folder / "latest_universal").write_text(tag)
    sync_folder(folder)


def _save(content: Any, path: Path) -> None:
    with path.open("xb") as file:
        torch_for_writing().save(content, file)
        file.flush()
        os.fsync(file.fileno())


def _optimizer(state: WrittenState) -> dict[str, Any]:
    """AdamW's groups for stages 1 and 2, and its first group's settings and step for stage 3.

    Stage 3 gives all its groups this one step, which a tensor would let each of them count up.
    """
    groups = [group | {"params": [index]} for index, group in enumerate(state.groups())]
    return {
        "ds_version": VERSION,
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {"step": state.updates}}, "param_groups": groups},
    }


def _model(state: WrittenState) -> dict[str, Any]:
    """Counters of the run; weights are under `zero/`."""
    shapes = {tensor.name: torch_for_writing().Size(tensor.spec.shape) for tensor in state.tensors["model"]}
    return {
        "module": {},
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [shapes],
        "frozen_param_shapes": None,
        "shared_params": state.aliases,
        "frozen_param_fragments": None,
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": state.step,
        "global_samples": state.samples,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {} if state.batch is None else {"train_batch_size": state.batch},
        "ds_version": VERSION,
    }

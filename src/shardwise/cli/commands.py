"""Names of the commands with a summary each, grouped by purpose for `shardwise --help`."""

from __future__ import annotations

GROUPS = {
    "Plan and predict": {
        "plan": "the best ways to train or serve a model on a cluster, and why",
        "estimate": "memory, communication and time of one layout, before anything runs",
        "validate": "predicted against published measurements, source by source",
        "calibrate": "measure this host, or read nvidia-smi's table, for predictions",
    },
    "Run": {
        "train": "train a model, split over processes, on text",
        "generate": "continue prompts with a split model",
        "serve": "answer OpenAI's clients over HTTP with a split model",
        "launch": "a training as a job of SLURM, Kubernetes, or of hosts over ssh",
        "lab": "a command's ranks on several hosts, made on this machine",
    },
    "Inspect": {
        "compare": "a run's prediction against its measurement, or two step reports",
        "checkpoint": "inspect, verify, reshard, diff, export or import checkpoints",
        "sync": "workers and parameter servers: staleness and waiting",
        "studio": "pictures of what happens inside the devices, in a browser",
    },
    "Your own module": {
        "verify": "a module of your own, split, against one device",
        "trace": "a module of your own, described for estimate and plan",
    },
    "Other engines": {
        "explain": "a configuration of vLLM, DeepSpeed, Megatron-LM or torchtitan",
        "emit": "a layout as the configuration of another engine",
    },
    "Learn": {
        "list": "models, devices, links, engines, schedules, layout keys",
        "collective": "algorithms of collectives: show, verify, price, measure",
        "pipeline": "pipeline schedules: show, verify, simulate, bubble, run",
        "demo": "the tour: predict, train on four processes, compare, one page",
        "completion": "the script that completes this command's words in bash or zsh",
    },
}
"""Purpose -> command -> summary."""

COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}


def overview() -> str:
    """The text of `shardwise --help`."""
    lines = [
        "usage: shardwise [-V | --version] [--traceback] COMMAND ...",
        "",
        "Plan how a large language model is split over devices, run that split, and",
        "compare the prediction with the run.",
    ]
    for purpose, commands in GROUPS.items():
        lines += ["", f"{purpose}:", *(f"  {name:<12}{summary}" for name, summary in commands.items())]
    lines += ["", "Start with: shardwise plan llama-3-8b --cluster 8xH100 --seq 8k --batch 64"]
    return "\n".join([*lines, "shardwise COMMAND --help has options and examples. Every command takes --json."])

"""Names of the commands with a summary each, grouped by purpose for `shardwise --help`."""

GROUPS = {
    "Plan and predict": {
        "plan": "the best ways to train or serve a model on a cluster, and why",
        "estimate": "memory, communication and time of one layout, before anything runs",
        "validate": "errors of predicted times on published measurements",
        "calibrate": "measure this host, or read nvidia-smi's table, for predictions",
        "mcp": "answer coding agents: plan, estimate, explain ... as MCP tools",
    },
    "Run": {
        "train": "train a model, split over processes, on text",
        "generate": "continue prompts with a split model",
        "serve": "answer OpenAI's clients over HTTP with a split model",
        "launch": "write a job for SLURM, Kubernetes, or hosts over ssh",
        "lab": "run a command on several emulated hosts of this machine",
    },
    "Inspect": {
        "compare": "compare a run with its prediction, or two step reports",
        "checkpoint": "inspect, verify, reshard, diff, export or import checkpoints",
        "sync": "parameter servers: staleness and waiting of workers",
        "studio": "draw memory, communication and schedules in a browser",
    },
    "Your own module": {
        "verify": "check that your split module computes as on one device",
        "trace": "describe your module in a file for estimate and plan",
    },
    "Other engines": {
        "certify": "compare an engine's gradients under its layouts with one device",
        "audit": "what a job of any engine sends and holds, and which rank differs",
        "explain": "read a vLLM, DeepSpeed, Megatron-LM or torchtitan configuration",
        "emit": "write a layout as the configuration of another engine",
    },
    "Learn": {
        "list": "models, devices, links, engines, schedules, layout keys",
        "collective": "algorithms of collectives: show, verify, predict, measure",
        "pipeline": "pipeline schedules: show, verify, simulate, bubble, run",
        "demo": "a tour: predict, train on four processes, compare",
        "completion": "print the completion script for bash or zsh",
    },
}
"""Purpose -> command -> summary."""

COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}


def overview() -> str:
    """The text of `shardwise --help`."""
    lines = [
        "usage: shardwise [-V | --version] [--traceback] COMMAND ...",
        "",
        "Find the best way to split a large language model over devices, run that",
        "split, and compare the prediction with the run.",
    ]
    for purpose, commands in GROUPS.items():
        lines += ["", f"{purpose}:", *(f"  {name:<12}{summary}" for name, summary in commands.items())]
    lines += ["", "Start with: shardwise plan llama-3-8b --cluster 8xH100 --seq 8k --batch 64"]
    return "\n".join([*lines, "shardwise COMMAND --help has options and examples. Every command takes --json."])

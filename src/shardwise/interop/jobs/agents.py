"""Programs that start the ranks of their node themselves, and the flags by which one learns of the other nodes.

Any program runs once per node, and finds the nodes in its environment: NNODES, NODE_RANK, NPROC_PER_NODE, MASTER_ADDR,
MASTER_PORT, and PET_*, which torchrun reads in place of flags. A program that reads flags alone gets those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class NodeAgent:
    """A program and its flags for several nodes."""

    words: tuple[str, ...]
    """First words of its command."""
    flags: str = ""
    """Shell words after them, from the variables above. Without single quotes."""
    restarts: bool = False
    """Whether it restarts failed ranks itself."""


AGENTS = (
    NodeAgent(("torchrun",), restarts=True),
    NodeAgent(("python", "-m", "torch.distributed.run"), restarts=True),
    NodeAgent(
        ("accelerate", "launch"),
        "--num_machines $NNODES --machine_rank $NODE_RANK --num_processes $((NNODES * NPROC_PER_NODE)) "
        '--main_process_ip "$MASTER_ADDR" --main_process_port $MASTER_PORT',
    ),
    NodeAgent(
        ("vllm", "serve"),
        '--nnodes $NNODES --node-rank $NODE_RANK --master-addr "$MASTER_ADDR" --master-port $MASTER_PORT '
        "${HEADLESS+--headless}",
    ),
    NodeAgent(
        ("python", "-m", "sglang.launch_server"),
        '--nnodes $NNODES --node-rank $NODE_RANK --dist-init-addr "$MASTER_ADDR:$MASTER_PORT"',
    ),
)
"""vLLM needs a release with --nnodes; its nodes but the first are --headless (HEADLESS is set there)."""


def agent_of(command: Sequence[str]) -> NodeAgent | None:
    """The agent that a command starts. Its program may be a path, and python3 for python."""
    program = command[0].rpartition("/")[2]
    plain = "python" if program.startswith("python") else program
    words = (plain, *command[1:])
    return next((agent for agent in AGENTS if words[: len(agent.words)] == agent.words), None)

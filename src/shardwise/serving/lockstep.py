"""The ranks of a replica in lockstep: what its first rank receives reaches the others at the beginning of every engine
step, and the tokens that are chosen reach them before they are needed.

An engine step, on every rank (in brackets its ledger rows, in the step's own phase; "control" and "tokens" are units):

1. control. One all-reduce (maximum) of 1 + r int64 numbers over cp and tp, with zero=3 over the data ranks and tp, with
   experts on other replicas over the ranks of these [all_reduce, `lockstep_axes`, control, int64, 1 + r]: whether
   anybody has anything to do, and how many bytes of messages each of the r replicas in step has. r is
   `replicas_in_step` with prompts of their own, else 1. Only where there are messages, they follow [all_reduce, the
   same axes (tp where prompts are own), control, uint8, bytes]. Under a pipeline the first stage does that, and each
   stage sends both on to the next one [send / recv, pp, control, int64, 1 + r; and uint8, bytes].
2. the forward pass, as `engine.py` has it. A stage of a pipeline receives [n, hidden] of the one before, n = ceil(T /
   cp), and sends its own to the next one [recv and send, pp, "stage <the taker>", the layout's dtype, n x hidden].
3. tokens. Under a pipeline of p stages the last one sends what it has chosen, where B > 0, to every other one [send,
   pp, tokens, float64, (2 + 2 K) B], and these receive what engine step k - p + 1 has chosen [recv, with that engine
   step's B and K]. K is the number of likeliest tokens that are reported with each, mostly 0.

One rank communicates with nobody and has no rows.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.layout.axes import PP, TP
from shardwise.layout.serving import lockstep_axes, replicas_in_step
from shardwise.runtime.transport.protocol import Work
from shardwise.serving.engine import TokenGenerator
from shardwise.serving.graphs import alone
from shardwise.serving.messages import Answer, Cancel, Command, Drain, Request, Top, decode, encode
from shardwise.serving.pages import Pages
from shardwise.serving.sampling import choose
from shardwise.serving.scheduler import EngineStep, Scheduler

CONTROL, TOKENS = "control", "tokens"
OVER, IDLE, ACTIVE = range(3)

Receive = Callable[[bool], list[Command]]
"""(whether there is nothing else to do) -> commands that have arrived; it may wait a little where there are none."""


@dataclass(frozen=True)
class StepResult:
    """Result of one engine step on this rank. answers: for the first rank of the replica to give. more: whether another
    engine step will follow."""

    step: EngineStep
    answers: list[Answer]
    more: bool


class Lockstep:
    """One rank's loop of engine steps. receive: given to the first rank of each replica, None to all others."""

    def __init__(self, generator: TokenGenerator, receive: Receive | None) -> None:
        self.generator, self.comms, self._receive_commands = generator, generator.comms, receive
        job, layout = generator.job, generator.plan.layout
        self.depth, self.place = layout.pp, generator.stage
        pages = Pages(job.pages, job.page, job.reuse)
        self.scheduler = Scheduler(
            pages, batch=job.batch, chunk=job.chunk, depth=self.depth, rows=job.logit_rows, whole=job.whole_prompts
        )
        own = replicas_in_step(layout) > 1 and job.prompts == "own"
        self._step = lockstep_axes(layout)
        """The ranks in step, among which control goes round."""
        self._replicas = replicas_in_step(layout) if own else 1
        self._replica = self.comms.index(self._step) // layout.tp if own else 0
        self._hearers = TP if own else self._step
        self._others = not alone(layout)
        """Whether other ranks are in step with this one."""
        self._state = IDLE
        self._draining = False
        self._scheduled_steps: deque[tuple[EngineStep, Tensor | None]] = deque()
        """Engine steps whose tokens are not known yet, the oldest first; with what they have chosen on the last
        stage."""
        self._leaving: deque[tuple[Tensor, Work]] = deque()
        self._most = 2 * self.depth * max(3, self.depth - 1)
        """Sends that are kept: those of 2 p engine steps. Older ones wait for nothing that comes after them."""

    @property
    def active(self) -> bool:
        """Whether anybody in step had anything to do in the latest engine step."""
        return self._state == ACTIVE

    @property
    def first(self) -> bool:
        return self.place == 0

    @property
    def last(self) -> bool:
        return self.place == self.depth - 1

    def step(self) -> StepResult:
        """The next engine step, which all ranks in step begin together."""
        answers: list[Answer] = []
        for command in self._control():
            answers += self._execute(command)
        step = self.scheduler.schedule()
        if step.chunks:
            self._scheduled_steps.append((step, self._compute(step)))
        else:
            self._scheduled_steps.append((step, None))
            if self._state == ACTIVE:
                self.generator.idle()
        if len(self._scheduled_steps) == self.depth:
            answers += self._receive_output(*self._scheduled_steps.popleft())
        return StepResult(step, answers, self._state != OVER)

    def _execute(self, command: Command) -> list[Answer]:
        if isinstance(command, Request):
            self.scheduler.add(command)
        elif isinstance(command, Cancel):
            return self.scheduler.cancel(command.id)
        elif isinstance(command, Drain):
            self._draining = True
        return []

    # -- control

    @property
    def _own_state(self) -> int:
        if self.scheduler.active or any(step.chunks for step, _ in self._scheduled_steps):
            return ACTIVE
        return OVER if self._draining else IDLE

    def _control(self) -> list[Command]:
        # One rank alone sends it nowhere, and a device would only make the host wait.
        device = self.generator.device if self._others else "cpu"
        header = torch.zeros(1 + self._replicas, dtype=torch.int64, device=device)
        message = b""
        idle = max(self._state, self._own_state) != ACTIVE
        if self._receive_commands is not None:
            commands = self._receive_commands(idle)
            state = self._own_state
            if commands:
                message = encode(commands)
                state = ACTIVE if any(isinstance(command, Request) for command in commands) else state
            header[0], header[1 + self._replica] = state, len(message)
        self.comms.rest(idle)
        if self.first:
            self.comms.all_reduce(header, self._step, CONTROL, maximum=True)
        else:
            self.comms.receive(header, PP, self.place - 1, CONTROL).wait()
        self.comms.rest(False)
        self._state, *sizes = header.tolist()
        payload = self._payload(message, sizes[self._replica])
        if not self.last:
            self._send(header, self.place + 1, CONTROL)
            if payload is not None:
                self._send(payload, self.place + 1, CONTROL)
        return decode(bytes(payload.tolist())) if payload is not None else []

    def _payload(self, message: bytes, size: int) -> Tensor | None:
        if not size:
            return None
        payload = torch.zeros(size, dtype=torch.uint8)
        if message:
            payload.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        payload = payload.to(self.generator.device)
        if self.first:
            self.comms.all_reduce(payload, self._hearers, CONTROL)
        else:
            self.comms.receive(payload, PP, self.place - 1, CONTROL).wait()
        return payload

    # -- tokens and activations

    def _compute(self, step: EngineStep) -> Tensor | None:
        """This stage's part of an engine step; on the last stage what it has chosen (`_choose`)."""
        generator = self.generator
        generator.begin(step)
        if (decoded := generator.decode(step)) is not None:
            return self._choose(step, *decoded)
        x = None
        if not self.first:
            shape = 1, generator.tokens_here(step), generator.job.model.hidden
            x = torch.empty(shape, dtype=generator.dtype, device=generator.device)
            self.comms.receive(x, PP, self.place - 1, f"stage {self.place}").wait()
        y = generator.forward(step, generator.rows(step), x)
        if not self.last:
            self._send(y, self.place + 1, f"stage {self.place + 1}")
            return None
        if not step.wanted:
            return None
        chosen = self._choose(step, y)
        for stage in range(self.place):
            self._send(chosen.to(generator.device), stage, TOKENS)
        return chosen

    def _choose(self, step: EngineStep, logits: Tensor, greedy: Tensor | None = None) -> Tensor:
        """[2 + 2 K, B] tokens and log-probabilities, then K likeliest tokens and their log-probabilities, on the
        CPU."""
        rows = step.wanted
        targets = {index: row.target for index, row in enumerate(rows) if row.target is not None}
        banned = {index: row.banned for index, row in enumerate(rows) if row.target is None and row.banned}
        samplings, places = [row.sampling for row in rows], [row.place for row in rows]
        return torch.stack(choose(logits, samplings, places, greedy, targets=targets, banned=banned, top=step.top))

    def _receive_output(self, step: EngineStep, chosen: Tensor | None) -> list[Answer]:
        wanted = step.wanted
        if not wanted:
            return []
        if not self.last:
            chosen = torch.empty(2 + 2 * step.top, len(wanted), dtype=torch.float64, device=self.generator.device)
            self.comms.receive(chosen, PP, self.depth - 1, TOKENS).wait()
        assert chosen is not None
        tokens, logprobs, *tops = chosen.tolist()
        return self.scheduler.process_output(
            step, [int(token) for token in tokens], logprobs, _tops(tops) if tops else None
        )

    def _send(self, tensor: Tensor, stage: int, unit: str) -> None:
        """Send without waiting, but for what was sent steps ago: gloo never says that a send has arrived, and what is
        waited for was taken before its taker had anything of a later engine step to wait for."""
        self._leaving.append((tensor, self.comms.send(tensor.contiguous(), PP, stage, unit)))
        while self._leaving and (len(self._leaving) > self._most or self._leaving[0][1].is_completed()):
            self._leaving.popleft()[1].wait()

    def finish(self) -> None:
        """Wait for what is still on its way."""
        while self._leaving:
            self._leaving.popleft()[1].wait()


def _tops(numbers: list[list[float]]) -> list[Top]:
    """The likeliest tokens of each row, from K rows of tokens and K of their log-probabilities."""
    half = len(numbers) // 2
    columns = zip(zip(*numbers[:half], strict=True), zip(*numbers[half:], strict=True), strict=True)
    return [
        tuple((int(token), value) for token, value in zip(tokens, values, strict=True) if token >= 0)
        for tokens, values in columns
    ]

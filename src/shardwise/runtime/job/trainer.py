"""The training loop of one rank: set up, step, validate, measure, and write the run directory (rank 0)."""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint import Checkpoint, DamagedError, with_older
from shardwise.checkpoint.huggingface import PeftAdapters, open_weights
from shardwise.data import Corpus
from shardwise.data.splits import SPLITS
from shardwise.decoder import Batch, random
from shardwise.decoder.random import initial_values
from shardwise.errors import DivergedError, NotFiniteError, UserError
from shardwise.layout import Mesh, unit_plan
from shardwise.layout.axes import DP, REPLICA
from shardwise.layout.modules import check_run
from shardwise.layout.units import UnitPlan
from shardwise.model.flops import training_flops_per_token
from shardwise.model.parameters import Model, Parameter
from shardwise.report.exposure import Exposure
from shardwise.report.rank_timelines import Recorded, aligned, kept
from shardwise.report.run_directory import OFFLOADED, RunDirectory
from shardwise.report.step_memory import StepMemory, write_memory
from shardwise.report.step_report import Role, StepReport, merge_roles
from shardwise.runtime.allocator import retain_freed_memory
from shardwise.runtime.checkpointing import Position, Saver, restore, start_adapters, start_from
from shardwise.runtime.job import pulse
from shardwise.runtime.job.batches import Batches
from shardwise.runtime.job.config import TrainConfig
from shardwise.runtime.job.launch import RANK_FAILED, lost_a_peer, reason
from shardwise.runtime.job.meeting import meet
from shardwise.runtime.job.output import say
from shardwise.runtime.job.record import RunRecorder
from shardwise.runtime.job.setup import cuda_device, make_comms, sharing
from shardwise.runtime.job.slow import InjectedWaiting, TrainingClock
from shardwise.runtime.job.stop import Stopped, StopRequest
from shardwise.runtime.measure.hardware import matmul_rate
from shardwise.runtime.measure.memory import StepMeasurement
from shardwise.runtime.measure.timeline import TimelineRecorder
from shardwise.runtime.offload.file import Kept, newest_kept
from shardwise.runtime.pipeline.step import TrainProgram
from shardwise.runtime.sync.outer_step import Rounds
from shardwise.runtime.zero.flat_unit import torch_dtype

MEASURED_STEP = 2
"""The step whose report is taken: the first two fill caches. Its timeline is the next step's; where replicas train
apart from each other both have an outer step."""

_NOTES = ("time is the median step's; timelines and the collectives' times are those of one undisturbed step",)
_COMPILED = "compile=block: on CPU, what compiled blocks make and free inside themselves is not seen"
_NO_OVERLAP = "nothing was computed while communicating (--no-overlap): times are a diagnosis, not the layout's"


def train(config: TrainConfig) -> dict[str, Any]:
    """Train as the rank that the environment names (RANK, WORLD_SIZE, LOCAL_RANK); every rank returns the result.

    What the step report says of communication is in rank 0's result alone.
    Raises `UserError` for a layout that does not fit the number of processes, and whatever torch.distributed raises
    when a peer is lost, with the step as its attribute `step`.
    """
    device = _device(config)
    memory = pulse.from_environment()
    config = _join(config, device)
    if not pulse.watched():
        pulse.watch_over(memory, dist.get_rank(), config.hang, _give_up)
    try:
        result = _run_of(config)(config, device, memory).train()
    except Stopped:
        dist.destroy_process_group()
        raise
    # After a failure the groups stay as they are until the process ends: peers that see them go would report that
    # first, and taking them down may itself wait for a peer.
    dist.destroy_process_group()
    return result


def _run_of(config: TrainConfig) -> type[TrainingRun]:
    layout = config.layout
    if config.model.counted:
        from shardwise.runtime.module.class_run import ClassRun

        return ClassRun
    if not layout.served:
        return TrainingRun
    from shardwise.runtime.sync.run import ServerRun, WorkerRun

    return ServerRun if dist.get_rank() >= layout.training_ranks else WorkerRun


def _device(config: TrainConfig) -> torch.device:
    torch.set_num_threads(config.threads)
    torch.set_float32_matmul_precision(config.matmul)
    if config.device == "cpu":
        retain_freed_memory()
        return torch.device("cpu")
    return cuda_device(int(os.environ.get("LOCAL_RANK", "0")))


def _join(config: TrainConfig, device: torch.device) -> TrainConfig:
    """Meet the other ranks; returns the configuration as all of them have it."""
    # gloo looks for a name of the host first and says so on every rank when there is none
    warnings.filterwarnings("ignore", message=".*barrier.*device.*")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    notice = sharing(device)
    try:
        # All ranks must begin at the same step: under torchrun only rank 0's agent may know that it is a restart.
        store, words = meet(rank, world, json.dumps([config.resume, config.restart, bool(notice)]), pulse.STARTING)
        resume, restart, staged = json.loads(words)
        if notice and not staged:
            raise UserError(f"{notice}; but on rank 0's host each rank has a GPU: start as many ranks on each host")
        if staged and rank == 0:
            say(notice)
        nccl = device.type == "cuda" and not staged
        dist.init_process_group(
            "nccl" if nccl else "gloo",
            store=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=config.hang + pulse.MARGIN),
            device_id=device if nccl else None,  # which NCCL would guess
        )
    except (dist.DistNetworkError, RuntimeError) as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            port = os.environ.get("MASTER_PORT", "?")
            raise UserError(f"port {port} is in use: choose another (MASTER_PORT, or --port)") from None
        raise
    return replace(config, resume=resume, restart=restart)


def _give_up(line: str) -> None:
    say(f"shardwise: error: {line}")
    os._exit(RANK_FAILED)


class TrainingRun:
    """A rank's part in a run whose ranks make every step together."""

    trains = True
    """Whether this rank computes losses."""

    def __init__(self, config: TrainConfig, device: torch.device, memory: pulse.Memory) -> None:
        self.pulse = pulse.Pulse(memory)
        self.pulse.work("its preparation")
        self.config, self.device = config, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        layout = config.layout
        check_run(layout, config.model, config.workload, self.world)
        self.subject = model = self.subject_of_run()
        timeout = config.hang + pulse.MARGIN
        self.comms = make_comms(
            layout, model, self.rank,
            timeout=timeout, overlap=config.overlap, transport=config.transport, device=device, pulse=self.pulse,
        )  # fmt: skip
        plan = unit_plan(model, layout, config.workload, rank=self.rank, backend=self.comms.backend)
        folder = Path(config.offload_dir or Path(config.out) / OFFLOADED)
        self.name = self._name_of_run()
        self.at, kept = Position(0, 0, 0), self._kept(plan, folder)
        self._say_compiling("compiling the blocks ...")
        self.program = self._program(plan, folder, kept)
        if (seconds := self.program.compile_seconds) is not None:
            self._say_compiling(f"compiled the blocks in {seconds:.0f} s")
        self._open_corpus(plan)
        # Frozen weights are in no checkpoint.
        if config.weights and (config.model.lora or not (kept or config.resume)):
            self.start_from_weights()
        if kept is not None:
            self.at = Position(kept.about["step"], kept.about["samples"], kept.about["updates"])
            if self.rank == 0:
                say(f"resuming from the offloaded state of step {self.at.step} in {folder}")
        elif config.resume:
            self.at = self._restored(Path(config.resume))
            # A run that died after its last step has only its end to do again.
            if self.at.step > config.steps or (self.at.step == config.steps and not config.restart):
                raise UserError(f"{config.resume} is at step {self.at.step} already: give a larger --steps")
        elif config.adapters:
            adapters = PeftAdapters.open(Path(config.adapters), config.model, self.subject)
            start_adapters(self.program, adapters)
            if adapters.warning and self.rank == 0:
                say(f"shardwise: warning: {adapters.warning}")
        self._begin()
        # A run that one rank cannot begin leaves no directory, which a second attempt would find occupied.
        self.pulse.wait("the barrier before the run begins")
        dist.barrier()
        self.pulse.work()
        self.record = RunRecorder(config, self.world, self.at.step) if self.rank == 0 else None
        self.saver = Saver(
            self.program, RunDirectory(Path(config.out)).checkpoints,
            seed=config.seed, keep=config.keep_last, later=config.save_async,
            timeout=timeout, pulse=pulse.Pulse(memory, pulse.SAVING), **self.saver_options(),
        )  # fmt: skip
        self.rounds = Rounds.of(layout, config.steps)
        self.stop = StopRequest(self.rounds)
        slow = InjectedWaiting(self.config.stragglers, self.config.emulated, self.rank, self.device, self.pulse)
        if slow.active:
            self.program.computed = slow.computed
        self.clock, self.slow = TrainingClock(self.pulse), slow
        self._clear_records()

    def _clear_records(self) -> None:
        self.diverged = ""
        """Where and how the run has diverged, the same on all ranks; empty while it has not."""
        self.skips = 0
        """Steps whose update was skipped."""
        self.in_a_row = 0
        """The last steps, if their updates were skipped on all ranks."""
        self.first_step = self.at.step
        self._round: list[dict[str, Any]] = []
        """Steps that are not recorded yet."""
        self.times: list[float] = []
        """Seconds of steps; where replicas train apart from each other, of those with an outer step."""
        self.inner_times: list[float] = []
        """Seconds of the others."""
        self.cpu_times: list[float] = []
        """CPU seconds of all threads of this process, of the same steps."""
        self.role: Role | None = None
        """Measurements of a step on this rank before its times are known."""
        self.reported = False
        """Whether the measured step and the one after it are over."""
        self.memory: StepMemory | None = None
        """Memory of this rank over the measured step."""
        self.roles: dict[int, Role] | None = None

    def subject_of_run(self) -> Model:
        """The parts and parameters that the layout divides."""
        return self.config.model

    def saver_options(self) -> dict[str, Any]:
        """Contents of its checkpoints besides what all have: arguments of `Saver`."""
        return {"about": self.config.to_json()}

    def _program(self, plan: UnitPlan, folder: Path, kept: Kept | None) -> TrainProgram:
        return TrainProgram(
            plan, self.comms, self.config.optimizer, self._initial_values, self.device, folder, kept
        )  # fmt: skip

    def start_from_weights(self) -> None:
        """Begin with the weights of a Hugging Face folder."""
        assert self.config.weights
        start_from(self.program, open_weights(self.config.weights, self.config.model))

    def _begin(self) -> None:
        """The state of the first step is there."""

    def _restored(self, checkpoint: Path) -> Position:
        try:
            return restore(self.program, Checkpoint.open(checkpoint))
        except DamagedError as error:
            raise with_older(error, checkpoint) from None

    def _open_corpus(self, plan: UnitPlan) -> None:
        config, corpus = self.config, Corpus.open(Path(self.config.corpus))
        data_rank = Mesh.of(config.layout, self.subject).index(REPLICA + DP, self.rank)
        seq, isolate = config.workload.seq, config.workload.isolate_documents
        self.batches = {
            split: Batches(plan, corpus.sampler(split, seq, config.seed, isolate), data_rank, self.device)
            for split in SPLITS
        }
        self.entropy = corpus.unigram_entropy("validation")

    def _kept(self, plan: UnitPlan, folder: Path) -> Kept | None:
        """State on disk of a later step than that of the checkpoint, when the run continues in its own directory."""
        config = self.config
        inside = config.resume and Path(config.out).resolve() in Path(config.resume).resolve().parents
        if not (config.restart or inside):
            return None
        after = Checkpoint.open(Path(config.resume)).manifest.step if config.resume else -1
        until = None
        if self.rank == 0:
            # A full disk may have taken a step's state and not its loss: that step is run again.
            events = (event for _, event in RunDirectory(Path(config.out)).events())
            until = max((event["step"] for event in events if {"loss", "skipped"} & event.keys()), default=0)
        return newest_kept(plan, folder, self.rank, self.name, after, until)

    def _name_of_run(self) -> str:
        """A hash of what must be the same for state on disk to be this run's."""
        config = self.config
        same = (str(Path(config.out).resolve()), config.seed, str(config.layout), config.corpus_fingerprint)
        return hashlib.sha256(repr((same, config.model, config.workload, self.world)).encode()).hexdigest()

    def _say_compiling(self, words: str) -> None:
        if self.config.layout.compile != "off" and self.rank == 0:
            print(words, flush=True)

    def _initial_values(self, parameter: Parameter, index: Tensor) -> Tensor:
        self.pulse.work(f"the initial values of {parameter.name}")
        return initial_values(parameter, index, self.config.seed)

    def train(self) -> dict[str, Any]:
        config = self.config
        self.pulse.work("its preparation")
        self.peak = matmul_rate(self.device, torch_dtype(config.layout.dtype))
        start, loss = self.at.step, self.record.loss if self.record else float("nan")
        measured = self.rounds.measured(start, MEASURED_STEP) if config.report and start < config.steps else -1
        first, stopped = self._validate(start), False
        if self.record and not math.isfinite(first):
            self.record.warn(f"the validation loss is {first} before the first step: look at the weights", start)
        for boundary in self._boundaries(start, measured):
            with self.clock.running():
                loss, stopped = self._train_to(boundary, measured, loss)
            if stopped or self.diverged or boundary == config.steps:
                break
            if self._due(config.validate_every, boundary):
                self._validate(boundary)
            if self._due(config.save_every, boundary):
                started = time.perf_counter()
                self._save(last=False)
                if self.record:
                    self.record.saved(boundary, time.perf_counter() - started)
            if self.diverged:
                break
        if self.role is not None:  # no step was left after the measured one
            self.roles, self.role = self._gather(self.role, None), None
        self._save(last=True)
        if stopped or self.diverged:
            self._break_off()
        return self._finish(first, self._validate(config.steps), loss)

    def _break_off(self) -> NoReturn:
        if self.record:
            self.record.end_line()
        self._end()
        self.program.close(remove=True)
        if not self.diverged:
            self.pulse.idle()
            raise Stopped(self.at.step, self.config.out)
        if self.record:
            self.record.end("diverged")
        self._meet_last()
        raise DivergedError(self._how_it_diverged())

    def _meet_last(self) -> None:
        self.pulse.collective("the last barrier")
        self.pulse.wait()
        dist.barrier()
        self.pulse.idle()

    def _how_it_diverged(self) -> str:
        kept = self.saver.saved or self.config.resume
        where = f"its last finite state is in {kept}" if kept else "nothing was saved"
        skip = " --on-nonfinite skip leaves out a bad batch." if self.config.on_nonfinite == "stop" else ""
        return f"training diverged {self.diverged}; {where}. Start again with a smaller --lr.{skip}".removesuffix(".")

    def _boundaries(self, start: int, measured: int) -> Iterator[int]:
        """The steps after which there is something to do beside the next one, the last of all included. measured: the
        step that is measured."""
        for step in range(start + 1, self.config.steps):
            if self._due(self.config.validate_every, step) or self._due(self.config.save_every, step):
                yield step
        yield self.config.steps

    def _due(self, period: int, done: int) -> bool:
        """Whether something that happens every `period` steps does so when so many are done."""
        return self.rounds.due(period, done - 1)

    def _train_to(self, boundary: int, measured: int, loss: float) -> tuple[float, bool]:
        """Make all steps before `boundary`. Returns the loss of the last, and whether the run was told to end."""
        while (step := self.at.step) < boundary:
            if self.stop.agreed(step):
                return loss, True
            loss = self._observed(step, measure=step == measured)
            if self.diverged:
                return loss, True
        return loss, False

    def _observed(self, step: int, measure: bool) -> float:
        """One training step with its times. Looking at every storage slows a step down, so the one after a measured
        step, undisturbed but for its clock, gives the timeline and the times of the collectives."""
        started, cpu, waited = time.perf_counter(), time.process_time(), self.pulse.waited
        measurement = StepMeasurement(self.program) if measure else None
        again = self.role is not None and self.rounds.ends(step)
        last = self.reported and step == self.config.steps - 1 and not self.config.layout.served
        timeline = TimelineRecorder(self.program) if again or last else None
        loss, norm = self._step(step, measurement or timeline or nullcontext())
        elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu
        if measurement is not None:
            self.role, self.memory = measurement.role(self.rank), measurement.trace(self.rank, step + 1)
            if self.record:
                self.record.memory_snapshot(measurement.events)
        elif step > self.first_step or self.config.steps == 1:
            (self.times if self.rounds.ends(step) else self.inner_times).append(elapsed)
            self.cpu_times.append(cpu)
        if timeline is not None and last:
            self._gather_last(timeline.recorded())
        elif timeline is not None and self.role is not None:
            role = replace(self.role, transport=timeline.transport(self.role.ledger))
            self.role = None
            self._measured(role, timeline.recorded())
            self.reported = True
        if self.record:
            rate = self._rate(elapsed)
            self._record(step, dict(
                time=time.time(), step=step + 1, loss=loss, grad_norm=norm, seconds=elapsed, tokens_per_s=rate,
                mfu=self._mfu(rate), lr=self.config.learning_rate(step), recorded=measure,
                waiting_s=self.pulse.waited - waited, experts=self.program.expert_loads.event(),
                skipped=self.program.optimizer.skipped, **self.slow.event(),
            ))  # fmt: skip
        return loss

    def _record(self, step: int, event: dict[str, Any]) -> None:
        """Record and show a step. Where replicas train apart from each other, the mean loss over all of them is known
        after the next outer step, and steps are recorded then."""
        assert self.record
        outer, ends = self.program.outer, self.rounds.ends(step)
        self._round.append(event)
        if ends and outer is not None:
            for each, loss in zip(self._round, outer.losses, strict=True):
                each |= {"loss": loss, "skipped": not math.isfinite(loss)}
            event["outer_loss"] = outer.loss
        if ends:
            for each in self._round:
                self.record.step(**each, shown=False)
            self._round.clear()
        self.record.show(event, recorded=event["recorded"], whose="" if ends else " (rank 0's replica)")

    def _seconds(self, typical: Callable[[list[float]], float] = statistics.median) -> float | None:
        """The median step's; where replicas train apart from each other, the mean over a round of the median step with
        an outer step and of the others."""
        kinds = [typical(times) for times in (self.times, self.inner_times) if times]
        if len(kinds) < 2:
            return kinds[0] if kinds else None
        return (kinds[0] + (self.rounds.every - 1) * kinds[1]) / self.rounds.every

    def _measured(self, role: Role, recorded: Recorded | None) -> None:
        self.roles = self._gather(role, recorded)

    def _rate(self, seconds: float) -> float:
        """Tokens/s of all ranks in a step that took so many seconds here."""
        return self.config.workload.batch * self.config.workload.seq / seconds

    def _typical_rate(self, seconds: float) -> float:
        """Tokens/s of the run. seconds: of the median step."""
        return self._rate(seconds)

    def _mfu(self, tokens_per_s: float) -> float:
        """Model FLOPs utilization, causal attention counted once, against the measured rate of this machine's matrix
        products."""
        return training_flops_per_token(self.config.model, self.config.workload.seq) * tokens_per_s / self.peak

    def _save(self, last: bool) -> None:
        """Report a checkpoint that cannot be written; only the last one ends the run, and one that is not finite."""
        self._tried(self.saver.finish)  # the one before may still be under way
        if self.diverged and self.at.step in (self.first_step, self.saver.step):
            return
        if not last and self.saver.saved and self.in_a_row >= self.at.step - self.saver.step:
            return  # no update since
        # What a run has when it diverges may be of no use: it pushes out no earlier checkpoint.
        self.saver.keep = 0 if self.diverged or self.in_a_row else self.config.keep_last
        if last:
            with self._told_nonfinite():
                self.saver.save(self.at)
                self.saver.finish()
        else:
            self._tried(lambda: self.saver.save(self.at))

    @contextmanager
    def _told_nonfinite(self) -> Iterator[None]:
        """Around a save, which all ranks make together: the run has diverged where its state is not finite."""
        try:
            yield
        except NotFiniteError as error:
            self.diverged = self.diverged or f"up to step {self.at.step}: {error}"

    def _tried(self, saving: Callable[[], None]) -> None:
        try:
            with self._told_nonfinite():
                saving()
        except UserError as error:
            if self.record:
                self.record.warn(str(error), self.at.step)

    def _finish(self, first: float, last: float, loss: float) -> dict[str, Any]:
        config = self.config
        # Where some steps are slowed, none of them is typical.
        seconds = self._seconds(statistics.fmean if config.stragglers.slow else statistics.median)
        rate = self._typical_rate(seconds) if seconds else None
        seen: Exposure | None = None
        if self.roles is not None and self.record:
            seen = self.record.report(self._report(self.roles, seconds))
        step = statistics.median(self.cpu_times) if self.cpu_times else None
        done = self.at.step - self.first_step
        writing = self.record.directory.writing_s / done if self.record and done else None
        result = {
            "steps": config.steps,
            "ranks": self.world,
            "layout": str(config.layout),
            "loss": loss if self.program.outer is None else self.program.outer.loss,
            "validation_loss": last,
            "first_validation_loss": first,
            "unigram_entropy": self.entropy,
            "median_step_s": self._seconds(),
            "tokens_per_s": rate,
            "mfu": self._mfu(rate) if rate else None,
            "matmul_flops_per_s": self.peak,
            "compile_s": self.program.compile_seconds,
            "communication": seen.to_json() if seen else None,
            "skipped_steps": self.skips,
            **self._waiting(),
            "step_cpu_s": step,
            "writing_cpu_s": writing,
            "writing_share": writing / step if writing and step else None,
            "verdict": self.record.verdict() if self.record and self.roles is not None else None,
        }
        if self.trains and not math.isfinite(last):
            self.diverged = f"up to step {self.at.step}: the validation loss is {last}"
        if self.record:
            self.record.finish(result, "diverged" if self.diverged else "finished")
        self._end()
        self.program.close(remove=True)
        self._meet_last()
        if self.diverged:
            raise DivergedError(self._how_it_diverged())
        return result

    def _step(self, step: int, around: AbstractContextManager[Any]) -> tuple[float, float]:
        config, batch = self.config, self.config.workload.batch
        self.pulse.step(step + 1)
        self.program.optimizer.about = {"run": self.name, "step": step + 1, "samples": self.at.samples + batch}
        key = random.key(config.seed, "dropout", step)
        try:
            timeline = around if isinstance(around, TimelineRecorder) else None
            inside = timeline is not None and not config.layout.served
            micro_batches = [] if inside else self._micro_batches(step, key)
            with around:
                if timeline is not None and inside:
                    with timeline.loading() as loaded:
                        micro_batches = self._micro_batches(step, key)
                        loaded(len(micro_batches), sum(targets.numel() for _, targets in micro_batches))
                self.slow.begin(self._number(step), recorded=isinstance(around, StepMeasurement))
                lr = config.learning_rate(step)
                loss, norm, _ = self.program.step(micro_batches, lr, self.rounds.ends(step))
                if timeline is not None:
                    timeline.injected(self.slow.spans, self.config.emulated is not None)
        except RuntimeError as error:
            raise self._named(error, step) from error
        if not self._stops_at(step, loss, norm):
            self.at = Position(step + 1, self.at.samples + batch, self.program.optimizer.steps)
        return loss, norm

    def _stops_at(self, step: int, loss: float, norm: float) -> bool:
        """Whether the run ends before a step that was made, because it was not finite. Where replicas train apart from
        each other, they learn of it when they agree, and all end after that step."""
        stops, outer = self.config.on_nonfinite == "stop", self.program.outer
        if outer is not None:
            skips = sum(not math.isfinite(each) for each in outer.losses) if self.rounds.ends(step) else 0
            self.skips += skips
            if stops and skips:
                self.diverged = f"in the round up to step {step + 1}: the loss or the gradient norm of a replica is not"
                self.diverged += " finite, and its update was not made"
            return False
        self.skips += self.program.optimizer.skipped
        self.in_a_row = self.in_a_row + 1 if self.program.optimizer.skipped else 0
        if stops and self.program.optimizer.skipped:
            what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}, the loss {loss}"
            self.diverged = f"at step {step + 1}: {what}, and the update was not made"
        return bool(self.diverged)

    def _number(self, step: int) -> int:
        return step

    def _micro_batches(self, step: int, key: int) -> list[tuple[Batch, Tensor]]:
        return self.batches["train"].step(self.at.samples, self.config.workload.batch, key)

    def _named(self, error: RuntimeError, step: int) -> RuntimeError:
        """The error with its step, and with the collective when a peer was lost in it."""
        text = reason(error)
        if lost_a_peer(error) and self.comms.last:
            text = f"lost a peer in {self.comms.last} ({text})"
        named = RuntimeError(text)
        named.step = step + 1  # type: ignore[attr-defined]
        return named

    def _validate(self, step: int) -> float:
        """Mean loss a token over `validate_batches` global batches of held-out text, the same ones every time."""
        started = time.perf_counter()
        layout, count = self.config.layout, self.config.workload.batch
        item = layout.dp * layout.micro
        total, tokens = 0.0, 0
        for start in range(0, self.config.validate_batches * count, item):
            for batch, targets in self.batches["validation"].step(start, item, None):
                loss, valid = self.program.evaluate(batch, targets)
                total, tokens = total + loss, tokens + valid
        outer = self.program.outer
        if outer is None:
            total, tokens = self._over_replicas(total, tokens)
        mean = total / max(1, tokens) if outer is None else outer.mean(total, tokens)
        if self.record:
            self.record.validation(step, mean, self.entropy, time.perf_counter() - started)
        return mean

    def _over_replicas(self, total: float, tokens: int) -> tuple[float, int]:
        if self.config.layout.independent == 1:
            return total, tokens
        both = torch.tensor([total, tokens], dtype=torch.float64)
        with self.comms.in_phase("loss"):
            self.comms.all_reduce(both, REPLICA, "validation")
        return float(both[0]), int(both[1])

    def _end(self) -> None:
        """The rank has made its last step."""

    def _gather(self, role: Role, recorded: Recorded | None) -> dict[int, Role] | None:
        """Every rank's own role, on rank 0, which writes the timelines. They are long: of many ranks only the first of
        several equal ones, and as many others as there is room for, send their own."""
        self.pulse.collective("the gather of the measurements")
        self.pulse.wait()
        events = recorded.events if recorded else ()
        reported = self._on_rank_0((role, len(events)))
        roles = {rank: one for rank, (one, _) in reported.items()} if reported else None
        senders: list[Any] = [None]
        if reported and roles:
            leaders = {one.ranks[0] for one in merge_roles(roles)}
            senders = [(kept({rank: count for rank, (_, count) in reported.items()}, leaders), leaders)]
        dist.broadcast_object_list(senders, src=0)
        timelines = self._on_rank_0(recorded if self.rank in senders[0][0] else None)
        memories = self._on_rank_0(self.memory if self.rank in senders[0][1] else None)
        self.pulse.work()
        if roles is None or timelines is None or memories is None:
            return None
        there = {rank: one for rank, one in timelines.items() if one is not None}
        traces = [one for one in memories.values() if one is not None]
        if self.record:
            directory = self.record.directory
            self._write_timelines(there)
            if traces:
                self._tried(lambda: write_memory(directory.memory, traces))
        return {rank: replace(roles[rank], timeline=there[rank].events if rank in there else ()) for rank in roles}

    def _write_timelines(self, there: dict[int, Recorded], last: bool = False) -> None:
        if there and self.record:
            directory, step = self.record.directory, self.at.step
            self._tried(lambda: directory.write_timelines(aligned(there, step, self.world), last))

    def _gather_last(self, recorded: Recorded) -> None:
        """The last step's timelines, of as many ranks as there is room for, on rank 0, which writes them."""
        self.pulse.collective("the gather of the last step's timelines")
        self.pulse.wait()
        reported = self._on_rank_0(len(recorded.events))
        senders = [kept(reported, {0})] if reported else [None]
        dist.broadcast_object_list(senders, src=0)
        timelines = self._on_rank_0(recorded if self.rank in (senders[0] or ()) else None)
        self.pulse.work()
        self._write_timelines({rank: one for rank, one in (timelines or {}).items() if one is not None}, last=True)

    def _waiting(self) -> dict[str, Any]:
        """Seconds that each rank that trains stood still for others; on rank 0, which shows them."""
        self.pulse.collective("the gather of waiting times")
        self.pulse.wait()
        own = self.clock.of_rank(self.rank, self.slow.seconds), (self.slow.exceeded, self.slow.longest)
        gathered = self._on_rank_0(own)
        self.pulse.work()
        if gathered is None or self.record is None:
            return {"waiting": None}
        ranks = [gathered[rank] for rank in range(self.config.layout.training_ranks)]
        self.record.waiting([one for one, _ in ranks], max(late for _, late in ranks), self.at.step)
        return {"waiting": [one.to_json() for one, _ in ranks]}

    def _on_rank_0(self, value: Any) -> dict[int, Any] | None:
        values: list[Any] | None = [None] * self.world if self.rank == 0 else None
        dist.gather_object(value, values)
        return dict(enumerate(values)) if values is not None else None

    def _report(self, roles: dict[int, Role], seconds: float | None) -> StepReport:
        config = self.config
        local = int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
        nodes = self.world // local
        name = "CPU" if self.device.type == "cpu" else "GPU"
        return StepReport(
            source="measured",
            model={"name": self.subject.name} if config.model.counted else config.model.to_json(),
            layout=str(config.layout),
            workload=config.workload.to_json(),
            cluster=f"{nodes}x{local}x{name}" if nodes > 1 else f"{local}x{name}",
            roles=merge_roles(roles),
            time=seconds,
            notes=(
                *_NOTES,
                *([] if config.overlap else [_NO_OVERLAP]),
                *([_COMPILED] if config.layout.compile != "off" else []),
            ),
        )

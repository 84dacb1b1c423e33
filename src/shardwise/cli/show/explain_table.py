"""Effects of a configuration on a model: memory and traffic of a step, or what fits a server."""

from dataclasses import dataclass, replace
from math import gcd

from shardwise import predict
from shardwise.cluster import Cluster
from shardwise.codec import Json
from shardwise.errors import UserError
from shardwise.interop import Reading
from shardwise.interop.engines.serving import is_format
from shardwise.interop.reading.arguments import dashed
from shardwise.interop.reading.settings import ServerSettings
from shardwise.interop.spec import EngineSpec, specs
from shardwise.layout import Layout, Workload, check
from shardwise.layout.context import PAGE
from shardwise.layout.optimizers import DEFAULT
from shardwise.model import ModelConfig
from shardwise.model.parameters import Model
from shardwise.predict.memory import engine_workspace as usual
from shardwise.predict.memory.capacity import explained, try_room
from shardwise.predict.memory.engine_settings import EngineSettings
from shardwise.predict.tables import timing_lines
from shardwise.predict.time.profiles import engine as engine_of
from shardwise.predict.traffic.slow_links import tensor_warning
from shardwise.report import StepReport
from shardwise.report.room import DeviceRoom
from shardwise.report.tables import memory_table
from shardwise.report.terminal import Renderable
from shardwise.report.timing_table import binding
from shardwise.report.units import format_bytes, format_things

PROFILES = {"Megatron-LM": ("megatron-core", "megatron-bridge"), "torchtitan": ("torchtitan", "torchtitan")}
"""Engine whose configuration is read -> profiles that stand for it in `predict.time`: of fp32 and of bf16 gradients."""

CODE_KEYS = ("micro", "recompute")
"""Keys of layouts that some engines leave to the user's code, which says them to `explain`."""


def counted_as(engine: str, layout: Layout) -> str | None:
    """The profile whose memory and time stand for an engine's; None for this runtime's memory, and no time."""
    return PROFILES.get(engine, (None, None))[layout.grads == "bf16"]


def room_for(engine: str, model: Model, cluster: Cluster | None) -> DeviceRoom | None:
    """A device's room under an engine; None where the device's memory is not known."""
    profiles = (one.profile for one in specs().values() if one.title == engine)
    return try_room(cluster, next(profiles, "unknown"), bool(model.experts))


@dataclass(frozen=True)
class Training(Json):
    """One step. report: what it holds and moves; None where nothing prices the layout yet, for the reason `why`."""

    json_keys = "model=model.name report not_estimated?=why"

    model: ModelConfig
    report: StepReport | None
    why: str = ""
    room: DeviceRoom | None = None

    def lines(self, cluster: Cluster | None) -> list[Renderable]:
        """Printed tables and texts."""
        if self.report is None:
            return [f"What it will do with {self.model.name} is not priced: {self.why}"]
        moved = [f"  {line}" for line in _moved(self.report)]
        tokens = self.report.workload["seq"] * self.report.workload["batch"]
        return [
            f"What a step of {self.model.name} takes:",
            memory_table(self.report, self.room),
            *([line] if cluster and (line := explained(cluster)) else []),
            *([f"Collectives of rank {self.report.roles[0].ranks[0]} in a step:", *moved] if moved else []),
            *timing_lines(self.report, cluster, tokens),
            *(f"  {note}" for note in self.report.notes),
        ]


@dataclass(frozen=True)
class CacheRoom(Json):
    """Memory of one GPU of a server that is left for the cache, on the stage with room for the fewest tokens."""

    json_keys = (
        "model=model.name weight_bytes_per_gpu=weights cache_bytes_per_token_per_gpu=a_token "
        "workspace_bytes_per_gpu=workspace graph_bytes_per_gpu=graphs kv_cache=cache cache_bytes_per_gpu=room "
        "cache_tokens=tokens warning?=warning longest_sequences"
    )

    model: ModelConfig
    weights: int
    """Bytes."""
    a_token: float
    """Bytes of the cache for a token of a sequence, the mean of its longest one."""
    workspace: int
    """Bytes that the engine sets aside for what passes through memory, its context and libraries."""
    graphs: float
    """Bytes of captured graphs, outside of the share that the engine fills."""
    room: float | None
    """Bytes left for the cache."""
    tokens: int | None
    """Tokens that fit there, over the sequences of an engine; None where no cluster says."""
    length: int | None
    """Tokens of the longest sequence."""
    sequences: int | None
    """The most of one iteration."""
    cache: str = "bfloat16"
    """torch's name of the type of keys and values."""
    warning: str = ""
    """Of tensor parallelism over slow links."""

    @property
    def longest_sequences(self) -> int | None:
        """Sequences of the greatest length that fit."""
        return self.tokens // self.length if self.tokens is not None and self.length else None

    def lines(self, cluster: Cluster | None) -> list[Renderable]:
        """Printed lines."""
        results: list[Renderable] = [
            f"What it will do with {self.model.name}, on each GPU:",
            f"  {format_bytes(self.weights)} of weights, {format_bytes(self.a_token)} of cache for a token of a "
            "sequence",
        ]
        if self.room is None or self.tokens is None:
            return [*results, "  how much cache there is room for, --cluster tells"]
        graphs = f"; captured graphs take about {format_bytes(self.graphs)} outside of the share that may be used"
        results.append(
            f"  {format_bytes(self.workspace)} of workspace, driver and libraries{graphs if self.graphs else ''}"
        )
        results.append(f"  {format_bytes(self.room)} left for the cache: {self.tokens:,} tokens")
        results += [self.warning] if self.warning else []
        if self.longest_sequences is not None:
            most = format_things(self.longest_sequences, "sequence")
            results.append(f"  at most {most} of {self.length:,} tokens at a time")
        if self.sequences:
            several = format_things(self.sequences, "sequence")
            results.append(f"  with {several} at a time, {self.tokens // self.sequences:,} tokens for each")
        return results


def training(reading: Reading, model: ModelConfig, cluster: Cluster | None) -> Training:
    """Memory, traffic and time of a step, the time where there is a profile of the engine. Raises `UserError` where the
    layout does not suit the model, the batch or the cluster."""
    if reading.unpriced:
        return Training(model, None, reading.unpriced)
    assert reading.seq and reading.batch
    workload = Workload(seq=reading.seq, batch=reading.batch, optimizer=reading.optimizer or DEFAULT)
    check(reading.layout, model, workload, cluster.devices if cluster else None)
    try:
        engine, room = counted_as(reading.engine, reading.layout), room_for(reading.engine, model, cluster)
        settings = EngineSettings(modules=reading.recomputed, narrow_state=reading.narrow_state)
        report = predict.estimate(model, reading.layout, workload, cluster, engine=engine, settings=settings)
        parts = report.timing["parts"] if report.timing else {}
        slow = tensor_warning(cluster, reading.layout.tp, parts, "the step") if cluster else None
        peak = max(role.peak_bytes for role in report.roles)
        notes = (*([slow] if slow else []), *report.notes)
        report = replace(report, notes=notes, room=room.to_json(peak) if room else None)
        if engine is None and report.timing:
            note = f"no time of a step: there is no profile of what {reading.engine} overlaps and fuses"
            bound = (f"as shardwise would run it, {line}" for line in binding(report.timing))
            report = replace(report, time=None, timing=None, notes=(*report.notes, *bound, note))
        return Training(model, report, room=room)
    except UserError as error:
        return Training(model, None, str(error))


def serving(reading: Reading, model: ModelConfig, cluster: Cluster | None) -> CacheRoom:
    """Room for the cache. Raises `UserError` where the heads cannot be split so, and where the weights, or one sequence
    of the greatest length, do not fit."""
    from shardwise.predict.memory.serving import ServingSetup, stage_bytes

    assert reading.served
    served, layout = reading.served, _with_shared_experts(reading, model)
    writer = next(spec for spec in specs().values() if spec.title == reading.engine)
    device = cluster.device if cluster else None
    profile = engine_of(writer.profile)
    share = served.memory or usual.usual_share(profile, device, layout, served.tokens)
    profile = replace(profile, cache_share=share)
    check(replace(layout, ep=1, cp=1), model)
    heads = 1 if model.latent_attention else model.kv_heads
    if served.cache_cut > 1 and layout.tp % (heads * served.cache_cut):
        copies = f"tp={layout.tp} has no {served.cache_cut} copies to cut by tokens"
        raise UserError(f"its cache has {heads} heads, of which {copies}")
    length = served.length or model.max_positions
    cache = served.cache or (model.counted.cache_type if model.counted else "") or "bfloat16"
    sequences = served.sequences or usual.usual_sequences(profile, device)
    setup = ServingSetup(length, sequences, weights=_weights_of(served, model), cache_type=cache, engine=profile)
    setup = replace(setup, padded=usual.expert_padding(profile, device))
    tokens = served.tokens or usual.usual_tokens(profile, device)
    stages = [
        (
            max(0, int(one.weights - served.cpu_bytes)),
            usual.engine_workspace(model, layout, one.head, profile, tokens, sequences),
            one.page / PAGE / served.cache_cut,
        )
        for one in stage_bytes(model, layout, setup)
    ]
    weights, workspace, a_token = max(stages, key=lambda row: row[0] + row[1] + setup.pages * PAGE * row[2])
    told = model, weights, a_token, workspace, profile.graph_bytes
    if (memory := device.memory_bytes if device else None) is None:
        return CacheRoom(*told, None, None, length, served.sequences, cache)

    def left(taken: int) -> float:
        if served.cache_bytes:
            return served.cache_bytes if taken + served.cache_bytes <= memory else 0.0
        return memory * share - taken if profile.cache_of_all else (memory - taken) * share

    fits = int(min(left(row[0] + row[1]) / row[2] for row in stages if row[2]))
    if fits < 1:
        raise UserError(
            f"{model.name} does not fit: {format_bytes(weights)} of weights and {format_bytes(workspace)} of workspace "
            f"on each GPU, and {format_bytes(memory * share)} may be used; split it over more GPUs, or "
            "store it in fewer bits"
        )
    fits = min(fits, served.cache_tokens or fits)
    if fits < length and (served.length or reading.engine == "vLLM"):
        raise UserError(f"{model.name}: {_too_short(writer, fits, length)}")
    room = a_token * fits if served.cache_tokens else left(weights + workspace)
    slow = tensor_warning(cluster, layout.tp, {}, "") if cluster else None
    return CacheRoom(*told, room, fits, min(length, fits), served.sequences, cache, slow or "")


def _with_shared_experts(reading: Reading, model: ModelConfig) -> Layout:
    """The layout; replicas of vLLM split the width of experts, of which whole ones have as many bytes, or more where
    ranks are too many."""
    layout = reading.layout
    if reading.engine != "vLLM" or layout.ep > 1 or layout.dp == 1 or not model.experts:
        return layout
    return replace(layout, ep=gcd(model.experts.count, layout.tp * layout.dp))


def _weights_of(served: ServerSettings, model: ModelConfig) -> str:
    """Format of the weights of which the model's files name none. Raises `UserError` where the command leaves it to
    files that are not known."""
    if is_format(served.weights):
        return served.weights
    if model.counted and model.counted.stored:
        return "bfloat16"
    hint = "give their folder with --model"
    raise UserError(f"--quantization {served.weights}: the files of the model say in how many bits: {hint}")


def _too_short(writer: EngineSpec, fits: int, length: int) -> str:
    """Message for a cache of fewer tokens than a sequence of that length."""
    flag = dashed(writer.options["length"].option) if writer.flags else writer.options["length"].option
    words = f"the cache has room for {fits:,} tokens, less than one sequence of {length:,}"
    return f"{words}: give {flag} {fits}, or less, or split it over more GPUs"


def _moved(report: StepReport) -> list[str]:
    """The collectives of the first role by phase and axes, a line each."""
    sums: dict[tuple[str, str, str], list[int]] = {}
    for row in report.roles[0].ledger:
        if row.elements > 1:
            result = sums.setdefault((row.phase, row.op, row.axes), [0, 0])
            result[0] += row.count
            result[1] += row.payload_bytes
    return [
        f"{phase}: {count:,} {op.removesuffix('_into')} over {axes}, {format_bytes(payload)} in all"
        for (phase, op, axes), (count, payload) in sums.items()
    ]

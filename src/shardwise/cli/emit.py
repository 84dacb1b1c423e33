"""A layout as the configuration of another engine: a file, or a script with the command.

Training engines take --seq and --batch (where they are left out, usual ones, as in plan), servers (vllm and sglang)
--prompt, --output and --concurrency. ddp and fsdp2 are programs of plain PyTorch. What an engine cannot express is an
error with the nearest layout that it can; what its files leave to your code is a comment. `shardwise explain` reads the
file back.
"""

from dataclasses import replace
from pathlib import Path

from shardwise.cli.clusters import HostOptions, cluster_of
from shardwise.cli.declare import HIDDEN, arg, borrow, changed, given, leave_out, word
from shardwise.cli.models import OfflineOptions, config_of_trace, traced_of
from shardwise.cli.output import print_json
from shardwise.cli.plan_emit import check_name, source_of
from shardwise.cli.workloads import workload_of
from shardwise.cluster import Cluster
from shardwise.errors import UserError, os_errors
from shardwise.interop import EngineFile, EngineSpec, Reading, ServerSettings, WriteRequest, write
from shardwise.interop.jobs import ClusterJob, JobOptions, write_job
from shardwise.interop.reading.settings import PREFILL_TOKENS
from shardwise.interop.writing.request import nodes_for
from shardwise.interop.writing.writer import WRITERS, command_of, writer_for
from shardwise.layout import Layout, Workload
from shardwise.model import ModelConfig
from shardwise.model.catalog import resolve
from shardwise.model.changes import change
from shardwise.model.hub import hub_models
from shardwise.predict.time.profiles import engine as engine_of
from shardwise.records import dataclass
from shardwise.report.units import format_bytes

SERVING = ("prompt", "output", "concurrency")
JOB = "name time sbatch setup logs"
"""Options of --slurm."""


@dataclass
class EmitOptions(HostOptions, OfflineOptions):
    borrowed = borrow((Workload, "seq batch optimizer"), (JobOptions, JOB))
    model: str = word("a name of the catalog, a config.json, its folder, or a file that `trace` wrote", "MODEL")
    layout: str | None = arg("how the model is split, such as tp=8,dp=8,zero=1", "TEXT")
    former: str | None = arg(HIDDEN, flag="--model")
    set: tuple[str, ...] = arg("change the model", "FIELD=VALUE,...", ())
    engine: str = arg(
        "the engine: megatron, torchtitan, deepspeed, accelerate, transformers, ddp, fsdp2, torchrun, vllm, sglang",
        "ENGINE",
        flag="--for",
    )
    engine_version: str = arg("version of the engine, where names changed", "V", "")
    prompt: int | None = arg("servers: tokens of a prompt", "N", positive=True, tokens=True)
    output: int | None = arg("servers: tokens of an answer", "N", positive=True, tokens=True)
    concurrency: int | None = arg("servers: clients at the same time", "N", positive=True)
    weights: str | None = arg("the model's folder or hub name, as the engine loads it", "NAME")
    out: str | None = arg("write the file here instead of to standard output", "FILE")
    slurm: bool = arg("write a SLURM job that runs it, too: --out, or shardwise.sbatch", needs="cluster")


def run(args: EmitOptions) -> int:
    if args.former is not None:
        # The former order, emit LAYOUT --model MODEL.
        args.model, args.layout = args.former, args.model
    if args.layout is None:
        raise UserError("emit needs --layout, such as tp=8,dp=8,zero=1; plan --emit finds one")
    writer = writer_for(args.engine)
    if not args.slurm:
        leave_out(args, JOB, "is for --slurm: add it, or leave that out")
    check_name(args, writer)
    layout = Layout.parse(args.layout)
    given_here = [name for name in (("seq", "batch") if writer.serves else SERVING) if getattr(args, name) is not None]
    if given_here:
        right = SERVING if writer.serves else ("seq", "batch")
        kind, flags = ("serves" if writer.serves else "trains"), " and ".join(f"--{name}" for name in right)
        raise UserError(f"{writer.title} {kind}: give {flags} in place of --{given_here[0]}")
    described = config_of_trace(args.model)
    of_file = described not in (None, args.model)
    traced = traced_of(args) if described is None or (args.set and of_file) else None
    model = described or traced or change(resolve(args.model, stored=writer.serves), ",".join(args.set))
    workload, assumed = (Workload(), ()) if writer.serves else workload_of(args, model, layout.dp * layout.micro)
    request = WriteRequest(
        model, layout, workload, _served_of(args, writer), cluster_of(args) if args.cluster else None,
        args.weights or ("" if of_file else source_of(args.model)), args.engine_version, args.slurm,
        tuple(f"assumed {note}" for note in assumed),
    )  # fmt: skip
    file = write(args.engine, request)
    if request.cluster and writer.serves and isinstance(model, ModelConfig):
        _check_server(replace(request, layout=file.layout), model, request.cluster, writer)
    elif request.cluster and (note := _too_large(replace(request, layout=file.layout), request.cluster, writer)):
        file = write(args.engine, replace(request, notes=(*request.notes, note)))
    return _show_job(args, file, request.cluster) if args.slurm else _show_file(args, file)


def _show_job(args: EmitOptions, file: EngineFile, cluster: Cluster | None) -> int:
    """Write the job that runs the file, and the file, unless the job has its command."""
    from shardwise.cli.launch import show_job

    assert cluster is not None
    words, variables = command_of(file)
    options = JobOptions(**given(args, JobOptions) | {"env": tuple(variables)})
    nodes, ranks = nodes_for(file.layout, cluster)
    title = f"{WRITERS[file.engine].title}, layout {file.layout}, on {nodes} x {ranks} {cluster.device.name}"
    job = ClusterJob(title, tuple(words), nodes, ranks, cluster.device.kind == "cuda", str(Path.cwd()), "", options,
                     own=True, per_node=True)  # fmt: skip
    if not file.file.endswith(".sh"):
        with os_errors(f"write {file.file}"):
            Path(file.file).write_text(file.text, encoding="utf-8")
    code = show_job(changed(args, submit=False), job, write_job("slurm", job))
    if not args.json:
        print("".join(f"  {line}\n" for line in file.comments), end="")
    return code


def _check_server(request: WriteRequest, model: ModelConfig, cluster: Cluster, writer: EngineSpec) -> None:
    """Raise `UserError` where the weights, as the engine loads them, do not fit."""
    from shardwise.cli.show.explain_table import serving

    try:
        serving(Reading(writer.title, request.layout, served=request.served), model, cluster)
    except UserError as error:
        names = (name for name in hub_models() if name.lower().endswith(f"/{model.name}"))
        stored = {name: one.counted for name in names if (one := resolve(name, fetch=False, stored=True)).counted}
        files = (f"; the files of {name} are in {one.stored}: emit {name}" for name, one in stored.items() if one)
        raise UserError(f"{error}{''.join(files)}") from None


def _too_large(request: WriteRequest, cluster: Cluster, writer: EngineSpec) -> str:
    """Comment on a training that does not fit; empty where it does."""
    from shardwise.cli.show.explain_table import counted_as, room_for
    from shardwise.planner.exact import ExactMemory

    known = room_for(writer.title, request.model, cluster)
    if known is None:
        return ""
    engine, room = counted_as(writer.title, request.layout) or "", known.safe
    held = ExactMemory(request.model, request.workload, cluster, engine=engine).total(request.layout, room)
    if held <= room:
        return ""
    return (
        f"does not fit: {format_bytes(held)} per device; {format_bytes(room)} may be used on "
        f"{cluster.device.name}; plan --emit {writer.name} finds a layout that does"
    )


def _served_of(args: EmitOptions, writer: EngineSpec) -> ServerSettings | None:
    """A server's numbers; None for training. Raises `UserError` for one of the three without the others."""
    missing = [f"--{name}" for name in SERVING if getattr(args, name) is None]
    memory = engine_of(writer.profile).cache_share
    if len(missing) == len(SERVING):
        return ServerSettings(memory=memory) if writer.serves else None
    if args.prompt is None or args.output is None or args.concurrency is None:
        raise UserError(f"a server needs {', '.join(missing)}, too")
    # Each replica takes its share of the clients.
    share = -(-args.concurrency // Layout.parse(args.layout or "").dp)
    return ServerSettings(length=args.prompt + args.output, sequences=share, tokens=PREFILL_TOKENS, memory=memory)


def _show_file(args: EmitOptions, file: EngineFile) -> int:
    """Print the file, or write it to --out; with --json all about it."""
    if args.out:
        with os_errors(f"write {args.out}"):
            Path(args.out).write_text(file.text, encoding="utf-8")
    if args.json:
        print_json(file.to_json() | {"out": args.out})
    elif args.out:
        print(f"{args.out}: {file.layout} for {file.layout.ranks} ranks")
        for line in file.comments:
            print(f"  {line}")
    else:
        print(file.text, end="")
    return 0

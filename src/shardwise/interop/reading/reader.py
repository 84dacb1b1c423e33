"""`read`: from a file or arguments to the engine that they are for, and its reader."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardwise.errors import UserError, nearest
from shardwise.interop.engines import accelerate, deepspeed, torchtitan, transformers
from shardwise.interop.reading.arguments import LAUNCHER_SHORT, launched_ranks, parse
from shardwise.interop.reading.engine_reader import read_as
from shardwise.interop.reading.recognized import engine_of, engines, names, program_of, unknown, unread
from shardwise.interop.reading.settings import Reading
from shardwise.interop.reading.source import ConfigInput, sources
from shardwise.interop.spec import spec

ENGINES = tuple(engines())


def read(
    config: Sequence[str], ranks: int | None = None, engine: str | None = None, precision: str | None = None
) -> Reading:
    """Contents of a configuration.

    config: one path of a file (.json, .toml, .yaml, .py, a shell script or a text with arguments), or arguments, as one
    text or word by word. ranks: processes that it is for, where it does not say. engine: one of `ENGINES`; left out, it
    is recognized. precision: bf16, fp16 or fp32, where DeepSpeed's file leaves it to a trainer. Raises `UserError` for
    what cannot be read or recognized, and values that contradict each other.
    """
    if engine is not None and engine not in ENGINES:
        raise UserError(f"no engine {engine!r}; there are {', '.join(ENGINES)}")
    first, *others = _chosen(sources(config), engine)
    reading = _read(*first, ranks, precision)
    also = [f"{len(others) + 1} commands start engines and this is the first; another: {_other(*one, ranks)}"
            for one in others]  # fmt: skip
    if engine is None and (program := _stranger(first[1])):
        also.append(f"{program} is no program of {reading.engine}, whose arguments these look like")
    return replace(reading, unsettled=(*also, *first[1].open, *reading.unsettled))


def _stranger(source: ConfigInput) -> str:
    """The program of a command that is neither an engine's nor a script; empty where there is none."""
    words = source.words or [""]
    known = program_of(words) != ("", 0) or words[0].endswith((".py", ".sh"))
    return "" if known or not re.fullmatch(r"[a-z][\w./-]*", words[0]) else words[0]


def _other(engine: str, source: ConfigInput, ranks: int | None) -> str:
    """One more command of a script, in a few words."""
    try:
        reading = _read(engine, source, ranks, None)
    except UserError as error:
        return f"{engine}, which is not read: {error}"
    return f"{reading.engine} on {reading.layout.ranks} GPUs: {reading.layout}"


def _chosen(found: Sequence[ConfigInput], engine: str | None) -> list[tuple[str, ConfigInput]]:
    """The engines' commands, or the one table. Raises `UserError` where there is none."""
    named = [(_engine(source), source) for source in found]
    if engine:
        largest = max(found, key=lambda source: len(source.table if source.words is None else source.words))
        return [pair for pair in named if pair[0] == engine] or [(engine, largest)]
    pairs = [pair for pair in named if pair[0]]
    # Launchers of programs that are no engine's say little beside an engine's command.
    pairs = [pair for pair in pairs if pair[0] != "torchrun"] or pairs
    if not pairs or pairs[0][0] in unread():
        raise unknown((word for one in found for word in one.words or one.table), pairs[0][0] if pairs else "")
    texts = [re.sub(r"--node[-_]rank[= ]\S+", "", " ".join(source.words or ())) for _, source in pairs]
    return [pair for number, pair in enumerate(pairs) if pair[1].words is None or texts[number] not in texts[:number]]


def _engine(source: ConfigInput) -> str:
    """The engine of an input; empty where it is not recognized."""
    if source.engine or source.words is None:
        return source.engine or engine_of(names(source.table))
    engine, place = program_of(source.words)
    head = source.words[:place]
    if "launch" in head and any(word.endswith("accelerate") for word in head):
        return engine if engine in ("megatron", "torchtitan", *unread()) else "accelerate"
    flags = parse(source.words[place:], {}, frozenset()).flags
    starts = any(word.rpartition("/")[2] in ("torchrun", "deepspeed") for word in head)
    return engine or engine_of(names(flags)) or ("torchrun" if starts else "")


def _read(engine: str, source: ConfigInput, ranks: int | None, precision: str | None) -> Reading:
    data, launched = source.table, None
    if source.words is None and engine == "torchrun":
        raise UserError("torchrun is read from its arguments: give them, or the script that has them")
    if source.words is not None:
        _, place = program_of(source.words)
        words = list(source.words[place:])
        head = parse(source.words[:place], LAUNCHER_SHORT, spec("torchrun").standing_alone).flags
        # LLaMA-Factory's command reads NNODES and NPROC_PER_NODE.
        counts = {key.lower(): value for key, value in source.variables.items() if engine == "llamafactory"}
        launched = launched_ranks(parse(words, {}, frozenset()).flags | head) or launched_ranks(counts)
        if engine == "torchrun":
            return spec("torchrun").functions["read"](words, launched or ranks)
        if engine == "torchtitan":
            return _torchtitan(source, words, ranks or launched)
        data = _table(engine, source, words)
        if engine == "accelerate":
            named = head.pop("config_file", None)
            # A launch without a file takes all GPUs of its machine.
            table = source.file(named) if isinstance(named, str) else {"distributed_type": "MULTI_GPU"}
            settings = accelerate.merged(table, head)
            arguments = _table("transformers", source, words)
            dialects = (program_of(source.words)[0], engine_of(names(arguments)))
            dialect = next((one for one in dialects if one in transformers.DIALECTS), "transformers")
            trainer = transformers.trainer(arguments, dialect)
            reading = accelerate.read(settings, ranks, source.file, trainer=trainer)
            default = "accelerate's own file of that machine fills in what this does not say"
            return reading if named else replace(reading, unsettled=(*reading.unsettled, default))
        if engine == "deepspeed" and not set(data) & spec("deepspeed").marks:
            raise UserError("DeepSpeed is read from its configuration file: give that, or a command that names it")
    if precision and engine != "deepspeed":
        raise UserError("--precision says what DeepSpeed's file leaves to a trainer; leave it out here")
    if precision:
        data = deepspeed.filled(data, bf16=precision == "bf16", fp16=precision == "fp16")
    own = spec(engine).functions.get("read")
    if engine == "trl":
        data = dict(data)
        started = accelerate.launched(data, source, ranks)
        if isinstance(started, Reading):
            return started
        launched = launched or started
    ranks_of = ranks or launched
    reading = own(data, ranks_of, source.file, engine) if own else read_as(spec(engine), data, ranks_of)
    doubts = []
    if launched and ranks and launched != ranks:
        doubts.append(f"the command starts {launched} processes, but {ranks} are given: {ranks} are counted")
    titles = [spec(name).title for name in ("transformers", "llamafactory", "trl")]
    if (
        not launched
        and not source.engine
        and reading.engine in titles
        and reading.layout.dp == reading.layout.ranks > 1
        and not reading.layout.zero
    ):
        doubts.append("what starts it may shard it (accelerate launch does): counted as plain data parallel")
    return replace(reading, unsettled=(*reading.unsettled, *doubts))


def _table(engine: str, source: ConfigInput, words: Sequence[str]) -> dict[str, Any]:
    """Flags of a program, over the keys of the file that one of them names. Raises `UserError` where that cannot be
    read."""
    one = spec(engine)
    arguments = parse(words, one.short, one.standing_alone)
    flags = dict(arguments.flags)
    for word in arguments.words if one.serves else ():
        if re.fullmatch(r"-[a-z]{2,4}", word):
            if near := nearest(word, one.short, cutoff=0.5):
                raise UserError(f"{word} is not known; did you mean {near[0]}?")
            flags[word.lstrip("-")] = True
    named = [flags.pop(key, None) for key in one.names_file]
    rest = [word for word in arguments.words[1:] if word not in ("serve", "train", "sft", "-m")]
    tables = [word for word in (*named, *rest) if isinstance(word, str) and word.endswith((".json", ".yaml", ".yml"))]
    base = {key.replace("-", "_"): value for key, value in source.file(tables[0]).items()} if tables else {}
    model = next((word for word in rest if not word.startswith(("-", "$@"))), None)
    return base | ({"model": model} if model and one.serves and "model" not in flags else {}) | flags


def _torchtitan(source: ConfigInput, words: list[str], ranks: int | None) -> Reading:
    """torchtitan's command, over the file of --job.config_file or CONFIG_FILE."""
    named = parse(words, {}, frozenset()).flags.get("job.config_file")
    script = words[0].endswith("run_train.sh")
    named = named[0] if isinstance(named, list) else named
    named = named or (source.variables.get("CONFIG_FILE") if script else None)
    count = source.variables.get("NGPU", "") if script else ""
    ranks = ranks or (int(count) if count.isdigit() else None)
    base = source.file(named) if isinstance(named, str) else {}
    return torchtitan.read(words, ranks, base=base)

"""Manifests that were changed: refused in one line, whatever was done to them, and with next to no memory."""

import copy
import json
import random
import resource
import zlib
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from simulated import LLAMA, save, state_of, write_rank

from harness.today import EVERYTHING, seed
from shardwise.checkpoint import Checkpoint, model_of
from shardwise.checkpoint.manifest import NAME, Manifest
from shardwise.errors import UserError
from shardwise.layout import Layout

SMALL = LLAMA.replace(hidden=8, heads=2, kv_heads=2, head_dim=4, layers=1, ffn=6, vocab=11)

STRANGE = [
    None, True, False, 0, 1, -1, 2, 7, 255, 2**31, 2**48 - 1, 2**48, 2**63, 2**64, 10**30, 0.5, 1e308, float("nan"),
    "", "x", "..", "/etc/passwd", "../rank-00000.safetensors", "rank-00000.safetensors/../../x",
    "rank-00001.safetensors", "rank-00009.safetensors", "float64", "bfloat16", "int8", "\x00", "\ud800", "a" * 2000,
    [], {}, [[]], [0, 0],
    [2**40, 2**40], [1] * 50, [[0, 2**47], [0, 2**47]], {"shape": [2**40], "dtype": "float64"},
]  # fmt: skip


def signed(content: object) -> bytes:
    content = {key: value for key, value in content.items() if key != "crc32"} if isinstance(content, dict) else content
    body = json.dumps(content)[:-1].encode()
    return body + b',\n"crc32": "%08x"}\n' % zlib.crc32(body)


def places(value: object) -> list[tuple[object, object]]:
    """(container, key) of everything inside a JSON value."""
    found: list[tuple[object, object]] = []
    left = [value]
    while left:
        container = left.pop()
        keys = container if isinstance(container, dict) else range(len(container))
        found += [(container, key) for key in keys]
        left += [container[key] for key in keys if isinstance(container[key], (dict, list))]
    return found


def mutate(content: object, rng: random.Random) -> None:
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        container, key = rng.choice(places(content))
        action = rng.randrange(6)
        old = container[key]
        if action == 0:
            container[key] = copy.deepcopy(rng.choice(STRANGE))
        elif action == 1:
            del container[key]
        elif action == 2 and isinstance(old, int):
            container[key] = old + rng.choice([-1, 1, 2, -8, 8, 2**20, 2**40])
        elif action == 3 and isinstance(container, list):
            container.insert(key, copy.deepcopy(rng.choice([old, rng.choice(container)])))
        elif action == 4 and isinstance(container, dict):
            container[rng.choice(["format", "x", "shape", str(key) + "x"])] = container.pop(key)
        else:
            other, place = rng.choice(places(content))
            container[key] = copy.deepcopy(other[place])
        if not places(content):
            return


@contextmanager
def little_memory(more: int):
    """Allow this process `more` bytes of address space than it has: an allocation beyond is a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def use(folder: Path) -> bool:
    """Do all that is done with a checkpoint; False when it is refused in one line."""
    try:
        checkpoint = Checkpoint.open(folder)
        checkpoint.verify()
        for tensor in checkpoint.tensors:
            checkpoint.read(tensor)
        model_of(checkpoint)
    except UserError as error:
        assert len(str(error)) < 3000
        assert str(folder) in str(error)
        return False
    return True


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("manifests") / "step-1"
    return save(folder, SMALL, "tp=2", state_of(SMALL, kinds=("model",)))


def test_the_limit_of_memory_works():
    with little_memory(64 << 20), pytest.raises(MemoryError):
        np.zeros(128 << 20, np.uint8)


def test_thousands_of_changed_manifests(checkpoint):
    count, rng = (10_000, random.Random(3)) if EVERYTHING else (2_000, random.Random(seed()))
    path = checkpoint.folder / NAME
    original = path.read_bytes()
    refused = 0
    try:
        with little_memory(256 << 20):
            for _ in range(count):
                changed = json.loads(original)
                mutate(changed, rng)
                path.write_bytes(signed(changed))
                refused += not use(checkpoint.folder)
    finally:
        path.write_bytes(original)
    # What remains are changes of what no file can contradict: the step, the seed, what is there for information.
    assert refused > 0.8 * count
    assert use(checkpoint.folder)


def test_every_changed_byte(checkpoint):
    data = (checkpoint.folder / NAME).read_bytes()
    Manifest.parse(data)
    rng = random.Random(4)
    for at in rng.sample(range(len(data)), 1500):
        changed = bytearray(data)
        changed[at] ^= rng.randrange(1, 256)
        with pytest.raises(UserError):
            Manifest.parse(bytes(changed))


def test_every_cut(checkpoint):
    data = (checkpoint.folder / NAME).read_bytes()
    for at in [*range(50), *range(50, len(data), 97), len(data) - 1]:
        with pytest.raises(UserError):
            Manifest.parse(data[:at])


@pytest.mark.parametrize(
    "data",
    [b"", b"\0" * 100, b"[" * 100_000, b'{"a":' * 100_000, b'{"format": ' + b"9" * 10_000, b"\xff" * 300],
    ids=["empty", "zeros", "deep-lists", "deep-objects", "long-number", "no-text"],
)
def test_what_no_manifest_looks_like(data):
    for text in (data, data + b',\n"crc32": "%08x"}\n' % zlib.crc32(data)):
        with pytest.raises(UserError):
            Manifest.parse(text)


def test_messages_name_what_is_wrong(checkpoint):
    content = json.loads((checkpoint.folder / NAME).read_bytes())

    def refusal(change) -> str:
        changed = copy.deepcopy(content)
        change(changed)
        with pytest.raises(UserError) as error:
            Manifest.parse(signed(changed))
        return str(error.value)

    assert "format 2" in refusal(lambda c: c.update(format=2))
    assert "no name of a part file" in refusal(lambda c: c["files"][0].update(name="../rank-00000.safetensors"))
    assert "a piece starts at byte" in refusal(lambda c: c["files"][0]["pieces"][1].update(offset=8))
    assert "pieces end at byte" in refusal(lambda c: c["files"][0]["pieces"].pop())
    assert "each of its elements once" in refusal(lambda c: c["files"].pop())
    assert "have the fields" in refusal(lambda c: c.update(more=1))
    assert "two files" in refusal(lambda c: c["files"].append(c["files"][0]))


def test_it_reads_what_it_writes(checkpoint):
    manifest = checkpoint.manifest
    assert Manifest.parse(manifest.to_bytes()) == manifest
    assert manifest.about["layout"] == "tp=2" and manifest.samples == 28
    json.loads(manifest.to_bytes())


@pytest.mark.parametrize(
    ("name", "value"), [("seed", 1 << 64), ("step", -1), ("samples", 1 << 60), ("optimizer_steps", 1.5)]
)
def test_what_would_not_be_read_is_not_written(tmp_path, name, value):
    record = write_rank(tmp_path, SMALL, Layout(), 0, state_of(SMALL, kinds=("model",)))
    common = {"step": 1, "samples": 1, "seed": (1 << 64) - 1, "optimizer_steps": 1, "about": {}}
    assert Manifest.parse(Manifest.of([record], **common).to_bytes()).seed == (1 << 64) - 1
    with pytest.raises(UserError, match=f"{name} must be a whole number"):
        Manifest.of([record], **common | {name: value})


def test_ranks_that_disagree_and_ranks_that_are_missing(tmp_path):
    layout, state = Layout.parse("tp=2"), state_of(SMALL, kinds=("model",))
    first, second = (write_rank(tmp_path, SMALL, layout, rank, state) for rank in range(2))
    common = {"step": 1, "samples": 1, "seed": 0, "optimizer_steps": 1, "about": {}}
    Manifest.of([first, second], **common)
    with pytest.raises(UserError, match="each of its elements once"):
        Manifest.of([first], **common)
    with pytest.raises(UserError, match="two files"):
        Manifest.of([first, first], **common)

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter

import shardwise
from shardwise.runtime import torch_versions
from shardwise.runtime.job import trainer
from shardwise.serving import rank as serving_rank

PACKAGE = Path(shardwise.__file__).parent
COMPAT = PACKAGE / "runtime" / "torch_versions.py"
KNOWN = Path(__file__).parent / "data" / "torch_names.txt"
"""Every name of torch that the package uses, each found in torch 2.9.1 and in 2.13.0. Arguments are listed as
name(argument=)."""


def names_in(tree: ast.AST) -> Iterator[str]:
    """Dotted names of torch that a module uses, and the keyword arguments it calls them with."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {a.asname or "torch": a.name if a.asname else "torch" for a in node.names if _is_torch(a.name)}
        elif isinstance(node, ast.ImportFrom) and _is_torch(node.module or ""):
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    yield from known.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := _dotted(node, known)):
            yield name
        elif isinstance(node, ast.Call) and (name := _dotted(node.func, known)):
            yield from (f"{name}({keyword.arg}=)" for keyword in node.keywords if keyword.arg)


def _is_torch(module: str) -> bool:
    return module.split(".")[0] == "torch"


def _dotted(node: ast.AST, known: dict[str, str]) -> str | None:
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value, known)
        return before and f"{before}.{node.attr}"
    return known.get(node.id) if isinstance(node, ast.Name) else None


def used() -> set[str]:
    files = [file for file in PACKAGE.rglob("*.py") if file != COMPAT]
    return {name for file in files for name in names_in(ast.parse(file.read_text()))}


def test_every_name_is_one_that_torch_2_9_has() -> None:
    known = KNOWN.read_text().split()
    assert known == sorted(set(known))
    assert sorted(used() - set(known)) == []


def test_names_are_found_however_they_are_imported() -> None:
    source = "import torch\nimport torch.distributed as dist\nfrom torch import nn as layers\n"
    source += "dist.new(1, a=2)\ntorch.x.y\nlayers.Z\nother.name\n"
    expected = {"torch", "torch.distributed", "torch.nn", "torch.distributed.new", "torch.distributed.new(a=)"}
    assert set(names_in(ast.parse(source))) == expected | {"torch.x", "torch.x.y", "torch.nn.Z"}


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")  # the older names, in newer torch
@pytest.mark.parametrize("older", [False, True])
def test_collectives_go_by_either_name(monkeypatch: pytest.MonkeyPatch, alone: None, older: bool) -> None:
    if older:
        for name in ("all_gather_single", "reduce_scatter_single"):
            monkeypatch.delattr(dist, name, raising=False)
    x, out = torch.arange(4.0), torch.zeros(4)
    torch_versions.all_gather_single(out, x)
    assert out.equal(x)
    torch_versions.reduce_scatter_single(out.zero_(), x, async_op=True).wait()
    assert out.equal(x)


@pytest.mark.parametrize("older", [False, True])
def test_compilations_of_one_function_do_not_count_as_one_another_s(
    monkeypatch: pytest.MonkeyPatch, older: bool
) -> None:
    """More of them than torch compiles one function anew, each for shapes of its own."""
    if older:
        whole = torch.compile

        def compile_of_2_9(model: Any, *, fullgraph: bool, dynamic: bool, backend: Any = "inductor") -> Any:
            return whole(model, fullgraph=fullgraph, dynamic=dynamic, backend=backend)

        monkeypatch.setattr(torch, "compile", compile_of_2_9)
        monkeypatch.delattr(torch.compiler, "get_default_backend", raising=False)
        assert torch_versions.default_backend() == "inductor"
    counter = CompileCounter()
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", _with(plain, counter))

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        for size in range(2, 7):
            apart = torch_versions.compile_apart(double, fullgraph=True)
            assert apart(torch.ones(size)).sum() == 2 * size
    assert counter.frame_count == 5


def test_the_compiler_knows_that_fp64_attention_has_sums_in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before torch 2.13, where it takes all sums for fp32."""
    kernels = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default.py_kernels
    meta, calls = torch._C.DispatchKey.Meta, []

    def of_2_9(query: torch.Tensor, *args: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(query.dtype)
        return torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float)

    monkeypatch.setitem(kernels, meta, of_2_9)
    for _ in range(2):
        torch_versions.know_fp64_attention()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = torch.empty(2, 3, 4, 5, dtype=dtype, device="meta")
        calls.clear()
        out, sums = kernels[meta](x, x, x, is_causal=True)
        assert calls == [dtype] and out.dtype == dtype and out.shape == x.shape
        assert sums.dtype == (dtype if dtype == torch.float64 else torch.float32)


def _with(plain: Any, backend: Any) -> Any:
    @functools.wraps(plain)
    def call(model: Any, **options: Any) -> Any:
        return plain(model, **options, backend=backend)

    return call


@pytest.mark.parametrize(("module", "imported"), [(None, ["torch.distributed._tools.fake_collectives"]), ("here", [])])
def test_the_dry_run_s_collectives_are_those_of_torch_or_of_its_tools(
    monkeypatch: pytest.MonkeyPatch, module: Any, imported: list[str]
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch_versions, "find_spec", lambda name: module)
    monkeypatch.setattr(torch_versions, "import_module", seen.append)
    torch_versions.know_fake_collectives()
    assert seen == imported


@pytest.fixture
def process_groups(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("SHARDWISE_RENDEZVOUS", "file:///none")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: seen.append(options))
    return seen


@pytest.mark.parametrize(("name", "expected"), [("cuda", torch.device("cuda", 3)), ("cpu", None)])
def test_nccl_need_not_guess_the_device_of_training(
    monkeypatch: pytest.MonkeyPatch, process_groups: list[dict[str, Any]], name: str, expected: Any
) -> None:
    monkeypatch.setattr(trainer, "meet", lambda *_: (None, "[null, 0, false]"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    device = torch.device(name, 3) if name == "cuda" else torch.device(name)
    monkeypatch.setattr(trainer, "replace", lambda config, **changes: config)
    trainer._join(SimpleNamespace(resume=None, restart=0, hang=1.0), device)  # type: ignore[arg-type]
    (options,) = process_groups
    assert options["device_id"] == expected


def test_nccl_need_not_guess_the_device_of_serving(
    monkeypatch: pytest.MonkeyPatch, process_groups: list[dict[str, Any]]
) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # two hosts of two
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr("shardwise.runtime.allocator.retain_freed_memory", lambda: None)
    assert serving_rank.join(SimpleNamespace(device="cuda", hang=1.0)) == 3  # type: ignore[arg-type]
    (options,) = process_groups
    assert [options["device_id"]] == chosen == [torch.device("cuda", 1)]

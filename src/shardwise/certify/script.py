"""A script that shows a wrong cell without shardwise: the adapter's functions, the plain model, and a comparison.

Definitions are copied with what they name, from the adapter's file and from this package. Annotations, docstrings, and
branches of other layouts and variants are left out.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Sequence
from importlib import import_module
from inspect import getsource
from types import ModuleType
from typing import Any

from shardwise.certify import adapter as defaults
from shardwise.certify import tiny
from shardwise.certify.adapter import OPTIMIZER, Adapter
from shardwise.certify.reference import BINDING, SEED, Reference
from shardwise.certify.result import WrongCell

_OWN = "shardwise.certify"
_ALIASES = ("distributed as dist", "nn as nn", "nn.functional as F")
"""Of torch's modules, as scripts import them."""
_SAMPLE = """
dist.init_process_group("gloo")
torch.manual_seed(SEED)
plain = MODEL
model, rank = copy.deepcopy(plain), dist.get_rank()
for tensor in (*model.parameters(), *model.buffers()):
    tensor.data += rank
run = Run(model=model, engine=parallelize(model, LAYOUT), layout=LAYOUT, data=DATA, most=MOST, logits=logits)
run.model = run.engine
adam = torch.optim.AdamW(plain.parameters(), **ADAM)
run.optimizer = optimizer(run, **ADAM)
for number in range(NUMBER):
    ids, labels = batch(number, VARIANT)
    tokens, mine = int((labels != -100).sum()), slice(*(24 * (run.data[0] + i) // run.data[1] for i in (0, 1)))
    losses = F.cross_entropy(logits(plain, ids).flatten(0, 1), labels.flatten(), reduction="none").view(24, -1) / tokens
    losses.sum().backward()
    value = backward(run, ids[mine], labels[mine], tokens)
    COMPARED
wrong, right = BOTH
error = float((torch.as_tensor(wrong) - right).norm() / (right.norm() or 1))
print(f"rank {rank}: WHAT differs by {error:.1e} of its norm", flush=True)
os._exit(error > LIMIT)  # an interpreter that ends beside gloo's threads now and then aborts
"""
_BOTH = {
    "loss": "value, losses[mine].sum()",
    "gradients": "gradients(run).get(NAME, 0 * RIGHT) if NAME in parameters(run) else RIGHT, RIGHT",
    "norm": "norm, total",
    "clipped": "gradients(run)[NAME], RIGHT",
    "steps": "parameters(run)[NAME], plain.get_parameter(NAME)",
}
"""Property -> what an engine has, and what is right."""
_WHOLE = (
    "RIGHT if (p := dict(run.model.named_parameters()).get(NAME)) is None else 0 * RIGHT if p.grad is None "
    "else getattr(p.grad, 'full_tensor', lambda: p.grad)(), RIGHT"
)
_CLIPPED = [
    "square = sum(float(p.grad.square().sum()) for p in plain.parameters() if p.grad is not None)",
    "most = most if number else BINDING * square**0.5",
    "total = nn.utils.clip_grad_norm_(plain.parameters(), most)",
    "norm = clip(run, most)",
]
_STEPPED = ["adam.step()", "adam.zero_grad()", "step(run)"]


def reproduction(adapter: Adapter, model: str, variant: str, finding: WrongCell) -> str:
    """Source of the script, for `torchrun --nproc-per-node N FILE.py`: prints the error, and exits with 1. Empty for
    what it cannot show: a resume, and rows that only float32 has."""
    name, cell, layout = finding.cell.note, finding.cell, adapter.parse(finding.layout)
    if name not in _BOTH or variant == "dropout":
        return ""
    steps, prepares = cell.step, adapter.optimizer is not defaults.optimizer  # which may need most
    body = [*_CLIPPED, *_STEPPED] if name == "steps" else list(_CLIPPED) if name in ("norm", "clipped") else []
    if steps > 1 and name != "steps":
        body += [f"if number < {steps - 1}:", *(f"    {line}" for line in [*(_CLIPPED if not body else []), *_STEPPED])]
    module = sys.modules[adapter.parallelize.__module__]
    built = f"models[{model!r}]" if hasattr(module, "models") else "Tiny"
    places = [adapter.data_place(layout, rank) for rank in range(adapter.ranks(layout))]
    frozen = cell.parameter in {n for n, p in adapter.models[model](variant).named_parameters() if not p.requires_grad}
    grad = "torch.zeros(())" if frozen else "plain.get_parameter(NAME).grad"
    both = _BOTH[name]
    if adapter.gradients is defaults.gradients:  # in one line
        both = _WHOLE if name in ("gradients", "clipped") else both
    words = {
        "COMPARED": "\n    ".join(body), "BOTH": both, "RIGHT": grad, "MODEL": f"{built}({variant!r}).double()",
        "DATA": repr(places[0]) if len(set(places)) == 1 else f"{places}[rank]", "SEED": str(SEED),
        "LAYOUT": repr(layout), "ADAM": repr(OPTIMIZER), "NUMBER": str(steps), "VARIANT": repr(variant),
        "BINDING": str(BINDING), "NAME": repr(cell.parameter), "LIMIT": repr(cell.bound),
        "WHAT": f"{name} {cell.parameter}".strip(),
        "MOST": repr(Reference(adapter, model, variant).most) if prepares else "",
    }  # fmt: skip
    text = _SAMPLE
    for word, value in words.items():
        text = text.replace(word, value)
    if adapter.logits is defaults.logits:
        text = text.replace("logits(plain, ids)", "plain(ids)").replace("=logits", "=lambda model, ids: model(ids)")
    if adapter.loss is not defaults.loss:
        both = text.replace("losses[mine].sum()", "loss(logits(plain, ids[mine]), labels[mine]).detach() / tokens")
        one, two = (line for line in text.splitlines() if "losses" in line and "wrong" not in line)
        text = both.replace(f"{one}\n{two}", "    (loss(logits(plain, ids), labels) / tokens).backward()")
    elif name != "loss":
        one, two = (line for line in text.splitlines() if "losses" in line)
        summed = one.replace("losses = ", "(").replace('"none").view(24, -1) / tokens', '"sum") / tokens).backward()')
        text = text.replace(f"{one}\n{two}", summed)
    text = text if prepares else text.replace(" most=,", "")
    stepped = bool(body) and body != _CLIPPED
    apart = adapter.broadcasts and name == "loss"
    left_out = (
        *(() if stepped else ("adam =",)), *(() if stepped or prepares else ("run.optimizer",)),
        *(() if adapter.rebuilds else ("run.model =",)), *(() if apart else ("for tensor", "tensor.data +=")),
    )  # fmt: skip
    text = text.replace("Run(", "types.SimpleNamespace(")
    lines = [line for line in text.splitlines() if not left_out or not line.strip().startswith(left_out)]
    if steps == 1:  # no loop
        loop = lines.index("for number in range(1):")
        lines[loop:] = [line.removeprefix("    ").replace("number", "0") for line in lines[loop + 1 :]]
    text = "\n".join(lines)
    if len(set(places)) == 1:  # all ranks have all rows
        for word in (", mine", ", slice(*(24 * (run.data[0] + i) // run.data[1] for i in (0, 1)))", "[mine]"):
            text = text.replace(word, "")
    copied = _Copied(layout, variant, adapter, module)
    main = copied.folded(ast.parse(text))
    copied.add_names(main, [module, defaults, tiny])
    how = f"torchrun --nproc-per-node {len(places)} FILE.py"
    return copied.source(main, f"{adapter.name}, {finding.column} at {finding.layout}. {how}")


class _Copied:
    """Definitions of modules, after what they name."""

    def __init__(self, layout: dict[str, Any], variant: str, adapter: Adapter, module: ModuleType) -> None:
        self.folded = _Folded(layout, variant).generic_visit
        self.overrides: dict[str, tuple[ModuleType, str]] = {
            name: (sys.modules[function.__module__], function.__name__)
            for name, function in vars(adapter).items()
            if inspect.isfunction(function) and function.__name__ != "<lambda>"
        }
        self.defined: dict[str, ast.AST] = {}
        self.lines: dict[str, None] = {}
        """Imports."""

    def add_names(self, node: ast.AST, modules: Sequence[ModuleType]) -> None:
        """Copy what a statement names, of the first module that defines it."""
        names = [item for item in ast.walk(node) if isinstance(item, ast.Name)]
        local = {item.id for item in names if isinstance(item.ctx, ast.Store) and isinstance(node, ast.FunctionDef)}
        for name in dict.fromkeys(item.id for item in names if item.id not in local):
            at_top = name in self.overrides and len(modules) > 1
            places = [self.overrides[name]] if at_top else [(module, name) for module in modules]
            any(name in self.defined or self._add(module, there, name) for module, there in places)

    def _add(self, module: ModuleType, name: str, known: str) -> bool:
        """Copy one definition or import. Returns whether the module has it."""
        for node in ast.parse(getsource(module)).body:
            names = {(a.asname or a.name).partition(".")[0]: a for a in getattr(node, "names", ())}
            if isinstance(node, (ast.Import, ast.ImportFrom)) and (alias := names.get(name)):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith(_OWN):
                    return self._add(import_module(str(node.module)), alias.name, known)
                one = ast.Import([alias]) if isinstance(node, ast.Import) else ast.ImportFrom(node.module, [alias], 0)
                self.lines[ast.unparse(one)] = None
                return True
            targets = [item for target in getattr(node, "targets", ()) for item in ast.walk(target)]
            if name in (getattr(node, "name", ""), *(item.id for item in targets if isinstance(item, ast.Name))):
                key = known if not targets else ast.unparse(node)
                if key not in self.defined:
                    kept = self.folded(node)
                    if not targets:
                        kept.name = known
                    self.defined[key] = ast.Pass()  # while what it names is copied
                    self.add_names(kept, [module])
                    del self.defined[key]
                    self.defined[key] = kept
                return True
        return False

    def source(self, main: ast.AST, title: str) -> str:
        """The whole script, with imports of a module in one line."""
        froms: dict[str, list[str]] = {}
        whole = {"copy", "os", "types", "torch", *(f"torch.{name}" for name in _ALIASES)}
        for line in self.lines:
            kind, rest = line.split(" ", 1)
            if kind == "import":
                whole.add(rest)
            elif line != "from torch import nn":
                module, names = rest.split(" import ")
                froms[module] = list(dict.fromkeys([*froms.get(module, []), names]))
        lines = [f"import {', '.join(sorted(whole))}"]
        lines += [f"from {module} import {', '.join(names)}" for module, names in sorted(froms.items())]
        text = "\n".join([f'"""{title}"""', *lines, *map(ast.unparse, self.defined.values()), ast.unparse(main)])
        return joined([line for line in text.splitlines() if line.strip()])


def joined(lines: Sequence[str]) -> str:
    """Bodies of one line behind what they belong to."""
    result, depths = list[str](), [len(line) - len(line.lstrip()) for line in [*lines, ""]]
    for place, line in enumerate(lines):
        alone = place > 0 and depths[place + 1] < depths[place] == depths[place - 1] + 4 and not line.endswith(":")
        if alone and result[-1].endswith(":") and len(result[-1]) + len(line.strip()) < 120:
            result[-1] += f" {line.strip()}"
        else:
            result.append(line)
    return "\n".join(result) + "\n"


class _Folded(ast.NodeTransformer):
    """Without annotations and docstrings, and with the layout's and the variant's constants folded."""

    def __init__(self, layout: dict[str, Any], variant: str) -> None:
        numbers = {name: value for name, value in vars(tiny).items() if isinstance(value, int)}
        self.layout = layout
        self.constants: dict[str, Any] = {"variant": variant, **numbers}

    def generic_visit(self, node: ast.AST) -> Any:
        node = super().generic_visit(node)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            if ast.get_docstring(node):
                node.body = node.body[1:] or [ast.Pass()]
            if isinstance(node, ast.FunctionDef):
                node.returns = None
                match node.body:
                    case [*_, ast.Assign(targets=[names]), ast.Return(value=result) as end] if result is not None:
                        if ast.unparse(names) == ast.unparse(result):
                            end.value = node.body.pop(-2).value  # type: ignore[attr-defined]
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            return ast.copy_location(ast.Assign([node.target], node.value), node)
        elif isinstance(node, ast.Name) and node.id in self.constants and isinstance(node.ctx, ast.Load):
            return ast.Constant(self.constants[node.id])
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "layout.get":
            match node.args:
                case [ast.Constant(value=str(key)), *default]:
                    if key in self.layout or not default:
                        return ast.Constant(self.layout.get(key))
                    return default[0]
        elif isinstance(node, (ast.If, ast.IfExp)) and isinstance(node.test, ast.Constant):
            return node.body if node.test.value else node.orelse
        elif isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple) and not node.iter.elts:
            return []
        elif isinstance(node, (ast.Compare, ast.BoolOp)) and not any(
            isinstance(item, (ast.Name, ast.Call, ast.Attribute)) for item in ast.walk(node)
        ):
            return ast.Constant(eval(ast.unparse(node), {}))
        return node

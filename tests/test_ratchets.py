"""Ratchets on small pieces and private words: today's counts, which may only fall (lower them with the change)."""

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

import shardwise

PACKAGE = Path(shardwise.__file__).parent
SOURCES = {
    "shardwise." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path.read_text(encoding="utf-8")
    for path in sorted(PACKAGE.rglob("*.py"))
}
SHORT_HELPER, SMALL_MODULE = 6, 60
"""Lines, of a helper without its docstring."""

SHORT_HELPERS, SMALL_MODULES = 445, 13
CIRCLES = {
    ("model.blueprint", "model.config", "model.counted"),
    ("runtime.transport.mail", "runtime.transport.shared", "runtime.transport.shared_collective"),
    ("schedule.staleness", "schedule.update_record"),
}
"""Modules that import each other, type-checking imports included."""

WORDS = {
    "found": 763, "told": 56, "asked": 119, "wanted": 179, "alike": 6, "likewise": 2, "thereof": 0, "hear": 2,
    "heard": 5, "settle": 2, "visit": 2, "lone": 0, "flies": 0, "own": 768, "each": 1642,
    "turn": 105, "turns": 33, "mend": 1, "figures": 82, "nobody": 34, "whoever": 9, "lies in": 4,
    "stands in": 3, "goes on": 8, "going on": 1,
}  # fmt: skip
"""Words of a dialect that PyTorch, Megatron-LM and vLLM do not have -> lines with them."""


def code_lines(node: ast.FunctionDef) -> int:
    start = node.body[0] if ast.get_docstring(node) else None
    documented = (start.end_lineno or 0) - start.lineno + 1 if start else 0
    return (node.end_lineno or 0) - node.lineno + 1 - documented


def short_helpers(sources: dict[str, str]) -> list[str]:
    """Private functions of a few lines that are named in one other place of their module."""
    helpers = []
    for module, source in sources.items():
        names = Counter(re.findall(r"\w+", source))
        helpers += [
            f"{module}.{node.name}"
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef)
            and node.name.startswith("_")
            and not node.name.startswith("__")
            and names[node.name] == 2
            and code_lines(node) <= SHORT_HELPER
        ]
    return helpers


def imports(sources: dict[str, str], *, deferred: bool) -> dict[str, set[str]]:
    """Module -> modules of ours that it imports; deferred: those in functions too."""
    imported = defaultdict(set)
    for module, source in sources.items():
        tree = ast.parse(source)
        inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for part in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (deferred or id(node) not in inside):
                names = {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
                imported[module] |= (names & sources.keys()) - {module}
    return imported


def circles(imported: dict[str, set[str]]) -> set[tuple[str, ...]]:
    reached = {}
    for module in imported:
        seen: set[str] = set()
        ahead = [module]
        while ahead:
            ahead += new if (new := imported.get(ahead.pop(), set()) - seen) else []
            seen |= new
        reached[module] = seen
    groups = {
        tuple(sorted({module} | {other for other in seen if module in reached.get(other, ())}))
        for module, seen in reached.items()
        if module in seen
    }
    return {tuple(name.removeprefix("shardwise.") for name in group) for group in groups}


def test_few_short_helpers_have_one_caller() -> None:
    assert len(short_helpers(SOURCES)) <= SHORT_HELPERS, "inline the new one"


def test_few_small_modules_have_one_importer() -> None:
    importers = Counter(name for names in imports(SOURCES, deferred=True).values() for name in names)
    small = [
        module for module, source in SOURCES.items() if source.count("\n") < SMALL_MODULE and importers[module] == 1
    ]
    assert len(small) <= SMALL_MODULES, "put its contents where they are used"


def test_no_new_circle_of_modules() -> None:
    assert circles(imports(SOURCES, deferred=False)) <= CIRCLES


def test_private_words_only_fall() -> None:
    lines = [line for source in SOURCES.values() for line in source.splitlines()]
    counts = {word: sum(bool(re.search(rf"\b{word}\b", line)) for line in lines) for word in WORDS}
    assert {word: count for word, count in counts.items() if count > WORDS[word]} == {}


def test_few_lines_ask_which_class_a_model_is() -> None:
    asks = re.compile(r"isinstance\([a-z_.]*, (?:ModelConfig|Blueprint)\)")
    assert sum(len(asks.findall(source)) for source in SOURCES.values()) <= 26, "ask for what both have"


def test_pieces_are_seen() -> None:
    sources = {
        "a": "from b import f\n\ndef _one():\n    return f()\n\nx = _one()\n",
        "b": "if TYPE_CHECKING:\n    from a import x\n",
    }
    assert short_helpers(sources) == ["a._one"]
    assert circles(imports(sources, deferred=False)) == {("a", "b")}

"""Test files that a change concerns, by the imports of every file: `python tests/harness/changed.py [COMMIT]`.

What changed is what differs from where the branch left COMMIT (main; the commit before on main itself), files that git
does not know included. A test file is near when it imports a changed file, or one that does; it is far when it gets
there by more imports.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOTS = [ROOT / folder for folder in ("src", "tests", "docs", "benchmarks")]
TESTS = ROOT / "tests"
NO_TESTS = 5
"""pytest's exit code where none of a file's tests has its turn."""
NEAR = 2
"""Imports from a changed file to a test."""


def git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.splitlines()


def changed(base: str) -> set[Path]:
    """Files that differ from where HEAD left `base`; on `base` itself, from the commit before."""
    (fork,) = git("merge-base", base, "HEAD")
    if [fork] == git("rev-parse", "HEAD") and not git("status", "--porcelain"):
        fork = "HEAD~1"
    names = git("diff", "--name-only", fork) + git("ls-files", "--others", "--exclude-standard")
    return {ROOT / name for name in names}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def find(name: str, beside: Path) -> Path | None:
    """The file of a module, which may be in the folder of the file that imports it."""
    for root in (*ROOTS, beside):
        path = root / name.replace(".", "/")
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


def home(module: str, name: str, beside: Path) -> Path | None:
    if found := find(f"{module}.{name}", beside):
        return found
    file = find(module, beside)
    if file and file.name == "__init__.py":
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.ImportFrom) and node.module and any(alias.name == name for alias in node.names):
                return home(node.module, name, file.parent)
    return file


def imports(path: Path) -> Iterator[Path | None]:
    """Files that a file imports, inside functions too; names as `harness.jobs:train`, commands and data by string."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (find(alias.name, path.parent) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (home(node.module, alias.name, path.parent) for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 80:
            module, colon, _ = node.value.partition(":")
            if colon and module.isprintable() and " " not in module:
                yield find(module, path.parent)
            elif TESTS in path.parents and node.value.isidentifier():
                yield find(f"shardwise.cli.{node.value}", path.parent)


def distances(files: set[Path]) -> dict[Path, int]:
    """Test file -> imports between it and a changed file, the fewest; data counts as the Python that names it."""
    every = [path for root in ROOTS for path in root.rglob("*.py")]
    users: dict[Path, set[Path]] = {}
    for path in every:
        for found in imports(path):
            if found:
                users.setdefault(found, set()).add(path)
    texts = {path: path.read_text() for path in every}
    for file in files - set(every):
        inside = ROOTS[0] in file.parents
        users[file] = {p for p, text in texts.items() if file.name in text and p.is_relative_to(ROOTS[0]) == inside}
    found, edge, far = dict.fromkeys(files, 0), files, 0
    while edge:
        far += 1
        edge = {user for file in edge for user in users.get(file, ())} - set(found)
        found |= dict.fromkeys(edge, far)
    # What all tests share is about the run itself: of it only its own changes concern them.
    for conftest in [path for path in found if path.name == "conftest.py" and (path in files or path.parent != TESTS)]:
        found |= {path: min(found.get(path, 99), found[conftest] + 1) for path in conftest.parent.rglob("test_*.py")}
    return {path: far for path, far in found.items() if path.name.startswith("test_") and path.is_file()}


def main(base: str) -> int:
    """Run the near test files as on any day, and of the far ones the quick part. Returns the worst exit code."""
    tests = distances(changed(base))
    codes = [0]
    for part, far in (("", False), ("quick", True)):
        names = sorted(str(path.relative_to(ROOT)) for path, way in tests.items() if (way > NEAR) == far)
        print(f"{len(names)} test files {'far from' if far else 'near'} what differs from {base}", flush=True)
        if names:
            command = [sys.executable, "-m", "pytest", "-q", *names]
            codes.append(subprocess.call(command, cwd=ROOT, env={**os.environ, "SHARDWISE_PART": part}))
    return max(code for code in codes if code != NO_TESTS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "main"))

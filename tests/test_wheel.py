"""The wheel of `make wheel`: all files of the package, for the Pythons that it names, and extras that messages name."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

import shardwise

PACKAGE = Path(shardwise.__file__).parent
ROOT = PACKAGE.parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
IMPORTED_AS = {"pyyaml": "yaml"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    """Built from a copy, since a build leaves files beside its source."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", PROJECT["readme"], *PROJECT["license-files"]):
        shutil.copy(ROOT / name, folder)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "."]
    done = subprocess.run(build, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("*.whl")
    assert file.name == f"shardwise-{shardwise.__version__}-py3-none-any.whl"
    return ZipFile(file)


def test_the_wheel_has_every_file_of_the_package(wheel: ZipFile) -> None:
    files = {path.relative_to(PACKAGE.parent).as_posix() for path in PACKAGE.rglob("*") if path.is_file()}
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == {name for name in files if "__pycache__" not in name}


def test_its_metadata_names_the_pythons_and_the_system(wheel: ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert metadata["Requires-Python"] == ">=3.11"
    classifiers = metadata.get_all("Classifier", [])
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= set(classifiers)
    assert "Operating System :: POSIX :: Linux" in classifiers
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert [re.split(r"\W", line)[0] for line in needed] == ["numpy", "rich", "safetensors"]


def brought(extra: str) -> set[str]:
    """Modules that an extra brings, those of the extras in it included."""
    found = set()
    for line in EXTRAS[extra]:
        name, inner = re.match(r"([\w-]+)(?:\[([\w,]+)\])?", line).groups()
        if name == "shardwise":
            found |= set().union(*map(brought, inner.split(",")))
        found.add(IMPORTED_AS.get(name, name))
    return found


def required() -> list[tuple[Path, str, str]]:
    """(file, module, extra) of each call of a `require`, whose message names the extra."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "require"):
                continue
            words = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            named = {keyword.arg: keyword.value.value for keyword in node.keywords}
            if "extra" not in named and words[1] in EXTRAS:
                found.append((path, words[0].partition(".")[0], words[1]))
            else:
                found += [(path, module, named.get("extra", "train")) for module in words[1:]]
    return found


def test_an_extra_that_a_message_names_brings_what_is_missing() -> None:
    calls = required()
    assert {extra for _, _, extra in calls} == {"train", "data", "export", "serve", "mcp"}
    assert not [call for call in calls if call[1] not in brought(call[2])]


def test_every_extra_that_is_named_exists() -> None:
    places = [PACKAGE, ROOT / "docs", ROOT / "lessons", ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    files = [file for place in places for file in (place.rglob("*") if place.is_dir() else [place])]
    texts = [file.read_text() for file in files if file.suffix in (".py", ".md", ".html", ".js", ".toml")]
    named = {
        name for text in texts for group in re.findall(r"shardwise\[([\w,]+)\]", text) for name in group.split(",")
    }
    assert {"serve", "test"} <= named <= EXTRAS.keys()


def test_uvs_lock_is_of_these_requirements() -> None:
    """`uv lock` after a change of pyproject.toml or constraints.txt writes it anew."""
    packages = {row["name"]: row for row in tomllib.loads((ROOT / "uv.lock").read_text())["package"]}
    rows = packages["shardwise"]["metadata"]["requires-dist"]
    locked = {(row["name"], frozenset(row.get("extras", ())), row.get("specifier", "")) for row in rows}
    lines = [*PROJECT["dependencies"], *(line for lines in EXTRAS.values() for line in lines)]
    stated = {Requirement(line) for line in lines}
    assert locked == {(line.name, frozenset(line.extras), str(line.specifier)) for line in stated}
    torch = Requirement((ROOT / "constraints.txt").read_text().splitlines()[-1])
    assert torch.specifier.contains(packages["torch"]["version"])

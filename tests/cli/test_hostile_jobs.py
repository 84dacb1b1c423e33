"""2,000 jobs whose names, values and folders try to be code: bash runs each, and every value arrives as it was given.

Programs in a folder stand for those of the cluster. `make test-day` runs a sample of the day, SHARDWISE_ALL=1 all.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import stat
import subprocess
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness.today import some_of
from shardwise.cli.main import main

JOBS, SAMPLE = 2000, 60
LIMIT = 60
PLAIN = (
    "a", "x y", " ", "END", "EOF", "'", '"', "\\", "`", "$", "$$", "#", "~", "*", "?", "[a]", "{a,b}", "!", "%", "%j",
    "-", "- ", ": ", "yes", "null", "1e3", "&", "|", ";", ">", "<", "(", ")", "=", ",", "é", "\U0001f600", "\u202e",
    "\xa0", "{{setup}}", "{{command}}", "${HOME}", "$(HOSTNAME)", "$((1", "--wrap=pwned", "-rf", "if", "eval", "&1",
    "\\n", "\\\\", "$(pwned)", "`pwned`", ";pwned;", "';pwned;'", '";pwned;"', "&&pwned", "|pwned",
    "'\"'\"';pwned;", "$(echo;pwned)",
)  # fmt: skip
CONTROL = (
    "\n", "\r", "\t", "\v", "\f", "\x1b", "\x1c", "\x1e", "\x7f", "\x85", "\u2028", "\u2029", "\udcff",
    "\nEND\npwned\n", "\nEND\n}\npwned\n", "\n#SBATCH --wrap=pwned\n", "\vpwned\v", "\x85pwned\x85",
)  # fmt: skip
VARIABLES = (
    "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "NODE_RANK", "JOB_COMPLETION_INDEX", "attempt", "node", "group", "IFS",
    "ENV", "BASH_ENV", "PS4", "RANDOM", "OLDPWD", "TMOUT", "PROMPT_COMMAND", "CDPATH", "NNODES",
    "TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip
FORBIDDEN = {"Cc", "Zl", "Zp", "Cs"}


def is_data(value: str) -> bool:
    return not any(unicodedata.category(character) in FORBIDDEN for character in value)


def hostile(draw: random.Random, most: int = 1 << 20) -> str:
    pieces = PLAIN + CONTROL if draw.random() < 0.08 else PLAIN
    value = "".join(draw.choices(pieces, k=draw.randrange(6)))
    if draw.random() < 0.03:
        value *= 300
    return value[:most]


@dataclass
class HostileJob:
    """A drawn job: its system, options, command, and folder."""

    system: str
    options: dict[str, str] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    folder: str = "folder"
    own: bool = False
    per: str = "node"
    """Of an own program."""
    variable: str = "A"
    """Name of the variable of --env."""

    @classmethod
    def of(cls, number: int) -> HostileJob:
        draw = random.Random(f"hostile {number}")
        job = cls(draw.choice(("slurm", "ssh", "k8s")), own=draw.random() < 0.7, per=draw.choice(("node", "rank")))
        job.variable = draw.choice(("A", "A", *VARIABLES))
        name = hostile(draw, 60).replace("/", "")
        if len(name.encode("utf-8", "surrogateescape")) > 200 or not name.strip("."):
            name = "folder"
        job.folder = draw.choice((name, "folder"))
        job.words = [hostile(draw) for _ in range(draw.randrange(1, 4))]
        values = ["env", "setup", "logs"]
        values += {"slurm": ["time", "sbatch"], "ssh": ["container"], "k8s": ["volume"]}[job.system]
        for option in draw.sample((*values * 3, "python", "head", "interface", "name", "python"), draw.randrange(3)):
            job.options[option] = hostile(draw, 60)
        return job

    @property
    def all_data(self) -> bool:
        # Kubernetes knows nothing of the folder.
        return all(map(is_data, [*self.words, *self.options.values(), self.folder if self.system != "k8s" else ""]))

    @property
    def must_run(self) -> bool:
        """Whether nothing but words, folder and variables are hostile: any of those is possible."""
        sizes = [len(word.encode()) for word in [*self.words, *self.options.values()]] if self.all_data else [1 << 20]
        if self.system == "slurm" and {"%", "\\"} & {*self.folder}:
            return False
        return self.all_data and max(sizes) < 1000 and not {*self.options} - {"env"} and self.variable == "A"

    def command(self) -> list[str]:
        start = {"slurm": ["--slurm"], "ssh": ["--ssh", "me@host"], "k8s": ["--k8s"]}[self.system]
        given = {"python": "python3"} | self.options
        if self.system == "k8s":
            given = {"container": "image", "volume": "claim:/data"} | given
        if "env" in given:
            given["env"] = f"{self.variable}={given['env']}"
        if "sbatch" in given:
            given["sbatch"] = "--comment=" + given["sbatch"]
        if "setup" in given:
            given["setup"] = ": " + shlex.quote(given["setup"])
        flags = [f"--{name}={value}" for name, value in given.items()] + ["--per", self.per] * self.own
        return ["launch", *start, "--cluster", "1x1xcpu", "--out", "job", *flags, "--", *self.program()]

    def program(self) -> list[str]:
        if self.own:
            return ["program", *self.words]
        small = ["train", "tiny-llama", "--layout", "dp=1", "--seq", "64", "--batch", "1", "--out", "/data/run"]
        return [*small, *(f"--data={word}" for word in self.words)]


PROGRAM = """{ printf '%s\\0' "$(printenv "$NAME")" "$PWD" "${0##*/}" "$@"; } >"$RECORD/arrived"
"""
STUBS = {
    "pwned": 'touch "$RECORD/pwned"',
    "program": PROGRAM,
    "python3": PROGRAM,
    "apptainer": PROGRAM,
    "ssh": '[[ "$1 $2 $3 $4 $5" == "-o BatchMode=yes me@host bash -s" ]] || touch "$RECORD/pwned"\nexec bash -s',
    "srun": 'while [[ "$1" == --* ]]; do printf "%s\\0" "$1" >>"$RECORD/srun"; shift; done\nexec "$@"',
    "scontrol": "echo node",
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bin")
    for name, text in STUBS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod((folder / name).stat().st_mode | stat.S_IXUSR)
    return folder


def sbatch_options(text: str) -> list[str]:
    """Options in the lines of a script as sbatch reads them: a backslash escapes in any quotes."""
    options = []
    for line in re.findall(
        r"^#SBATCH(.*)$", re.split(r"^[^#\n]", text, maxsplit=1, flags=re.MULTILINE)[0], re.MULTILINE
    ):
        for match in re.finditer(r"""((?:\\.|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^\s\\"'#])+)|#.*""", line):
            if match[1] is None:
                break
            parts = re.findall(r"""\\(.)|"((?:\\.|[^"\\])*)"|'((?:\\.|[^'\\])*)'|([^\\"'])""", match[1])
            plain = [
                re.sub(r"\\(.)", r"\1", quoted or single) or escaped or bare for escaped, quoted, single, bare in parts
            ]
            options.append("".join(plain))
    return options


def expanded(text: str, variables: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\((\w+)\)", value, text)


def check(job: HostileJob, folder: Path, programs: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Write the job, run it, and compare what arrives. Returns "refused" or "ran"."""
    where, record = folder / "jobs" / job.folder, folder / "record"
    where.mkdir(parents=True)
    record.mkdir()
    os.chdir(where)
    code = main(job.command())
    said = capsys.readouterr()
    if code:
        assert code == 2 and said.err.count("\n") == 1 and not Path("job").exists(), said.err
        assert not job.must_run, said.err
        return "refused"
    assert job.all_data, "a control character went through"
    if "python" in job.options:
        (record / job.options["python"]).symlink_to(programs / "python3")
    variables = {
        "PATH": f"{programs}:{record}:/usr/bin:/bin",
        "RECORD": str(record),
        "NAME": job.variable,
        "SLURM_JOB_ID": "7",
        "SLURM_NODEID": "0",
    }
    variables |= {"SLURM_JOB_NODELIST": "n1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "JOB_COMPLETION_INDEX": "0"}
    text = Path("job").read_text()
    command = ["bash", "job"]
    if job.system == "k8s":
        command = in_pod(text, variables)
    elif job.system == "slurm":
        check_sbatch(job, text, where)
    done = subprocess.run(command, env=variables, timeout=LIMIT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check_arrived(job, where, record)
    return "ran"


def in_pod(text: str, variables: dict[str, str]) -> list[str]:
    container = json.loads(text)["items"][1]["spec"]["template"]["spec"]["containers"][0]
    assert all(isinstance(item["value"], str) for item in container["env"])
    for item in container["env"]:
        variables[item["name"]] = expanded(item["value"], variables)
    return [*container["command"], *(expanded(word, variables) for word in container["args"])]


def check_sbatch(job: HostileJob, text: str, where: Path) -> None:
    options = sbatch_options(text)
    names = ["job-name", "nodes", "ntasks-per-node", "chdir", "output", "open-mode", "requeue", "signal"]
    names += ["time"] * ("time" in job.options) + ["comment"] * ("sbatch" in job.options)
    assert [option[2:].partition("=")[0] for option in options] == names, options
    values = dict(option[2:].partition("=")[::2] for option in options)
    assert values["chdir"] == str(where) and values.get("comment", "") == job.options.get("sbatch", "")
    assert values["output"] == job.options.get("logs", "logs") + "/job-%j.log"


def check_arrived(job: HostileJob, where: Path, record: Path) -> None:
    assert not (record / "pwned").exists(), "it broke out"
    value, working, *words = os.fsdecode((record / "arrived").read_bytes()).split("\0")[:-1]
    assert value == job.options.get("env", value)
    assert working == str(where)
    if "container" in job.options:
        assert words[:5] == ["apptainer", "exec", "--bind", str(where), job.options["container"]]
        words = words[5:]
    expected = job.program()
    if job.own and (job.per == "node" or job.system == "slurm"):
        assert words == expected
    else:
        assert words[0] == job.options.get("python", "python3") and words[-len(expected) :] == expected


NAMED = [
    HostileJob("ssh", words=["a\nEND\npwned"]),
    HostileJob("ssh", {"setup": "END"}, ["x"], own=True),
    *(
        HostileJob(system, words=["x"], folder=name)
        for system in ("slurm", "ssh")
        for name in ("$(pwned)", 'a"b', "a\nb")
    ),
    *(HostileJob("slurm", {flag: f"1{sign}pwned"}) for flag in ("time", "sbatch", "env") for sign in "\v\x85\u2028"),
]
"""Jobs of a review, which all broke out, or ran as no user meant."""


@pytest.mark.parametrize("number", range(len(NAMED)))
def test_reported_jobs_stay_data(
    number: int, tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    job = NAMED[number]
    assert check(job, tmp_path, programs, capsys) == ("ran" if job.all_data else "refused")


def test_no_value_of_a_job_becomes_code(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    ends = {"refused": 0, "ran": 0}
    for number in some_of(range(JOBS), SAMPLE, "hostile jobs"):
        job = HostileJob.of(number)
        try:
            ends[check(job, tmp_path / str(number), programs, capsys)] += 1
        except (AssertionError, subprocess.TimeoutExpired, OSError) as error:
            pytest.fail(f"job {number}, {job}: {error}")
    print(ends)
    assert min(ends.values()) > 3, ends

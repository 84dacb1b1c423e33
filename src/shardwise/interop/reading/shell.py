"""Shell scripts as commands: comments, quotes, variables and branches as bash reads them, and nothing that runs."""

from __future__ import annotations

import operator
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from shardwise.errors import UserError

_TOKEN = re.compile(
    r"""(?P<space>(?:[ \t]|\\\n)+) | (?P<comment>\#[^\n]*) | (?P<redirect>&>+|\d*(?:<<<|<|>>|>)&?\ *[^\s;&|()]*)
    | (?P<end>\n|;;|&&|\|\||[;&|()])
    | (?P<word>(?:[^\s;&|()<>'"\\$`] | \\. | '[^']*' | "(?:[^"\\]|\\.)*" | `[^`]*` | \$\{(?:[^{}]|\$\{[^{}]*\})*\}
        | \$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\) | \$)+)""",
    re.VERBOSE | re.DOTALL,
)
_SEGMENT = re.compile(r"'([^']*)'|\"((?:[^\"\\]|\\.)*)\"|\\(.)|([^'\"\\]+)", re.DOTALL)
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1([^\n]*)\n.*?^\s*\2\s*$", re.DOTALL | re.MULTILINE)
_WHOLE = re.compile(r'(")?\$\{?(\w+)(?:\[[@*]\])?\}?(?(1)")')
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*0]\])?(?::?([-=+?])([^{}]*))?\})")
_SUM = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_SCRIPT = r"[\"']*\$(?:0|\{0\}|\{?BASH_SOURCE(?:\[0\])?\}?)[\"']*"
_FOLDERS = [
    (re.compile(pattern), goal)
    for pattern, goal in (
        (rf"\$\( *(?:realpath|readlink -f) (?:-- )?({_SCRIPT}|[\"']?[^\s\"'$()]+[\"']?) *\)", r"\1"),
        (rf"\$\( *dirname (?:-- )?{_SCRIPT} *\)|`dirname (?:-- )?{_SCRIPT}`", "."),
        (r"\$\( *cd (?:-- )?[\"']?([^\s\"'$()&;]+)[\"']?(?: *&?>[^&;]*(?:2>&1)?)? *(?:&&|;) *pwd(?: -\w)? *\)", r"\1"),
    )
]
"""How scripts write their own folder in several words, and what stands for it."""
_DECLARES = ("export", "local", "declare", "readonly", "typeset")
_OPENS = ("if", "case", "for", "while", "until", "select")
_CLOSES = ("fi", "esac", "done")
_KEYWORDS = ("then", "do", "else", "elif", "{", "}", "!", "time", "exec", "eval", "nohup", "env", "sudo")
_COMPARES: dict[str, Callable[[int, int], bool]] = {
    f"-{one.__name__}": one for one in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
}
_SHELLS = 4
"""Shells inside shells that are followed."""
_PRINTS = frozenset(["echo", "printf", ":", "pip", "grep", "pkill", "pgrep", "tee", "ssh-keygen"])
"""Commands whose arguments may look like another command."""


@dataclass
class Command:
    """One command. variables: the script's, at that point. open: choices that it depends on, a sentence each."""

    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)


def commands(text: str, inside: int = 0, sourced: Callable[[str], str] = lambda name: "") -> list[Command]:
    """The commands of a script in order, without those that print; options in variables that no command uses are the
    last one. inside: shells around this one. sourced: text of a file that it sources, empty where there is none. Raises
    `UserError` for quotes that are not closed."""
    shell = _Shell()
    for pattern, goal in _FOLDERS:
        text = pattern.sub(goal, text)
    found = list(_run(shell, text, sourced))
    started = [one for command in found if not command.words[0].startswith("-") for one in _inner(command, inside)]
    options = [word for command in found if command.words[0].startswith("-") for word in command.words]
    if not started or options:
        unused = (value for value in shell.values.values() if not options and value and value[0].startswith("--"))
        options += [word for value in unused for word in value]
    return started + ([Command(options, shell.texts())] if options else [])


def _run(shell: _Shell, text: str, sourced: Callable[[str], str]) -> Iterator[Command]:
    """The commands of a script, and of files that it sources, each once, in one shell."""
    before = [""]
    for words, end in _statements(_HEREDOC.sub(lambda match: match[3], text.replace("\r\n", "\n"))):
        # [ -n "$X" ] && TP=8 is a branch, too.
        branch = before[0] in ("[", "[[", "test") and before[-1] in ("&&", "||")
        shell.tested = branch
        command = shell.run(words, end)
        if command and command.words[0] in ("source", ".") and len(command.words) > 1:
            name = command.words[1]
            inner = "" if name in shell.sourced else sourced(name)
            shell.sourced.add(name)
            yield from _run(shell, inner, sourced)
        elif command:
            yield command
        before = [*words[:1], end] if words else before


def _inner(command: Command, inside: int) -> Iterator[Command]:
    """The commands in `bash -c TEXT`, or the command itself."""
    words = command.words
    for number, word in enumerate(words):
        shell = re.fullmatch(r"(?:\S*/)?(?:ba|z)?sh -\w*c", " ".join(words[max(0, number - 2) : number]))
        if inside < _SHELLS and " " in word.strip() and (shell or len(words) == 1 or words[0] == "ssh"):
            head = words[: max(0, number - 2)] if shell else []
            for inner in commands(word, inside + 1):
                yield Command([*head, *inner.words], command.variables | inner.variables, command.open + inner.open)
            return
    yield command


def _statements(text: str) -> Iterator[tuple[list[str], str]]:
    """(Raw words of a command, what ends it); an array is one word, NAME=( ... )."""
    words: list[str] = []
    array = False
    glued, position = False, 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise UserError("the arguments cannot be read: no closing quotation")
        kind, token, position = match.lastgroup, match[0], match.end()
        if array:
            words[-1] += f" {token}" if kind == "word" else ")" if token == ")" else ""
            array = token != ")"
        elif kind == "end" and token == "(" and glued and words[-1].endswith("="):
            words[-1], array = f"{words[-1]}(", True
        elif kind == "end":
            yield words, token
            words = []
        elif kind == "word":
            words.append(token)
        glued = kind == "word"
    yield words, ""


@dataclass
class _Block:
    """if, case or a loop."""

    holds: bool | None = None
    """Whether its statements run; None where nothing here decides that."""
    done: bool = False
    """An earlier branch of it has run."""
    open: bool = False
    """An earlier branch of it may have run."""


class _Shell:
    """Variables while a script is read from its start to its end."""

    def __init__(self) -> None:
        self.values: dict[str, list[str]] = {}
        self.branches: dict[str, list[list[str]]] = {}
        self.sourced: set[str] = set()
        self.tested = False
        """A test that nothing here decides is before the statement."""
        self.blocks: list[_Block] = []
        self.open: list[str] = []
        self.said: dict[str, list[str]] = {}

    def texts(self) -> dict[str, str]:
        """Name -> value as one text."""
        return {name: " ".join(value) for name, value in self.values.items()}

    def run(self, raw: Sequence[str], end: str) -> Command | None:
        """One statement: its assignments are made; its command is returned, None without one. end: what follows it."""
        raw = list(raw)
        while raw and (raw[0] in _KEYWORDS or raw[0] in _OPENS or raw[0] in _CLOSES):
            word = raw.pop(0)
            self._enter(word, raw, end)
            if word in ("for", "select") and raw[1:2] == ["in"]:
                for value in raw[2:]:
                    self._assign(raw[0], [value], "")
                return None
            if word in ("if", "elif", "while", "until", "case", "for"):
                return None
        if any(block.holds is False for block in self.blocks):
            return None
        while raw and (raw[0] in _DECLARES or _ASSIGNMENT.fullmatch(raw[0])):
            if raw[0] in _DECLARES:
                raw = [word for word in raw[1:] if not word.startswith("-")]
                continue
            match = _ASSIGNMENT.fullmatch(raw.pop(0))
            assert match
            value = match[3]
            inside = [token[0] for token in _TOKEN.finditer(value[1:-1]) if token.lastgroup == "word"]
            elements = inside if value[:1] == "(" else [value]
            self.open = []
            self._assign(match[1], [one for raw_word in elements for one in self._expand(raw_word)], match[2])
        self.open = []
        words = [word for raw_word in raw for word in self._expand(raw_word)]
        if not words or words[0] in _PRINTS:
            return None
        return Command(words, self.texts(), list(dict.fromkeys(self.open)))

    def _enter(self, word: str, raw: Sequence[str], end: str) -> None:
        """Begin, change or end a block: of several conditions, and of those that are no plain test, none is decided."""
        if word in _OPENS:
            self.blocks.append(_Block())
        block = self.blocks[-1] if self.blocks else _Block()
        if word in ("if", "elif", "else"):
            block.done = block.done or block.holds is True
            block.open = block.open or (word != "if" and block.holds is None)
            test = True if word == "else" else None if end in ("&&", "||") else self._test(raw)
            block.holds = False if block.done else None if block.open else test
        if word in _CLOSES and self.blocks:
            self.blocks.pop()

    def _test(self, raw: Sequence[str]) -> bool | None:
        """Whether [ A = B ] and its like hold; None for other conditions, and where nothing here sets a variable."""
        self.open = []
        words = [" ".join(self._expand(word)) for word in raw]
        undecided = self.open or words[:1] not in (["["], ["[["], ["test"]) or any(set("$`*?") & set(w) for w in words)
        self.open = []
        if undecided:
            return None
        words = [word for word in words[1:] if word not in ("]", "]]")]
        if len(words) == 2 and words[0] in ("-n", "-z"):
            return (words[0] == "-n") == bool(words[1])
        if len(words) != 3:
            return None
        left, sign, right = words
        if sign in ("=", "==", "!="):
            return (left == right) == (sign != "!=")
        if sign in _COMPARES and left.isdigit() and right.isdigit():
            return _COMPARES[sign](int(left), int(right))
        return None

    def _assign(self, name: str, value: list[str], plus: str) -> None:
        said = self.said.get(name, []) * bool(plus)
        self.said[name] = [*said, *self.open]
        if plus:
            value = [*self.values.get(name, []), *value]
        if self.tested or any(block.holds is None for block in self.blocks):
            self.branches.setdefault(name, []).append(value)
        else:
            self.values[name] = value
            self.branches.pop(name, None)

    def _value(self, name: str) -> list[str] | None:
        """Words of a variable; None where nothing sets it, or branches set it to several. Choices go to `open`."""
        self.open += self.said.get(name, [])
        value, others = self.values.get(name), self.branches.get(name, [])
        others = [other for number, other in enumerate(others) if other != value and other not in others[:number]]
        if not others:
            return value
        if value and re.fullmatch(r"\$\{?\d\}?", value[0]):  # an argument that a branch may replace
            value = None
        said = " or ".join(" ".join(other) or '""' for other in others)
        if value is None and len(others) == 1:
            self.open.append(f"{name}={said} is set in a branch, which is taken to run")
            return others[0]
        taken = f"a branch sets {name} to {said}: {' '.join(value) or 'nothing'} is taken" if value is not None else ""
        self.open.append(taken or f"{name} is {said}, by branch: write its value")
        return value

    def _expand(self, raw: str) -> list[str]:
        """Words of a raw one. A quoted "--flag value" is two, as options in variables are meant."""
        if re.fullmatch(r"\"?\$(?:[@*]|\{[@*][^}]*\})\"?", raw):
            return []
        if match := _WHOLE.fullmatch(raw):
            value = self._value(match[2])
            if value is None:
                return [raw.strip('"')]
            return [word for text in value for word in ([text] if match[1] and len(value) > 1 else _split(text))]
        raw = re.sub(r"(\$\{\w+:?[-=])(['\"])([^'\"{}]*)\2\}", r"\1\3}", raw)
        text = "".join(
            match[1] if match[1] is not None
            else self._filled(re.sub(r'\\(["\\$`\n])', r"\1", match[2])) if match[2] is not None
            else match[3].replace("\n", "") if match[3] is not None
            else self._filled(match[4])
            for match in _SEGMENT.finditer(raw)
        )  # fmt: skip
        return _split(text) if re.match(r"\s*--[\w.-]+\s", text) else [text]

    def _filled(self, text: str) -> str:
        for _ in range(5):
            before, text = text, _SUM.sub(self._sum, _VARIABLE.sub(self._replaced, text))
            if text == before:
                break
        return text

    def _replaced(self, match: re.Match[str]) -> str:
        value = self._value(match[1] or match[2])
        if match[3] and match[3] in "-=" and not (value and any(value)):
            return match[4].strip("'\"")
        return match[0] if value is None else " ".join(value)

    def _sum(self, match: re.Match[str]) -> str:
        terms = re.sub(r"\b[A-Za-z_]\w*", lambda name: " ".join(self._value(name[0]) or [name[0]]), match[1])
        if not re.fullmatch(r"[\d\s+*/%()-]{1,200}", terms) or "**" in re.sub(r"\s", "", terms):
            return match[0]
        try:
            return str(eval(terms.replace("/", "//"), {"__builtins__": {}}))
        except (SyntaxError, ArithmeticError, TypeError, ValueError, RecursionError):
            return match[0]


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()

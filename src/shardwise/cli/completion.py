"""Print the script that completes this command's words in a shell.

bash: shardwise completion bash > ~/.local/share/bash-completion/completions/shardwise

zsh: shardwise completion zsh > ~/.shardwise.zsh, and after compinit in ~/.zshrc: source ~/.shardwise.zsh

The script starts nothing when it completes a word. Print it again after an update.
"""

import argparse
from collections.abc import Iterator

from shardwise.cli.commands import COMMANDS
from shardwise.cli.declare import CommandOptions, parser_of, word
from shardwise.cli.output import print_json
from shardwise.model.catalog import catalog
from shardwise.records import dataclass

SHELLS = ("bash", "zsh")

_SCRIPT = """\
{head}_shardwise() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}}
    local place=${{COMP_WORDS[1]}} words=
    if [ "$COMP_CWORD" -gt 2 ]; then
        case "$place ${{COMP_WORDS[2]}}" in
            {actions}) place="$place ${{COMP_WORDS[2]}}" ;;
        esac
    fi
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    else
        case "$place $previous" in
{values}
            *)
                case "$place" in
{places}
                esac ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _shardwise shardwise
"""
_HEADS = {
    "bash": "# Completion of shardwise for bash.\n",
    "zsh": "# Completion of shardwise for zsh.\nautoload -U bashcompinit && bashcompinit\n",
}


@dataclass
class CompletionOptions(CommandOptions):
    shell: str = word("bash or zsh", choices=SHELLS)


def run(args: CompletionOptions) -> int:
    text = script(args.shell)
    if args.json:
        print_json({"shell": args.shell, "script": text})
    else:
        print(text, end="")
    return 0


def script(shell: str) -> str:
    """The script for one of `SHELLS`."""
    places = dict(_places())
    values = [line for place, parser in places.items() for line in _values(place, parser)]
    options = (
        f'                    "{place}") words="{" ".join(_words(parser))}" ;;' for place, parser in places.items()
    )
    return _SCRIPT.format(
        head=_HEADS[shell],
        actions="|".join(f'"{place}"' for place in places if " " in place),
        commands=" ".join(COMMANDS),
        values="\n".join(values),
        places="\n".join(options),
    )


def _places() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """(words, parser) of every command and every action."""
    for name in COMMANDS:
        parser = parser_of(name)
        yield name, parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from ((f"{name} {inner}", added) for inner, added in action.choices.items())


def _words(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Words that may come next: actions, choices and models, then options."""
    for action in parser._actions:
        if not action.option_strings:
            yield from map(str, action.choices or (catalog() if action.dest in ("model", "models") else ()))
    for action in parser._actions:
        yield from (option for option in action.option_strings if option.startswith("--"))


def _values(place: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """Cases of the options that take a value: their choices, or none, so that the shell completes files."""
    files = []
    for action in parser._actions:
        names = [f'"{place} {option}"' for option in action.option_strings if action.nargs != 0]
        if names and action.choices:
            yield f'            {"|".join(names)}) words="{" ".join(map(str, action.choices))}" ;;'
        else:
            files += names
    if files:
        yield f"            {'|'.join(files)}) ;;"

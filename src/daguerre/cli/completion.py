"""Print a script that completes commands in bash, zsh or fish.

usage: daguerre completion bash|zsh|fish

Completes verbs, shipped recipes, settings and the names of plug-ins. The script holds them as they are now: print it
again after an update, or after you have installed plug-ins.

  daguerre completion bash > ~/.local/share/bash-completion/completions/daguerre
  daguerre completion zsh > ~/.zfunc/_daguerre        a folder of $fpath
  daguerre completion fish > ~/.config/fish/completions/daguerre.fish
"""

import re
from collections.abc import Iterator
from pathlib import Path

from daguerre import errors, plugins
from daguerre.cli import main
from daguerre.errors import UserError

_PACKAGE = Path(plugins.__file__).parent
_BASH = """\
_daguerre() {
    local cur=${COMP_WORDS[COMP_CWORD]} key=
    if [[ $cur == "=" ]]; then key=${COMP_WORDS[COMP_CWORD-1]} cur=
    elif [[ ${COMP_WORDS[COMP_CWORD-1]} == "=" ]]; then key=${COMP_WORDS[COMP_CWORD-2]}
    elif [[ $cur == *=* ]]; then key=${cur%%=*}; fi
    compopt -o nospace 2>/dev/null
    if [[ -n $key ]]; then
        case $key in
@values
        *) COMPREPLY=($(compgen -f -- "${cur#*=}")) ;;
        esac
    elif ((COMP_CWORD == 1)); then COMPREPLY=($(compgen -W "@verbs" -- "$cur"))
    else
        case ${COMP_WORDS[1]}/$COMP_CWORD in
@groups
        *) COMPREPLY=($(compgen -W "@words" -- "$cur") $(compgen -f -- "$cur")) ;;
        esac
    fi
}
complete -F _daguerre daguerre
"""
_ZSH = """\
#compdef daguerre
_daguerre() {
    if ((CURRENT == 2)); then compadd -- @verbs; return; fi
    if [[ ${words[CURRENT]} == *=* ]]; then
        local key=${words[CURRENT]%%=*}
        compset -P '*='
        case $key in
@values
        *) _files ;;
        esac
        return
    fi
    case ${words[2]}/$CURRENT in
@groups
    *) compadd -- @recipes; compadd -S '' -- @keys; _files ;;
    esac
}
compdef _daguerre daguerre
"""


def run(arguments: list[str]) -> int:
    """Prints the script of a shell."""
    shells = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    if len(arguments) != 1 or arguments[0] not in shells:
        raise UserError(f"give the shell: daguerre completion {'|'.join(shells)}", code="missing")
    print(shells[arguments[0]]())
    return errors.DONE


def _bash() -> str:
    values = "\n".join(f'        {k}) COMPREPLY=($(compgen -W "{_line(v)}" -- "${{cur#*=}}")) ;;' for k, v in _named())
    groups = "\n".join(f'        {g}/2) COMPREPLY=($(compgen -W "{_line(v)}" -- "$cur")) ;;' for g, v in _groups())
    return _filled(_BASH, values, groups)


def _zsh() -> str:
    values = "\n".join(f"        {key}) compadd -- {_line(names)} ;;" for key, names in _named())
    groups = "\n".join(f"    {group}/3) compadd -- {_line(names)} ;;" for group, names in _groups())
    return _filled(_ZSH, values, groups)


def _fish() -> str:
    lines = [f"complete -c daguerre -f -n __fish_use_subcommand -a '{_line(main.verbs())}'"]
    inner = "not __fish_use_subcommand"
    for group, names in _groups():
        lines.append(f"complete -c daguerre -n '__fish_seen_subcommand_from {group}' -a '{_line(names)}'")
    lines.append(f"complete -c daguerre -n '{inner}' -a '{_line(_recipes())}'")
    keys = [f"{key}=" for key in _keys()] + [f"{key}={name}" for key, names in _named() for name in names]
    lines.append(f"complete -c daguerre -n '{inner}' -a '{_line(keys)}'")
    return "\n".join(lines)


def _filled(text: str, values: str, groups: str) -> str:
    keys = [f"{key}=" for key in _keys()]
    parts = {"values": values, "groups": groups, "verbs": _line(main.verbs()), "recipes": _line(_recipes())}
    parts |= {"keys": _line(keys), "words": _line([*_recipes(), *keys])}
    for name, part in parts.items():
        text = text.replace(f"@{name}", part)
    return text.rstrip()


def _line(words: object) -> str:
    return " ".join(map(str, words))  # type: ignore[call-overload]


def _groups() -> Iterator[tuple[str, list[str]]]:
    for name, verb in main.verbs().items():
        if verb.is_group:
            yield name, [*main.verbs(name)]


def _recipes() -> list[str]:
    return sorted(path.stem for path in (_PACKAGE / "recipes").glob("*.yaml"))


def _named() -> Iterator[tuple[str, list[str]]]:
    """Settings that name a plug-in, with the names."""
    sections = {"model.family": "families", "objective.name": "objectives", "adapter.name": "adapters"}
    sections |= {"adapter.condition": "conditions", "data.source": "sources", "optimizer.name": "optimizers"}
    sections |= {"sampling.sampler": "samplers"}
    for key, kind in sections.items():
        yield key, [*plugins.names(kind)]


def _keys() -> list[str]:
    """The settings of a recipe that no plug-in brings, and those that name plug-ins, read off the source."""
    module = "daguerre.config.config"
    found = [key for key, _ in _named()]
    for field, cls in _fields(module, "Config"):
        inner = [name for name, _ in _fields(*cls)] if cls else []
        found += [f"{field}.{name}" for name in inner] or [field]
    return sorted({*found})


def _fields(module: str, name: str) -> Iterator[tuple[str, tuple[str, str] | None]]:
    """The fields of a settings class; of those that are sections of a fixed class, that class by module and name."""
    file = plugins.file_of(module)
    assert file is not None
    text = file.read_text(encoding="utf-8")
    body = text.partition(f"\nclass {name}(")[2].partition("\n\n\n")[0]
    for field, kind in re.findall(r"^    (\w+): (?!ClassVar)(\S.*?)(?: = .*)?$", body, re.MULTILINE):
        origin = re.search(rf"^from (\S+\.settings) import (?:\([^)]*|.*)\b{re.escape(kind)}\b", text, re.MULTILINE)
        yield field, (origin[1], kind) if origin else None

"""The command line: finds the verb's file in this folder, runs it, and turns errors into text and an exit code.

A file whose docstring is a help (one line, then `usage: daguerre VERB ...`) and that has `run(arguments) -> int` is a
verb; `data/__init__.py` is the group `data`, and `data/pack.py` in this folder the verb `data pack`. The docstring is
read from the file without importing it, and what few commands need is imported by them, so that every help is printed
at once. Exit codes are in `errors`.
"""

import io
import os
import re
import sys
import warnings
from collections.abc import Mapping
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TextIO

from daguerre import __version__, credentials, errors, faults, plugins
from daguerre.errors import UserError
from daguerre.fresh import FULL
from daguerre.regular import is_loop, is_odd

FOLDER = Path(__file__).parent
USUAL_ORDER = ("train", "generate", "report", "serve", "recipes", "init", "data", "doctor")


class Verb:
    """One command."""

    def __init__(self, path: Path) -> None:
        self.path = path
        """Its file."""

    @property
    def is_group(self) -> bool:
        """True for a folder of verbs, such as `data`: alone it prints its help."""
        return self.path.name == "__init__.py"

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        return self._parts[0].removesuffix(".")

    @property
    def help(self) -> str:
        """The rest of its docstring; of a group with its verbs behind the line of usage."""
        usage, _, text = self._parts[1].partition("\n\n")
        listed = [_listed(verbs(self.path.parent.name))] if self.is_group else []
        return "\n\n".join([usage, *listed, *([text] if text else [])])

    @cached_property
    def _parts(self) -> tuple[str, str]:
        """The first line of its docstring, and the rest."""
        summary, _, text = _docstring(self.path).partition("\n\n")
        return summary, text.rstrip()

    def run(self, arguments: list[str]) -> int:
        """Runs the verb; returns its exit code."""
        module = ".".join(self.path.relative_to(FOLDER).with_suffix("").parts).removesuffix(".__init__")
        try:
            with plugins.uncollected():
                verb = import_module(f"daguerre.cli.{module}")
            code = verb.run(arguments)
        except UserError as error:
            if "--json" in arguments:
                from daguerre.cli.parts import output  # imports pydantic

                output.write_refusal(module.replace(".", " "), error)
            raise
        assert isinstance(code, int), f"{module} returned {code!r}"
        return code


def verbs(above: str = "") -> dict[str, Verb]:
    """All verbs by name, the usual ones in the order in which one needs them, then the others; or those `above` one."""
    files = [*(FOLDER / above).glob("[!_]*.py"), *([] if above else FOLDER.glob("[!_]*/__init__.py"))]
    found = {
        path.parent.name if path.name == "__init__.py" else path.stem: Verb(path)
        for path in sorted(files)
        if "\n\nusage: daguerre " in _docstring(path)
    }
    order = [*(name for name in USUAL_ORDER if name in found), *sorted(found.keys() - {*USUAL_ORDER})]
    return {name: found[name] for name in order}


def _docstring(path: Path) -> str:
    """The text at the top of a file, empty without one. Backslashes are the only escapes in it."""
    return (*path.read_text(encoding="utf-8").split('"""', 2), "")[1].replace(r"\\", "\\")


def main() -> None:
    """Entry point: runs the arguments of the process and exits. Uncaught exceptions are reported as internal errors
    (exit code 1)."""
    faults.install()
    # torch says so of every norm that stays in float32 under autocast, as it is meant to.
    warnings.filterwarnings("ignore", "Mismatch dtype between input and weight", UserWarning)
    sys.stdout, sys.stderr = map(_fitting, (sys.stdout, sys.stderr))
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """The exit code of one command line; its messages are printed."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names and texts of others never end a command: they are escaped
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("daguerre: stopped", file=sys.stderr)
        return errors.INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone (`daguerre recipes | head`); Python must not complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return errors.DONE
    except UserError as error:
        if not isinstance(error, errors.ReportedElsewhere):
            print(f"daguerre: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        return _report_os_error(error)


def _fitting(stream: TextIO) -> TextIO:
    """A stream whose lines fit its terminal, if it is one."""
    if not isinstance(stream, io.TextIOWrapper) or not stream.isatty():
        return stream
    from daguerre.formatting import Terminal  # neither a pipe nor a script needs it

    return Terminal(stream.buffer, stream.encoding, stream.errors, line_buffering=True)


def _dispatch(arguments: list[str]) -> int:
    arguments = _with_plugins([credentials.word(word) for word in arguments])
    first, *rest = arguments or ["--help"]
    if first in ("-h", "--help", "help"):
        return _print(_verb([*rest, "--help"])[0].help if rest else _overview())
    if first in ("-V", "--version"):
        return _print(f"daguerre {__version__}")
    verb, rest = _verb(arguments)
    _refuse_pipes(rest)
    return _print(verb.help) if verb.is_group or _asks_for_help(rest) else verb.run(rest)


def _with_plugins(words: list[str]) -> list[str]:
    """The words after `--plugins DIR`, which stand before the verb alone: no list of settings that others wrote, such
    as an entry of the queue, can name code. The folders are for this process and for all that it starts."""
    given: list[str] = []
    while words and words[0].partition("=")[0] == "--plugins":
        first, *words = words
        folder = first.partition("=")[2] if "=" in first else "".join(words[:1])
        words = words if "=" in first else words[1:]
        if not folder:
            raise UserError("--plugins DIR names a folder of plug-ins (docs/plugins.md)", code="missing")
        given.append(str(Path(folder).expanduser().absolute()))
    if any(word.partition("=")[0] == "--plugins" for word in words):
        raise UserError("--plugins stands before the verb: daguerre --plugins DIR VERB ...", code="unknown")
    earlier = [folder for folder in os.environ.get(plugins.VARIABLE, "").split(os.pathsep) if folder]
    if given or earlier:
        os.environ[plugins.VARIABLE] = os.pathsep.join(dict.fromkeys([*given, *earlier]))
        try:
            plugins.check_folders()
        except UserError:
            os.environ[plugins.VARIABLE] = os.pathsep.join(earlier)  # for who goes on in this process
            raise
    return words


def _refuse_pipes(words: list[str]) -> None:
    """UserError for a path in the arguments that is a pipe, a socket or a device, as a verb that opens it may wait for
    ever, and for a link that leads to itself."""
    for word in words:
        key, _, value = word.partition("=")
        inner = re.split(r"[\s,{}\[\]\"']+|:\s", value) if value.startswith(("{", "[")) else []
        if loop := next((text for text in (word, value, *inner) if text and is_loop(text)), None):
            what = f"{loop} is a link that leads to itself: give the file or folder that it stands for"
            raise UserError(what, code="unsupported", setting=key if value else None)
        if odd := next((text for text in (word, value, *inner) if text and is_odd(text)), None):
            raise UserError(
                f"{odd} is a pipe, a socket or a device, not a file or a folder: give a file",
                code="unsupported",
                setting=key if value else None,
            )


def _asks_for_help(words: list[str]) -> bool:
    return "--help" in words or "-h" in words


def _verb(words: list[str], group: str = "") -> tuple[Verb, list[str]]:
    """The verb (of a group) that the first words name, and the other words."""
    name, *rest = words
    found, command = verbs(group), f"daguerre {group}".strip()
    if name not in found:
        import difflib  # for a wrong word alone

        near = difflib.get_close_matches(name, found, n=1)
        meant = f". Did you mean `{command} {near[0]}`? There are" if near else "; there are"
        hint = "" if near else f". The verb comes first: {command} VERB ..."
        called = f"{group} {name}".strip()
        raise UserError(f"there is no verb `{called}`{meant}: {', '.join(found)}{hint}", code="unknown")
    if found[name].is_group and rest and (rest[0] in verbs(name) or not _asks_for_help(rest)):
        return _verb(rest, name)
    return found[name], rest


def _report_os_error(error: OSError) -> int:
    """A full disk, a file without permission, a store out of reach: no traceback if the error names a file.

    An error of a full disk often names none, as the file was open already.
    """
    if hasattr(
        error, "explanation"
    ):  # of an object store: the text is ours, says where and what to do, and holds no secrets
        print(f"daguerre: {error}", file=sys.stderr)
        return errors.FAILED
    full = error.errno in FULL
    name = error.filename2 or error.filename  # of a copy or a new name the second, which could not be written
    if error.strerror is None or (name is None and not full):
        raise error
    where = "" if name is None else f": {name}"
    advice = ". Free some space and run the same command again" if full else ""
    print(f"daguerre: {error.strerror}{where}{advice}", file=sys.stderr)
    return errors.FAILED


def _print(text: str) -> int:
    print(text)
    return errors.DONE


def _listed(found: Mapping[str, Verb]) -> str:
    """Verbs with their summaries, a line each."""
    width = max(map(len, found))
    return "\n".join(f"  {name:<{width}}  {verb.summary}" for name, verb in found.items())


def _overview() -> str:
    codes = "\n".join(f"  {code:>3}  {meaning}" for code, meaning in errors.EXIT_CODES.items())
    return f"""\
daguerre {__version__}: train, fine-tune, sample and evaluate diffusion models

usage: daguerre VERB RECIPE [key=value ...]

{_listed(verbs())}

RECIPE is the name of a shipped recipe (`daguerre recipes`), a YAML file, or the folder of a run.
`daguerre VERB --help` explains a verb, docs/config.md explains recipes and settings.

A first run, on any machine: daguerre train quickstart
Commands and configs of diffusers' scripts, kohya's, OneTrainer, MaxDiffusion and others: docs/coming-from.md

exit codes
{codes}"""

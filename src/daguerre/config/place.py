"""The place of a run that a command line means: its folder or its address. No plug-in is imported."""

import os
from collections.abc import Sequence
from pathlib import Path

from daguerre.config import config as configs
from daguerre.config.recipe import shipped
from daguerre.remote.run import working_folder
from daguerre.storage import address
from daguerre.storage.bucket import prefix


def own_place(target: str, given: Sequence[str]) -> list[str]:
    """Overrides by which a run folder means itself, from wherever it is seen and wherever it was moved to.

    None if the target is no run folder, or if the command names another place: that is a new run of its recipe.
    """
    path = Path(target).expanduser()
    if not address.is_remote(target) and (not target or target in shipped() or not path.is_dir()):
        return []
    if configs.peek(target, given) != configs.peek(target):
        return []
    if address.is_remote(target):
        above, _, name = address.checked(target).rpartition("/")
        return [f"output_dir={above}", f"run_name={name}"]
    path = path if path.name not in ("", "..") else path.resolve()
    return [f"output_dir={path.parent}", f"run_name={path.name}"]


def of(recipe: str, given: Sequence[str]) -> tuple[str, Path]:
    """The folder, absolute, or the address of the run that this recipe and these overrides train; and the folder of
    this machine in which it works."""
    output_dir, run_name = configs.peek(recipe, [*given, *own_place(recipe, given)])
    if address.is_remote(output_dir):
        far = prefix(output_dir) / run_name
        return far.url, working_folder(far)
    folder = os.path.abspath(Path(output_dir).expanduser() / run_name)
    return folder, Path(folder)

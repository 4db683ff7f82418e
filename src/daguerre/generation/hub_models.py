"""Models of the hub, as commands that take a model find them: by OWNER/NAME, or by one of its files."""

from pathlib import Path

from daguerre.config import recipe
from daguerre.errors import UserError
from daguerre.families.pretrained import catalogue
from daguerre.models.components import ComponentLoader
from daguerre.models.settings import SINGLE_FILES
from daguerre.models.weights import architectures, index, resolve
from daguerre.models.weights.files import read_json
from daguerre.storage import address


def known(target: str) -> bool:
    """True for a model of the hub that lies in its local cache, or whose published name is known.

    Any other `A/B` may as well be a run that is not there yet, such as `runs/quickstart`: nothing asks the hub for it.
    """
    if _is_here(target):
        return False
    return resolve.here(target, resolve.Options()) is not None or ("/" in target and bool(architectures.find(target)))


def place(target: str) -> str:
    """The folder or file of a model of the hub: from the local cache, else downloaded. What is on this machine, a
    recipe, and what is no name of the hub is returned as it is. UserError for a pipeline of no family here, and where
    the hub cannot be reached."""
    if _is_here(target):
        return target
    if target.endswith(SINGLE_FILES):
        return str(resolve.file(target, resolve.Options()))
    if not resolve.is_hub_id(target):
        return target
    # The index first, as it says which networks to ask for: a whole repository may hold each of them several times.
    told = index.find(resolve.locate(target, {}, resolve.Options()))
    family = catalogue.pipelines().get(str(read_json(told).get("_class_name"))) if told else None
    if family is None:
        raise UserError(
            f"{target} is no pipeline of a family that is known here: give one of its files", code="unknown"
        )
    settings = catalogue.pretrained()[family].model_validate(
        {"family": family, "pretrained_model_name_or_path": target}
    )
    return str(resolve.locate(target, ComponentLoader(settings, 0).of_base(), resolve.Options()))


def _is_here(target: str) -> bool:
    there = target in recipe.shipped() or address.is_remote(target) or Path(target).expanduser().exists()
    return there or target.endswith((".yaml", ".yml", ".toml", ".json"))

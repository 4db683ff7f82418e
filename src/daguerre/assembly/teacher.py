"""Opens the teacher that an objective names: the denoiser of another model of the student's family."""

from pathlib import Path

from daguerre import plugins
from daguerre.assembly import base_digests
from daguerre.config.config import Config
from daguerre.errors import UserError
from daguerre.models import encoders
from daguerre.models.family import Family
from daguerre.models.network import Network
from daguerre.models.settings import FamilySettings
from daguerre.models.weights import resolve
from daguerre.models.weights.files import read_json
from daguerre.objectives.networks.teacher import TEACHER, Teacher
from daguerre.remote import local_copy

_SETTING = f"objective.{TEACHER}.path"


def network(place: str, config: Config, student: Family) -> Network:
    """The frozen denoiser of the model at a place, and how it is called. It is read as the student's own would be that
    came from there (`model.COMPONENT=PLACE`), with the student's other networks, which take no memory a second time.
    UserError for another family, and for other text encoders than the student's."""
    model = config.model
    if not (names := model.networks("denoiser")) or not model.places:
        raise _refused(f"model.family={model.family} reads no denoiser from a place, so it cannot have a teacher")
    place = _place(place)
    _check_family(place, model)
    encoder_names = _encoders(place, model)
    # Of the teacher its denoiser alone takes memory: captions are encoded by the student's encoders.
    with encoders.leaving_out(set(model.networks()) - {*names}):
        try:
            family: Family = plugins.find("families", model.family).load(
                model.teacher(place, *encoder_names), config.seed
            )
        except UserError as error:
            raise type(error)(f"the teacher {place}: {error}", code=error.code, setting=_SETTING) from error
    if not resolve.without_weights():
        _check_encoders(place, encoder_names, family, student)
    if family.make_net is not None:
        family = family.training(())
    family.net.requires_grad_(False).eval()
    denoiser = family.networks[names[0]]
    denoiser.module.requires_grad_(False).eval()
    return Network(denoiser.module, "loss", denoiser.facts, teacher=Teacher(family.net, family.guidance))


def _place(place: str) -> str:
    """The place of the networks: the pipeline of a run, or what was given."""
    folder = local_copy.located(place)
    if (folder / "config.yaml").is_file():
        local_copy.fetch_export(folder, "pipeline")
        if not (folder / "pipeline" / "model_index.json").is_file():
            raise _refused(
                f"the run {place} has no pipeline of a whole model: a run that trains an adapter writes none, nor does "
                "one that was not saved yet, or with checkpoint.export=false. Give a run that has one, or its base"
            )
        return str(folder / "pipeline")
    return str(folder) if folder.exists() else place


def _check_family(place: str, model: FamilySettings) -> None:
    folder = resolve.here(place, resolve.Options())
    index = None if folder is None else folder / "model_index.json"
    if index is None or not index.is_file():
        return
    theirs, ours = read_json(index).get("_class_name"), getattr(model, "pipeline_class", None)
    if theirs != ours:
        raise _refused(
            f"the teacher {place} is a {theirs}, and the student's family, {model.family}, has the pipeline {ours}: "
            "give a teacher of the student's family"
        )


def _encoders(place: str, model: FamilySettings) -> list[str]:
    """The text encoders that the place has; none where it is a denoiser alone."""
    folder = resolve.here(place, resolve.Options())
    names = model.networks(*(role for role, half in encoders.ROLES.items() if half == "texts"))
    return [] if folder is None else [name for name in names if (folder / name / "config.json").is_file()]


def _check_encoders(place: str, there: list[str], teacher: Family, student: Family) -> None:
    """UserError where the teacher was trained with another text encoder: what the student reads would mean nothing to
    it."""
    for name in there:
        # The same files need no digest, for which the weights would be read.
        if encoders.identity(teacher, name) == encoders.identity(student, name):
            continue
        if base_digests.of_component(teacher, name) != base_digests.of_component(student, name):
            raise _refused(
                f"the teacher {place} has another {name} than the student, so captions would mean something else to "
                f"it: give a teacher with the same one, or the student that of the teacher (model.{name}={Path(place)})"
            )


def _refused(text: str) -> UserError:
    return UserError(text, code="conflict", setting=_SETTING)

"""Every reader of `_class_name` on a file that has something else there than a name: it refuses, or knows no class."""

import json
from types import SimpleNamespace

import pytest
from diffusers.models.unets.unet_stable_cascade import StableCascadeUNet

from daguerre.assembly import teacher
from daguerre.errors import UserError
from daguerre.families.cascade import files as cascade_files
from daguerre.families.cascade import load as cascade_load
from daguerre.families.cascade.controlnets import files as cascade_controlnets
from daguerre.families.pretrained import bases, catalogue
from daguerre.families.stable_diffusion import controlnet_files
from daguerre.families.stable_diffusion.single_file import save
from daguerre.foreign import base_models
from daguerre.generation import hub_models
from daguerre.generation import load as generation_load
from daguerre.models.export import of_authors
from daguerre.models.parts import vae
from daguerre.models.schedulers.scheduler import other_sampling
from daguerre.models.weights import resolve

REFUSING = {
    **{
        f"objective of {name}": lambda folder, said, name=name: catalogue.pretrained()[name].schedulers.objective_of(
            said
        )
        for name in ("sd", "flux", "cascade_c")
    },
    "pipeline": lambda folder, said: generation_load.find(str(folder), [], False),
    "hub": lambda folder, said: hub_models.place("someone/something"),
    "single file": lambda folder, said: save.write(folder / "a.safetensors", folder),
    "teacher": lambda folder, said: teacher._check_family(
        str(folder), SimpleNamespace(family="sd", pipeline_class="StableDiffusionPipeline")
    ),
    "autoencoder": lambda folder, said: vae.load(
        SimpleNamespace(settings=SimpleNamespace(vae="V"), config=lambda name: said)
    ),
    "ControlNet": lambda folder, said: controlnet_files._of_folder(folder, None),
    "ControlNet of Stage C": lambda folder, said: cascade_controlnets.read(str(folder), None, (), {}),
    "Stage C": lambda folder, said: cascade_load._check_class(
        SimpleNamespace(config=lambda name: said), "prior", StableCascadeUNet
    ),
}
KNOWING_NONE = {
    "base of a converted config": lambda folder, said: catalogue.pipelines().get(str(base_models._class_of(folder))),
    "network for LoRAs": lambda folder, said: bases._outline("transformer", said),
    "network in its authors' names": lambda folder, said: of_authors.chosen(folder) or None,
    "network of Cascade": lambda folder, said: cascade_files.chosen(folder, None),
}
VALUES = [["StableDiffusionPipeline"], [], {}, 5, True, None]


@pytest.fixture(params=VALUES, ids=str)
def said(request, tmp_path, monkeypatch):
    """The value, and a folder whose files all have it."""
    document = {"_class_name": request.param}
    for place in ("model_index.json", "config.json", "transformer/config.json"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(json.dumps(document))
    monkeypatch.setattr(resolve, "locate", lambda *given: tmp_path)
    return tmp_path, document


@pytest.mark.parametrize("reader", REFUSING)
def test_a_class_that_is_no_name_is_refused(said, reader):
    with pytest.raises(UserError):
        REFUSING[reader](*said)


@pytest.mark.parametrize("reader", KNOWING_NONE)
def test_a_class_that_is_no_name_is_of_no_kind(said, reader):
    assert KNOWING_NONE[reader](*said) is None


def test_other_sampling_of_such_a_scheduler_is_refused(said):
    _, document = said
    if document["_class_name"] is None:
        assert other_sampling(document) == []
    else:
        with pytest.raises(UserError, match=r"_class_name is .* and must be text"):
            other_sampling(document)

"""`daguerre fetch` of Stable Cascade's stages from a hub on the loopback, and recipes that find them in its cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import fake_hub
import pytest
from huggingface_hub import constants
from tiny_cascade import RECORDED, write_decoder, write_prior

from daguerre import errors
from daguerre.cli import main
from daguerre.families import cascade_c
from daguerre.families.cascade import sizes
from daguerre.models.weights import resolve

PRIOR, STAGES = "stabilityai/stable-cascade-prior", "stabilityai/stable-cascade"
OF = {
    "stage_c": "prior",
    "stage_b": "decoder",
    "stage_a": "vqgan",
    "effnet_encoder": "effnet",
    "previewer": "previewer",
}
FILES = [f"{name}{end}" for name in sizes.FILES for end in ([""] if OF.get(name) not in ("prior", "decoder") and
         "lite" not in name else ["", "_bf16"])]  # fmt: skip


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny pipelines, the prior's also in bf16 names, with single files of Stability's layout beside Stage B."""
    folder = tmp_path_factory.mktemp("hub")
    prior, stages = write_prior(folder / "prior"), write_decoder(folder / "stages")
    for part, name in (("prior", "diffusion_pytorch_model"), ("text_encoder", "model"), ("image_encoder", "model")):
        shutil.copy(prior / part / f"{name}.safetensors", prior / part / f"{name}.bf16.safetensors")
    for name in FILES:
        component = OF[name.removesuffix("_bf16").removesuffix("_lite")]
        shutil.copy(RECORDED / f"{component}.safetensors", stages / f"{name}.safetensors")
    return {PRIOR: prior, STAGES: stages}


@pytest.fixture
def hub(repositories: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The hub that this process asks, with an empty cache."""
    with fake_hub.running() as found:
        for name, folder in repositories.items():
            found.add(name, folder)
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", found.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        for name in ("HF_HUB_CACHE", "HF_XET_CACHE"):
            monkeypatch.setattr(constants, name, str(tmp_path / "cache"), raising=False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield found


def fetch(*given: object) -> int:
    return main.run(["fetch", *map(str, given)])


def test_each_published_file_comes_alone(hub, tmp_path, capsys):
    """Both sizes of both stages, also in bf16, Stage A, the EfficientNet and the previewer."""
    assert len(FILES) == 11
    for name in FILES:
        assert fetch(f"{STAGES}/{name}.safetensors", "-o", tmp_path / "files") == errors.DONE
    assert {path.stem for path in (tmp_path / "files").glob("*.safetensors")} == {*FILES}
    said = capsys.readouterr().out
    for name in FILES:
        component = OF[name.removesuffix("_bf16").removesuffix("_lite")]
        assert f"use it with model.{component}={tmp_path / 'files'}/{name}.safetensors\n" in said
        content = (tmp_path / "files" / f"{name}.safetensors").read_bytes()
        assert content == (RECORDED / f"{component}.safetensors").read_bytes()


def test_pipelines_come_with_their_clips(hub, tmp_path, capsys):
    """The text encoder of both stages, and the image encoder of Stage C; in bf16 by `variant`."""
    assert fetch(PRIOR, "-o", tmp_path / "c", "variant=bf16") == errors.DONE
    assert fetch(STAGES, "-o", tmp_path / "b") == errors.DONE
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if ".cache" not in path.parts}
    said = capsys.readouterr().out
    assert f"use it with model.pretrained_model_name_or_path={tmp_path / 'c'} model.variant=bf16\n" in said
    assert f"use it with model.pretrained_model_name_or_path={tmp_path / 'b'}\n" in said
    wanted = {f"c/{part}/{name}.bf16.safetensors" for part, name in (
        ("prior", "diffusion_pytorch_model"), ("text_encoder", "model"), ("image_encoder", "model"))}  # fmt: skip
    wanted |= {f"b/{part}/diffusion_pytorch_model.safetensors" for part in ("decoder", "vqgan")}
    wanted |= {"b/text_encoder/model.safetensors", "c/tokenizer/tokenizer.json", "b/tokenizer/tokenizer.json"}
    assert wanted <= found
    assert not {name for name in found if "stage_" in name}, "files beside the pipeline are asked for by name"
    assert json.loads((tmp_path / "c" / "fetched.json").read_text())["complete"] is True


def test_a_file_that_is_nowhere_is_named_with_its_setting_and_asked_for_once(hub, repositories, capsys):
    """And one that is there is asked for once: what is in the cache is taken from there."""
    settings = {"pretrained_model_name_or_path": str(repositories[PRIOR]), "effnet": f"{STAGES}/none.safetensors"}
    with pytest.raises(errors.UserError, match=r"^model\.effnet: .* it has no none\.safetensors") as raised:
        cascade_c.load(cascade_c.Settings.model_validate(settings), 0)
    assert "copy the file here and give its path" in str(raised.value)
    place = f"{STAGES}/effnet_encoder.safetensors"
    first = resolve.file(place, resolve.Options())
    hub.answers.clear()
    assert resolve.file(place, resolve.Options()) == first
    assert not hub.answers


@pytest.mark.long
def test_a_recipe_finds_what_was_fetched(hub, tmp_path, capsys, monkeypatch):
    """Without `-o`: cascade_c as it stands, by the previewer and by Stage B and Stage A; the small one by its file."""
    for name in (PRIOR, STAGES, *(f"{STAGES}/{each}.safetensors" for each in ("effnet_encoder", "previewer"))):
        assert fetch(name) == errors.DONE
    assert fetch(f"{STAGES}/stage_c_lite_bf16.safetensors") == errors.DONE
    hub.answers.clear()
    given = ["base=true", "prompt=a fox", "height=64", "width=64", "num_inference_steps=1"]
    for out, recipe, more in (
        ("previewer", "cascade_c", []),
        ("stages", "cascade_c", ["model.decode.name=stages", "model.decode.num_inference_steps=1"]),
        ("lite", "cascade_c_1b", []),
        ("b", "cascade_b", [f"image={tmp_path / 'previewer' / '000.png'}"]),
    ):
        assert main.run(["generate", recipe, *given, *more, f"out={tmp_path / out}"]) == errors.DONE, out
        assert (tmp_path / out / "000.png").exists()

"""The metadata of a stranger's file: it may not choose where files are written, nor what is loaded."""

import json

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import write_sd

from daguerre.errors import UserError
from daguerre.families.stable_diffusion.single_file import load, save
from daguerre.families.stable_diffusion.single_file.configs import METADATA


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    place = tmp_path_factory.mktemp("trust")
    save.write(place / "a.safetensors", write_sd(place / "p"))
    return place / "a.safetensors"


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (["tokenizers", "tokenizer", "../../evil.json"], "{}", r"names '../../evil.json', which Daguerre never writes"),
        (["tokenizers", "tokenizer", "code.py"], "", r"names 'code.py'"),
        (["tokenizers", "../tokenizer"], {}, r"names '../tokenizer'"),
        (["configs", "../unet"], {}, r"names '../unet'"),
        (["layout"], "sd9", r"names 'sd9'"),
        (["index", "scheduler"], ["os", "system"], r"names 'os.system'"),
        (["index", "extra"], ["pipeline", "Own"], r"names 'pipeline.Own'"),
        (["index", "_class_name"], "OwnPipeline", r"names 'diffusers.OwnPipeline'"),
        (["configs", "text_encoder", "attn_implementation"], "stranger/kernels", r"names 'attn_implementation'"),
        (["configs", "unet", "norm_num_groups"], 5, r"the unet cannot be built"),
        (["configs", "text_encoder", "hidden_size"], "wide", r"the text_encoder cannot be built"),
        (["configs", "vae"], 3, r"cannot be read \(configs.vae: Input should be an object"),
        (["configs", "unet", "cross_attention_dim"], 96, r"\S+ is \[\d+, 48\], not \[\d+, 96\]"),
    ],
)
def test_metadata_chooses_no_place_and_no_class(file, tmp_path, path, value, words):
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    document = json.loads(metadata[METADATA])
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    save_file(load_file(file), tmp_path / "b.safetensors", metadata | {METADATA: json.dumps(document)})
    (tmp_path / "made").mkdir()
    with pytest.raises(UserError, match=words):
        load.convert(tmp_path / "b.safetensors", tmp_path / "made")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["b.safetensors", "made"]


def test_a_pipeline_with_a_safety_checker_comes_back_without(file, tmp_path):
    folder = write_sd(tmp_path / "p")
    index = json.loads((folder / "model_index.json").read_text())
    index["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    (folder / "model_index.json").write_text(json.dumps(index))
    save.write(tmp_path / "c.safetensors", folder)
    (tmp_path / "made").mkdir()
    load.convert(tmp_path / "c.safetensors", tmp_path / "made")
    assert json.loads((tmp_path / "made" / "model_index.json").read_text())["safety_checker"] == [None, None]

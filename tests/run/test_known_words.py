"""Words that training captions never held are told before images of them are drawn."""

import pytest
import tiny_drawings
import tiny_runs
from safetensors.torch import load_file, save_file

from daguerre import errors
from daguerre.cli import main
from daguerre.config import config
from daguerre.data.images.words import words
from daguerre.data.sources import shapes
from daguerre.run import known_words

STRANGE = "these words are in none of the training captions: dog, beach (as in 'a red dog on a beach')"
KNOWS = "the 26 that it knows are: a, background, black, blue, circle, cross, cyan, front, green, in, is, large, medium"


@pytest.fixture(scope="module")
def run(tiny_sd, tmp_path_factory):
    return tiny_drawings.write_run(tiny_drawings.write_recipe(tmp_path_factory.mktemp("recipe"), tiny_sd))


def test_words_are_compared_without_case_and_punctuation():
    assert words("A Red star,", "it's 3 x-rays: É!") == ["a", "red", "star", "it's", "3", "x-rays", "é"]


def test_the_shapes_words_are_those_of_their_captions():
    source = shapes.open_source(shapes.Settings(), "train")
    seen = {word for i in range(2000) for word in words(source.record(i).texts["text"])}
    assert seen == shapes.Settings().words()


@pytest.mark.parametrize(
    ("recipe", "given", "found"),
    [
        ("quickstart", ["data.captions.prefix=drawn: "], {"drawn", "circle"}),
        ("quickstart", ["data.captions.text=one thing", "sampling.prompts=[x]"], {"one", "thing"}),
        ("quickstart", ["init_from=elsewhere"], None),
        ("sd15_dreambooth", [], None),
        ("sd15_dreambooth", ["model.unet=null"], {"a", "photo", "of", "sks", "dog"}),
        ("sd15", ["model.unet=null"], None),
    ],
)
def test_which_words_are_known(recipe, given, found):
    known = known_words.known(config.load(recipe, given).config)
    assert known is None if found is None else found <= known


def test_few_known_words_are_listed_and_many_are_counted(monkeypatch):
    quickstart = config.load("quickstart").config
    assert known_words.notices(quickstart, ["A small, RED star!", ""]) == []
    (line,) = known_words.notices(quickstart, ["a star", "a red dog on a beach", "a dog"])
    assert STRANGE in line
    assert KNOWS in line
    (line,) = known_words.notices(quickstart, [" ".join(f"w{i}" for i in range(30))])
    assert "w9, ... (as in" in line
    assert "w10," not in line.partition("(as in")[0]
    monkeypatch.setattr(known_words, "_FEW", 25)
    assert known_words.notices(quickstart, ["dog"])[0].endswith("it knows 26 others")


@pytest.mark.long
def test_generate_says_it(run, tmp_path, capsys):
    assert main.run(["generate", str(run), "prompt=a red dog on a beach", f"out={tmp_path / 'out'}"]) == errors.DONE
    out = capsys.readouterr().out
    assert STRANGE in out
    assert KNOWS in out
    assert out.index(STRANGE) < out.index("generated: 1 image")
    given = ["prompt=a red star", "negative_prompt=blurry blue", f"out={tmp_path / 'other'}"]
    assert main.run(["generate", str(run), *given]) == errors.DONE
    assert "these words are in none of the training captions: blurry (as in 'blurry blue')" in capsys.readouterr().out
    assert main.run(["generate", str(run), "prompt=a red star", f"out={tmp_path / 'known'}"]) == errors.DONE
    assert "in none of the training captions" not in capsys.readouterr().out


def test_nothing_is_said_of_words_that_a_file_of_tokens_brings(run, tiny_sd, tmp_path, capsys):
    network = load_file(next((tiny_sd / "text_encoder").glob("*.safetensors")))
    (words,) = (rows for name, rows in network.items() if name.endswith("token_embedding.weight"))
    save_file({"<dog>": words[:1].contiguous()}, tmp_path / "dog.safetensors")
    given = [f"use={{{tmp_path / 'dog.safetensors'}: 1}}", f"out={tmp_path / 'out'}"]
    assert main.run(["generate", str(run), "prompt=a <dog> on blue", *given]) == errors.DONE
    out = capsys.readouterr().out
    assert "<dog>, 1 vector" in out
    assert "in none of the training captions" not in out


def test_a_run_says_it_of_its_sampling_prompts_when_it_starts(tmp_path, capsys):
    prompts = 'sampling.prompts=["a red dog on a beach"]'
    assert tiny_runs.train(tmp_path, prompts, "training.duration=2 steps") == errors.DONE
    said = " ".join(capsys.readouterr().out.split())
    assert STRANGE in said
    assert main.run(["train", "quickstart", prompts, "--dry-run"]) == errors.DONE
    assert STRANGE in " ".join(capsys.readouterr().out.split())
    assert main.run(["train", "quickstart", prompts, "sampling.num_images=0", "--dry-run"]) == errors.DONE
    assert "in none of the training captions" not in capsys.readouterr().out

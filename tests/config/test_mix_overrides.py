"""Settings of the sources of a mix on the command line: typed by their fields, whatever the order; another kind of
source drops what the recipe set for the old one."""

import pytest

from daguerre.config import config
from daguerre.config.errors import ConfigError

MIX = ["data.source=mix", "data.resolution=64", "data.sources.b.source=folder", "data.sources.b.path=DIR"]


def member(*given, recipe="quickstart", name="b"):
    return config.load(recipe, given).config.data.sources[name]


@pytest.mark.parametrize("text", ["a photo of: a dog", "001", "no", "[a, b]", "{a: 1}", "null and void", '"quoted"'])
def test_text_stays_as_it_is_written(text):
    assert member(*MIX, f"data.sources.b.captions.text={text}").captions.text == text


def test_numbers_and_switches_are_read():
    both = [*MIX, "data.sources.a.source=shapes"]
    own = member(*both, "data.sources.b.repeats=3", "data.sources.b.shuffle=false", "data.sources.b.loss_weight=1e-1")
    assert (own.repeats, own.shuffle, own.loss_weight) == (3, False, 0.1)
    made = member(*MIX, "data.sources.b.generate.count=7", "data.sources.b.generate.prompt=007").generate
    assert (made.count, made.prompt) == (7, "007")
    assert member(*MIX, 'data.sources.b.captions.templates=["a {}", "the {}, here"]').captions.templates == (
        "a {}",
        "the {}, here",
    )
    with pytest.raises(ConfigError, match=r"data\.sources\.b\.repeats"):
        member(*MIX, "data.sources.b.repeats=many")


def test_the_kind_of_a_source_may_stand_behind_its_settings():
    turned = ["data.sources.b.captions.text=a: b", *reversed(MIX)]
    assert member(*turned).captions.text == "a: b"


def test_another_kind_of_source_drops_what_the_recipe_set_for_the_old_one():
    loaded = config.load("sd15_dreambooth", ["data.sources.instance.source=folder", "data.sources.instance.path=dog"])
    own = loaded.config.data.sources["instance"]
    assert (own.source, own.path, own.captions.text) == ("folder", "dog", "a photo of sks dog")
    assert loaded.notices == (
        "data.sources.instance.source is folder instead of huggingface: the recipe's data.sources.instance.name "
        "dropped out",
    )


def test_the_names_of_dreambooth_trainers(tmp_path):
    given = ["instance_data_dir=my dog", "instance_prompt=a photo of: sks dog", "class_data_dir=dogs"]
    given += ["class_prompt=a photo of: a dog", "num_class_images=50", "prior_loss_weight=0.5", "sample_batch_size=8"]
    loaded = config.load("sd15_dreambooth", [*given, "per_device_batch_size=1", "with_prior_preservation=True"]).config
    instance, others = loaded.data.sources.values()
    assert (instance.path, instance.captions.text) == ("my dog", "a photo of: sks dog")
    assert (others.path, others.captions.text, others.generate.count) == ("dogs", "a photo of: a dog", 50)
    assert (instance.loss_weight, others.loss_weight, loaded.sampling.batch_size) == (1, 0.5, 8)
    assert (loaded.training.global_batch_size, loaded.training.per_device_batch_size) == (2, 1), "1 + 1, in two passes"
    (tmp_path / "again.yaml").write_text(config.dump(loaded))
    assert config.load(str(tmp_path / "again.yaml")).config == loaded


@pytest.mark.parametrize(
    ("given", "count"),
    [
        (["instance_prompt=a photo of sks cat"], 1),
        (["instance_prompt=a photo of sks dog"], 0),
        (["instance_prompt=a photo of sks cat", "class_prompt=a photo of a cat"], 0),
        ([], 0),
    ],
)
@pytest.mark.parametrize("recipe", ["sd15", "sd15_dreambooth"])
def test_class_images_of_another_thing_are_said(recipe, given, count, tmp_path):
    """With the recipe's own class prompt a cat would be learnt beside 200 dogs."""
    loaded = config.load(recipe, [f"instance_data_dir={tmp_path}", *given])
    said = [notice for notice in loaded.notices if "class_prompt='...'" in notice]
    assert len(said) == count
    assert all("'a photo of sks cat'" in notice and "'a photo of a dog'" in notice for notice in said)

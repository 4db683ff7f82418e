"""What other trainers' names of new tokens become: on recipes that learn some, on others, and beside a LoRA."""

from __future__ import annotations

import pytest

from daguerre import trees
from daguerre.config import config
from daguerre.config.errors import ConfigError
from daguerre.credentials import is_secret
from daguerre.data.caption_templates import TEMPLATES

DATA = "data.path=somewhere"


def adapters(name: str, *given: str) -> dict:
    return config.load(name, list(given)).config.model_dump(mode="json")["adapters"]


@pytest.mark.parametrize(
    "given",
    [
        ("placeholder_token=<toy>", "initializer_token=toy", "num_vectors=2"),
        ("token_string=<toy>", "init_word=toy", "num_vectors_per_token=2"),
        ("adapter.placeholder_token=<toy>", "adapter.initializer_token=toy", "adapter.num_vectors=2"),
    ],
)
def test_names_of_diffusers_mindone_and_kohya(given):
    wanted = {"placeholder_token": "<toy>", "initializer_token": "toy", "num_vectors": 2}
    for name, others in {"sd15_textual_inversion": set(), "sd15": set(), "sd15_lora": {"lora"}}.items():
        found = adapters(name, DATA, *given) if name == "sd15_textual_inversion" else adapters(name, *given)
        assert found.keys() == {"tokens", *others}
        assert found["tokens"].items() >= wanted.items()
    found = adapters("sdxl_pivotal", DATA, *given[:1])
    assert (found["tokens"]["placeholder_token"], found["tokens"]["num_vectors"]) == ("<toy>", 2)


def test_the_name_is_what_the_caption_and_the_prompts_have():
    given = [DATA, "placeholder_token=<toy>", "learnable_property=style"]
    found = config.load("sd15_textual_inversion", given).config
    (source,) = found.data.sources.values()
    assert (source.captions.text, source.captions.templates) == ("<toy>", TEMPLATES["style"])
    assert found.sampling.prompts == ["a photo of a <toy>", "a <toy> on a beach"]
    assert config.load("sdxl_pivotal", given[:2]).config.data.sources["images"].captions.text == "a photo of <toy>"
    (source,) = config.load(
        "sd15", ["placeholder_token=<toy>", "use_object_template=true"]
    ).config.data.sources.values()
    assert (source.captions.text, source.captions.templates) == ("<toy>", TEMPLATES["object"])
    assert (len(TEMPLATES["object"]), len(TEMPLATES["style"])) == (27, 19)
    with pytest.raises(ConfigError, match="set placeholder_token as well"):
        config.load("sd15", ["learnable_property=object"])


def test_a_file_of_templates_is_read(tmp_path):
    file = tmp_path / "templates.txt"
    file.write_text("a photo of {}\n\n{}, at night\n", encoding="utf-8")
    tree = config.load("sd15_textual_inversion", [DATA, f"template_file={file}"]).config.model_dump(mode="json")
    (source,) = trees.get(tree, "data.sources").values()
    assert source["captions"]["templates"] == ["a photo of {}", "{}, at night"]
    other = ["placeholder_token=<toy>", "learnable_property=face"]  # MindOne's third property has sentences in a file
    tree = config.load("sd15_textual_inversion", [DATA, *other, f"template_file={file}"]).config.model_dump(mode="json")
    (source,) = trees.get(tree, "data.sources").values()
    assert source["captions"]["templates"] == ["a photo of {}", "{}, at night"]
    with pytest.raises(ConfigError, match="allowed: object, style"):
        config.load("sd15_textual_inversion", [DATA, *other])
    with pytest.raises(ConfigError, match="cannot be read"):
        config.load("sd15_textual_inversion", [DATA, f"template_file={tmp_path / 'none.txt'}"])


def test_tokens_of_stable_cascade():
    given = "train_tokens=[['[rex]', '^dog</w>'], ['<new>', null], ['^snail', null]]"
    found = adapters("sdxl_lora", given)
    assert found.keys() == {"lora", "tokens"}
    assert found["tokens"]["tokens"]["[rex]"]["init_pattern"] == "^dog</w>"
    assert {*found["tokens"]["tokens"]} == {"[rex]", "<new>"}
    assert found["tokens"]["existing"] == ["^snail"]
    found = adapters("sdxl", "module_filters=['.attn']", "rank=8", given)
    assert (found["lora"]["rank"], found["tokens"]["existing"]) == (8, ["^snail"])
    assert adapters("sdxl_pivotal", DATA, "adapter.rank=8")["lora"]["rank"] == 8
    with pytest.raises(ConfigError, match="expected pairs"):
        config.load("sdxl_lora", ["train_tokens=[dog]"])


def test_names_of_new_tokens_are_no_secrets():
    for name in ("placeholder_token", "initializer_token", "num_vectors_per_token"):
        assert not is_secret(f"adapters.tokens.{name}")
    assert is_secret("hub_token")
    assert is_secret("logging.token")

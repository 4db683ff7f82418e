"""Every shipped recipe's tiny twin trains, saves, goes on, exports and draws; its header says what one must know.

What the twins are is in twins.py. A recipe that is added is covered without a change here.
"""

import json
import re
import shutil

import pytest
import tiny_texts
from diffusers import DiffusionPipeline
from tiny_runs import assert_equal, outcome
from twins import Twins, base, begun_from, left_to_users, tree

from daguerre import errors
from daguerre.cli import main
from daguerre.config import config, recipe
from daguerre.training import step as updates


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    return Twins(tmp_path_factory.mktemp("twins"))


def train(name, twins, output_dir, *more):
    return main.run(["train", name, f"output_dir={output_dir}", *twins.overrides(name), *more])


def step(run):
    return json.loads((run / "status.json").read_text())["step"]


NORMS = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
"""torch says so of norms that stay float32 where 16-bit weights are drawn with; the command is silent about it."""
QUICK = ("quickstart_text", "quickstart_vae")
"""Recipes of `make test` whose kinds of family, objective or data no other quick test trains: tests/run trains those of
the quickstart and of sd15_lora, tests/gpu one of SDXL."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long]) for name in recipe.shipped()],
)
@NORMS
def test_a_recipe_trains_goes_on_exports_and_draws(name, twins, tmp_path, capsys):
    first = begun_from(name)
    if first:
        assert train(first, twins, tmp_path) == errors.DONE
    assert train(name, twins, tmp_path, "run_name=twin") == errors.DONE
    run = tmp_path / "twin"
    assert step(run) == 2
    assert (run / "report.html").exists()
    if tree(name)["data"].get("filters"):
        assert "filter: pwatermark" in (run / "data.json").read_text(), "half of the twin's samples have a watermark"
    assert ("starting from the weights of" in capsys.readouterr().out) == bool(tree(name).get("init_from"))
    assert train(name, twins, tmp_path, "run_name=twin", "training.duration=3 steps") == errors.DONE
    assert "continuing from step-00000002" in capsys.readouterr().out
    assert step(run) == 3
    assert any((run / exported).is_dir() and any((run / exported).iterdir()) for exported in ("pipeline", "adapter"))
    if (run / "pipeline" / "model_index.json").exists():
        # docs/cascade.md: diffusers cannot open what it has itself written of Stage B; it has no pipeline of `dit`
        if (family := tree(name)["model"]["family"]) not in ("cascade_b", "dit"):
            # Its own needs torchvision, for videos.
            handed = {"processor": tiny_texts.qwen3_vl_processor()} if family == "qwen_image_21" else {}
            DiffusionPipeline.from_pretrained(run / "pipeline", local_files_only=True, **handed)
        assert main.run(["generate", str(run), "prompt=a circle", f"out={tmp_path / 'drawn'}"]) == errors.DONE
        assert list((tmp_path / "drawn").glob("*.png"))


KILLED = ("cascade_b",)
"""The recipe of `make test`: of the quick tests, tests/run kills runs of a whole network and of a LoRA."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in KILLED else [pytest.mark.long])
        for name in recipe.shipped()
        if tree(name)["training"]["duration"] != "0 steps"
    ],
)
def test_a_recipe_whose_run_is_killed_ends_equal_to_the_bit(name, twins, tmp_path, monkeypatch):
    class Killed(BaseException):
        """Stands for SIGKILL: nothing catches it."""

    first = begun_from(name)
    if first:
        assert train(first, twins, tmp_path) == errors.DONE
    given = ["run_name=twin", "training.duration=4 steps", "sampling.num_images=0", "validation.every=4 steps"]
    assert train(name, twins, tmp_path, *given) == errors.DONE
    expected = outcome(tmp_path / "twin")
    shutil.rmtree(tmp_path / "twin")
    original, count = updates.update, iter(range(4))

    def killed(*arguments, **named):
        if next(count) == 3:
            raise Killed
        return original(*arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(updates, "update", killed)
        with pytest.raises(Killed):
            train(name, twins, tmp_path, *given)
    assert train(name, twins, tmp_path, *given) == errors.DONE
    assert_equal(tmp_path / "twin", expected)


def draws_only(name):
    return tree(name)["training"]["duration"] == "0 steps"


@pytest.mark.parametrize("name", [name for name in recipe.shipped() if draws_only(name)])
def test_a_recipe_to_draw_with_draws_without_a_run_and_is_not_trained(name, twins, tmp_path, capsys):
    assert main.run(["train", name, f"output_dir={tmp_path}"]) == errors.REFUSED
    assert f"daguerre generate {name}" in capsys.readouterr().err
    changes = [change for change in twins.overrides(name) if not change.startswith(("training.duration", "lr_sch"))]
    (tmp_path / "twin.yaml").write_text(config.dump(config.load(name, changes).config), encoding="utf-8")
    for out in ("first", "again"):
        assert (
            main.run(["generate", f"{tmp_path}/twin.yaml", "prompt=a circle", f"out={tmp_path / out}"]) == errors.DONE
        )
    first, again = (next((tmp_path / out).glob("*.png")).read_bytes() for out in ("first", "again"))
    assert first == again


@pytest.mark.parametrize("name", [name for name in recipe.shipped() if base(name)])
def test_only_name_and_place_need_be_given(name):
    """Of recipes for real models; those that train on people's own shards need these too, and say so."""
    given = ["run_name=x", "output_dir=y", *left_to_users(name)]
    chosen = config.load(name, given).config
    shown = any(own.separate for own in chosen.adapters.values()) or chosen.model.family == "cascade_b"
    shown = shown or getattr(chosen.model, "references", 0)
    shown = shown or name.endswith("_lora")  # of one's own pictures: prompts of others say nothing about them
    assert chosen.sampling.prompts or shown, "or of held-out samples"
    sources = chosen.data.sources.values()
    assert all(source.source in ("webdataset", "folder") or source.name for source in sources)
    known = {"cascade_c": "cascade_c", "cascade_b": "cascade_b", "cascade_effnet": "cascade_b", "sdxl": "sdxl"}
    known |= {"flux3": "flux3", "flux2": "flux2", "flux": "flux", "z_image": "z_image"}
    known |= {"qwen_image_21": "qwen_image_21", "qwen_image_edit": "qwen_image_edit", "qwen_image": "qwen_image"}
    known |= {"krea2": "krea2", "anima": "anima"}
    known |= dict.fromkeys(("illustrious", "noobai", "pony"), "sdxl")
    assert chosen.model.family == next((family for part, family in known.items() if part in name), "sd")


@pytest.mark.parametrize("name", recipe.shipped())
def test_a_header_says_what_one_must_know(name):
    text = recipe.shipped()[name].read_text(encoding="utf-8")
    head = text[: re.search(r"^[^#]", text, flags=re.MULTILINE).start()]
    verb = "generate" if draws_only(name) else "train"
    words = ("Command:", "Hardware:", "Time:", "Result:", f"daguerre {verb} {name}")
    for word in (*words, "Memory:", "expected, not measured", "daguerre fetch") if base(name) else words:
        assert word in head, f"the header of {name}.yaml does not say {word}"
    for blank in ("TIME", "RESULT", "PROVISIONAL", "TODO"):
        assert blank not in text.split()
    assert not re.search(r"[A-Z_]MEM", text), "a blank for memory that nobody filled in"


def test_a_loss_that_couples_samples_is_not_cut_into_micro_batches(tmp_path, capsys):
    cut = ["training.global_batch_size=4", "training.per_device_batch_size=2"]
    assert main.run(["train", "quickstart_text", f"output_dir={tmp_path}", *cut]) == errors.REFUSED
    assert "cannot be computed as 2 x 2" in capsys.readouterr().err

"""Names of settings, and values that no plug-in decides, are checked before any is imported, with the same words."""

import subprocess
import sys

import hinted
import pytest

from daguerre import plugins
from daguerre.config import config as configs
from daguerre.config import fields, outline
from daguerre.config.errors import ConfigError
from daguerre.settings import Plugin

KINDS = {"families", "objectives", "adapters", "optimizers"}


def marks(root: type) -> dict[str, Plugin]:
    found = (fields.plugin_of(field) or fields.plugin_inside(field) for field in root.model_fields.values())
    return {mark.kind: mark for mark in found if mark}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_an_outline_has_the_settings_of_the_plug_in(kind: str) -> None:
    outlined, real = marks(outline.of(configs.Config))[kind], marks(configs.Config)[kind]
    for name in plugins.names(kind):
        both = [{each.path for each in fields.walk(mark.settings_class(name))} for mark in (outlined, real)]
        assert both[0] == both[1], name


def test_every_kind_in_a_config_is_outlined() -> None:
    assert {*marks(configs.Config)} == KINDS


MISSPELT = [
    ("quickstart", ["optmizer.x=1"]),
    ("quickstart", ["learning_rte=1"]),
    ("quickstart", ["optimizer.lerning_rate=1"]),
    ("quickstart", ["objective.schedul.name=cosine"]),
    ("quickstart", ["data.pth=x"]),
    ("quickstart_lora", ["adapter.rnk=4", "model.vea=x"]),
    ("quickstart_lcm", ["objective.diffusion.schedul=1"]),
    ("quickstart_controlnet", ["adapter.condition=canny", "adapter.condition.lo=4"]),
    ("sd15", ["optimizer.d_coef=2", "adapters.full.rank=3"]),
    ("sdxl", ["optimizer.name=lion", "optimizer.beta3=0.9"]),
]


MISVALUED = [
    ("quickstart", ["training.duration=80"]),
    ("quickstart", ["seed=-1", "training.global_batch_size=none", "lr_scheduler.warmup=soon"]),
    ("sdxl", ["training.global_batch_size=30", "training.per_device_batch_size=7", "seed=-1"]),
    ("sd15_lora", ["run_name=x", "sampling.prompts=3", "loader.num_workers=many"]),
    ("quickstart", ["data.source=folder", "training.duration=80"]),
]


@pytest.mark.parametrize(("recipe", "given"), [*MISSPELT, *MISVALUED])
def test_a_misspelt_name_and_a_wrong_value_are_told_in_the_same_words(recipe: str, given: list[str]) -> None:
    told = []
    for check in (configs.check_soon, configs.load):
        with pytest.raises(ConfigError) as error:
            check(recipe, given)
        told.append(str(error.value))
    assert told[0] == told[1]


def test_a_misspelt_key_of_a_file_is_told_in_the_same_words(tmp_path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: quickstart\nrun_name: x\noptmizer: {learning_rate: 1}\nobjective: {nme: v}\n")
    told = []
    for check in (configs.check_soon, configs.load):
        with pytest.raises(ConfigError) as error:
            check(str(path))
        told.append(sorted(problem.path for problem in error.value.problems))
    assert told[0] == told[1] == ["objective.nme", "optmizer"]


@pytest.mark.parametrize("recipe", [*configs.recipe.shipped()])
def test_shipped_recipes_have_no_misspelt_names(recipe: str) -> None:
    configs.check_soon(recipe, ["learning_rate=1e-5"])


def test_settings_that_a_choice_brings_are_known_below_it() -> None:
    configs.check_soon("quickstart_controlnet", ["adapter.condition=canny", "adapter.condition.low=4"])
    configs.check_soon("quickstart", ["optimizer.name=prodigy", "optimizer.d_coef=2"])
    configs.check_soon("quickstart", ["adapter=lora", "rank=4"])


def test_a_condition_may_be_chosen_for_an_adapter_that_has_none() -> None:
    configs.check_soon("quickstart", ["adapter.name=controlnet", "adapter.condition=canny"])


def test_plug_ins_of_another_place_are_asked_themselves() -> None:
    with hinted.known():
        configs.check_soon("quickstart", ["adapter.name=hinted", "adapter.condition=grey"])
        with pytest.raises(ConfigError, match=r"Did you mean adapters\.hinted\.image"):
            configs.check_soon("quickstart", ["adapter.name=hinted", "adapter.imge=control"])


@pytest.mark.parametrize(
    "also",
    [
        "training.global_batch_size=none",
        "training.global_batch_size=true",
        "data.source=folder",
        "objective.name=epsilon",
        "lr_scheduler.warmup=1M steps",
        "data={source: folder, path: x, mask_dir: y}",  # without a loss that reads masks: the objective's own default
    ],
)
def test_a_misspelt_name_beside_another_mistake_is_told_with_it(also: str) -> None:
    given = ["optmizer.x=1", also]
    configs.check_soon("quickstart", given)
    with pytest.raises(ConfigError) as error:
        configs.load("quickstart", given)
    assert len(error.value.problems) > 1
    assert "Did you mean optimizer?" in str(error.value)


@pytest.mark.parametrize("also", ["optimizer.learning_rate=fast", "objective.name=flow", "model.width=x"])
def test_a_wrong_value_beside_the_settings_of_a_plug_in_is_told_with_theirs(also: str) -> None:
    given = ["training.duration=80", also]
    configs.check_soon("quickstart", given)
    with pytest.raises(ConfigError, match="is not a duration"):
        configs.load("quickstart", given)


def test_mistakes_are_refused_without_torch() -> None:
    """`train` in a process in which torch cannot be imported."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from daguerre.cli import main; assert main.run(['train', 'sdxl', 'training.duration=80', 'run_name=x']) == 2\n"
        "sys.exit(main.run(['train', 'sdxl', 'optmizer.x=1', 'adapter=lora', 'rnk=8']))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "'80' is not a duration" in run.stderr
    assert "Did you mean optimizer?" in run.stderr
    assert "rnk" in run.stderr

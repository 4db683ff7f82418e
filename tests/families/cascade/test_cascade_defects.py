"""The defects of Stability's training code and of diffusers beside it, and the tests that show ours does not have them.

The table names a test for each; what no other file shows is tested here.
"""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import forked_runs
import pytest
import torch
import yaml
from safetensors.torch import load_file
from several_devices import MESHES, Runs, zeros
from test_cascade_configs import COMMON, CONFIGS, B
from tiny_cascade import RECORDED, stage_b, stage_c, write_decoder, write_prior
from torch import nn
from twins import BESIDE, SHORT, Twins, shards

from daguerre import errors, plugins
from daguerre.assembly.parts import build
from daguerre.cli import main
from daguerre.config import config as configs
from daguerre.config.errors import ConfigError

TESTS = Path(__file__).parents[2]
HERE = "families/cascade/test_cascade_defects.py"
DEFECTS: dict[str, list[str]] = {
    "the shift of Stage B's configs is never read": [
        f"{HERE}::test_the_shift_of_stage_b_acts",
        "families/cascade/test_stages.py::TestStep::test_of_stage_c",
        "families/cascade/test_cascade_configs.py::test_it_is_converted_whole",
    ],
    "the config for v cannot start": ["families/cascade/test_cascade_configs.py::test_a_tiny_twin_trains_two_steps"],
    "fields with a default cannot be set, and types are not checked": [
        f"{HERE}::test_every_field_can_be_set_and_types_are_checked",
        "test_seed_keys.py::test_an_alias_is_our_setting",
    ],
    "SLURM alone launches it": [
        "run/test_several_devices.py::test_every_mesh_learns_what_one_process_does",
        "run/test_train_launched.py::test_torchrun_starts_workers_again",
    ],
    "several GPUs without FSDP share no gradients": [
        "run/test_several_devices.py::test_every_mesh_learns_what_one_process_does",
    ],
    "a list of data with a file: in it is read by aws": [f"{HERE}::test_a_list_of_places_trains"],
    "beside a LoRA the base gets gradients and drops out": [
        f"{HERE}::test_beside_a_lora_the_base_has_no_gradients_and_drops_nothing",
        "families/cascade/test_stages.py::TestConditioning::test_the_base_is_frozen",
    ],
    "each device clips by the norm of its own shards": [f"{HERE}::test_gradients_are_clipped_by_the_norm_of_all"],
    "the first update after each start has a rate of 0": [f"{HERE}::test_the_first_update_after_each_start_learns"],
    "the pipelines are deprecated": [
        f"{HERE}::test_diffusers_pipelines_are_not_needed",
        "families/cascade/test_cascade_runs.py::test_an_export_is_opened_again",
    ],
    "diffusers' network starts from other weights": [
        "families/cascade/test_cascade_networks.py::TestInitial::test_weights_are_drawn_as_stability_draws_them",
        "families/cascade/test_cascade_networks.py::TestInitial::test_the_first_prediction_is_zero",
    ],
    "nothing trains Stage B or reads a LoRA": [
        "families/cascade/test_stages.py::TestStep::test_of_stage_b",
        "families/cascade/test_cascade_loras.py::test_a_numbered_file_has_the_effect_that_it_has_in_stabilitys_code",
        "run/test_lora_runs.py::test_generate_draws_what_the_run_drew",
    ],
}


def test_the_tests_of_the_table_are_there():
    for defect, ids in DEFECTS.items():
        for each in ids:
            file, *path = each.split("::")
            nodes: Any = ast.parse((TESTS / file).read_text(encoding="utf-8"))
            for name in path:
                nodes = next((node for node in nodes.body if getattr(node, "name", None) == name), None)
                assert nodes is not None, f"{defect}: there is no {each}"


@pytest.mark.parametrize("recipe", ["cascade_b", "cascade_c"])
def test_the_shift_of_stage_b_acts(recipe):
    """On the levels of the recipe: 2 ln 4 in log-SNR, up to the clamp."""
    levels = []
    for shift in (1, 4):
        config = configs.load(recipe, ["data.path=x", f"objective.schedule.shift={shift}"]).config
        objective: Any = plugins.find("objectives", "eps").build(config.objective)
        a, s = objective.path(torch.tensor([0.3, 0.6], dtype=torch.float64))
        levels.append(2 * (a / s).log())
    assert (levels[0] - levels[1]).tolist() == pytest.approx([2 * math.log(4)] * 2)


def test_every_field_can_be_set_and_types_are_checked(tmp_path):
    """Of a config of theirs, also what its own code does not let one set."""
    said = COMMON | CONFIGS["finetune_c_3b"] | {"webdataset_path": "file:x.tar", "bucketeer_random_ratio": 0.2}
    said |= {"clip_image_model_name": "openai/clip-vit-large-patch14", "allow_tf32": False}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(said))
    assert (
        main.run(["convert", "config", str(tmp_path / "theirs.yaml"), f"out={tmp_path / 'ours.yml'}", "--all"])
        == errors.DONE
    )
    config: Any = configs.load(str(tmp_path / "ours.yml"), ["model.pretrained_model_name_or_path=x"]).config
    assert config.data.buckets.random == 0.2
    assert config.model.image_encoder == "openai/clip-vit-large-patch14"
    assert config.training.matmul_precision == "highest"
    with pytest.raises(ConfigError, match=r"optimizer.learning_rate = \"banana\""):
        configs.load("cascade_c", ["data.path=x", "lr=banana"])


def dropping(net: nn.Module) -> list[nn.Module]:
    """Its dropout layers that act."""
    return [module for module in net.modules() if isinstance(module, nn.Dropout) and module.training and module.p]


def test_beside_a_lora_the_base_has_no_gradients_and_drops_nothing(tmp_path):
    """Of Stage C and Stage B in training, whose networks have dropout."""
    for kind, write, settings in (("c", write_prior, stage_c), ("b", write_decoder, stage_b)):
        tree = {
            "run_name": "x",
            "model": settings(write(tmp_path / kind)),
            "objective": {"name": "eps", "schedule": {"name": "cosine"}},
            "data": {"source": "folder", "path": ".", "resolution": 64},
            "training": {"duration": "1 steps", "global_batch_size": 1},
        }
        whole = build(configs.load("x", [], whole=tree).config, torch.device("cpu"))
        whole.net.train()
        assert dropping(whole.net), "as it is trained by itself"
        config = configs.load("x", ["adapter.name=lora", "adapter.rank=2"], whole=tree).config
        parts = build(config, torch.device("cpu"))
        parts.net.train()
        assert not dropping(parts.net)
        assert {name for name, p in parts.net.named_parameters() if p.requires_grad and ".lora_" not in name} == set()


@pytest.mark.long
def test_diffusers_pipelines_are_not_needed():
    """No module of ours imports one; exports name their classes alone."""
    source = Path(configs.__file__).parents[1]
    for path in source.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "StableCascade" not in text and "stable_cascade" not in text:
            continue  # parsing all would take seconds
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                names = {node.module or "", *(alias.name for alias in node.names)}
                assert not any("StableCascade" in name and "Pipeline" in name for name in names), path
                assert not any("pipelines.stable_cascade" in name for name in names), path


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    return Twins(tmp_path_factory.mktemp("twins"))


@pytest.mark.long
def test_a_list_of_places_trains(twins, tmp_path):
    """`file:` and a plain path, as the guide has them."""
    shards(tmp_path / "shards", labelled=False)
    places = [f"file:{tmp_path / 'shards' / '00000.tar'}", str(tmp_path / "shards" / "00001.tar")]
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(COMMON | B | {"batch_size": 2, "webdataset_path": places}))
    ours = tmp_path / "ours.yml"
    assert main.run(["convert", "config", str(tmp_path / "theirs.yaml"), f"out={ours}", "--all"]) == errors.DONE
    b = twins.pipeline("cascade_b")
    given = SHORT | {"data.resolution": 96, "sampling.num_images": 0, "logging.trackers.wandb": "null"}
    given |= {"model.effnet": BESIDE["cascade_b"]["model.effnet"], "model.vqgan": b / "vqgan"}
    given |= {"model.decoder": RECORDED / "decoder.safetensors", "model.pretrained_model_name_or_path": b}
    given |= {"output_dir": tmp_path, "run_name": "twin", "checkpoint.backup_every": "null"}
    assert main.run(["train", str(ours), *(f"{path}={value}" for path, value in given.items())]) == errors.DONE
    assert '"count": 16' in (tmp_path / "twin" / "data.json").read_text()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["cascade_c", "cascade_b"])
def test_gradients_are_clipped_by_the_norm_of_all(kind, tmp_path):
    """Over shards as on one device, where clipping decides the update."""
    runs, clipped = Runs(tmp_path, kind, steps=3, batch=4), "training.max_grad_norm=1e-3"
    plan = [runs.on(name, MESHES[name], clipped) for name in ("one", "fsdp4")]
    assert zeros(forked_runs.together(tmp_path, plan))
    norms = runs.numbers("one", "learning/gradient_norm")
    assert min(norms) > 1e-2, "the limit acts"
    assert runs.numbers("fsdp4", "learning/gradient_norm") == pytest.approx(norms, rel=1e-4)
    runs.assert_equal("fsdp4", "one")


@pytest.mark.long
def test_the_first_update_after_each_start_learns(twins, tmp_path):
    """The one update of warm-up that all of their configs have is left out: it has a rate of 0."""
    given = [each for each in twins.overrides("cascade_c") if not each.startswith("lr_scheduler.")]
    given += [f"output_dir={tmp_path}", "run_name=x", "sampling.num_images=0"]
    states = []
    for steps in (1, 2):
        assert main.run(["train", "cascade_c", *given, f"training.duration={steps} steps"]) == errors.DONE
        (file,) = (tmp_path / "x" / "pipeline" / "prior").glob("*.safetensors")
        states.append(load_file(file)["clf.1.weight"].clone())
    base = load_file(twins.pipeline("cascade_c") / "prior" / "diffusion_pytorch_model.safetensors")["clf.1.weight"]
    for before, after in ((base, states[0]), (states[0], states[1])):
        assert not torch.equal(before, after)

"""`daguerre generate` on a run folder made by hand: what is drawn, what is written beside it, what is refused."""

from __future__ import annotations

import json
import shutil
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_models import TINY_UNET

from daguerre import cli
from daguerre import config as configs
from daguerre.checkpoint.run_folder import RunFolder
from daguerre.checkpoint.store import Store
from daguerre.commands import parts, pictures
from daguerre.samplers.draw import initial_noise

PROMPT = "a small green star: on a white background"


@pytest.fixture(scope="module")
def recipe(tiny_sd: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    tree = {
        "run_name": "tiny",
        "output_dir": str(folder / "runs"),
        "model": {"family": "sd", "pretrained_model_name_or_path": str(tiny_sd), "unet": TINY_UNET},
        "objective": {"name": "v", "schedule": {"zero_terminal_snr": True}},
        "data": {"source": "shapes"},
        "training": {"duration": "2 steps", "global_batch_size": 2, "device": "cpu"},
        "sampling": {"num_inference_steps": 2, "guidance_scale": 3.0, "num_images": 6},
    }
    (folder / "tiny.yaml").write_text(json.dumps(tree))
    return folder / "tiny.yaml"


def weights(shift: float, built: parts.Parts) -> dict[str, torch.Tensor]:
    return {name: value + shift for name, value in built.net.state_dict().items()}


@pytest.fixture(scope="module")
def run(recipe: Path) -> Path:
    """A run folder with two checkpoints; model and EMA weights differ."""
    config = configs.load(str(recipe)).config
    folder = RunFolder(Path(config.output_dir) / config.run_name)
    built = parts.build(config)
    for step in (1, 2):
        tensors = {"model": weights(0.01 * step, built), "ema": weights(-0.01 * step, built)}
        document = {"step": step, "slots": 0, "samples": 0}
        Store(folder.checkpoints).save(f"step-{step:08d}", tensors, {"state": document}, built.family.files())
    folder.config.write_text(configs.dump(config))
    return folder.path


def drawn(folder: Path) -> np.ndarray:
    return np.stack([np.asarray(Image.open(path)).astype(int) for path in sorted(folder.glob("*.png"))])


def draw(run: Path, out: Path, *given: str) -> np.ndarray:
    assert cli.run(["generate", str(run), f"prompt={PROMPT}", f"out={out}", *given]) == 0
    return drawn(out)


def test_pictures_and_how_they_were_made(run, tmp_path, capsys):
    assert draw(run, tmp_path / "out", "num_images=3", "seed=7").shape == (3, 64, 64, 3)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "000.png",
        "001.png",
        "002.png",
        "samples.json",
    ]
    listing = json.loads((tmp_path / "out" / "samples.json").read_text())
    assert [entry["seed"] for entry in listing] == [7, 8, 9]
    expected = {
        "file": "001.png",
        "prompt": PROMPT,
        "negative_prompt": "",
        "sampler": "ddim",
        "num_inference_steps": 2,
        "guidance_scale": 3.0,
        "checkpoint": "step-00000002",
        "step": 2,
        "initial_noise_sha256": sha256(initial_noise([8], (4, 32, 32)).numpy().tobytes()).hexdigest(),
    }
    assert expected.items() <= listing[1].items()
    assert "code_version" in listing[1]
    assert "step-00000002" in capsys.readouterr().out


def test_a_picture_depends_on_its_seed_alone(run, tmp_path):
    """Noise equal to the bit, pixels within 1/255, whatever the batch size and the place in the list."""
    together = draw(run, tmp_path / "a", "num_images=4", "seed=7")
    pairs = draw(run, tmp_path / "b", "num_images=4", "seed=7", "batch_size=2")
    later = draw(run, tmp_path / "c", "num_images=2", "seed=9")
    assert np.abs(together - pairs).max() <= 1
    assert np.abs(together[2:] - later).max() <= 1
    digests = [
        {e["seed"]: e["initial_noise_sha256"] for e in json.loads((tmp_path / name / "samples.json").read_text())}
        for name in "abc"
    ]
    assert digests[0] == digests[1]
    assert digests[2].items() <= digests[0].items()
    assert len(set(digests[0].values())) == 4
    assert np.abs(together[0] - together[1]).mean() > 5


def test_the_newest_averaged_weights_are_used(run, recipe, tmp_path):
    config = configs.load(str(recipe), ["sampling.num_images=1"]).config
    built = parts.build(config)
    built.net.load_state_dict(weights(-0.02, built))
    built.net.eval()
    expected = list(pictures.draw_pictures(built, 64, config.sampling, [PROMPT], [7]))
    assert np.array_equal(draw(run, tmp_path / "a", "seed=7"), np.stack(expected))
    older = draw(run, tmp_path / "b", "seed=7", "resume_from_checkpoint=step-00000001")
    assert not np.array_equal(older, np.stack(expected))


def test_a_recipe_stands_for_its_run(run, recipe, tmp_path):
    by_folder = draw(run, tmp_path / "a")
    assert np.array_equal(by_folder, draw(recipe, tmp_path / "b"))
    assert np.array_equal(by_folder, draw(recipe, tmp_path / "c", f"output_dir={run.parent}", "--run_name", "tiny"))


def test_pictures_are_never_overwritten(run, tmp_path):
    for _ in range(2):
        assert cli.run(["generate", str(run), f"prompt={PROMPT}"]) == 0
    names = {path.name for path in (run / "generated").iterdir()}
    assert {"a-small-green-star-on-a-white-background", "a-small-green-star-on-a-white-background-2"} <= names
    draw(run, tmp_path / "out")
    assert cli.run(["generate", str(run), f"prompt={PROMPT}", f"out={tmp_path / 'out'}"]) == 2


def test_prompts_from_a_file(run, tmp_path):
    (tmp_path / "list.txt").write_text("a red circle\n\n  größer, blue \n", encoding="utf-8")
    given = [f"prompts_file={tmp_path / 'list.txt'}", f"out={tmp_path / 'out'}", "num_images=2", "seed=1"]
    assert cli.run(["generate", str(run), *given]) == 0
    listing = json.loads((tmp_path / "out" / "samples.json").read_text())
    assert [e["prompt"] for e in listing] == ["a red circle"] * 2 + ["größer, blue"] * 2
    assert [e["seed"] for e in listing] == [1, 2, 3, 4]


def test_the_negative_prompt_counts(run, tmp_path):
    plain, dark = draw(run, tmp_path / "a"), draw(run, tmp_path / "b", "negative_prompt=dark")
    assert not np.array_equal(plain, dark)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "what shall be drawn"),
        (["prompt=a", "prompts_file=b"], "choose one"),
        (["prompts_file=missing.txt"], "cannot be read"),
        (["prompt=a", "objective.name=x0"], "fixed when"),
        (["prompt=a", "optimizer.learning_rate=1"], "without effect"),
        (["prompt=a", "num_images=0"], "nothing to draw"),
        (["prompt=a", "sampler=dim"], "ddim"),
        (["prompt=a", "guidance=3"], "no such setting"),
        (["prompt=a", "resume_from_checkpoint=step-00000009"], "it has: step-00000001, step-00000002"),
        (["prompt=a", "run_name=other"], "would have no effect"),
    ],
)
def test_what_cannot_be_done_is_refused(run, capsys, given, said):
    assert cli.run(["generate", str(run), *given]) == 2
    assert said in capsys.readouterr().err


def test_places_without_a_run_are_refused(recipe, tmp_path, capsys):
    assert cli.run(["generate", str(recipe), "prompt=a", "run_name=none"]) == 2
    assert "daguerre train" in capsys.readouterr().err
    assert cli.run(["generate", str(tmp_path), "prompt=a"]) == 2
    assert "no run folder" in capsys.readouterr().err
    (tmp_path / "model_index.json").touch()
    assert cli.run(["generate", str(tmp_path), "prompt=a"]) == 2
    assert "StableDiffusionPipeline.from_pretrained" in capsys.readouterr().err
    assert cli.run(["generate"]) == 2
    assert "which run" in capsys.readouterr().err


def test_a_run_without_a_checkpoint_says_so(run, tmp_path, capsys):
    young = RunFolder(tmp_path / "young")
    young.path.mkdir()
    young.config.write_text((run / "config.yaml").read_text())
    assert cli.run(["generate", str(young.path), "prompt=a"]) == 2
    assert "no checkpoint yet" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_passed_over(run, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    path = copy / "checkpoints" / "step-00000002" / "ema.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    draw(copy, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "samples.json").read_text())[0]["step"] == 1
    assert "ema.safetensors" in capsys.readouterr().out

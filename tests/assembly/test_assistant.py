"""A LoRA that acts in training alone, on every family that has the setting: losses are those of the base with it in its
weights, images those of the base, and a run knows which one it has."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import forked_runs
import numpy as np
import pytest
import several_devices
import tiny_families
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_families import flux2
from tiny_runs import lines

from daguerre import errors, plugins
from daguerre.assembly import parts
from daguerre.assembly.parts import Components
from daguerre.bench import inputs
from daguerre.cli import main
from daguerre.config import config as configs
from daguerre.config.config import Config
from daguerre.errors import UserError
from daguerre.families.pretrained import catalogue
from daguerre.generation import generate
from daguerre.kernels import blocks
from daguerre.memory import static
from daguerre.models.settings import ASSISTANT
from daguerre.types import REFERENCES, SEEN, Prompt

SIDE_PX, RANK = 64, 3
NAMES = [name for name, kind in catalogue.pretrained().items() if ASSISTANT in kind.model_fields]
OTHERS = {"flux": {"guidance_embeds": False}, "flux2": {"is_distilled": True}, "krea2": {"is_distilled": True}}
OTHERS |= {"flux3": {"flow_map": True}}
"""How a tiny base is written that is distilled; the other families say so by a setting, or cannot be."""


def model(name: str, folder: Path) -> dict[str, Any]:
    """Settings of a family with tiny networks, distilled where the family knows that."""
    found = tiny_families.settings(name, folder)
    if name in OTHERS:
        place = import_module(f"tiny_families.{name}").write(folder / "few", **OTHERS[name])
        return found | {"pretrained_model_name_or_path": str(place)}
    known = "is_distilled" in plugins.find("families", name).Settings.model_fields
    return found | ({"is_distilled": True} if known else {})


def factors(network: torch.nn.Module, rank: int = RANK, seed: int = 0) -> dict[str, torch.Tensor]:
    """Large ones for every linear layer of attention, as diffusers names them."""
    draw = torch.Generator().manual_seed(seed)
    found: dict[str, torch.Tensor] = {}
    for layer, module in network.named_modules():
        if isinstance(module, torch.nn.Linear) and "attn" in layer.replace("attention", "attn"):
            out, columns = module.weight.shape
            found[f"transformer.{layer}.lora_A.weight"] = torch.randn(rank, columns, generator=draw) / columns**0.5
            found[f"transformer.{layer}.lora_B.weight"] = torch.randn(out, rank, generator=draw)
    return found


def recipe(place: Path, own: dict[str, Any], **more: Any) -> Path:
    sections = {
        "run_name": "run",
        "output_dir": str(place),
        "model": own,
        "objective": {"name": "flow"},
        "adapter": {"name": "lora", "rank": 2},
        "data": {"source": "shapes", "resolution": SIDE_PX, "checked_prompts": 2},
        "training": {"duration": "2 steps", "global_batch_size": 2, "device": "cpu"},
        "optimizer": {"learning_rate": 1e-2},
        "lr_scheduler": {"warmup": "0 steps"},
        "ema": {"enabled": False},
        "validation": {"every": None},
        "checkpoint": {"every": "1 steps"},
        "sampling": {"num_images": 0, "num_inference_steps": 2, "sampler": "euler", "guidance_scale": 0},
        "logging": {"every": "1 steps", "tensorboard": False},
    }
    path = place / "recipe.yaml"
    path.write_text(json.dumps({**sections, **more}))
    return path


def built(path: Path, *given: str) -> tuple[Config, Components]:
    """The parts as a run has them, with additions of the adapter that are not zero."""
    config = configs.load(str(path), given).config
    made = parts.build(config, trains=True)
    with torch.no_grad():
        for name, parameter in made.net.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
    return config, made


def loss(config: Config, made: Components) -> torch.Tensor:
    with torch.no_grad():
        batch = inputs.random_batch(made, 2, inputs.image_shape(config))
        return made.loss(made.net.eval(), batch).loss_B


def losses_of(run: Path) -> list[float]:
    return [line["learning/loss"] for line in lines(run) if "learning/loss" in line]


def drawn(config: Config, made: Components) -> np.ndarray:
    rule = made.family.prompt_references
    needed = REFERENCES[: rule.least] if rule is not None else ()
    grey = np.full((SIDE_PX, SIDE_PX, 3), 128, np.uint8)
    prompt = Prompt("a red circle", images={each: grey for name in needed for each in (name, SEEN[name])})
    request = generate.ImageRequest(0, prompt, 0, (SIDE_PX, SIDE_PX), config.sampling.guidance_scale)
    (image,) = generate.generate(made, config.sampling, [request])
    return image.pixels_HWC


QUICK = ("dit", "flux2")
"""The others are distilled by a setting (FLUX.3, Anima) or by the index of the pipeline, as FLUX.2, or cannot be."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name not in QUICK)) for name in NAMES])
def test_losses_are_those_of_the_base_with_it_and_images_those_of_the_base(name: str, tmp_path: Path) -> None:
    if name == "anima":
        from tiny_families.anima import with_resize

        with_resize()
    own = model(name, tmp_path / "model")
    path, file = recipe(tmp_path, own), tmp_path / "assistant.safetensors"
    family = plugins.find("families", name).load(configs.load(str(path), []).config.model, 0)
    save_file(factors(family.components["transformer"]), file)
    if family.distilled:
        with pytest.raises(UserError, match=r"distilled to few steps.*or give model\.assistant=FILE"):
            built(path)
    config, helped = built(path, f"model.assistant={file}")
    denoiser: Any = helped.family.components["transformer"]
    plain = {each.layer: each for each in helped.family.components[ASSISTANT].products}  # type: ignore[union-attr]
    assert len(plain) == len(load_file(file)) // 2
    found, image = loss(config, helped), drawn(config, helped)
    assert torch.equal(loss(config, helped), found), "it acts again behind images"
    with helped.family.components[ASSISTANT].absent():  # type: ignore[operator]
        without, other = loss(config, helped), drawn(config, helped)
    assert np.array_equal(image, other)
    assert not torch.allclose(found, without, rtol=1e-3)
    # The same product in the weights themselves, by hand.
    with torch.no_grad():
        for layer, product in plain.items():
            module = denoiser.get_submodule(layer)
            getattr(module, "base_layer", module).weight.add_(product.up @ product.down)
    with helped.family.components[ASSISTANT].absent():  # type: ignore[operator]
        torch.testing.assert_close(loss(config, helped), found, rtol=2e-5, atol=0)
        assert not np.array_equal(drawn(config, helped), image)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("few")
    flux2.write(place / "klein", is_distilled=True)
    for name, seed in (("one", 0), ("other", 1)):
        family = tiny_families.load("flux2", place / "model")
        save_file(factors(family.components["transformer"], seed=seed), place / f"{name}.safetensors")
    return place


def of_klein(base: Path, place: Path, **more: Any) -> Path:
    place.mkdir(exist_ok=True)
    own = {"family": "flux2", "pretrained_model_name_or_path": str(base / "klein"), **flux2.reading()}
    return recipe(place, own, **more)


def test_a_run_goes_on_with_the_same_one_alone_and_exports_what_it_has_learnt(base, tmp_path, capsys) -> None:
    size = {"height": SIDE_PX, "width": SIDE_PX, "num_inference_steps": 2, "guidance_scale": 0}
    path = of_klein(base, tmp_path / "a", sampling={"num_images": 1, "prompts": ["a"], **size})
    file = tmp_path / "a.safetensors"
    file.write_bytes((base / "one.safetensors").read_bytes())
    words = ["train", str(path), f"model.assistant={file}"]
    assert main.run(words) == errors.DONE, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "layers where losses are computed, and not in images and exports" in " ".join(said.split())
    run = tmp_path / "a" / "run"
    losses, adapter = lines(run), load_file(run / "adapter" / "pytorch_lora_weights.safetensors")
    assert {value.shape[0 if "lora_A" in name else 1] for name, value in adapter.items()} == {2}, "the run's own rank"
    # From the middle again, to the bit, with the file in another place.
    moved = file.rename(tmp_path / "moved.safetensors")
    words = ["train", str(path), f"model.assistant={moved}"]
    assert main.run([*words, "resume_from_checkpoint=step-00000001"]) == errors.DONE, capsys.readouterr().err
    assert lines(run) == losses
    again = load_file(run / "adapter" / "pytorch_lora_weights.safetensors")
    assert all(torch.equal(again[name], value) for name, value in adapter.items())
    capsys.readouterr()
    moved.write_bytes((base / "other.safetensors").read_bytes())
    longer = ["training.duration=3 steps", "allow_change=[training.duration]"]
    assert main.run([*words, *longer]) == errors.REFUSED
    assert "was trained on another assistant" in capsys.readouterr().err
    assert main.run(["train", str(path), *longer]) == errors.REFUSED
    assert "Give the same one (model.assistant)" in capsys.readouterr().err
    # It generates without, and without the file.
    moved.unlink()
    out = tmp_path / "out"
    given = [f"height={SIDE_PX}", f"width={SIDE_PX}", "seed=0", f"out={out}"]
    assert main.run(["generate", str(run), "prompt=a", *given]) == errors.DONE, capsys.readouterr().err
    assert (out / "000.png").read_bytes() == (run / "samples" / "step-00000002" / "000.png").read_bytes()


@pytest.mark.long  # of the quick tests, a LoRA is trained and exported without it
def test_full_training_changes_the_base_and_exports_it_without(base, tmp_path, capsys) -> None:
    """Its validation loss is measured with the assistant, as it is trained."""
    path = of_klein(base, tmp_path / "b", adapter={"name": "full"}, optimizer={"learning_rate": 1e-4})
    words = ["train", str(path), f"model.assistant={base / 'one.safetensors'}", "validation.every=1 steps",
             "validation.num_samples=2", "validation.num_levels=1"]  # fmt: skip
    assert main.run(words) == errors.DONE, capsys.readouterr().err
    run = tmp_path / "b" / "run"
    weights = "transformer/diffusion_pytorch_model.safetensors"
    before, now = load_file(base / "klein" / weights), load_file(run / "pipeline" / weights)
    assert before.keys() == now.keys()
    # Adam moves a weight by about the learning rate an update: the assistant's products are far larger.
    assert 0 < max(float((now[name] - value).abs().max()) for name, value in before.items()) < 1e-3
    assert json.loads((run / "pipeline" / "model_index.json").read_text())["is_distilled"] is True
    assert not (run / "pipeline" / ASSISTANT).exists()
    capsys.readouterr()
    words = ["evaluate", str(run), "metrics=[validation_loss]", "metrics.validation_loss.num_samples=2",
             "metrics.validation_loss.quantiles=[0.5]"]  # fmt: skip
    assert main.run([*words, f"out={tmp_path / 'out'}"]) == errors.DONE, capsys.readouterr().err
    (result,) = (tmp_path / "out").glob("*/result.json")
    rows = json.loads(result.read_text())["tables"]["validation_loss-raw"]["rows"]
    of_run = [line["validation/loss"] for line in lines(run) if "validation/loss" in line]
    assert rows[0]["value"] == pytest.approx(of_run[-1], rel=1e-6)


def test_layers_in_few_bits_add_it(base, tmp_path) -> None:
    """And stay as they are: without it they give what they give in a run that has none."""
    path = of_klein(base, tmp_path / "f", adapter={"name": "lora", "rank": 2})
    given = ["training.base_precision=int8", "model.is_distilled=false"]
    plain = loss(*built(path, *given))
    config, helped = built(path, *given, f"model.assistant={base / 'one.safetensors'}")
    assert not torch.allclose(loss(config, helped), plain, rtol=1e-3)
    with helped.family.components[ASSISTANT].absent():
        assert torch.equal(loss(config, helped), plain)


def test_a_plan_counts_it_and_a_tensor_mesh_refuses_it(base, tmp_path) -> None:
    path = of_klein(base, tmp_path / "c")
    given = [f"model.assistant={base / 'one.safetensors'}"]
    config = configs.load(str(path), given).config
    made = parts.outline(config)
    counted = static.count(config, made, config.mesh.resolved(1, 1))
    held = sum(each.kinds["frozen"] for each in counted.held if each.component == ASSISTANT)
    assert held == sum(value.nbytes for value in load_file(base / "one.safetensors").values())
    mesh = configs.load(str(path), [*given, "mesh.ici_tensor_parallelism=2"]).config.mesh.resolved(2, 1)
    with pytest.raises(UserError, match=r"set mesh\.ici_tensor_parallelism=1"):
        static.count(config, made, mesh)


def test_what_is_no_plain_lora_of_the_denoiser_is_refused(base, tmp_path) -> None:
    path = of_klein(base, tmp_path / "d")
    with safe_open(base / "one.safetensors", "pt") as opened:
        name = next(iter(opened.keys())).partition(".lora_")[0]
    encoder: Any = tiny_families.load("flux2", tmp_path).components["text_encoder"]
    reading = encoder.model.layers[0].self_attn.q_proj.weight
    pair = load_file(base / "one.safetensors")
    whole = pair[f"{name}.lora_B.weight"] @ pair[f"{name}.lora_A.weight"]
    reader = "text_encoder.model.layers.0.self_attn.q_proj"
    rows, width = reading.shape
    for tensors, said in (
        ({f"{name}.diff": whole}, "a product of two matrices alone"),
        ({f"{reader}.lora_A.weight": torch.ones(2, width), f"{reader}.lora_B.weight": torch.ones(rows, 2)},
         "an assistant acts on the transformer alone"),
        ({"transformer.nothing.lora_A.weight": torch.ones(2, 2),
          "transformer.nothing.lora_B.weight": torch.ones(2, 2)}, "was made for another model"),
    ):  # fmt: skip
        save_file(tensors, tmp_path / "wrong.safetensors")
        with pytest.raises(UserError, match=said):
            built(path, f"model.assistant={tmp_path / 'wrong.safetensors'}")
    with pytest.raises(UserError, match=r"model\.assistant: there is no file"):
        built(path, f"model.assistant={tmp_path / 'none.safetensors'}")


@pytest.mark.long
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_devices_train_as_one(base, tmp_path, adapter) -> None:
    """Over data and fsdp."""
    more: dict[str, Any] = {"training": {"duration": "3 steps", "global_batch_size": 4}}
    more |= {"optimizer": {"learning_rate": 1e-4, "epsilon": 1e-6}, "checkpoint": {"every": None, "export": False}}
    path = of_klein(base, tmp_path / "e", **more)
    given = [f"model.assistant={base / 'one.safetensors'}", f"adapter.name={adapter}"]
    given += [] if adapter == "full" else ["adapter.rank=2"]
    runs = {"one": (1, 1, 1), "data": (2, 2, 1), "fsdp": (2, 1, 2)}
    plan = []
    for run, (size, data, fsdp) in runs.items():
        axes = [f"mesh.ici_data_parallelism={data}", f"mesh.ici_fsdp_parallelism={fsdp}"]
        plan.append(forked_runs.run(tmp_path / "e", run, size, *given, *axes, recipe=str(path)))
    codes = forked_runs.together(tmp_path / "e", plan)
    assert several_devices.zeros(codes), [(tmp_path / "e" / f"{r}.seen.log-0").read_text()[-2000:] for r in runs]
    losses = {run: losses_of(tmp_path / "e" / run) for run in runs}
    assert len(losses["one"]) == 3
    for run in runs:
        assert losses[run] == pytest.approx(losses["one"], rel=1e-5), run


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # those of torch itself while it traces
def test_compiled_blocks_add_it(base, tmp_path, monkeypatch) -> None:
    """Layers of blocks that are alike but for it, too. What is traced runs as it is: compiling takes minutes."""
    place, found = flux2.write(tmp_path / "two", is_distilled=True, num_single_layers=2), {}

    def traced(function: Any, **options: Any) -> Any:
        return compile_as_it_is(function, backend="aot_eager", dynamic=False)

    compile_as_it_is = torch.compile
    monkeypatch.setattr(blocks.torch, "compile", traced)
    monkeypatch.setattr(blocks, "_check_compiler", lambda device: None)
    monkeypatch.setattr(blocks, "_keep_what_is_compiled", lambda folder: None)
    for compiled in ("false", "blocks"):
        path = of_klein(base, tmp_path / compiled)
        words = [f"model.assistant={base / 'one.safetensors'}", f"training.compile={compiled}"]
        words.append(f"model.pretrained_model_name_or_path={place}")
        assert main.run(["train", str(path), *words, "checkpoint.export=false"]) == errors.DONE
        found[compiled] = losses_of(tmp_path / compiled / "run")
    assert found["blocks"] == pytest.approx(found["false"], rel=1e-5)

"""Trainers of autoencoders as commands: Stage A, the previewer and its EfficientNet, the EfficientNet with Stage B,
and KL autoencoders that were trained before. Terms of their loss: tests/objectives/test_autoencoder_terms.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import data_sets
import forked_runs
import numpy as np
import pytest
import torch
import yaml
from diffusers import AutoencoderKL
from diffusers.pipelines.deprecated.wuerstchen.modeling_paella_vq_model import PaellaVQModel
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_cascade import EFFNET, PREVIEWER, TINY_B, VQGAN, write_decoder

from daguerre import errors
from daguerre.assembly import parts as built
from daguerre.assembly.batch_sizes import BatchSizes, check_uncut_batches, couples_samples, shared_out
from daguerre.assembly.loss_networks import Source
from daguerre.checkpoint.store import Store
from daguerre.cli import main
from daguerre.config import config as configs
from daguerre.data.sources import shapes
from daguerre.errors import UserError
from daguerre.families.cascade.batch_norms import KeptBatchNorm2d
from daguerre.memory import static

KL = {
    "block_out_channels": [8, 16],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "latent_channels": 3,
    "norm_num_groups": 4,
    "sample_size": 16,
    "scaling_factor": 0.25,
}
JUDGED = {"name": "autoencoder", "adversarial": {"channels": 4, "layers": 1, "start_steps": 1}}
MODELS: dict[str, dict[str, Any]] = {
    "stage_a": {"vqgan": VQGAN},
    "previewer": {"previewer": {"hidden_channels": 16}, "effnet": str(EFFNET)},
    "autoencoder": {"vae": KL},
}


def recipe(folder: Path, family: str, objective: dict[str, Any] | None = None, **model: Any) -> str:
    """A recipe of a few updates."""
    tree = {
        "run_name": family,
        "output_dir": str(folder),
        "model": {"family": family, **(model or MODELS[family])},
        "objective": objective or {"name": "autoencoder"},
        "data": {"source": "shapes", "caption_dropout": 0},
        "training": {"duration": "4 steps", "global_batch_size": 2},
        "lr_scheduler": {"warmup": "1 step"},
        "optimizer": {"learning_rate": 1e-2},
        "ema": {"decay": 0.5},
        "checkpoint": {"every": "2 steps"},
        "validation": {"every": "2 steps", "num_samples": 2, "num_levels": 1},
        "sampling": {"num_images": 0},
        "logging": {"every": "1 step", "tensorboard": False},
        "loader": {"num_workers": 0},
    }
    place = folder / f"{family}.yaml"
    place.write_text(yaml.safe_dump(tree))
    return str(place)


def newest(run: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint."""
    folder = sorted((run / "checkpoints").glob("step-*"))[-1]
    return {
        f"{path.stem}/{name}": value
        for path in folder.rglob("*.safetensors")
        for name, value in load_file(path).items()
    }


def test_a_run_that_goes_on_has_its_discriminator_codebook_and_moments_to_the_bit(tmp_path: Path) -> None:
    given = recipe(tmp_path, "stage_a", JUDGED)
    assert main.run(["train", given, "run_name=whole"]) == errors.DONE
    for duration in ("2 steps", "4 steps"):
        assert main.run(["train", given, "run_name=parts", f"training.duration={duration}"]) == errors.DONE
    whole, parts = newest(tmp_path / "whole"), newest(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert [name for name, value in whole.items() if not torch.equal(value, parts[name])] == []
    names = " ".join(whole)
    for part in ("discriminator.head.weight", "vquantizer.embedding.weight", "adversarial_weight"):
        assert part in names
    losses = [json.loads(line) for line in (tmp_path / "whole/metrics/metrics.jsonl").read_text().splitlines()]
    assert losses[1]["learning/adversarial_weight"] > 0
    assert any("validation/psnr" in line for line in losses)


def test_stage_a_is_exported_as_diffusers_and_stability_read_it(tmp_path: Path) -> None:
    assert main.run(["train", recipe(tmp_path, "stage_a")]) == errors.DONE
    run, one = tmp_path / "stage_a", tmp_path / "stage_a.safetensors"
    assert main.run(["convert", "export", str(run), "format=single_file", f"out={one}"]) == errors.DONE
    folder = PaellaVQModel.from_pretrained(run / "pipeline" / "vqgan").state_dict()
    assert "vquantizer.codebook.weight" in load_file(one)
    again = recipe(tmp_path, "stage_a", vqgan=str(one))
    read = built.load(configs.load(again, []).config)[0].components["vqgan"].state_dict()
    assert read.keys() == folder.keys()
    assert all(torch.equal(value, folder[name]) for name, value in read.items())


def test_a_previewer_learns_with_its_effnet_and_both_are_files_of_their_own(tmp_path: Path, capsys) -> None:
    given = recipe(tmp_path, "previewer", previewer={"hidden_channels": 16}, effnet=str(EFFNET), latent_noise=0.1)
    learns = "adapter.train=[previewer, effnet]"
    assert main.run(["train", given, learns, "data.resolution=64"]) == errors.DONE
    run = tmp_path / "previewer"
    before = load_file(EFFNET)
    for component, theirs in (("effnet", before), ("previewer", load_file(PREVIEWER))):
        one = tmp_path / f"{component}.safetensors"
        command = ["convert", "export", str(run), "format=single_file", f"component={component}", f"out={one}"]
        assert main.run(command) == errors.DONE
        made, folder = load_file(one), load_file(run / "pipeline" / component / "diffusion_pytorch_model.safetensors")
        assert made.keys() == theirs.keys()
        assert all(torch.equal(value, folder[name]) for name, value in made.items())
    after = load_file(tmp_path / "effnet.safetensors")
    moved = {name for name, value in before.items() if not torch.equal(after[name], value)}
    assert any(name.endswith("0.0.weight") for name in moved)
    assert not any("running" in name for name in moved), "norms of weights that were read keep their statistics"
    wrong = ["convert", "export", str(run), "format=single_file", "component=unet", f"out={tmp_path / 'x.safetensors'}"]
    assert main.run(wrong) == errors.REFUSED
    assert "it has previewer, effnet" in capsys.readouterr().err.replace("effnet, previewer", "previewer, effnet")


@pytest.mark.long  # of the quick tests, a previewer learns with its effnet
def test_an_effnet_learns_with_stage_b(tmp_path: Path) -> None:
    base = write_decoder(tmp_path / "base")
    given = recipe(
        tmp_path, "cascade_b", {"name": "eps", "schedule": {"name": "cosine"}},
        pretrained_model_name_or_path=str(base), effnet=str(EFFNET), decoder=TINY_B, effnet_dropout=0.0,
    )  # fmt: skip
    short = ["training.duration=2 steps", "sampling.num_inference_steps=1"]
    assert main.run(["train", given, "adapter.train=[decoder, effnet]", *short]) == errors.DONE
    assert main.run(["train", given, "run_name=alone", *short]) == errors.DONE
    before = load_file(EFFNET)
    for run, learns in (("cascade_b", True), ("alone", False)):
        after = load_file(tmp_path / run / "pipeline" / "effnet" / "diffusion_pytorch_model.safetensors")
        assert any(not torch.equal(after[name], value) for name, value in before.items()) == learns
    assert "outline" in (tmp_path / "alone" / "evaluation.json").read_text(), "of images that it makes again"
    _evaluate_measures_what_generate_makes_again(tmp_path / "cascade_b", tmp_path)


def _evaluate_measures_what_generate_makes_again(run: Path, folder: Path) -> None:
    """Of a run of Stage B: the same PSNR, from the same captions and noise."""
    source, told = shapes.open_source(shapes.Settings(), "held_out"), []
    for number in range(3):
        record, picture, out = source.record(number), folder / f"{number}.png", folder / f"again-{number}"
        Image.fromarray(record.image).save(picture)
        asked = [f"prompt={record.texts['text']}", f"seed={number}", f"image={picture}", f"out={out}"]
        assert main.run(["generate", str(run), *asked]) == errors.DONE
        told.append(json.loads((out / "000.json").read_text())["psnr"])
    assert main.run(["evaluate", str(run), "num_images=3"]) == errors.DONE
    (result,) = (run / "evaluations").rglob("result.json")
    found = json.loads(result.read_text())["tables"]
    assert found.keys() == {"psnr", "ssim"}
    assert found["psnr"]["rows"][0]["value"] == pytest.approx(np.mean(told), rel=1e-3)
    assert main.run(["evaluate", str(run), "num_images=3", "num_inference_steps=2"]) == errors.DONE
    assert len([*(run / "evaluations").rglob("result.json")]) == 2, "another protocol"


@pytest.mark.long  # of the quick tests, test_recipes_train.py trains an autoencoder
def test_a_decoder_is_fine_tuned_alone_and_opened_by_diffusers(tmp_path: Path) -> None:
    AutoencoderKL(**KL).save_pretrained(tmp_path / "vae")
    given = recipe(tmp_path, "autoencoder", JUDGED, vae=str(tmp_path / "vae"), train="decoder")
    assert main.run(["train", given, "training.gradient_checkpointing=true"]) == errors.DONE
    before = load_file(tmp_path / "vae" / "diffusion_pytorch_model.safetensors")
    made = AutoencoderKL.from_pretrained(tmp_path / "autoencoder" / "pipeline" / "vae")
    moved = {name for name, value in made.state_dict().items() if not torch.equal(before[name], value)}
    assert {name.partition(".")[0] for name in moved} == {"decoder", "post_quant_conv"}
    assert made.config.scaling_factor == 0.25
    out = ["evaluate", str(tmp_path / "autoencoder"), "num_images=6"]
    assert main.run(out) == errors.DONE
    (result,) = (tmp_path / "autoencoder" / "evaluations").rglob("result.json")
    tables = json.loads(result.read_text())
    assert "psnr" in json.dumps(tables)
    assert "ssim" in json.dumps(tables)
    assert main.run(["train", given, "objective.kl_weight=0.1", "run_name=other"]) == errors.REFUSED
    whole = ["model.train=all", "objective.kl_weight=0.1", "run_name=whole"]
    assert main.run(["train", given, *whole]) == errors.DONE
    own = AutoencoderKL.from_pretrained(tmp_path / "whole" / "pipeline" / "vae").state_dict()
    assert not torch.equal(own["encoder.conv_in.weight"], before["encoder.conv_in.weight"])


class TestWhatCannotBe:
    def refused(self, capsys: Any, *arguments: str) -> str:
        assert main.run(["train", *arguments]) == errors.REFUSED
        return " ".join(capsys.readouterr().err.split())

    def test_norms_over_the_batch_are_not_cut(self, tmp_path: Path, capsys) -> None:
        given = recipe(tmp_path, "stage_a")
        text = self.refused(capsys, given, "training.per_device_batch_size=1")
        assert "norms over the batch, such as vqgan.down_blocks.3.1, are trained from random weights" in text
        parts = built.outline(configs.load(given, []).config)
        with pytest.raises(UserError, match="cannot be split over 2 devices"):
            check_uncut_batches(configs.load(given, []).config, BatchSizes(4, 2, 2), parts.objective, parts.net)
        save_file(PaellaVQModel(**VQGAN).state_dict(), tmp_path / "a.safetensors")
        kept = built.load(configs.load(recipe(tmp_path, "stage_a", vqgan=str(tmp_path / "a.safetensors")), []).config)
        assert not couples_samples(parts.objective, kept[1].net)
        assert any(
            isinstance(module, KeptBatchNorm2d) and not module.training for module in kept[1].net.train().modules()
        )

    def test_without_held_out_images_nothing_is_made_again(self, tmp_path: Path, capsys) -> None:
        data_sets.folder(tmp_path / "images", 4)
        own = [
            f"data.path={tmp_path / 'images'}",
            "data.source=folder",
            "data.held_out_fraction=0",
            "data.resolution=64",
        ]
        short = ["training.duration=1 steps", "validation.every=null", "checkpoint.every=1 steps"]
        assert main.run(["train", recipe(tmp_path, "stage_a"), *own, *short]) == errors.DONE
        assert main.run(["evaluate", str(tmp_path / "stage_a")]) == errors.REFUSED
        assert "no images to make again: a run with data.held_out_fraction above 0" in capsys.readouterr().err

    def test_networks_of_a_loss_are_not_split(self, tmp_path: Path) -> None:
        loaded = configs.load(recipe(tmp_path, "autoencoder", JUDGED), [])
        with pytest.raises(UserError, match=r"networks of this loss \(discriminator\).*data parallelism alone"):
            shared_out(loaded, loaded.config.mesh.model_copy(update={"ici_fsdp_parallelism": 2}).resolved(2, 1))

    def test_lpips_without_its_file(self, tmp_path: Path, capsys) -> None:
        given = recipe(tmp_path, "autoencoder")
        text = self.refused(capsys, given, f"objective.perceptual.path={tmp_path / 'none'}")
        assert "objective.perceptual.path" in text
        assert "vgg.pth of the package lpips" in text

    def test_adapters_on_what_makes_latents(self, tmp_path: Path, capsys) -> None:
        given = recipe(tmp_path, "previewer")
        text = self.refused(capsys, given, "adapter.name=lora", "adapter.rank=2")
        assert "previewer is not a component that model.family=previewer can train; it reads or makes images" in text

    def test_another_familys_objective(self, tmp_path: Path, capsys) -> None:
        plain = {"name": "eps"}
        text = self.refused(capsys, recipe(tmp_path, "autoencoder", plain))
        assert "objective.name=eps cannot train model.family=autoencoder, which makes images again" in text
        text = self.refused(capsys, "quickstart", "objective={name: autoencoder}", f"output_dir={tmp_path}")
        assert "cannot train model.family=sd, which makes no images again" in text


def test_plan_counts_the_discriminator(tmp_path: Path) -> None:
    config = configs.load(recipe(tmp_path, "autoencoder", JUDGED), []).config
    parts = built.outline(config)
    found = static.count(config, parts, config.mesh.resolved(1, 1))
    counted = {name: sum(each.numbers for each in held) for name, held in found.components()}
    made = config.objective.networks["discriminator"].network(Source(config, parts.family))
    assert counted["discriminator"] == sum(p.numel() for p in made.parameters())


@pytest.mark.long
def test_two_processes_train_the_same_discriminator(tmp_path: Path) -> None:
    """Data parallelism: the balance, the discriminator and the autoencoder, as on one device."""
    given = recipe(tmp_path, "autoencoder", JUDGED)
    runs = [
        forked_runs.run(tmp_path, f"on{size}", size, "training.global_batch_size=4", recipe=given) for size in (1, 2)
    ]
    assert forked_runs.together(tmp_path, runs) == [[0], [0, 0]]
    stores = [Store(tmp_path / name / "checkpoints") for name in ("on1", "on2")]
    one, two = (store.load(store.root / store.names()[-1], ["model", "objective"]).tensors for store in stores)
    for group, tensors in one.items():
        for name, value in tensors.items():
            if name.endswith("to_k.bias") or name == "discriminator.convs.1.bias":
                continue  # its gradient is zero but for rounding: a norm of each channel follows
            distance = torch.linalg.vector_norm((two[group][name] - value).float())
            part = 1e-2 if name == "mean_square" else 1e-4  # an estimate from the images of rank 0
            assert distance <= part * torch.linalg.vector_norm(value.float()), name

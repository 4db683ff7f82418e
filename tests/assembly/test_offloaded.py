"""Text encoders in the host's memory compute what they compute on the device, and are there while they compute."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_families
import torch
from tiny_models import prompts, write_sdxl

from daguerre import errors
from daguerre.assembly import parts
from daguerre.bench import inputs
from daguerre.cli import main
from daguerre.config import config as configs
from daguerre.memory import peak, static
from daguerre.models import encoders
from daguerre.models.parts.text.language_model import LanguageModel

CPU = torch.device("cpu")
OFFLOAD = "training.text_encoders=offload"


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> list[str]:
    """Of a model with two text encoders."""
    place = tmp_path_factory.mktemp("offloaded")
    base = [f"pretrained_model_name_or_path={write_sdxl(place / 'sdxl')}", "data.source=shapes", "data.resolution=64"]
    sampling = ["sampling.height=64", "sampling.width=64", "sampling.num_images=1", "sampling.num_inference_steps=1"]
    length = ["training.duration=2 steps", "training.global_batch_size=2", "training.per_device_batch_size=1"]
    length += ["training.weights_dtype=float32", "training.mixed_precision=no", "training.gradient_checkpointing=false"]
    others = ["training.device=cpu", "logging.tensorboard=false", "validation.every=null", "data.checked_prompts=2"]
    return [*base, *sampling, *length, *others, "model.probe=false", f"output_dir={place}"]


class Moves:
    """The bytes that are copied to a device, and the most of them that are there at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copied, self.now, self.most = 0, 0, 0
        before, copied = encoders._exchanged, encoders._copied

        def counted(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
            self.copied, self.now = self.copied + tensor.nbytes, self.now + tensor.nbytes
            self.most = max(self.most, self.now)
            return copied(tensor, device)

        def exchanged(*given: Any) -> Any:
            return _after(before(*given), lambda: setattr(self, "now", 0))

        monkeypatch.setattr(encoders, "_copied", counted)
        monkeypatch.setattr(encoders, "_exchanged", exchanged)


class _after:
    def __init__(self, inner: Any, end: Any) -> None:
        self.inner, self.end = inner, end

    def __enter__(self) -> None:
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> Any:
        self.end()
        return self.inner.__exit__(*error)


def test_losses_are_equal_and_one_encoder_is_there_at_a_time(given, monkeypatch) -> None:
    found = []
    for more in ([], [OFFLOAD]):
        moves = Moves(monkeypatch)
        config = configs.load("sdxl_lora", [*given, *more]).config
        made = parts.build(config, trains=True)
        batch = inputs.random_batch(made, 2, inputs.image_shape(config))
        before = dict(made.family.components["text_encoder"].named_parameters())
        with made.autocast():
            found.append(made.loss(made.net, batch).loss_B)
        own = [encoders.held_bytes(made.family.components[name]) for name in ("text_encoder", "text_encoder_2")]
        assert (moves.copied, moves.most) == ((sum(own), max(own)) if more else (0, 0))
        after = made.family.components["text_encoder"].named_parameters()
        assert all(before[name] is p for name, p in after), "the host's own weights are in their places again"
        assert made.family.device == CPU
    assert torch.equal(*found)


def test_a_block_inside_copies_nothing_again(monkeypatch) -> None:
    """As of an encoder that sees pictures, then reads the text with them."""
    moves, network = Moves(monkeypatch), torch.nn.Linear(3, 2)
    encoders.wait(network, CPU)
    with encoders.at_work(network):
        with encoders.at_work(network):
            assert not encoders.is_elsewhere(network)
        assert moves.copied == encoders.held_bytes(network)
    assert encoders.is_elsewhere(network)


@pytest.mark.long
def test_a_run_and_generate_are_the_same(given, tmp_path, capsys) -> None:
    images = []
    for name, more in {"resident": [], "offload": [OFFLOAD]}.items():
        words = [*given, f"output_dir={tmp_path}", f"run_name={name}", *more]
        assert main.run(["train", "sdxl_lora", *words]) == errors.DONE, capsys.readouterr().err
        said = " ".join(capsys.readouterr().out.split())
        assert ("of text encoders are in the host's memory" in said) == bool(more)
        images.append((tmp_path / name / "samples" / "step-00000002" / "000.png").read_bytes())
        out = tmp_path / f"{name}-out"
        words = ["prompt=a", "height=64", "width=64", "num_inference_steps=1", f"out={out}", *more]
        assert main.run(["generate", str(tmp_path / name), *words]) == errors.DONE, capsys.readouterr().err
        images.append((out / "000.png").read_bytes())
    assert images[:2] == images[2:]


@pytest.mark.long
def test_a_plan_counts_the_larger_of_both_phases(given) -> None:
    """What waits is held by no device; while captions are read the encoder is made in a step, before activations."""
    peaks, held = [], []
    for more in ([], [OFFLOAD]):
        config = configs.load("sdxl_lora", [*given, *more]).config
        made = parts.outline(config)
        counted = static.count(config, made, config.mesh.resolved(1, 1))
        own = [encoders.held_bytes(made.family.components[name]) for name in ("text_encoder", "text_encoder_2")]
        held.append(counted.whole)
        peaks.append(peak.SimulatedStep(config, made, counted, False, False).peak(1))
    assert held[0] - held[1] == sum(own)
    assert peaks[1].whole < peaks[0].whole
    assert peaks[1].passes >= max(own)


def test_settings_without_effect_are_refused(given, tmp_path, capsys) -> None:
    trained = ["train", "sdxl", *given, "run_name=x", OFFLOAD, "train_text_encoder=true", "--dry-run"]
    cached = ["sdxl_lora", *given, "run_name=x", OFFLOAD, f"cache.path={tmp_path}"]
    numbers = ["train", "quickstart_vae", OFFLOAD, f"output_dir={tmp_path}", "--dry-run"]
    for words, why in ((trained, "is trained"), (["train", *cached, "--dry-run"], "cache.path has what"),
                       (["train", *cached], "cache.path has what"), (numbers, "reads no captions")):  # fmt: skip
        assert main.run(words) == errors.REFUSED, words
        assert why in " ".join(capsys.readouterr().err.split()), words
    config = configs.load("sdxl_lora", [*cached[1:], "cache.texts=false"]).config
    assert encoders.waiting(parts.outline(config).family.components["text_encoder"]) is not None


@pytest.mark.parametrize("exports", [False, True])
def test_a_frozen_denoiser_makes_room_for_encoders_that_a_cache_has_left_out(exports, tmp_path, monkeypatch) -> None:
    """With a device of another name: what reads a prompt finds the denoiser's frozen weights in the host's memory. The
    encoder's are read of their files, and in the host's memory only where they are exported, too."""
    monkeypatch.setattr(encoders, "_HOMES", ("meta",))
    family = tiny_families.load("flux2", tmp_path)
    settings = family.pretrained.settings
    expected, _ = family.encode_prompts(prompts(["a"]), (3, 64, 64))
    with encoders.leaving_out(["text_encoder"]):
        fresh = tiny_families.plugins.find("families", "flux2").load(settings, 1)
    moves, seen = Moves(monkeypatch), list[bool]()
    transformer = fresh.components["transformer"].requires_grad_(False)
    # Held, as its memory, once free, may be given to the copy that is made next.
    before = [p.detach() for p in transformer.parameters()]
    read = LanguageModel.read

    def watching(*given: Any) -> Any:
        seen.append(encoders.is_elsewhere(transformer))
        return read(*given)

    monkeypatch.setattr(LanguageModel, "read", watching)
    with encoders.present(fresh, CPU, exports=exports):
        assert any(p.is_meta for p in fresh.components["text_encoder"].parameters()) != exports
        found, _ = fresh.encode_prompts(prompts(["a"]), (3, 64, 64))
        assert not encoders.is_elsewhere(transformer)
    assert torch.equal(found["text"], expected["text"])
    assert seen == [True]
    held = encoders.held_bytes(family.components["text_encoder"])
    assert moves.copied == 2 * encoders.held_bytes(transformer) + held * exports
    assert all(p.data_ptr() != old.data_ptr() for p, old in zip(transformer.parameters(), before, strict=True))
    assert encoders.absent(fresh)

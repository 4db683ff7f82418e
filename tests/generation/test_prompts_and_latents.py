"""What a family gets to generate from: prompts as values, and latents with their prompts and seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_drawings
import torch
from torch import nn

from daguerre import keys
from daguerre.assembly.parts import Components
from daguerre.errors import UserError
from daguerre.generation import generate
from daguerre.generation.generate import ImageRequest
from daguerre.models.pixel_codec import levels
from daguerre.samplers.settings import SamplingSettings
from daguerre.types import Cond, Latents, Prompt

SAMPLING = SamplingSettings(num_inference_steps=2, guidance_scale=3.0, batch_size=4)
SIZE = (32, 32)


@pytest.fixture(scope="module")
def built(tiny_sd: Path, tmp_path_factory: pytest.TempPathFactory) -> Components:
    return tiny_drawings.build(tmp_path_factory.mktemp("r"), tiny_sd)


def drawn(built: Components, prompts: Sequence[Prompt], batch_size: int = 4, scale: float = 3.0) -> list[np.ndarray]:
    wanted = (ImageRequest(i, prompt, 7 + i, SIZE, scale) for i, prompt in enumerate(prompts))
    sampling = SAMPLING.model_copy(update={"batch_size": batch_size})
    return [one.pixels_HWC for one in generate.generate(built, sampling, wanted)]


@dataclass(frozen=True)
class NoisyDecoder:
    """Stands for a decoder that is itself a diffusion model: it starts from noise of its own, and reads the prompts."""

    own: Any
    seen: list[Latents]

    def latent_shape(self, pixel_shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.own.latent_shape(pixel_shape)

    def decode(self, latents: Latents) -> np.ndarray:
        self.seen.append(latents)
        x0_BCHW = nn.functional.interpolate(latents.x0_BCHW[:, :3], scale_factor=2)
        shape = tuple(x0_BCHW.shape[1:])
        for row, (prompt, seed) in enumerate(zip(latents.prompts, latents.seeds, strict=True)):
            noise = keys.normals(seed, "sample/decoder", 0, count=int(np.prod(shape))).reshape(shape)
            x0_BCHW[row] += 0.1 * len(prompt.text) * torch.from_numpy(noise).float()
        return levels(x0_BCHW)


def test_a_decoder_gets_the_prompt_and_seed_of_each_row_however_batches_are_cut(built, monkeypatch):
    decoder = NoisyDecoder(built.family.images, [])
    own = replace(built, family=replace(built.family, images=decoder))
    prompts = [Prompt(text) for text in ("red", "a blue square", "red", "green", "")]
    whole = drawn(own, prompts, batch_size=5)
    assert [seed for latents in decoder.seen for seed in latents.seeds] == [7, 8, 9, 10, 11]
    monkeypatch.setattr(generate, "_DECODED_PX", 2 * 32 * 32)  # two at once
    for batch_size in (5, 2):
        decoder.seen.clear()
        again = drawn(own, prompts, batch_size)
        assert all(len(latents.prompts) == len(latents.x0_BCHW) <= 2 for latents in decoder.seen)
        assert [prompt for latents in decoder.seen for prompt in latents.prompts] == prompts
        for image, expected in zip(again, whole, strict=True):
            assert np.abs(image.astype(int) - expected).max() <= 1
    assert not np.array_equal(whole[0], whole[2])  # the same prompt from another seed


def test_each_prompt_has_its_own_negative_text(built):
    """As in a batch in which all have the same."""
    mixed = drawn(built, [Prompt("red", "blue"), Prompt("red"), Prompt("red", "dark")])
    for i, negative in enumerate(("blue", "", "dark")):
        alike = drawn(built, [Prompt("red", negative)] * 3)
        assert np.abs(alike[i].astype(int) - mixed[i]).max() <= 1
    without = drawn(built, [Prompt("red")] * 3)
    assert [bool((one != other).any()) for one, other in zip(mixed, without, strict=True)] == [True, False, True]


def told(prompts: Sequence[Prompt], pixel_shape: tuple[int, ...], unguided: bool) -> Cond:
    """A prompt's control image as one number; the unguided side is shown none."""
    shown = [0.0 if unguided else float(prompt.images["control"].mean()) / 255 for prompt in prompts]
    return {"control": torch.tensor(shown)[:, None]}


class Controlled(nn.Module):
    """The net with what it is told of the control image added."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.seen: list[torch.Tensor] = []

    def forward(self, x_BCHW: torch.Tensor, c_noise_B: torch.Tensor, cond: Cond) -> torch.Tensor:
        self.seen.append(cond["control"])
        return self.net(x_BCHW, c_noise_B, cond) + cond["control"][:, :, None, None]


def test_images_of_a_prompt_reach_the_network_by_name_on_the_side_that_reads_them(built):
    family = replace(built.family, prompt_condition=told, prompt_images=("control",))
    net = Controlled(built.net)
    own = replace(built, family=family, attached=replace(built.attached, net=net))
    white, black = (np.full((32, 32, 3), value, np.uint8) for value in (255, 0))
    bright, dark = drawn(own, [Prompt("red", images={"control": white}), Prompt("red", images={"control": black})])
    assert net.seen[0].flatten().tolist() == [0, 0, 1, 0]  # the unguided side first
    assert not np.array_equal(bright, dark)


def test_an_image_that_nobody_reads_is_refused_by_its_name(built):
    with pytest.raises(UserError, match=r"does not read pose with a prompt: .* text alone"):
        drawn(built, [Prompt("red", images={"pose": np.zeros((8, 8, 3), np.uint8)})])

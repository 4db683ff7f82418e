"""Stage C and Stage B as families: a training step against formulas, what is dropped, sizes, decoding, refusals."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableCascadeDecoderPipeline, StableCascadePriorPipeline
from diffusers.loaders.single_file_utils import convert_stable_cascade_unet_single_file_to_diffusers
from diffusers.schedulers import scheduling_ddpm_wuerstchen as wuerstchen
from losses import loss_of
from safetensors.torch import load_file
from tiny_cascade import EFFNET, TINY_B, TINY_C, stage_b, stage_c, write_decoder, write_prior
from torch.nn import functional
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from daguerre import keys, plugins
from daguerre.errors import UserError
from daguerre.families import cascade_b, cascade_c
from daguerre.families.cascade import initial, sizes
from daguerre.models.family import Family
from daguerre.models.weights.resolve import SHIPPED
from daguerre.objectives.algebra import Diffusion
from daguerre.samplers.draw import draw, fresh_noise, initial_noise
from daguerre.samplers.settings import SamplingSettings
from daguerre.types import Batch, Latents, Prompt

SEED = 7
KEYS = np.array([[i, 0, 0] for i in range(3)], dtype=np.int64)
TEXTS = ["a red circle", "", "two green stars on blue"]


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("cascade")
    return {"c": write_prior(folder / "c"), "b": write_decoder(folder / "b")}


def family(pipelines: dict[str, Path], kind: str, **changes: Any) -> Family:
    module: Any = cascade_c if kind == "c" else cascade_b
    said = (stage_c if kind == "c" else stage_b)(pipelines[kind])
    return module.load(module.Settings.model_validate(said | changes), SEED)


def objective(**changes: Any) -> Diffusion:
    own = plugins.find("objectives", changes.pop("name", "eps"))
    built: Diffusion = own.build(own.Settings.model_validate({"schedule": {"name": "cosine"}} | changes))
    return built.with_noise_conditioning("cosine_time", 1.0)


def batch(made: Family, side: int, trained: Diffusion | None = None) -> Batch:
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 3, side, side), dtype=np.uint8))
    shape = made.latent_shape((3, side, side))
    draws = made.random_inputs(SEED, KEYS, (3, side, side)) | (
        trained.draws(SEED, KEYS, shape).tensors if trained else {}
    )
    return Batch(KEYS, {"image": pixels}, TEXTS, torch.ones(3), TEXTS, np.zeros((3, 6), np.int32), draws)


def level(shift: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a, s and r of the samples: Stability's formulas, in float64."""
    t = torch.from_numpy(keys.batch_uniforms(SEED, "time", KEYS))
    low = math.cos(0.008 / 1.008 * math.pi / 2) ** 2
    variance = (torch.cos((0.008 + t) / 1.008 * math.pi / 2) ** 2 / low).clamp(1e-4, 0.9999)
    bounds = [math.log(end / (1 - end)) for end in (1e-4, 0.9999)]
    log_snr = (torch.log(variance / (1 - variance)) - 2 * math.log(shift)).clamp(*bounds)
    a2 = torch.sigmoid(log_snr)
    r = torch.acos((a2 * low).sqrt()) / (math.pi / 2) * 1.008 - 0.008
    return a2.sqrt(), (1 - a2).sqrt(), r.clamp(0, 1)


def texts(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states before the last norm and pooled features, with padding masked, by transformers alone."""
    tokenizer = CLIPTokenizer.from_pretrained(folder / "tokenizer")
    encoder = CLIPTextModelWithProjection.from_pretrained(folder / "text_encoder").eval()
    said = tokenizer(TEXTS, padding="max_length", max_length=24, truncation=True, return_tensors="pt")
    out = encoder(said.input_ids, attention_mask=said.attention_mask, output_hidden_states=True)
    return out.hidden_states[-1], out.text_embeds[:, None]


def compressed(effnet: Any, pixels: torch.Tensor) -> torch.Tensor:
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return effnet((pixels - mean[:, None, None]) / std[:, None, None])


def gradients(net: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    net.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


class TestStep:
    """The loss and every gradient of an update, against formulas written down here."""

    @pytest.mark.parametrize(("shift", "weighting"), [(1.0, "p2"), (2.0, "none")])
    def test_of_stage_c(self, pipelines, shift, weighting):
        made = family(pipelines, "c", image_embedding_dropout=0.5)
        made.components["prior"].eval()
        trained = objective(schedule={"name": "cosine", "shift": shift}, weighting={"name": weighting})
        given = batch(made, 64, trained)
        x0, cond = made.encode(given)
        ours = loss_of(trained, made.net, x0, cond, given.draws).loss_B
        grads = gradients(made.net, ours.sum())

        a, s, r = level(shift)
        with torch.no_grad():
            latent = compressed(made.components["effnet"], given.pixels_BCHW / 255)
            text, pooled = texts(pipelines["c"])
            small = functional.interpolate(given.pixels_BCHW / 255, (32, 32), mode="bicubic", antialias=True)
            mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None, None]
            std = torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None, None]
            image = made.components["image_encoder"]((small - mean) / std).image_embeds
            kept = torch.from_numpy(keys.batch_uniforms(SEED, "image embedding", KEYS)) >= 0.5
        eps = torch.from_numpy(keys.batch_normals(SEED, "noise", KEYS, (16, 2, 2)))
        x = a.float()[:, None, None, None] * latent + s.float()[:, None, None, None] * eps
        prior = made.components["prior"]
        y = prior(x, r.float(), pooled, text, image[:, None] * kept.float()[:, None, None]).sample
        weight = s.float() ** 2 if weighting == "p2" else torch.ones(3)
        theirs = weight * (y - eps).square().mean((1, 2, 3))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        assert {*kept.tolist()} == {True, False}
        wanted = gradients(made.net, theirs.sum())
        assert grads.keys() == wanted.keys()
        for name, gradient in grads.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-5)

    def test_of_stage_b(self, pipelines):
        """Pyramid noise, adaptive weights in their second update, and images that are scaled before they are read."""
        made = family(pipelines, "b", effnet_dropout=0.4)
        made.components["decoder"].eval()
        trained = objective(weighting={"name": "adaptive"}, noise={"pyramid": 0.75})
        given = batch(made, 128, trained)
        x0, cond = made.encode(given)
        first = loss_of(trained, made.net, x0, cond, given.draws)
        trained.learnt.observe(first, torch.ones(3))
        trained.learnt.absorb(lambda sums: sums, torch.tensor(False))
        ours = loss_of(trained, made.net, x0, cond, given.draws).loss_B
        grads = gradients(made.net, ours.sum())

        a, s, r = level()
        noise, power = keys.batch_normals(SEED, "noise", KEYS, (4, 32, 32)).astype(np.float64), 1.0
        for octave in range(1, 6):  # 16 x 16 to 1 x 1
            side = 32 >> octave
            coarse = keys.batch_normals(SEED, f"noise/pyramid/{octave}", KEYS, (4, side, side))
            noise += 0.75**octave * coarse.repeat(2**octave, axis=2).repeat(2**octave, axis=3)
            power += 0.75 ** (2 * octave)
        eps = torch.from_numpy((noise / power**0.5).astype(np.float32))
        with torch.no_grad():
            encoded = made.components["vqgan"].encode(given.pixels_BCHW / 255, return_dict=False)[0] / 0.43
            scales = 0.5 + 0.5 * keys.batch_uniforms(SEED, "effnet scale", KEYS)
            kept = keys.batch_uniforms(SEED, "effnet", KEYS) >= 0.4
            read = torch.zeros(3, 16, 16, 16)
            for row in np.flatnonzero(kept):
                side = int(128 * scales[row]) // 32 * 32
                small = functional.interpolate(given.pixels_BCHW[row : row + 1] / 255, (side, side), mode="nearest")
                own = compressed(made.components["effnet"], small)
                read[row] = functional.interpolate(own, (16, 16), mode="bilinear", align_corners=True)[0]
            pooled = texts(pipelines["b"])[1]
        x = a.float()[:, None, None, None] * encoded + s.float()[:, None, None, None] * eps
        y = made.components["decoder"](x, r.float(), pooled, effnet=read).sample
        raw = (y - eps).square().mean((1, 2, 3))
        bucket = np.digitize(2 * (a.log() - s.log()).numpy(), np.linspace(-10, 10, 299), right=True)
        assert len({*bucket}) == 3
        theirs = raw / (0.99 + 0.01 * raw.detach())
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        wanted = gradients(made.net, theirs.sum())
        for name, gradient in grads.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-5)


class TestConditioning:
    def test_times_that_the_network_is_told(self):
        """r of the clamped levels, and never 1 (CASCADE.md: 0.0023 to 0.9936); a shift saturates the noisy end."""
        trained = objective()
        ends = trained.c_noise(torch.tensor([0.0, 1.0], dtype=torch.float64))
        assert [round(float(end), 4) for end in ends] == [0.0023, 0.9936]
        a, s = trained.path(torch.tensor([0.0, 1.0], dtype=torch.float64))
        assert [round(float(2 * (x / y).log()), 4) for x, y in zip(a, s, strict=True)] == [9.2102, -9.2102]
        moved = objective(schedule={"name": "cosine", "shift": 4.0})
        t = torch.tensor([0.4, 1.0], dtype=torch.float64)
        gap = [2 * float((o.path(t)[0] / o.path(t)[1]).log()[0]) for o in (trained, moved)]
        assert gap[0] - gap[1] == pytest.approx(2 * math.log(4))
        assert float(moved.c_noise(t)[1]) == pytest.approx(float(ends[1]))

    def test_shares_of_what_is_dropped(self, pipelines):
        many = np.array([[i, 0, 0] for i in range(2000)], dtype=np.int64)
        kept_c = family(pipelines, "c").random_inputs(SEED, many, (3, 64, 64))["image_kept"]
        kept_b = family(pipelines, "b").random_inputs(SEED, many, (3, 64, 64))["effnet_kept"]
        assert kept_c.mean() == pytest.approx(0.1, abs=0.02)
        assert kept_b.mean() == pytest.approx(0.9, abs=0.02)
        again = family(pipelines, "c").random_inputs(SEED, many[1000:], (3, 64, 64))["image_kept"]
        assert torch.equal(again, kept_c[1000:])

    @torch.no_grad()
    def test_a_lower_range_of_scales_is_a_higher_compression(self, pipelines):
        """At a quarter Stage B is told one cell of 128 px, a 128th of the sides, which the usual range never gives."""
        made = family(pipelines, "b", effnet_scale=(0.25, 0.25), effnet_dropout=0.0)
        given = batch(made, 128)
        small = functional.interpolate(given.pixels_BCHW / 255, (32, 32), mode="nearest")
        told = made.encode(given)[1]["effnet"]
        torch.testing.assert_close(told, compressed(made.components["effnet"], small).expand_as(told))
        usual = family(pipelines, "b", effnet_dropout=0.0).encode(given)[1]["effnet"]
        assert all((usual[row] - told[row]).abs().max() > 1e-3 for row in range(3))

    @torch.no_grad()
    def test_padding_is_masked(self, pipelines):
        """Without the mask, as in other families, the features of padding are others."""
        made = family(pipelines, "c")
        assert made.text is not None
        found = made.text.features(made.text.tokens(TEXTS))
        hidden, pooled = texts(pipelines["c"])
        torch.testing.assert_close(found["text"], hidden, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found["pooled"], pooled[:, 0], rtol=1e-4, atol=1e-5)
        reader: Any = made.text
        encoder = reader.encoders[0]
        object.__setattr__(encoder, "reading", replace(encoder.reading, masked=False))
        assert (made.text.features(made.text.tokens(TEXTS))["text"] - hidden).abs().max() > 1e-2

    @torch.no_grad()
    def test_image_prompts(self, pipelines):
        made = family(pipelines, "c")
        picture = np.random.default_rng(1).integers(0, 256, (40, 64, 3), dtype=np.uint8)
        cond, null = made.encode_prompts(
            [Prompt("a"), Prompt("a", images={"image_prompt": picture})], (3, 88, 88), guided=True
        )
        assert null is not None
        assert cond["image"][0].abs().max() == 0
        assert null["image"].abs().max() == 0
        assert cond["image"][1].abs().max() > 0
        told = [Prompt("a", images={"image_prompt": picture})]
        with pytest.raises(UserError, match="image_prompt"):
            family(pipelines, "c", image_prompts=False).encode_prompts(told, (3, 88, 88))

    def test_the_base_is_frozen(self, pipelines):
        """Stability's ControlNet and LoRA leave gradients in the base; here what is not trained requires none."""
        made = family(pipelines, "c").training(["text_encoder"])
        assert not any(p.requires_grad for p in made.components["prior"].parameters())
        assert not made.components["prior"].training


class TestSizes:
    def test_of_stage_c(self, pipelines):
        made = family(pipelines, "c")
        assert made.latent_shape((3, 768, 1024)) == (16, 24, 32)
        assert made.generated.latent_shape((3, 1024, 1368)) == (16, 24, 33)
        for shape, codec in (((3, 760, 768), made.images), ((3, 1020, 1024), made.generated)):
            with pytest.raises(UserError, match="multiples"):
                codec.latent_shape(shape)

    @torch.no_grad()
    def test_images_have_the_size_that_is_asked_for(self, pipelines):
        """Also where the latent is that of other sizes: diffusers' pipelines fail at 23 cells."""
        for made in (family(pipelines, "c"), _with_stages(pipelines)):
            shape = made.generated.latent_shape((3, 88, 120))
            x0 = torch.randn(1, *shape)
            assert made.decode(Latents(x0, [Prompt("a")], [1], (88, 120))).shape == (1, 88, 120, 3)
            assert made.decode(Latents(x0, [Prompt("a")], [1])).shape == (1, 128, 128, 3)
        assert shape == (16, 3, 3)

    @torch.no_grad()
    def test_an_image_starts_from_the_size_of_training(self, pipelines):
        made = family(pipelines, "c", resolution_multiple=64)
        pixels = torch.randint(0, 256, (1, 3, 64, 128), dtype=torch.uint8)
        assert made.encode_images(pixels, [1]).shape == (1, 16, 1, 2)


def _with_stages(pipelines: dict[str, Path], **decode: Any) -> Family:
    said = stage_c(pipelines["c"], pipelines["b"])
    said["decode"] = said["decode"] | decode
    return cascade_c.load(cascade_c.Settings.model_validate(said), SEED)


class TestDecoding:
    @torch.no_grad()
    def test_rows_are_of_their_own_prompt_and_seed(self, pipelines):
        made = _with_stages(pipelines)
        x0 = torch.randn(2, 16, 3, 3)
        prompts = [Prompt("a"), Prompt("something else")]
        both = made.decode(Latents(x0, prompts, [1, 2], (64, 64)))
        alone = made.decode(Latents(x0[1:], prompts[1:], [2], (64, 64)))
        assert np.abs(both[1].astype(int) - alone[0]).max() <= 1
        for other in (Latents(x0[1:], prompts[:1], [2], (64, 64)), Latents(x0[1:], prompts[1:], [3], (64, 64))):
            assert np.abs(made.decode(other).astype(int) - alone).max() > 1
        assert not torch.equal(initial_noise([1], (4,)), initial_noise([1], (4,), "sample/decoder"))

    @torch.no_grad()
    def test_as_diffusers_decodes(self, pipelines, monkeypatch):
        """Same noise, same steps; what is left is the last step's, and the time 1 that diffusers tells."""
        made = _with_stages(pipelines, num_inference_steps=3, guidance_scale=2.0)
        stages: Any = made.generated.trained_on.decoder  # type: ignore[attr-defined]
        monkeypatch.setattr(type(stages.settings), "objective", lambda own: _told_as_diffusers())
        pipe = opened(pipelines["b"], stages)
        pipe.set_progress_bar_config(disable=True)
        x0, shape = torch.randn(1, 16, 6, 6), (4, 64, 64)
        steps = iter(range(9))
        fresh = lambda *_, **__: fresh_noise([5], next(steps), shape, "sample/decoder")  # noqa: E731
        monkeypatch.setattr(wuerstchen, "randn_tensor", fresh)
        theirs = pipe(
            x0, prompt=["a red circle"], num_inference_steps=3, guidance_scale=2.0, output_type="np",
            latents=initial_noise([5], shape, "sample/decoder"), negative_prompt=[""],
        ).images  # fmt: skip
        ours = made.decode(Latents(x0, [Prompt("a red circle")], [5], (256, 256)))
        assert np.abs(ours - theirs * 255).mean() < 0.6
        assert theirs.std() > 0.02

    @torch.no_grad()
    def test_as_diffusers_samples_stage_c(self, pipelines, monkeypatch):
        made = family(pipelines, "c")
        made.net.eval()
        pipe = StableCascadePriorPipeline.from_pretrained(pipelines["c"])
        pipe.set_progress_bar_config(disable=True)
        shape, steps = (16, 3, 3), iter(range(9))
        monkeypatch.setattr(wuerstchen, "randn_tensor", lambda *_, **__: fresh_noise([5], next(steps), shape))
        theirs = pipe(
            prompt=["a red circle"], negative_prompt=["blue"], height=128, width=128, num_inference_steps=3,
            guidance_scale=3.0, latents=initial_noise([5], shape),
        ).image_embeddings  # fmt: skip
        cond, null = made.encode_prompts([Prompt("a red circle", "blue")], (3, 128, 128), guided=True)
        settings = SamplingSettings(sampler="euler_ancestral", num_inference_steps=3, guidance_scale=3.0)
        ours = draw(_told_as_diffusers(), made.net, cond, null, shape, [5], settings)
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-2)
        assert theirs.std() > 0.1


def opened(folder: Path, stages: Any) -> Any:
    """diffusers 0.42.1 cannot open what it has saved itself, as it has moved the class of Stage A."""
    parts = {"tokenizer": CLIPTokenizer.from_pretrained(folder / "tokenizer"), "vqgan": stages.vqgan}
    parts["text_encoder"] = CLIPTextModelWithProjection.from_pretrained(folder / "text_encoder")
    return StableCascadeDecoderPipeline(decoder=stages.unet, scheduler=wuerstchen.DDPMWuerstchenScheduler(), **parts)


def _told_as_diffusers() -> Diffusion:
    """The time itself, 1 at the first step."""
    return objective().with_noise_conditioning("auto", 1.0)


class TestRefused:
    """In words, before anything is trained."""

    @pytest.mark.parametrize(
        ("kind", "changes", "message"),
        [
            ("c", {"prior": "B/decoder"}, "model.prior is Stage B, and must be Stage C"),
            ("b", {"decoder": "C/prior"}, "model.decoder is Stage C, and must be Stage B"),
            ("c", {"prior": str(EFFNET)}, "the EfficientNet encoder"),
            ("c", {"effnet": "C/prior"}, "StableCascadeUNet"),
            ("c", {"decode": {"name": "stages"}, "decoder": "/nowhere"}, "/nowhere"),
            ("c", {"prior": {**TINY_C, "in_channels": 8, "out_channels": 8}}, "channels of the effnet's latents"),
            ("c", {"prior": TINY_C, "size": "1B"}, "size: the size is that of model.prior"),
        ],
    )
    def test_networks_that_do_not_belong(self, kind, changes, message, pipelines):
        places = {"B/": f"{pipelines['b']}/", "C/": f"{pipelines['c']}/"}
        changes = {
            name: next((place + value[2:] for mark, place in places.items() if value.startswith(mark)), value)
            if isinstance(value, str)
            else value
            for name, value in changes.items()
        }
        with pytest.raises((UserError, ValueError), match=message):
            family(pipelines, kind, **changes)

    def test_wuerstchen(self, pipelines, tmp_path):
        (tmp_path / "prior").mkdir()
        (tmp_path / "prior" / "config.json").write_text(json.dumps({"_class_name": "WuerstchenPrior"}))
        (tmp_path / "prior" / "diffusion_pytorch_model.safetensors").write_bytes(b"")
        with pytest.raises(UserError, match="a network of Wuerstchen v2"):
            family(pipelines, "c", prior=str(tmp_path))


class TestPlaces:
    def test_numbers_and_sizes(self, pipelines):
        """From random weights: as published, so that a fresh prior predicts 0; drawn from the seed alone."""
        made = [family(pipelines, "c", prior=TINY_C) for _ in range(2)]
        first, second = (each.components["prior"].state_dict() for each in made)
        assert all(torch.equal(value, second[name]) for name, value in first.items())
        assert first["clf.1.weight"].abs().max() == 0
        torch.manual_seed(SEED)
        network = initial.initialise(type(made[0].components["prior"])(**TINY_C))
        assert all(torch.equal(value, first[name]) for name, value in network.state_dict().items())
        with torch.device("meta"):
            texts = {"projection_dim": 1280, "hidden_size": 32, "num_attention_heads": 2}
            effnet = "stabilityai/x/effnet_encoder.safetensors"
            large = family(pipelines, "b", decoder=None, size="700M", effnet=effnet, text_encoder=texts)
        assert round(sum(p.numel() for p in large.components["decoder"].parameters()) / 1e6, 1) == 699.5

    def test_an_encoder_of_a_folder_or_of_numbers(self, pipelines, tmp_path):
        """As a run exports it; `{}` is EfficientNet-V2-S."""
        first = family(pipelines, "c").components["effnet"]
        first.save_pretrained(tmp_path / "effnet")  # type: ignore[operator]
        again = family(pipelines, "c", effnet=str(tmp_path)).components["effnet"]
        assert all(torch.equal(value, again.state_dict()[name]) for name, value in first.state_dict().items())
        with torch.device("meta"):
            whole = family(pipelines, "c", effnet={}).components["effnet"]
        assert round(sum(p.numel() for p in whole.backbone.parameters()) / 1e6, 2) == 20.18  # type: ignore[union-attr]

    def test_an_encoder_of_another_stride(self, pipelines):
        """A 16th of the sides, where the last stage does not halve them."""
        numbers = {
            "stem_channels": 4,
            "feature_channels": 8,
            "stages": [["fused", 1, stride, 4, 1] for stride in (2, 2, 2)],
        }
        made = family(pipelines, "c", effnet=numbers, resolution_multiple=16)
        assert made.components["effnet"].stride == 16
        assert made.latent_shape((3, 64, 48)) == (16, 4, 3) == made.generated.latent_shape((3, 64, 48))
        x0, _ = made.encode(batch(made, 64))
        assert x0.shape == (3, 16, 4, 4)
        with pytest.raises(UserError, match="multiples of 16"):
            made.latent_shape((3, 24, 64))

    def test_a_text_encoder_without_a_projection_projects_to_the_same(self, pipelines, tmp_path):
        changes = {"text_encoder": "quickstart", "tokenizer": "quickstart"}
        made = family(pipelines, "b", decoder={**TINY_B, "clip_text_pooled_in_channels": 96}, **changes)
        encoder: Any = made.components["text_encoder"]
        assert made.text is not None
        ids = made.text.tokens(["a small red star"])
        pooled = made.text.features(ids)["pooled"]
        plain = CLIPTextModel.from_pretrained(SHIPPED / "quickstart" / "text_encoder", dtype=torch.float32)
        reader: Any = made.text
        tokens = reader.encoders[0].tokens(["a small red star"]).ids_BKT[0]
        mask = (torch.arange(tokens.shape[1]) <= (tokens == plain.config.eos_token_id).int().argmax(1)).long()[None]
        with torch.no_grad():
            torch.testing.assert_close(pooled, plain(tokens, attention_mask=mask).pooler_output)
        encoder.save_pretrained(tmp_path)
        again = CLIPTextModelWithProjection.from_pretrained(tmp_path).state_dict()
        assert all(torch.equal(value, again[name]) for name, value in encoder.state_dict().items())

    def test_a_single_file_of_stability(self, pipelines):
        """Recorded from Stability's code, with the widths of its own text encoder."""
        path = EFFNET.parent / "decoder.safetensors"
        numbers = sizes.told({name: tuple(v.shape) for name, v in _own(path).items()})
        made = family(pipelines, "b", decoder=str(path))
        assert made.components["decoder"].config.block_out_channels == numbers["block_out_channels"]
        own = _own(path)
        assert all(torch.equal(value, own[name]) for name, value in made.components["decoder"].state_dict().items())


def _own(path: Path) -> dict[str, torch.Tensor]:
    return convert_stable_cascade_unet_single_file_to_diffusers(load_file(path))

"""Guidance against closed forms, diffusers' own function, and its pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, StableDiffusionPipeline
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import rescale_noise_cfg
from mixture import network
from quick_cases import crossed
from schedulers import objective_of
from torch import Tensor

from daguerre import plugins
from daguerre.objectives.settings import DiffusionSettings
from daguerre.samplers.draw import draw, initial_noise
from daguerre.samplers.guidance import CLASSIFIER_FREE, ClassifierFree, Embedded, Guidance, Unguided, rescaled
from daguerre.samplers.settings import SamplingSettings
from daguerre.types import Cond

X_BCHW = torch.randn(3, 4, 5, 5, generator=torch.Generator().manual_seed(0))
COND = {"text": torch.tensor([[1.0], [2.0], [3.0]])}
NULL = {"text": torch.tensor([[0.5], [0.5], [-0.5]])}


class Watched:
    """A prediction that grows with its conditioning, and remembers how it was called."""

    def __init__(self) -> None:
        self.calls: list[Tensor] = []

    def __call__(self, x_BCHW: Tensor, t: float, cond: Cond) -> Tensor:
        self.calls.append(cond["text"])
        return torch.tanh(x_BCHW * cond["text"].reshape(-1, 1, 1, 1)) + t


def test_guidance_leads_away_from_the_null_side_in_one_call_with_the_null_side_first() -> None:
    predict = Watched()
    y = CLASSIFIER_FREE.guide(predict, COND, NULL, torch.full((3,), 3.0))(X_BCHW, 0.25)
    null, cond = (torch.tanh(X_BCHW * side["text"].reshape(-1, 1, 1, 1)) + 0.25 for side in (NULL, COND))
    torch.testing.assert_close(y, null + 3.0 * (cond - null))
    assert [len(call) for call in predict.calls] == [6]
    assert torch.equal(predict.calls[0], torch.cat([NULL["text"], COND["text"]]))


def test_scale_one_is_the_conditional_prediction_and_never_runs_the_null_side() -> None:
    predict = Watched()
    assert not any(CLASSIFIER_FREE.runs_null(scale) for scale in (0.0, 1.0))
    y = CLASSIFIER_FREE.guide(predict, COND, None, torch.ones(3))(X_BCHW, 0.25)
    assert torch.equal(y, predict(X_BCHW, 0.25, COND))
    assert torch.equal(predict.calls[0], COND["text"])


def test_each_sample_has_its_own_scale_and_time_as_a_teacher_calls_it() -> None:
    """One call with scales per row equals a call per row, to the bit; a scale that is none is the conditional side."""
    predict, t_B = Watched(), torch.tensor([0.1, 0.2, 0.3])
    scale_B = torch.tensor([3.0, 7.5, 1.0])

    def timed(x_BCHW: Tensor, t: Any, cond: Cond) -> Tensor:
        return predict(x_BCHW, torch.as_tensor(t).reshape(-1, 1, 1, 1), cond)

    y = CLASSIFIER_FREE.guide(timed, COND, NULL, scale_B)(X_BCHW, t_B)
    for i in range(3):
        cond, null = ({"text": side["text"][i : i + 1]} for side in (COND, NULL))
        alone = CLASSIFIER_FREE.guide(timed, cond, null, scale_B[i : i + 1])(X_BCHW[i : i + 1], t_B[i : i + 1])
        assert torch.equal(y[i], alone[0])
    torch.testing.assert_close(y[2], timed(X_BCHW, t_B, COND)[2])


def test_pipelines_that_count_from_the_prompts_side_have_a_notation_of_their_own() -> None:
    """pos + g (pos - neg), as Z-Image's pipeline: its 5 is 6 in the usual form, 0 is none, and 0.5 is guidance."""
    guidance, predict = ClassifierFree(off=0.0), Watched()
    pos, neg = (predict(X_BCHW, 0.25, side) for side in (COND, NULL))
    y = guidance.guide(predict, COND, NULL, torch.full((3,), 5.0))(X_BCHW, 0.25)
    torch.testing.assert_close(y, pos + 5 * (pos - neg))
    torch.testing.assert_close(y, CLASSIFIER_FREE.guide(predict, COND, NULL, torch.full((3,), 6.0))(X_BCHW, 0.25))
    assert [guidance.acts(scale) for scale in (0.0, 0.5, 1.0)] == [False, True, True]
    assert guidance.fault(0.5) == ""


def test_an_embedded_scale_is_a_row_of_the_conditioning_and_runs_no_second_side() -> None:
    seen: list[Cond] = []

    def net(x_in: Tensor, c_noise_B: Tensor, cond: Cond) -> Tensor:
        seen.append(cond)
        return x_in * cond["guidance"].reshape(-1, 1, 1, 1) / 100

    settings = SamplingSettings(sampler="euler", num_inference_steps=2, guidance_scale=3.5)
    for scale in (3.5, 0.0):
        settings = settings.model_copy(update={"guidance_scale": scale})
        draw(objective_of("flow"), net, COND, None, (4, 5, 5), [1, 2, 3], settings, guidance=Embedded())
        assert torch.equal(seen[-1]["guidance"], torch.full((3,), scale))
        assert torch.equal(seen[-1]["text"], COND["text"])
    assert len(seen) == 4


def test_a_family_may_have_a_formula_of_its_own() -> None:
    """Qwen-Image's: the guided prediction has the norm of the conditional one over the channels."""

    class NormKept(ClassifierFree):
        def combine(self, y_cond_BCHW: Tensor, y_null_BCHW: Tensor, scale_B111: Tensor) -> Tensor:
            y = super().combine(y_cond_BCHW, y_null_BCHW, scale_B111)
            return y * (y_cond_BCHW.norm(dim=1, keepdim=True) / y.norm(dim=1, keepdim=True))

    predict = Watched()
    y = NormKept().guide(predict, COND, NULL, torch.full((3,), 4.0))(X_BCHW, 0.25)
    torch.testing.assert_close(y.norm(dim=1), predict(X_BCHW, 0.25, COND).norm(dim=1))


@pytest.mark.parametrize(
    ("guidance", "settings", "said"),
    [
        (CLASSIFIER_FREE, {"guidance_scale": 0.5}, "guidance_scale is 0.5: 0 and 1 are no guidance"),
        (CLASSIFIER_FREE, {"guidance_scale": 1, "negative_prompt": "dark"}, "so there is no guidance: raise"),
        (CLASSIFIER_FREE, {"guidance_scale": 0, "guidance_rescale": 0.5}, "remove guidance_rescale"),
        (ClassifierFree(off=0.0), {"guidance_scale": 0, "negative_prompt": "dark"}, "remove negative_prompt"),
        (Embedded(), {"guidance_scale": 3.5, "negative_prompt": "dark"}, "given guidance_scale itself"),
        (Unguided(), {"guidance_scale": 3.5}, "takes no guidance: set guidance_scale to 0"),
        (Unguided(), {"guidance_scale": 0, "negative_prompt": "dark"}, "takes no guidance: remove negative_prompt"),
        (CLASSIFIER_FREE, {"guidance_scale": 4, "negative_prompt": "dark", "guidance_rescale": 0.5}, None),
        (ClassifierFree(off=0.0), {"guidance_scale": 0.5, "negative_prompt": "dark"}, None),
        (Embedded(), {"guidance_scale": 0}, None),
        (Unguided(), {"guidance_scale": 1}, None),
    ],
)
def test_a_setting_without_effect_is_refused(guidance: Guidance, settings: dict[str, Any], said: str | None) -> None:
    faults = [fault for _, fault in guidance.faults(SamplingSettings(**settings))]
    assert len(faults) == (said is not None)
    assert said is None or said in faults[0]


@pytest.mark.parametrize("rescale", [0.0, 0.3, 0.7, 1.0])
def test_rescale_is_diffusers_rescale_noise_cfg(rescale: float) -> None:
    y, cond = 3 * X_BCHW + 1, X_BCHW.flip(0)
    torch.testing.assert_close(rescaled(y, cond, rescale), rescale_noise_cfg(y, cond, guidance_rescale=rescale))


def test_full_rescale_gives_each_sample_the_spread_of_its_conditional_prediction() -> None:
    cond = X_BCHW * torch.tensor([1.0, 2.0, 3.0]).reshape(3, 1, 1, 1)
    spread = rescaled(7 * X_BCHW, cond, 1.0).std((1, 2, 3))
    torch.testing.assert_close(spread, cond.std((1, 2, 3)))


def gaussian(objective: Any) -> Any:
    """A perfect network for x0 ~ N(cond, 0.2^2): the conditioning is the mean."""

    def net(x_in: Tensor, c_noise_B: Tensor, cond: Cond) -> Tensor:
        mean = cond["mean"].double().reshape(-1, 2, 1, 1)

        def denoise(x: Tensor, a: Tensor, s: Tensor) -> Tensor:
            return mean + a * 0.04 / (a**2 * 0.04 + s**2) * (x - a * mean)

        return network(objective, denoise)(x_in, c_noise_B, cond)

    return net


DIFFUSION = [
    n for n in plugins.names("objectives") if issubclass(plugins.find("objectives", n).Settings, DiffusionSettings)
]

FLOW = ("flow", "heun")
SLOW = ("dpmpp_2m_sde", "euler_ancestral", "lcm")
"""They draw noise at each step, which takes most of the time; test_mixture.py draws with each."""


@pytest.mark.parametrize(
    ("name", "sampler"),
    [
        pytest.param(
            name,
            sampler,
            marks=[] if (name == "eps" and sampler not in SLOW) or (name, sampler) == FLOW else [pytest.mark.long],
        )
        for name in DIFFUSION
        for sampler in plugins.names("samplers")
    ],
)
def test_guidance_between_two_gaussians_draws_the_gaussian_on_the_line_through_them(name: str, sampler: str) -> None:
    """With equal variances the guided denoiser is exactly that of the mean null + scale (cond - null)."""
    objective = objective_of(name)
    settings = SamplingSettings(sampler=sampler, num_inference_steps=50, guidance_scale=3)
    cond, null = torch.tensor([0.3, -0.1]), torch.tensor([0.1, 0.2])
    rows = {"mean": cond.expand(128, 2)}, {"mean": null.expand(128, 2)}
    seeds = range(128)
    x0 = draw(objective, gaussian(objective), *rows, (2, 1, 1), seeds, settings)

    alone = SamplingSettings(sampler=sampler, num_inference_steps=50, guidance_scale=1)
    led = {"mean": (null + 3 * (cond - null)).expand(128, 2)}
    torch.testing.assert_close(
        x0, draw(objective, gaussian(objective), led, None, (2, 1, 1), seeds, alone), rtol=0, atol=2e-5
    )
    torch.testing.assert_close(x0.mean((0, 2, 3)), null + 3 * (cond - null), rtol=0, atol=0.05)


def unet_as_net(pipeline: StableDiffusionPipeline) -> Any:
    def net(x_in: Tensor, c_noise_B: Tensor, cond: Cond) -> Tensor:
        return pipeline.unet(x_in, c_noise_B, encoder_hidden_states=cond["text"]).sample

    return net


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning:diffusers")
@pytest.mark.parametrize(
    ("scale", "rescale", "sampler", "order"),
    crossed([(4.0, 0.7), (4.0, 0.0), (1.0, 0.0)], [("ddim", 1), ("dpmpp_2m", 2)]),
)
def test_guidance_and_rescale_are_stable_diffusion_pipelines(
    tiny_sd: Path, sampler: str, order: int, scale: float, rescale: float
) -> None:
    pipeline = StableDiffusionPipeline.from_pretrained(tiny_sd, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = DPMSolverMultistepScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        prediction_type="v_prediction",
        timestep_spacing="trailing",
        solver_order=order,
        steps_offset=1,
    )
    rest = torch.Generator().manual_seed(3)
    width = pipeline.unet.config.cross_attention_dim
    text, null = (torch.randn(2, 6, width, generator=rest) for _ in range(2))
    latents = initial_noise([7, 8], (4, 8, 8))
    theirs = pipeline(
        prompt_embeds=text,
        negative_prompt_embeds=null,
        latents=latents,
        num_inference_steps=6,
        guidance_scale=scale,
        guidance_rescale=rescale,
        height=8 * pipeline.vae_scale_factor,
        width=8 * pipeline.vae_scale_factor,
        output_type="latent",
    ).images

    settings = SamplingSettings(sampler=sampler, num_inference_steps=6, guidance_scale=scale, guidance_rescale=rescale)
    ours = draw(objective_of("v"), unet_as_net(pipeline), {"text": text}, {"text": null}, (4, 8, 8), [7, 8], settings)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)

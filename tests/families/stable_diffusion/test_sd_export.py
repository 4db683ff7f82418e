"""An exported folder opens in stock diffusers and draws the same images, or the export says where it does not."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import EulerDiscreteScheduler, StableDiffusionPipeline
from diffusers_noise import inject
from quick_cases import quick_where
from tiny_models import latents, prompts, tiny_sd_folder

from daguerre.families import sd
from daguerre.models.family import Family
from daguerre.objectives.algebra import Diffusion
from daguerre.plugins import find, names
from daguerre.samplers.draw import draw, fresh_noise, initial_noise
from daguerre.samplers.settings import SamplingSettings

choose = sd.Settings.schedulers.scheduler_of

# diffusers' schedulers hand a tensor to np.array, which numpy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

PROMPTS = ["a large red circle", "blue"]
SEEDS = [3, 4]
SHAPE = (4, 8, 8)
SCHEDULES: dict[str, list[dict[str, Any]]] = {
    "scaled_linear": [{}],
    "scaled_linear, shift": [{"shift": 2.0}],
    "scaled_linear, zero terminal SNR": [{"zero_terminal_snr": True}, {"zero_terminal_snr": True, "shift": 0.5}],
    "cosine": [{"name": "cosine"}],
    "linear_flow": [{}, {"shift": 3.0}],
    "edm": [{}],
}
ON = {
    "eps": ["scaled_linear", "scaled_linear, shift", "cosine"],
    "x0": ["scaled_linear", "scaled_linear, shift", "scaled_linear, zero terminal SNR", "cosine"],
    "v": ["scaled_linear", "scaled_linear, shift", "scaled_linear, zero terminal SNR", "cosine"],
    "flow": ["linear_flow"],
    "edm": ["edm"],
}
CASES = [
    (objective, schedule, settings, sampler)
    for objective, schedules in ON.items()
    for schedule in schedules
    for settings in SCHEDULES[schedule]
    for sampler in names("samplers")
]
IN_LAW = ("euler_ancestral", "dpmpp_2m_sde", "lcm")
"""Samplers that always add fresh noise."""
QUICK_IN_LAW = (("eps", "scaled_linear"), ("flow", "linear_flow"))


def only_noise_differs(objective: str, schedule: str, sampler: str) -> bool:
    """Whether diffusers has the sampler; with a zero it extrapolates from what is none."""
    has_lcm = sampler != "lcm" or objective not in ("flow", "edm")
    return sampler in IN_LAW and has_lcm and not (sampler == "dpmpp_2m_sde" and "zero" in schedule)


@cache
def build(objective: str, schedule: str) -> Diffusion:
    module = find("objectives", objective)
    return module.build(module.Settings.model_validate({"schedule": json.loads(schedule)} if schedule != "{}" else {}))


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A family whose images depend strongly on noise level, text and noise, though nothing is trained."""
    folder = tiny_sd_folder(tmp_path_factory.mktemp("sd"))
    family = sd.load(sd.Settings(pretrained_model_name_or_path=str(folder)), seed=1)
    with torch.no_grad():
        for name, weight in family.net.named_parameters():
            if re.search(r"attn2\.to_(v|out\.0)\.weight|conv_out\.weight", name):
                weight.mul_(2)
    family.net.eval()
    return family


@pytest.fixture(scope="module")
def pipe(family: Family, tmp_path_factory: pytest.TempPathFactory) -> StableDiffusionPipeline:
    """The export, opened once; the tests change its scheduler."""
    folder = tmp_path_factory.mktemp("export") / "pipeline"
    family.export(folder, build("v", "{}"), SamplingSettings())
    return opened(folder)


def opened(folder: Path) -> StableDiffusionPipeline:
    pipe = StableDiffusionPipeline.from_pretrained(folder, local_files_only=True, low_cpu_mem_usage=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def our_images(family: Family, objective: Diffusion, sampling: SamplingSettings) -> np.ndarray:
    cond = family.encode_prompts(prompts(PROMPTS), (3, 16, 16))[0]
    null = family.encode_prompts(prompts([sampling.negative_prompt] * len(PROMPTS)), (3, 16, 16))[0]
    return family.decode(latents(draw(objective, family.net, cond, null, SHAPE, SEEDS, sampling))).astype(int)


def their_images(pipe: StableDiffusionPipeline, sampling: SamplingSettings) -> np.ndarray:
    generated = pipe(
        PROMPTS,
        negative_prompt=[sampling.negative_prompt] * len(PROMPTS),
        num_inference_steps=sampling.num_inference_steps,
        guidance_scale=sampling.guidance_scale,
        guidance_rescale=sampling.guidance_rescale,
        latents=initial_noise(SEEDS, SHAPE),
        height=16,
        width=16,
        output_type="np",
    ).images
    return (generated * 255).round().astype(int)


def quick(objective: str, schedule: str, settings: dict[str, Any], sampler: str) -> bool:
    """Every sampler with epsilon; DDIM with every objective, and with v of zero terminal SNR."""
    if settings != SCHEDULES[schedule][0]:
        return False
    usual = schedule == ON[objective][0]
    return (usual and objective == "eps") or (
        sampler == "ddim" and (usual or (objective == "v" and "zero" in schedule))
    )


@pytest.mark.parametrize(
    ("objective", "schedule", "settings", "sampler"),
    [pytest.param(*case, marks=[] if quick(*case) else [pytest.mark.long]) for case in CASES if case[3] not in IN_LAW],
)
def test_images_are_equal_or_the_export_says_that_they_are_not(family, pipe, objective, schedule, settings, sampler):
    """<= 2/255 a pixel in float32, guidance on, for every objective, schedule and sampler that diffusers has.

    The untrained network makes more of a difference than a trained one does; docs/samplers.md has figures of that.
    """
    sampling = SamplingSettings(sampler=sampler, num_inference_steps=10, guidance_scale=3.0, negative_prompt="dark")
    built = build(objective, json.dumps(settings))
    plan = choose(built, sampling)
    kind = getattr(diffusers, plan.class_name)
    pipe.scheduler = kind.from_config({"_class_name": plan.class_name} | plan.config)
    difference = np.abs(our_images(family, built, sampling) - their_images(pipe, sampling)).max()
    if not plan.notices:
        assert difference <= 2
    elif objective == "flow" and sampler != "heun":
        assert (sampler != "unipc") * 2 < difference <= 6, "the notice says that it is close"
    else:
        assert difference > 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("objective", "schedule", "settings", "sampler"),
    [
        pytest.param(*case, marks=[] if case[:2] in QUICK_IN_LAW and case[2] == {} else [pytest.mark.long])
        for case in CASES
        if only_noise_differs(case[0], case[1], case[3])
    ],
)
def test_images_that_are_equal_in_law_are_equal_from_the_same_noise(
    family, pipe, monkeypatch, objective, schedule, settings, sampler
):
    """diffusers gets the fresh noise of our seeds; flow's levels differ as ever."""
    sampling = SamplingSettings(sampler=sampler, num_inference_steps=5, guidance_scale=3.0)
    built = build(objective, json.dumps(settings))
    plan = choose(built, sampling)
    assert any("equal in distribution only" in notice for notice in plan.notices)
    pipe.scheduler = getattr(diffusers, plan.class_name).from_config(plan.config)
    inject(monkeypatch, lambda step: fresh_noise(SEEDS, step, SHAPE))
    difference = np.abs(our_images(family, built, sampling) - their_images(pipe, sampling)).max()
    print(objective, schedule, sampler, difference)
    assert difference <= (15 if objective == "flow" else 2)


def test_the_images_depend_on_prompt_noise_and_guidance(family):
    """Else the parity above would say nothing."""
    sampling = SamplingSettings(num_inference_steps=5, guidance_scale=3.0)
    generated = our_images(family, build("v", "{}"), sampling)
    unguided = our_images(family, build("v", "{}"), SamplingSettings(num_inference_steps=5, guidance_scale=1))
    negative = our_images(family, build("v", "{}"), sampling.model_copy(update={"negative_prompt": "dark"}))
    for other in (generated[::-1], unguided, negative):
        assert np.abs(generated - other).mean() > 5


@pytest.mark.parametrize(
    ("steps", "rescale"), quick_where([(4, 0.7), (7, 0.0)].__contains__, product((4, 7, 30), (0.0, 0.7)))
)
def test_any_number_of_steps_and_guidance_rescale(family, pipe, steps, rescale):
    objective = build("v", '{"zero_terminal_snr": true}')
    sampling = SamplingSettings(num_inference_steps=steps, guidance_scale=4.0, guidance_rescale=rescale)
    plan = choose(objective, sampling)
    pipe.scheduler = getattr(diffusers, plan.class_name).from_config(plan.config)
    assert np.abs(our_images(family, objective, sampling) - their_images(pipe, sampling)).max() <= 2


@pytest.mark.parametrize(
    ("objective", "schedule", "sampling", "said"),
    [
        ("v", "{}", {"eta": 1.0}, "equal in distribution only"),
        ("flow", "{}", {"eta": 1.0}, "adds no fresh noise"),
        ("edm", "{}", {"eta": 1.0}, "adds no fresh noise"),
        ("edm", "{}", {"sampler": "heun"}, "no heun for edm"),
        ("edm", "{}", {"sampler": "unipc"}, "no unipc for edm"),
        ("edm", "{}", {"sampler": "lcm"}, "no lcm for edm"),
        ("flow", "{}", {"sampler": "lcm"}, "no lcm for linear_flow"),
        ("v", '{"zero_terminal_snr": true}', {"sampler": "dpmpp_2m_sde"}, "extrapolates from pure noise"),
        ("eps", "{}", {"sampler": "heun", "s_churn": 5.0}, "those of s_churn=0"),
        ("eps", "{}", {"sampler": "lcm", "num_inference_steps": 6}, "do not divide 1000"),
        ("v", "{}", {"timestep_spacing": "leading"}, "one point more"),
        ("v", "{}", {"num_inference_steps": 61}, "makes 62 of 61"),
        ("v", '{"name": "cosine"}', {"num_inference_steps": 30}, "rounded to 1/1000"),
    ],
)
def test_what_differs_is_said(objective, schedule, sampling, said):
    assert any(said in notice for notice in choose(build(objective, schedule), SamplingSettings(**sampling)).notices)


@pytest.mark.parametrize(
    ("objective", "schedule", "told", "said"),
    [
        ("v", "{}", "timestep", None),
        ("edm", "{}", "log_sigma", None),
        ("flow", "{}", "flow_time", None),
        ("v", '{"name": "cosine"}', "cosine_time", "gives the network 1000.0, and this run 993.6"),
        ("v", '{"shift": 2.0}', "timestep", "those of shift 1; this run samples with shift 2, so images differ"),
        ("edm", "{}", "timestep", "this run gives the network timestep"),
        ("eps", "{}", "log_sigma", "images of the pipeline are wrong"),
    ],
)
def test_a_network_that_is_told_another_number_is_said(objective, schedule, told, said):
    usual, sampling = build(objective, schedule), SamplingSettings(num_inference_steps=20)
    notices = choose(usual.with_noise_conditioning(told, 1000.0), sampling).notices
    more = [notice for notice in notices if notice not in choose(usual, sampling).notices]
    assert said in more[0] if said else more == []


def test_a_shift_that_follows_the_size_is_that_of_the_images_of_the_run():
    flow = replace(build("flow", '{"resolution_shift": {"name": "linear_mu"}}'), sampled_px=1024**2)
    plan = choose(flow, SamplingSettings())
    assert plan.config["flow_shift"] == pytest.approx(3.1582, abs=1e-4)
    assert any("flow_shift=3.1582 is for images of 1,048,576 pixels" in notice for notice in plan.notices)
    table = build("v", '{"resolution_shift": {"name": "area", "base_px": 512}}')
    assert choose(replace(table, sampled_px=512**2), SamplingSettings()).notices == []
    plan = choose(replace(table, sampled_px=1024**2), SamplingSettings())
    assert plan.config == choose(build("v", "{}"), SamplingSettings()).config
    assert plan.notices[0].endswith("this run samples with shift 2, so images differ")
    notice = choose(replace(table, sampled_px=256**2), SamplingSettings(num_inference_steps=4)).notices[0]
    assert (
        "EulerDiscreteScheduler made from this config gives ours where the call is given sigmas=[7.30732, 2.0" in notice
    )


@contextmanager
def logged() -> Iterator[list[str]]:
    """The warnings that go to the log."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger().removeHandler(handler)


@pytest.mark.filterwarnings("ignore:`torch_dtype` is deprecated:FutureWarning")  # the snippet's own name for it
def test_the_folder_opens_offline_without_a_word(family, tmp_path):
    """The snippet of open-diffusion's page, on the CPU; nothing is missing, ignored, deprecated or warned of."""
    objective = build("v", '{"zero_terminal_snr": true}')
    notices = family.export(tmp_path / "pipeline", objective, SamplingSettings(sampler="euler"))
    assert notices == []
    diffusers.utils.logging.enable_propagation()
    with logged() as said:
        scheduler = EulerDiscreteScheduler.from_pretrained(tmp_path / "pipeline", subfolder="scheduler")
        pipe = StableDiffusionPipeline.from_pretrained(
            tmp_path / "pipeline", scheduler=scheduler, torch_dtype=torch.float32, low_cpu_mem_usage=False
        )
        pipe.set_progress_bar_config(disable=True)
        sampling = SamplingSettings(sampler="euler", num_inference_steps=6)
        theirs = their_images(pipe, sampling)
        assert pipe("an astronaut on mars", num_inference_steps=2).images[0].size == (16, 16)
    diffusers.utils.logging.disable_propagation()
    assert said == []
    assert np.abs(our_images(family, objective, sampling) - theirs).max() <= 2


def test_the_export_holds_the_present_weights_and_the_tokenizer(family, tmp_path):
    folder = tmp_path / "pipeline"
    family.export(folder, build("v", "{}"), SamplingSettings())
    again = sd.load(sd.Settings(pretrained_model_name_or_path=str(folder)), seed=9)
    for mine, other in zip(family.components.values(), again.components.values(), strict=True):
        assert mine.state_dict().keys() == other.state_dict().keys()
        assert all(
            torch.equal(a, b) for a, b in zip(mine.state_dict().values(), other.state_dict().values(), strict=True)
        )
    assert again.files() == family.files()
    assert all(folder.joinpath(path).read_bytes() == content for path, content in family.files().items())


def test_an_export_replaces_the_one_before(family, tmp_path):
    folder = tmp_path / "pipeline"
    family.export(folder, build("v", "{}"), SamplingSettings())
    (folder / "stale").touch()
    family.export(folder, build("edm", "{}"), SamplingSettings(sampler="heun"))
    assert [path.name for path in tmp_path.iterdir()] == ["pipeline"]
    assert not (folder / "stale").exists()
    assert type(opened(folder).scheduler).__name__ == "EDMDPMSolverMultistepScheduler"
    assert "no heun for edm" in (folder / "README.md").read_text()


def test_the_page_lists_every_scheduler():
    """docs/export.md has a row for each objective, schedule and sampler, with the class that the code chooses."""
    page = (Path(__file__).parents[3] / "docs" / "export.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("| \n").split("|")] for line in page.splitlines() if "Scheduler`" in line
    ]
    for objective, schedule, settings, sampler in CASES:
        plan = choose(build(objective, json.dumps(settings)), SamplingSettings(sampler=sampler, num_inference_steps=20))
        found = [
            row
            for row in rows
            if objective in row[0].split(", ")
            and row[1].startswith(schedule.partition(",")[0])
            and sampler in row[2].split(", ")
            if ("zero" in schedule) == ("with zero" in row[1]) or "any shift" in row[1]
        ]
        assert len(found) == 1, (objective, schedule, sampler, found)
        assert f"`{plan.class_name}`" in found[0][3], found
        assert (found[0][4] == "yes") == (not plan.notices), found

"""Settings that cannot work together, on the recipes of real models: each is refused with the reason and the way out.

Where a pair can work but is likely a mistake, a line says so and the run starts.
"""

import pytest

from daguerre import errors
from daguerre.cli import main

BIAS = ["timestep_bias.name=range", "timestep_bias.multiplier=2"]


def pair(case):
    name, given, _ = case
    return " ".join([name, *given])


REFUSED = [
    # objective
    ("sd15", ["objective.schedule.zero_terminal_snr=true"], "loss weights are infinite: use objective v"),
    ("sdxl_edm", ["objective.schedule.name=scaled_linear"], "'edm' is not defined on 'scaled_linear'"),
    ("sdxl_edm", ["objective.times.name=uniform"], "'uniform' draws a share of the schedule"),
    ("sd15", ["objective.times.name=log_normal"], "'log_normal' draws sigma, from 0 to infinity"),
    ("sd15", [*BIAS, "timestep_bias.end=1500"], "end is 1500: there are 1000 steps"),
    ("sdxl_edm", [*BIAS, "timestep_bias.begin=500", "timestep_bias.end=200"], "begin must be below end"),
    ("sd15", ["objective.timestep_bias.multiplier=2"], "no effect with 'none'"),
    ("quickstart_vae", ["objective.timestep_bias.name=later"], "this setting exists only with objective.name=edm or"),
    # objective and sampling
    (
        "sd21",
        ["objective.schedule.zero_terminal_snr=true", "timestep_spacing=leading"],
        "leading, which never visits the last timestep, and zero_terminal_snr is on",
    ),
    ("sdxl_edm", ["sampling.timestep_spacing=leading"], "has no meaning on a continuous schedule"),
    ("sd15", ["sampling.eta=0.5"], "eta is 0.5 but dpmpp_2m does not use it"),
    ("sdxl_lightning", ["sampling.negative_prompt=blurred"], "guidance_scale is 1, so there is no guidance"),
    # model
    ("sdxl", ["model.train_unet=false"], "nothing would be trained"),
    ("sdxl", ["model.latents_mean=[0,0,0,0]"], "latents_mean is given without latents_std"),
    (
        "sd15",
        ["model.train_text_encoder_2=true"],
        "text_encoder_2 is not a component that model.family=sd can train; there are unet, text_encoder",
    ),
    ("quickstart_vae", ["model.train_unet=true"], "not a component that model.family=autoencoder can train; it always"),
    (
        "quickstart_text",
        ["model.train_unet=false"],
        "not a component that model.family=clip can train; it always trains",
    ),
    ("quickstart_vae", ["adapter.train=[unet]"], "not a component that model.family=autoencoder can train; it always"),
    ("sdxl", ["model.long_prompts_pooled=last"], "no effect without long_prompts=true"),
    ("sd15", ["data.resolution=500"], "set data.resolution to a multiple of 8"),
    # precision, averages, batches
    ("sdxl", ["weights_dtype=float16", "mixed_precision=no"], "mixed_precision=no does not work with weights_dtype=fl"),
    ("sdxl", ["ema.decay=0.999"], "no effect while ema.enabled is false"),
    ("sd15", ["ema.enabled=false", "validation.raw_weights=true"], "no average of the weights is kept"),
    ("sd15", ["training.per_device_batch_size=3"], "must be a multiple of per_device_batch_size, which is 3"),
]


@pytest.mark.parametrize(("name", "given", "reason"), REFUSED, ids=map(pair, REFUSED))
def test_it_is_refused_with_the_reason(name, given, reason, capsys):
    assert main.run(["train", name, *given, "--dry-run"]) == errors.REFUSED
    assert reason in " ".join(capsys.readouterr().err.split())


PLAYGROUND = [
    "model.scaling_factor=0.5",
    "model.latents_mean=[-1.6574,1.886,-1.383,2.5155]",
    "model.latents_std=[8.4927,5.9022,6.5498,5.2299]",
]
ALLOWED = [
    # what it is, and whether something is said of the pretrained weights
    ("sd15", [], None),
    ("sd21", [], None),
    ("sdxl", ["training.weights_dtype=float16"], None),
    (
        "sd15",
        ["objective.name=v"],
        "the pretrained network predicts epsilon (objective.name=eps), this recipe trains v",
    ),
    ("sd21", ["objective.name=eps"], "the pretrained network predicts v_prediction (objective.name=v), this recipe"),
    ("sd15", ["objective.name=flow"], "was trained with the noise levels of a beta schedule, not linear_flow"),
    ("sd15", ["objective.schedule.beta_end=0.02"], "was trained with beta_end 0.012, this recipe has 0.02"),
    ("sdxl_edm", [], "takes the timestep of a noise level as input, but EDM gives it ln(sigma)/4"),
    ("sdxl_edm", PLAYGROUND, "ln(sigma)/4"),
    ("sdxl_edm", ["model.noise_conditioning=timestep"], "(objective.name=eps), this recipe trains edm"),
    (
        "sd15",
        ["objective.schedule.shift=2"],
        "model.noise_conditioning=timestep gives the network the timestep of the level",
    ),
    ("sd15", ["objective.schedule.shift=2", "model.noise_conditioning=timestep"], None),
    ("sdxl_edm", ["model.unet=null"], None),
    ("sdxl_edm", ["model.scheduler=null"], None),
    ("sdxl_edm", [*BIAS, "timestep_bias.begin=200", "timestep_bias.end=500", "snr_gamma=5"], "ln(sigma)/4"),
    ("imagenet_scratch", ["objective.name=v"], None),
]


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        pytest.param(*each, marks=[] if number % 6 == 0 else [pytest.mark.long], id=pair(each))
        for number, each in enumerate(ALLOWED)
    ],
)
def test_it_is_allowed_and_what_pretrained_weights_know_otherwise_is_said(name, given, said, capsys):
    assert main.run(["train", name, *given, "--dry-run"]) == errors.DONE
    out = " ".join(capsys.readouterr().out.split())
    assert said in out if said else "the pretrained network" not in out

"""What programs that read single-file checkpoints take for granted, and where a model is something else.

ComfyUI, A1111 and others have SD 1.x, 2.x and SDXL built in: their numbers, the scale of the latents, the noise
levels. The networks' shapes tell them which it is, two or three empty tensors what the UNet predicts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from daguerre.models import vae
from daguerre.models.single_file.configs import Numbers, guessed_prediction, of_architecture, shapes
from daguerre.models.single_file.layout import PLAYGROUND, V_PREDICTION, ZERO_TERMINAL_SNR
from daguerre.models.weights import architectures

SCALING_FACTORS = {"sd1": 0.18215, "sd2": 0.18215, "sdxl": 0.13025}
PLAYGROUND_MEAN = (-1.6574, 1.886, -1.383, 2.5155)
PLAYGROUND_STD = (8.4927, 5.9022, 6.5498, 5.2299)
TEXT_LAYERS = {"sd1": 12, "sd2": 23}
"""Layers of the text encoder whose last is read."""
_TEXT_LAYER = re.compile(r"((?:text_model\.)?encoder\.layers\.)(\d+)\.(.+)")
_NO_NUMBERS = {
    # What of a config does not change what a network computes, or is carried otherwise.
    "unet": {"sample_size", "upcast_attention"},
    "vae": {"sample_size", "force_upcast", "scaling_factor", "latents_mean", "latents_std", "shift_factor"},
    "text": {
        *("architectures", "attention_dropout", "dropout", "dtype", "torch_dtype", "initializer_factor", "model_type"),
        *("initializer_range", "bos_token_id", "eos_token_id", "pad_token_id", "projection_dim", "num_hidden_layers"),
    },
}


def differences(numbers: Numbers) -> list[str]:
    """Where such programs would compute something else than the model does."""
    known = _known(numbers)
    if known is None:
        return [
            "the networks are none of SD 1.x, 2.x and SDXL: ComfyUI and A1111 do not open the file; diffusers does "
            "with config=FOLDER, and Daguerre by what stands in its metadata"
        ]
    notices = []
    for component, config in numbers.configs.items():
        for name, value in known.configs[component].items():
            if not _alike(component, name, config.get(name, value), value):
                notices.append(
                    f"{component}: {name} is {config[name]}, readers of one file compute with {value}: pictures differ"
                )
    return [*notices, *_about_scheduler(numbers)]


def opens(numbers: Numbers) -> bool:
    """Whether such programs know the networks."""
    return _known(numbers) is not None


def _known(numbers: Numbers) -> Numbers | None:
    """The shipped architecture with the same names and shapes in every network, `whole_text` given."""
    configs = numbers.configs | {"text_encoder": whole_text(numbers)}
    wanted = {name: shapes(name, config) for name, config in configs.items()}
    for name in architectures.names():
        other = of_architecture(name, tuple(numbers.configs))
        if other.layout == numbers.layout and all(shapes(n, c) == wanted[n] for n, c in other.configs.items()):
            return other
    return None


def whole_text(numbers: Numbers) -> dict[str, Any]:
    """The text encoder's config with as many layers as readers have: 1.x and 2.x may be cut to the one that is read.

    The first encoder of SDXL is read before its last layer, so nothing can be put behind it.
    """
    config = numbers.configs["text_encoder"]
    layers = max(config.get("num_hidden_layers", 12), TEXT_LAYERS.get(numbers.layout, 0))
    return config | {"num_hidden_layers": layers}


def lengthened(network: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """A text encoder with layers behind its last that change nothing: copies that add zero to what they get."""
    own = {name: match for name in network if (match := _TEXT_LAYER.fullmatch(name))}
    count = 1 + max(int(match[2]) for match in own.values())
    made = dict(network)
    for name, match in own.items():
        if int(match[2]) == count - 1:
            adds = match[3].startswith(("self_attn.out_proj.", "mlp.fc2."))
            tensor = torch.zeros_like(network[name]) if adds else network[name]
            made |= {f"{match[1]}{layer}.{match[3]}": tensor for layer in range(count, layers)}
    return made


def _alike(component: str, name: str, value: Any, other: Any) -> bool:
    if name.startswith("_") or name in _NO_NUMBERS[component.partition("_")[0]]:
        return True
    if isinstance(value, list) == isinstance(other, list):
        return bool(value == other)
    many, one = (value, other) if isinstance(value, list) else (other, value)  # one number means it for every block
    return all(item == one for item in many)


def _about_scheduler(numbers: Numbers) -> list[str]:
    found = numbers.scheduler
    if _is_playground(numbers):
        return []
    kind, prediction = str(found.get("_class_name")), found.get("prediction_type", "epsilon")
    if kind.startswith("EDM") or prediction not in ("epsilon", "v_prediction"):
        what = "EDM" if kind.startswith("EDM") else str(prediction)
        return [
            f"the model is trained for {what}, for which the original layout has no mark: programs that read the file "
            "take it for a prediction of the noise and draw noise; Daguerre and the metadata know better"
        ]
    levels = {"trained_betas": None, "beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
    notices = []
    if any(found.get(name, usual) != usual for name, usual in levels.items()):
        notices.append("its noise levels are not Stable Diffusion's, which readers of one file take for granted")
    return notices + ([] if prediction == "epsilon" else _about_v(numbers))


def _about_v(numbers: Numbers) -> list[str]:
    """Marks are read in SDXL's files alone; elsewhere programs must be told."""
    notices = []
    if numbers.layout == "sd1":
        notices.append(
            "it predicts v, which programs do not expect of a 1.x model: ComfyUI needs the node ModelSamplingDiscrete "
            "(v_prediction), A1111 a .yaml beside the file (parameterization: v)"
        )
    if numbers.layout != "sdxl" and numbers.scheduler.get("rescale_betas_zero_snr"):
        notices.append(
            "it was trained with zero terminal SNR: ComfyUI needs the node ModelSamplingDiscrete (zsnr), A1111 the "
            "noise schedule for sampling `Zero Terminal SNR`"
        )
    return notices


def taken_for(numbers: Numbers, unet: Mapping[str, Tensor]) -> list[str]:
    """Whether ComfyUI, which looks at the weights of 2.x, would take the UNet for one that predicts something else."""
    said = numbers.scheduler.get("prediction_type", "epsilon")
    if numbers.layout != "sd2" or _known(numbers) is None:
        return []
    guess = guessed_prediction(unet["up_blocks.3.attentions.2.transformer_blocks.0.norm1.bias"])
    if guess == said or said not in ("epsilon", "v_prediction"):
        return []
    return [
        f"it predicts {said}, but by the weights ComfyUI takes it for {guess}: give it the node ModelSamplingDiscrete "
        f"({'eps' if said == 'epsilon' else said})"
    ]


def marks(numbers: Numbers) -> dict[str, Tensor]:
    """Tensors that say what the UNet predicts."""
    if _is_playground(numbers):
        lists = (numbers.configs["vae"]["latents_mean"], numbers.configs["vae"]["latents_std"])
        return {name: torch.tensor(of).reshape(1, -1, 1, 1) for name, of in zip(PLAYGROUND, lists, strict=True)}
    if numbers.scheduler.get("prediction_type") != "v_prediction":
        return {}
    names = [V_PREDICTION]
    if numbers.scheduler.get("rescale_betas_zero_snr"):
        names.append(ZERO_TERMINAL_SNR)
    return {name: torch.empty(0) for name in names}


def _is_playground(numbers: Numbers) -> bool:
    """Playground v2.5's form: EDM's F with sigma_data .5 on SDXL's networks and its own statistics of latents."""
    config, scheduler = numbers.configs["vae"], numbers.scheduler
    lists = tuple(tuple(config.get(name) or ()) for name in ("latents_mean", "latents_std"))
    return (
        numbers.layout == "sdxl"
        and str(scheduler.get("_class_name")).startswith("EDM")
        and (scheduler.get("sigma_data"), scheduler.get("prediction_type", "epsilon")) == (0.5, "epsilon")
        and (config.get("scaling_factor"), lists) == (0.5, (PLAYGROUND_MEAN, PLAYGROUND_STD))
    )


def scaled_vae(numbers: Numbers, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The autoencoder with its own scaling and statistics folded into it, and what changes in its config.

    None where readers use the right ones, or cannot open the file anyway.
    """
    config, factor = numbers.configs["vae"], SCALING_FACTORS[numbers.layout]
    mean, std = config.get("latents_mean"), config.get("latents_std")
    same = mean is None and config.get("scaling_factor", 0.18215) == factor
    if same or _is_playground(numbers) or _known(numbers) is None:
        return None
    net: Any = AutoencoderKL.from_config(config)
    net.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    # z = f (x - m) / s is to be factor * x', so x' = (x - m) / (s factor / f).
    channels = config["latent_channels"]
    ratio = factor / config.get("scaling_factor", 0.18215)
    buffers = {"mean": torch.tensor(mean or [0.0] * channels), "std": ratio * torch.tensor(std or [1.0] * channels)}
    for name, values in buffers.items():
        net.register_buffer(f"channel_{name}", values.reshape(-1, 1, 1), persistent=False)
    made = vae.folded(net)
    own = {"scaling_factor": factor, "latents_mean": None, "latents_std": None}
    own |= {"use_quant_conv": True, "use_post_quant_conv": True}
    return {name: tensor.detach() for name, tensor in made.state_dict().items()}, own

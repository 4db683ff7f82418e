"""Differences between a model and what programs that read single-file checkpoints take for granted.

ComfyUI, A1111 and others have the configs, the scale of the latents and the noise levels of SD 1.x, 2.x and SDXL built
in. The networks' shapes tell them which it is, two or three empty tensors what the UNet predicts.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from daguerre.families.stable_diffusion.single_file.configs import (
    OF_LAYOUTS,
    PipelineConfigs,
    guessed_prediction,
    of_architecture,
    shapes,
)
from daguerre.families.stable_diffusion.single_file.layout import EDM_V, PLAYGROUND, V_PREDICTION, ZERO_TERMINAL_SNR
from daguerre.models.parts import kl

SCALING_FACTORS = {"sd1": 0.18215, "sd2": 0.18215, "sdxl": 0.13025}
PLAYGROUND_MEAN = (-1.6574, 1.886, -1.383, 2.5155)
PLAYGROUND_STD = (8.4927, 5.9022, 6.5498, 5.2299)
TEXT_LAYERS = {"sd1": 12, "sd2": 23}
"""Layers of the text encoder whose last is read."""
_TEXT_LAYER = re.compile(r"((?:text_model\.)?encoder\.layers\.)(\d+)\.(.+)")
_WITHOUT_EFFECT = {
    # What of a config does not change what a network computes, or is stored elsewhere.
    "unet": {"sample_size", "upcast_attention"},
    "vae": {"sample_size", "force_upcast", "scaling_factor", "latents_mean", "latents_std", "shift_factor"},
    "text": {
        *("architectures", "attention_dropout", "dropout", "dtype", "torch_dtype", "initializer_factor", "model_type"),
        *("initializer_range", "bos_token_id", "eos_token_id", "pad_token_id", "projection_dim", "num_hidden_layers"),
    },
}
_LEVELS = {"trained_betas": None, "beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}


def differences(pipeline: PipelineConfigs) -> list[str]:
    """Messages where such programs would compute something else than the model does."""
    known = _known(pipeline)
    if known is None:
        return [
            "the networks are not SD 1.x, 2.x or SDXL: ComfyUI and A1111 cannot open the file; diffusers can with "
            "config=FOLDER, and Daguerre can by its metadata"
        ]
    return [
        *(
            f"{component}: {name} is {config[name]}, but programs that open single files assume {value}: images differ"
            for component, config in pipeline.configs.items()
            for name, value in known.configs[component].items()
            if not _is_equivalent(component, name, config.get(name, value), value)
        ),
        *_of_scheduler(pipeline),
    ]


def opens(pipeline: PipelineConfigs) -> bool:
    """True if such programs know the networks."""
    return _known(pipeline) is not None


def _known(pipeline: PipelineConfigs) -> PipelineConfigs | None:
    """The shipped architecture with the same names and shapes in every network, with `whole_text`."""
    configs = pipeline.configs | {"text_encoder": whole_text(pipeline)}
    wanted = {name: shapes(name, config) for name, config in configs.items()}
    for name in OF_LAYOUTS:
        other = of_architecture(name, tuple(configs))
        if other.layout == pipeline.layout and all(shapes(n, c) == wanted[n] for n, c in other.configs.items()):
            return other
    return None


def whole_text(pipeline: PipelineConfigs) -> dict[str, Any]:
    """The text encoder's config with as many layers as readers have: 1.x and 2.x may be truncated to the one that is
    read. The first encoder of SDXL is read before its last layer, so nothing can be put behind it."""
    config = pipeline.configs["text_encoder"]
    layers = max(config.get("num_hidden_layers", 12), TEXT_LAYERS.get(pipeline.layout, 0))
    return config | {"num_hidden_layers": layers}


def lengthened(network: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """A text encoder with layers behind its last that change nothing: copies that add zero to what they get."""
    matches = [match for name in network if (match := _TEXT_LAYER.fullmatch(name))]
    count = 1 + max(int(match[2]) for match in matches)
    made = dict(network)
    for match in matches:
        if int(match[2]) == count - 1:
            adds = match[3].startswith(("self_attn.out_proj.", "mlp.fc2."))
            tensor = torch.zeros_like(network[match[0]]) if adds else network[match[0]]
            made |= {f"{match[1]}{layer}.{match[3]}": tensor for layer in range(count, layers)}
    return made


def _is_equivalent(component: str, name: str, value: Any, other: Any) -> bool:
    if name.startswith("_") or name in _WITHOUT_EFFECT[component.partition("_")[0]]:
        return True
    if isinstance(value, list) == isinstance(other, list):
        return bool(value == other)
    many, one = (value, other) if isinstance(value, list) else (other, value)  # one number means it for every block
    return all(item == one for item in many)


def _of_scheduler(pipeline: PipelineConfigs) -> list[str]:
    """Differences in noise levels and prediction. Marks are read in SDXL's files alone; elsewhere users set it."""
    scheduler, prediction = pipeline.scheduler, _prediction(pipeline)
    is_edm = _is_edm(pipeline)
    if _is_playground(pipeline) or _is_cosxl(pipeline):
        return []
    if is_edm or prediction not in ("epsilon", "v_prediction"):
        return [
            f"the model is trained for {'EDM' if is_edm else prediction}, which the original layout cannot record: "
            "other programs assume noise prediction and generate noise; Daguerre reads the metadata"
        ]
    notices = []
    if any(scheduler.get(name, usual) != usual for name, usual in _LEVELS.items()):
        notices.append("its noise levels are not Stable Diffusion's, which other programs assume for single files")
    if prediction == "v_prediction" and pipeline.layout == "sd1":
        notices.append(
            "it predicts v, which other programs do not expect of an SD 1.x model: ComfyUI needs the node "
            "ModelSamplingDiscrete (v_prediction), A1111 a .yaml next to the file (parameterization: v)"
        )
    if prediction == "v_prediction" and pipeline.layout != "sdxl" and scheduler.get("rescale_betas_zero_snr"):
        notices.append(
            "it was trained with zero terminal SNR: ComfyUI needs the node ModelSamplingDiscrete (zsnr), A1111 the "
            "noise schedule for sampling `Zero Terminal SNR`"
        )
    return notices


def _prediction(pipeline: PipelineConfigs) -> str:
    return str(pipeline.scheduler.get("prediction_type", "epsilon"))


def misread_prediction(pipeline: PipelineConfigs, unet: Mapping[str, Tensor]) -> list[str]:
    """A message where ComfyUI, which looks at the weights of 2.x, takes the UNet for one that predicts something
    else."""
    prediction = _prediction(pipeline)
    if pipeline.layout != "sd2" or _known(pipeline) is None:
        return []
    guess = guessed_prediction(unet["up_blocks.3.attentions.2.transformer_blocks.0.norm1.bias"])
    if guess == prediction or prediction not in ("epsilon", "v_prediction"):
        return []
    return [
        f"it predicts {prediction}, but from the weights ComfyUI assumes {guess}: use the node ModelSamplingDiscrete "
        f"({'eps' if prediction == 'epsilon' else prediction})"
    ]


def marks(pipeline: PipelineConfigs) -> dict[str, Tensor]:
    """Tensors that say what the UNet predicts."""
    if _is_playground(pipeline):
        lists = (pipeline.configs["vae"]["latents_mean"], pipeline.configs["vae"]["latents_std"])
        return {name: torch.tensor(of).reshape(1, -1, 1, 1) for name, of in zip(PLAYGROUND, lists, strict=True)}
    if _is_cosxl(pipeline):
        return {name: torch.tensor(pipeline.scheduler[name.rpartition(".")[2]]) for name in EDM_V}
    if _prediction(pipeline) != "v_prediction" or _is_edm(pipeline):
        return {}
    snr = [ZERO_TERMINAL_SNR] if pipeline.scheduler.get("rescale_betas_zero_snr") else []
    return {name: torch.empty(0) for name in (V_PREDICTION, *snr)}


def _is_edm(pipeline: PipelineConfigs) -> bool:
    return str(pipeline.scheduler.get("_class_name")).startswith("EDM")


def _is_cosxl(pipeline: PipelineConfigs) -> bool:
    """CosXL's form: the negative of EDM's F with sigma_data 1 on SDXL's networks."""
    told = pipeline.scheduler.get("sigma_data"), _prediction(pipeline)
    return pipeline.layout == "sdxl" and _is_edm(pipeline) and told == (1.0, "v_prediction")


def _is_playground(pipeline: PipelineConfigs) -> bool:
    """Playground v2.5's form: EDM's F with sigma_data .5 on SDXL's networks and its own statistics of latents."""
    config, scheduler = pipeline.configs["vae"], pipeline.scheduler
    lists = tuple(tuple(config.get(name) or ()) for name in ("latents_mean", "latents_std"))
    return (
        pipeline.layout == "sdxl"
        and _is_edm(pipeline)
        and (scheduler.get("sigma_data"), _prediction(pipeline)) == (0.5, "epsilon")
        and (config.get("scaling_factor"), lists) == (0.5, (PLAYGROUND_MEAN, PLAYGROUND_STD))
    )


def scaled_vae(
    pipeline: PipelineConfigs, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The autoencoder with its own scaling and statistics folded into it, and what changes in its config.

    None where readers use the right ones, or cannot open the file anyway.
    """
    config, factor = pipeline.configs["vae"], SCALING_FACTORS[pipeline.layout]
    mean, std = config.get("latents_mean"), config.get("latents_std")
    own_factor = config.get("scaling_factor", 0.18215)
    if (mean is None and own_factor == factor) or _is_playground(pipeline) or _known(pipeline) is None:
        return None
    net: Any = AutoencoderKL.from_config(config)
    net.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    # z = f (x - m) / s is to be factor * x', so x' = (x - m) / (s factor / f).
    channels = config["latent_channels"]
    scale = factor / own_factor * torch.tensor(std or [1.0] * channels)
    kl.set_statistics(net, torch.tensor(mean or [0.0] * channels), scale)
    changed = {"scaling_factor": factor, "latents_mean": None, "latents_std": None}
    changed |= {"use_quant_conv": True, "use_post_quant_conv": True}
    return {name: tensor.detach() for name, tensor in kl.folded(net).state_dict().items()}, changed

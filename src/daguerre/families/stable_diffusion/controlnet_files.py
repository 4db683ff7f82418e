"""Files of ControlNets of UNets: reads them in any layout, and writes them for diffusers and for ComfyUI and A1111.

Layouts are the folder of diffusers, its names in one file, and the original names (lllyasviel/ControlNet), with or
without the prefix `control_model.`; of the latter also files that hold differences to the base model. What a file holds
is compared with the model's UNet, tensor by tensor; what is no ControlNet is refused by name.
"""

import re
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import ControlNetModel
from torch import Tensor, nn

from daguerre.errors import UserError
from daguerre.families.stable_diffusion import controlnet
from daguerre.families.stable_diffusion.single_file import keys, yaml_beside
from daguerre.models.controlnets import controlled
from daguerre.models.controlnets.places import SINGLE_FILE, find
from daguerre.models.export.about import UNKNOWN, About
from daguerre.models.lora_files import header
from daguerre.models.weights import beside, resolve, seals, unfilled
from daguerre.models.weights import load as weights_load
from daguerre.models.weights.files import read_file, read_json, write_compared
from daguerre.models.weights.opening import opened

PREFIX = "control_model."
_DIFFERENCE = "difference"
_OWN = ("controlnet_", "zero_convs.", "middle_block_out.", "input_hint_block.")
"""Beginnings of the names, in either layout, of what a ControlNet has in addition to its copy of the UNet."""
_MARKS = {"lora_controlnet", "task_embedding"}
"""Names without the prefix in any file."""
_UNION = "a union ControlNet, which reads several kinds of pictures at once: give one that was trained for one kind"
_OTHERS = (
    (r"lora_controlnet$|.*\.(up|down)$", "a Control-LoRA: only whole ControlNets can be read"),
    (r"task_embedding|control_add_embedding\.", _UNION),
    (r"(adapter\.)?body\.\d+\.", "a T2I-adapter, not a ControlNet"),
    (r"projections\.\d+\.", "a ControlNet for Stage C of Stable Cascade"),
    (r"(lora_|.*\.lora_|.*\.lora\.)", "a LoRA, not a ControlNet"),
    (r".*(controlnet_blocks\.|controlnet_x_embedder\.|double_blocks\.)", "a ControlNet of Flux or SD3"),
    (r"(model\.diffusion_model\.)", "a base model, not a ControlNet"),
)
_CLASSES = {
    "ControlNetUnionModel": _UNION,
    "T2IAdapter": "a T2I-adapter, not a ControlNet",
    "MultiAdapter": "several T2I-adapters, not a ControlNet",
    "UNet2DConditionModel": "a UNet, not a ControlNet",
}


_OF_UNET = (
    *("in_channels", "cross_attention_dim", "block_out_channels", "layers_per_block", "norm_num_groups"),
    "projection_class_embeddings_input_dim",
)
"""Numbers that are the UNet's."""


class Base(NamedTuple):
    """The model that a ControlNet is for."""

    unet: Any
    factor: int
    """Sides of an image by those of its latent."""
    ignored: tuple[str, ...] = ()
    """Patterns of tensors that are left out of files of ControlNets."""


def read(place: str, base: Base) -> Any:
    """The ControlNet of a place, on the CPU in float32: a folder of diffusers, a run's folder, a file, or the hub's.

    Under `torch.device("meta")` no weights are read. UserError for what is no ControlNet for this model.
    """
    found = find(place)
    network = _of_folder(found, base) if found.is_dir() else _of_file(found, base)
    if not resolve.without_weights():
        _check_numbers(place, network)
    return network


def _of_folder(folder: Path, base: Base) -> Any:
    named = read_json(folder / "config.json").get("_class_name")
    if named != "ControlNetModel":
        what = _CLASSES.get(str(named), f"a {named}" if named else "no network of diffusers (no _class_name)")
        raise UserError(f"{folder} is {what}: a ControlNetModel is needed", code="unsupported")
    defaults = {name: each.default for name, each in signature(ControlNetModel.__init__).parameters.items()}
    _check_fits(folder, defaults | weights_load.config(ControlNetModel, folder), base)
    for file in folder.glob("diffusion_pytorch_model*.safetensors") if not resolve.without_weights() else ():
        seals.check(file)
    return weights_load.load(ControlNetModel, folder, _variant(folder), base.ignored)


def _variant(folder: Path) -> str | None:
    """`fp16` of a folder that has no weights but diffusion_pytorch_model.fp16.safetensors."""
    weights = [path.name.split(".") for path in sorted(folder.glob("diffusion_pytorch_model*.safetensors"))]
    return weights[0][1] if len(weights) == 1 and len(weights[0]) == 3 else None


def _check_fits(folder: Path, config: Mapping[str, Any], base: Base) -> None:
    """UserError if the numbers are those of a ControlNet for another model."""
    embedding = config["conditioning_embedding_out_channels"]
    wanted = controlnet.numbers(base.unet, embedding)
    if wanted["addition_embed_type"] != config["addition_embed_type"]:
        kinds = {True: "SDXL", False: "Stable Diffusion 1.x or 2.x"}
        theirs, ours = (
            kinds[found == "text_time"] for found in (config["addition_embed_type"], wanted["addition_embed_type"])
        )
        raise UserError(f"{folder} is a ControlNet for {theirs}, and this model is {ours}", code="unsupported")
    if config["conditioning_channels"] != wanted.get("conditioning_channels", 3):
        raise UserError(
            f"{folder} reads pictures of {config['conditioning_channels']} channels: only those that read RGB (3) can "
            "be used",
            code="unsupported",
        )
    for name in _OF_UNET:
        own, asked = (list(v) if isinstance(v, list | tuple) else v for v in (config[name], wanted[name]))
        if own != asked:
            raise UserError(
                f"{folder} is a ControlNet for another model: its {name} is {own}, that of this model's UNet {asked}",
                code="unsupported",
            )
    _check_embedding(folder, len(embedding), base)


def _check_embedding(path: Path, levels: int, base: Base) -> None:
    if 1 << (levels - 1) != base.factor:
        raise UserError(
            f"{path} is a ControlNet for another autoencoder: it shrinks pictures by {1 << (levels - 1)}, and this "
            f"model's autoencoder shrinks images by {base.factor}",
            code="unsupported",
        )


def _of_file(path: Path, base: Base) -> Any:
    """The ControlNet in one file. Its size, and the channels of its embedding, follow from its tensors."""
    seals.check(path)
    with opened(path) as file:
        metadata = file.metadata() or {}
    tensors = beside.multiplied(beside.without(read_file(path), base.ignored)[0], metadata)
    beside.check_names(path, tensors)
    own = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if name.startswith(PREFIX)} or tensors
    for pattern, what in _OTHERS:
        if any(re.match(pattern, name) for name in (*own, *(tensors.keys() & _MARKS))):
            raise UserError(f"{path} is {what}", code="unsupported")
    own = {name: tensor for name, tensor in own.items() if name != _DIFFERENCE}
    original = any(name.startswith("input_hint_block.") for name in own)
    if not original and "controlnet_cond_embedding.conv_in.weight" not in own:
        raise UserError(f"{path} is no ControlNet: it has tensors such as {', '.join(sorted(own)[:3])}", code="unknown")
    is_difference = _DIFFERENCE in tensors
    numbers = _numbers(path, own, base, original, is_difference)
    if yaml_beside.pools(path):
        print(f"{path.name} is a ControlNet of the kind shuffle: its residuals are averaged over the image")
        numbers["global_pool_conditions"] = True
    network = weights_load.build(ControlNetModel, numbers)
    if original:
        links = keys.controlnet(network.state_dict())
        own = {link.names[0]: own[link.original] for link in links if link.original in own}
    found = _added(own, network, base) if is_difference else own
    if not resolve.without_weights():
        weights_load.fill(network, found, path)
    return network


def _added(differences: Mapping[str, Tensor], network: nn.Module, base: Base) -> dict[str, Tensor]:
    """All tensors of a ControlNet of which a file holds what training changed: what it lacks is the base's."""
    unet = controlnet.weights_of(base.unet)
    own = {name: unet[name].float() for name in network.state_dict() if controlnet.shared(name)}
    return own | {name: v.float() + own[name] if name in own else v for name, v in differences.items()}


def _numbers(path: Path, own: Mapping[str, Tensor], base: Base, original: bool, is_difference: bool) -> dict[str, Any]:
    """Numbers of the ControlNet with the tensors `own`. UserError if it is not one for this UNet. A difference may lack
    tensors that are the UNet's."""
    embedding = _embedding(own, original)
    _check_embedding(path, len(embedding), base)
    nearest: list[str] = []
    for size in controlled.SIZES:
        numbers = controlnet.numbers(base.unet, embedding, size)
        with unfilled.outlining():
            shapes = {
                name: tuple(v.shape) for name, v in weights_load.build(ControlNetModel, numbers).state_dict().items()
            }
        if original:
            shapes = {link.original: shapes[link.names[0]] for link in keys.controlnet(shapes)}
        odd = sorted(shapes.keys() ^ own.keys())
        if is_difference:
            odd = [name for name in odd if name in own or name.startswith(_OWN)]
        odd += [name for name in shapes.keys() & own.keys() if shapes[name] != tuple(own[name].shape)]
        if not odd:
            return numbers
        nearest = odd if not nearest or len(odd) < len(nearest) else nearest
    sized = {"add_embedding.linear_1.weight", "label_emb.0.0.weight"} & own.keys()
    theirs = "SDXL" if sized else "Stable Diffusion 1.x or 2.x"
    raise UserError(
        f"{path} is a ControlNet for another model ({theirs}, by its names): missing, unknown or of another shape than "
        f"this UNet asks for: {', '.join(nearest[:3])}{' ...' if len(nearest) > 3 else ''}",
        code="unsupported",
    )


def _embedding(own: Mapping[str, Tensor], original: bool) -> list[int]:
    """Channels of the control image's embedding: of its first layer, and of every second one after it."""
    names = [name for name in own if name.startswith(("input_hint_block.", "controlnet_cond_embedding.blocks."))]
    numbered = sorted(int(name.split(".")[1 if original else 2]) for name in names if name.endswith(".weight"))
    if original:
        return [len(own[f"input_hint_block.{number}.weight"]) for number in numbered[:-1:2]]
    every = [f"controlnet_cond_embedding.blocks.{number}.weight" for number in numbered[1::2]]
    return [len(own[name]) for name in ("controlnet_cond_embedding.conv_in.weight", *every)]


def _check_numbers(place: str, network: nn.Module) -> None:
    for name, tensor in network.state_dict().items():
        if not torch.isfinite(tensor).all():
            raise UserError(f"{place}: {name} has NaN or infinity in it", code="damaged")


def write(folder: Path, network: Any, about: About = UNKNOWN) -> None:
    """Fills an empty folder: diffusers' files, and SINGLE_FILE in the original layout. Both are read back and compared
    with the weights, to the bit; OSError where they differ. `about` goes into the headers."""
    metadata = header.modelspec({"controlnet": network}, about, "controlnet")
    own = {name: tensor.detach().to("cpu", torch.float32) for name, tensor in network.state_dict().items()}
    originals = {link.names[0]: PREFIX + link.original for link in keys.controlnet(own)}
    network.save_config(folder)
    for file, names in (
        ("diffusion_pytorch_model.safetensors", {name: name for name in own}),
        (SINGLE_FILE, originals),
    ):
        named = {names[name]: tensor for name, tensor in own.items()}
        write_compared(folder / file, named, metadata)

"""One .safetensors in the original layout, which ComfyUI and A1111 read, of a folder in diffusers' layout.

What the layout has no place for is not lost: the configs, the scheduler's numbers and tokenizers that are not CLIP's
own stand in the metadata, from which models/single_file/load.py makes the same folder again. Programs that know the
layout alone know SD 1.x, 2.x and SDXL; where they would compute something else than the model does, the caller is told.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from daguerre.checkpoint.atomic import make_folder, sync_folder, write_durably
from daguerre.checkpoint.safetensors import Later, encode
from daguerre.errors import UserError
from daguerre.models.single_file import compatibility, keys
from daguerre.models.single_file.configs import METADATA, Numbers
from daguerre.models.single_file.keys import Link
from daguerre.models.single_file.layout import LAYOUTS
from daguerre.models.tokenizers import clip_vocabulary
from daguerre.models.weights import files as weights_files
from daguerre.models.weights import pickled

Made = dict[str, Tensor | Later]


def write(path: Path, folder: Path, dtype: torch.dtype | None = None, variant: str | None = None) -> list[str]:
    """Writes the pipeline in `folder` as one file; what a person must be told. `dtype` None keeps every type.

    A kill leaves nothing under `path`. UserError for what the layout has no place for.
    """
    numbers = read_numbers(folder)
    networks = {name: weights_files.read(folder / name, variant) for name in numbers.configs}
    notices = [*compatibility.differences(numbers), *compatibility.taken_for(numbers, networks["unet"])]
    if (readers_vae := compatibility.scaled_vae(numbers, networks["vae"])) is not None:
        networks["vae"], config = readers_vae
        numbers.configs["vae"].update(config)
        notices.append("the latents' scaling is not the one that readers of one file know: it is folded into the VAE")
    if compatibility.opens(numbers):
        layers = compatibility.whole_text(numbers)["num_hidden_layers"]
        networks["text_encoder"] = compatibility.lengthened(networks["text_encoder"], layers)
    tensors: Made = {}
    for component, network in networks.items():
        weights_files.refuse_overflow(network, dtype, f"{component} of {folder}")
        tensors |= _original(numbers, component, network, dtype)
    tensors |= compatibility.marks(numbers)
    _write(path, tensors, _metadata(path, numbers))
    return notices


def write_unet(path: Path, folder: Path, dtype: torch.dtype | None = None, variant: str | None = None) -> None:
    """Writes the UNet of a pipeline alone as one file, in diffusers' names."""
    network = weights_files.read(folder / "unet", variant)
    weights_files.refuse_overflow(network, dtype, f"unet of {folder}")
    _write(path, {name: weights_files.cast(tensor, dtype) for name, tensor in network.items()}, {})


def read_numbers(folder: Path) -> Numbers:
    """What the configs of a pipeline in diffusers' layout say. UserError for a pipeline of another kind."""
    index = pickled.without_unused(_read(folder / "model_index.json"))
    named = index.get("_class_name")
    if named not in ("StableDiffusionPipeline", "StableDiffusionXLPipeline"):
        raise UserError(
            f"{folder} is a {named}: the original layout is for StableDiffusionPipeline and StableDiffusionXLPipeline"
        )
    layout = "sdxl" if named == "StableDiffusionXLPipeline" else _generation(folder)
    configs = {name: _read(folder / name / "config.json") for name in LAYOUTS[layout]}
    for name, config in configs.items():
        kind = config.get("model_type", "clip_text_model")
        if name.startswith("text_encoder") and not kind.startswith("clip"):
            raise UserError(f"{folder}: the original layout has a place for CLIP, not for a {kind} as {name}")
    names = [name for name in index if name.startswith("tokenizer")]
    tokenizers = {name: _tokenizer(folder / name) for name in names}
    return Numbers(layout, configs, _read(folder / "scheduler" / "scheduler_config.json"), index, tokenizers)


def _generation(folder: Path) -> str:
    """1.x reads with OpenAI's CLIP, 2.x with OpenCLIP's, which computes another activation."""
    return "sd1" if _read(folder / "text_encoder" / "config.json").get("hidden_act") == "quick_gelu" else "sd2"


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}. Needed is a whole pipeline in diffusers' layout") from error


def _tokenizer(folder: Path) -> dict[str, str]:
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
    if (pad := clip_vocabulary.padding_of_standard(files)) is not None:
        return {"pad": pad}
    return {name: content.decode("utf-8") for name, content in files.items()}


def _original(numbers: Numbers, component: str, network: Mapping[str, Tensor], dtype: torch.dtype | None) -> Made:
    """One network in the original layout."""
    place = LAYOUTS[numbers.layout][component]
    found: Made = {place.prefix + link.original: _packed(link, network, dtype) for link in place.links(sorted(network))}
    config = numbers.configs[component]
    if place.links is keys.clip:
        positions = torch.arange(config["max_position_embeddings"]).unsqueeze(0)
        found[f"{place.prefix}text_model.embeddings.position_ids"] = positions
    if numbers.layout == "sd2" and component == "text_encoder":
        found |= dict(_unused_layer(found, place.prefix, config["hidden_size"], dtype))
    return found


def _packed(link: Link, network: Mapping[str, Tensor], dtype: torch.dtype | None) -> Tensor | Later:
    first = network[link.names[0]]
    if link.form == "fused":
        parts = [network[name] for name in link.names]
        to = first.dtype if dtype is None else dtype
        shape = (len(parts) * first.shape[0], *first.shape[1:])
        return Later(to, shape, lambda: torch.cat([part.to(to) for part in parts]))
    if link.form == "convolution" and first.ndim == 2:
        first = first[:, :, None, None]
    return weights_files.cast(first.T if link.form == "transposed" else first, dtype)


def _unused_layer(
    found: Made, prefix: str, width: int, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor | Later]]:
    """2.x takes the features before OpenCLIP's last layer: files hold that layer and the projection without any use.

    Readers skip them; some refuse a file that lacks them. Here they are a copy of the layer before, and ones.
    """
    stem = f"{prefix}transformer.resblocks."
    last = 1 + max(int(name.removeprefix(stem).partition(".")[0]) for name in found if name.startswith(stem))
    of_last = f"{prefix}transformer.resblocks.{last - 1}."
    for name in [name for name in found if name.startswith(of_last)]:
        yield f"{prefix}transformer.resblocks.{last}.{name.removeprefix(of_last)}", found[name]
    to = dtype or torch.float32
    yield f"{prefix}text_projection", Later(to, (width, width), partial(torch.eye, width, dtype=to))


def _metadata(path: Path, numbers: Numbers) -> dict[str, str]:
    """Our own numbers, and what https://github.com/Stability-AI/ModelSpec asks for."""
    v = numbers.scheduler.get("prediction_type") == "v_prediction"
    latent = numbers.configs["unet"].get("sample_size") or 64
    side = latent if isinstance(latent, int) else max(latent)
    size = side * 2 ** (len(numbers.configs["vae"]["block_out_channels"]) - 1)
    architecture = {
        "sd1": "stable-diffusion-v1",
        "sd2": "stable-diffusion-v2-768-v" if v else "stable-diffusion-v2-512",
        "sdxl": "stable-diffusion-xl-v1-base",
    }[numbers.layout]
    return {
        METADATA: numbers.to_metadata(),
        "daguerre.version": version("daguerre"),
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": architecture,
        "modelspec.implementation": "https://github.com/Stability-AI/generative-models",
        "modelspec.title": path.stem,
        "modelspec.date": datetime.now(UTC).isoformat(timespec="seconds"),
        "modelspec.resolution": f"{size}x{size}",
        "modelspec.prediction_type": "v" if v else "epsilon",
        "modelspec.predict_key": "v" if v else "epsilon",
    }


def _write(path: Path, tensors: Made, metadata: Mapping[str, str]) -> None:
    """Puts the file in place whole."""
    make_folder(path.parent)
    fresh = path.with_name(f".{path.name}.tmp")
    fresh.unlink(missing_ok=True)
    try:
        write_durably(fresh, encode(tensors, metadata))
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    sync_folder(path.parent)

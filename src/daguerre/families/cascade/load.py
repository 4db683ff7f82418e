"""Opens the networks of Stable Cascade: from Stability's single files, diffusers' folders, or numbers.

A file has no config, so its numbers are read off the shapes of its weights.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from diffusers.models.unets.unet_stable_cascade import StableCascadeUNet
from diffusers.pipelines.deprecated.wuerstchen.modeling_paella_vq_model import PaellaVQModel

from daguerre.errors import UserError
from daguerre.families.cascade import files, initial, keys, sizes
from daguerre.families.cascade.efficientnet import EfficientNetEncoder
from daguerre.families.cascade.previewer import Previewer
from daguerre.models.components import ComponentLoader
from daguerre.models.settings import SINGLE_FILES
from daguerre.models.weights import load as weights_load
from daguerre.models.weights import resolve

_KINDS: dict[str, Any] = {
    "prior": StableCascadeUNet,
    "decoder": StableCascadeUNet,
    "vqgan": PaellaVQModel,
    "effnet": EfficientNetEncoder,
    "previewer": Previewer,
}
_TOLD: dict[str, Callable[[sizes.Shapes], dict[str, Any]]] = {
    "prior": sizes.told,
    "decoder": sizes.told,
    "vqgan": sizes.stage_a_told,
    "effnet": sizes.effnet_told,
    "previewer": sizes.previewer_told,
}


def network(components: ComponentLoader, name: str, size: Mapping[str, Any] | None = None) -> Any:
    """The network `name`, in float32 on the CPU. `size` are the numbers of one that starts from random weights, where
    the base's shall not be taken. UserError where the weights of another network are given."""
    return components.made(name, lambda: _network(components, name, size))


def _network(components: ComponentLoader, name: str, size: Mapping[str, Any] | None) -> Any:
    value, kind = getattr(components.settings, name), _KINDS[name]
    if isinstance(value, str) and value.endswith(SINGLE_FILES) and not Path(value).is_dir():
        return _of_file(components, name, value)
    if isinstance(value, str):
        _check_class(components, name, kind)
        found = components.network(name, kind)
    else:
        numbers = size if value is None else value
        numbers = weights_load.config(kind, components.base / name) if numbers is None else numbers
        fresh = initial.STARTS.get(kind, lambda network: network)
        found = weights_load.seeded(lambda: fresh(kind(**numbers)), components.seed, f"model.{name}")
    _check_stage(name, found)
    return found


def _of_file(components: ComponentLoader, name: str, value: str) -> Any:
    known = sizes.named(Path(value).name)
    if resolve.without_weights() and known is not None and not Path(value).is_file():
        return _KINDS[name](**known)
    path = components.file(name)
    ignored = components.elsewhere.ignored
    numbers = _TOLD[name](files.shapes(path, name, ignored))
    found = weights_load.seeded(lambda: _KINDS[name](**numbers), components.seed, f"model.{name}")
    if not resolve.without_weights():
        weights_load.fill(found, files.read(path, name, ignored), path)
    return found


def _check_class(components: ComponentLoader, name: str, kind: Any) -> None:
    """UserError for a folder of another network, by what its config says it is."""
    said = components.config(name).get("_class_name", kind.__name__)
    if said == kind.__name__:
        return
    other = "a network of Wuerstchen v2" if "Wuerstchen" in str(said) else f"a {said}"
    raise UserError(
        f"model.{name} is {other}, and must be {keys.STAGES[name]} of Stable Cascade, a {kind.__name__}",
        code="unsupported",
        setting=f"model.{name}",
    )


def _check_stage(name: str, network: Any) -> None:
    """UserError for Stage B where Stage C is wanted, and the other way round: both are of one class."""
    if name not in ("prior", "decoder"):
        return
    is_c = network.config.clip_text_in_channels is not None and network.config.clip_image_in_channels is not None
    is_b = network.config.effnet_in_channels is not None
    if (is_c, is_b) != (name == "prior", name == "decoder"):
        found = "Stage C" if is_c else "Stage B" if is_b else "neither Stage C nor Stage B"
        raise UserError(
            f"model.{name} is {found}, and must be {keys.STAGES[name]}",
            code="conflict",
            setting=f"model.{name}",
        )


def check_widths(names: Mapping[str, Any], networks: Mapping[str, Any], reader: Any) -> None:
    """UserError where networks do not fit each other."""
    pooled = int(reader.encoder.config.projection_dim)
    latent = int(networks["effnet"].config.latent_channels)
    wrong = []
    for name in ("prior", "decoder"):
        config = networks[name].config if name in networks else None
        if config is None:
            continue
        own = {"clip_text_pooled_in_channels": (pooled, "the width of the pooled text")}
        if name == "prior":
            own |= dict.fromkeys(("in_channels", "out_channels"), (latent, "the channels of the effnet's latents"))
            own["clip_text_in_channels"] = (reader.width, "the width of the text encoder")
        else:
            own["effnet_in_channels"] = (latent, "the channels of the effnet's latents")
            channels = int(networks["vqgan"].config.latent_channels)
            own |= dict.fromkeys(("in_channels", "out_channels"), (channels, "the channels of Stage A's latents"))
        if "image_encoder" in networks and name == "prior":
            width = int(networks["image_encoder"].config.projection_dim)
            own["clip_image_in_channels"] = (width, "the width of the image encoder")
        wrong += [
            f"{name}: {key} is {config[key]}, but must be {wanted}, {why}"
            for key, (wanted, why) in own.items()
            if config[key] != wanted
        ]
    if wrong:
        raise UserError(f"the networks do not belong together: {'; '.join(wrong)}", code="conflict")
    check_previewer(networks)


def check_previewer(networks: Mapping[str, Any]) -> None:
    """UserError for a previewer of other latents than the EfficientNet's."""
    read = int(networks["previewer"].config.latent_channels) if "previewer" in networks else None
    made = int(networks["effnet"].config.latent_channels)
    if read not in (None, made):
        raise UserError(
            f"the networks do not belong together: previewer: it reads latents of {read} channels, not {made}",
            code="conflict",
        )

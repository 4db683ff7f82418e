"""Names of the layers of text encoders in files of LoRAs: of sd-scripts, ComfyUI, A1111 and OneTrainer."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from daguerre.models.network import facts_of
from daguerre.models.weights.original_names import Layers, Spelling, flat, spelled

PROJECTION = "text_projection"
"""The layer of a CLIP text encoder that stands outside its transformer, and so has no `text_model` in its name."""
_TEXT_ENCODER = re.compile(r"text_encoder(_\d)?")


def with_wrapper(name: str) -> str:
    """A text encoder's name as the hub's files have it; transformers 5.6 and later leave `text_model.` out."""
    return name if name.startswith(("text_model.", "text_projection.")) else f"text_model.{name}"


def spellings(name: str) -> tuple[str, ...]:
    """A text encoder's name as the network has it, and as files have it with and without `text_model.`."""
    return name, name.removeprefix("text_model."), with_wrapper(name)


def hub_name(network: nn.Module, name: str) -> str:
    """A tensor's name as the hub's files of a network have it, and transformers 4 reads it as well as 5."""
    return with_wrapper(name) if type(network).__name__ == "CLIPTextModel" else name


def _place(component: str, networks: Mapping[str, nn.Module]) -> tuple[int, bool]:
    """The number of a text encoder among those of the model, and whether it is the only one."""
    texts = sorted(name for name in networks if _TEXT_ENCODER.fullmatch(name))
    return texts.index(component), len(texts) == 1


@dataclass(frozen=True)
class ClipNames:
    """Names of CLIP's encoders, which are numbered by their place in the model."""

    text_encoders: str = "te"
    swapped: frozenset[str] = frozenset()

    def spellings(self, component: str, networks: Mapping[str, nn.Module], layers: Sequence[str]) -> Iterator[Spelling]:
        number, alone = _place(component, networks)
        clips = ("clip_l", "clip_h", "clip_g") if alone else (("clip_l", "clip_g")[number],)
        dotted = [
            f"{component}.",
            *(f"{clip}." for clip in clips),
            *(f"text_encoders.{clip}.transformer." for clip in clips),
        ]
        flattened = ["lora_te_", "lora_te1_", "lora_prior_te_"] if alone else [f"lora_te{number + 1}_"]
        dotted += [""] if alone else []
        # Beside a transformer ai-toolkit has these starts and dots behind them.
        dotted += [f"{start[:-1]}." for start in flattened]
        flattened += ["lora_te_wrapped_transformer_"] if alone else []
        for layer in layers:
            for name in {*spellings(layer)}:
                yield from spelled(name, (layer,), dotted, flattened)

    def kohya(self, component: str, networks: Mapping[str, nn.Module], layers: Sequence[str]) -> dict[str, Layers]:
        number, alone = _place(component, networks)
        # Of Stable Cascade the encoder's prefix says that it is the prior's: the denoiser's names know that.
        only = next((names.text_encoders for each in networks.values() if (names := facts_of(each).names)), "te")
        prefix = only if alone else f"te{number + 1}"
        paths = {layer: layer if layer == PROJECTION else with_wrapper(layer) for layer in layers}
        return {f"lora_{prefix}_{flat(path)}": (layer,) for layer, path in paths.items()}


@dataclass(frozen=True)
class T5Names:
    """Names of T5, which is the third encoder for every program but OneTrainer, whichever others a model has."""

    text_encoders: str = "te"
    swapped: frozenset[str] = frozenset()

    def spellings(self, component: str, networks: Mapping[str, nn.Module], layers: Sequence[str]) -> Iterator[Spelling]:
        dotted = (f"{component}.", "t5.", "t5xxl.transformer.", "text_encoders.t5xxl.transformer.")
        flattened = {"lora_te3_", f"lora_te{_place(component, networks)[0] + 1}_"}
        for layer in layers:
            yield from spelled(layer, (layer,), dotted, flattened)

    def kohya(self, component: str, networks: Mapping[str, nn.Module], layers: Sequence[str]) -> dict[str, Layers]:
        return {f"lora_te3_{flat(layer)}": (layer,) for layer in layers}


def of_others(component: str, layers: Sequence[str]) -> Iterator[Spelling]:
    """Names of layers of a network whose class has none of its own: of language models, OneTrainer's as well."""
    is_text = _TEXT_ENCODER.fullmatch(component) is not None
    dotted = [f"{component}.", *(["text_encoders.qwen25_7b.transformer."] if is_text else [])]
    for layer in layers:
        yield from spelled(layer, (layer,), dotted, ["lora_te_"] if is_text else [])

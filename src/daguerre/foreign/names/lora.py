"""LoRAs as other trainers name them, in our settings: for the tables of names, and for configs."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from daguerre.errors import UserError
from daguerre.foreign.names.values import NOTHING_ASKED, Meaning, listed, number, one

_KINDS = {"lora": "lora", "locon": "lora", "loha": "loha", "lokr": "lokr"}
"""LyCORIS' algorithms, and kinds of ours."""
_PRESETS = {"full": "attention+ff+conv", "attn-mlp": "attention+ff", "attn-only": "attention"}
"""LyCORIS' presets, and the layers that they are."""
_LYCORIS = "lycoris.kohya"
WITH_KERNEL = ("conv[12]", "*samplers.*.conv")
"""The convolutions of 3 x 3, which have numbers of their own there."""
_OFF = {"rank_dropout": "0", "module_dropout": "0", "train_norm": "false", "use_tucker": "false", "use_cp": "false"}
_OFF |= {"factor": "-1", "decompose_both": "false", "use_scalar": "false", "rank_dropout_scale": "false"}
_OFF |= {"dora_wd": "false", "rs_lora": "false"}
"""Arguments of a network that are not here, and the value with which they ask for nothing."""
_MODULES: dict[str, dict[str, Any]] = {"networks.lora": {}, "networks.lora_fa": {"adapter.lora_fa": True}, _LYCORIS: {}}
"""Networks of kohya's scripts, and settings that they have in addition."""
_BLOCKS = {
    "networks.lora_flux": ["transformer.transformer_blocks.*", "transformer.single_transformer_blocks.*"],
    "networks.lora_flux_2": "attention+ff",
    "networks.lora_anima": "attention+ff",
    "networks.lora_qwen_image": "attention+ff",
    "networks.lora_krea2": "all",
    "networks.lora_zimage": ["transformer.layers.*.attention.*", "transformer.layers.*.feed_forward.*"],
}
"""Networks of kohya's scripts and of musubi-tuner for models of flow matching, and their layers."""
FUSED = {"networks.lora_flux": "split_qkv", "networks.lora_flux_2": ""}
"""Those whose layer of query, key and value together has one LoRA, and the argument that takes these apart."""
_WITH_TEXTS = ("networks.lora_flux", "networks.lora_anima")
"""Those that are added to the (first) text encoder, too."""
_SAME = ("bypass_mode", "split_qkv")
"""Arguments that choose how the same product is computed."""
KOHYA_RANK, KOHYA_ALPHA = 4, 1
"""Of kohya's scripts, where nothing is said."""
WHOLE = 64
"""The rank from which no layer of Stable Diffusion or SDXL has a LoKr with a product in it: LyCORIS then takes two
whole matrices and multiplies by 1, whatever alpha is (lycoris-lora 4.1.3, modules/lokr.py)."""


def kohya(module: str, arguments: Sequence[str], rank: int, alpha: float) -> dict[str, Any]:
    """A network of kohya's scripts or LyCORIS, of this rank and alpha, in our settings (`adapter` stands for its name).

    UserError for a network or an argument that is not here.
    """
    given = parted(arguments)
    is_lycoris = module == _LYCORIS
    if module not in (*_MODULES, *_BLOCKS):
        raise UserError(
            f"network_module={module} is not read; {', '.join(_MODULES)} are, and for models of flow matching "
            f"{', '.join(_BLOCKS)}. For a LoRA of another kind or model start from its recipe: `daguerre recipes` "
            "lists them",
            code="unsupported",
        )
    for name, value in lost(given).items():
        raise UserError(f"network_args: {name}={value} is not supported", code="unsupported")
    algorithm, preset = given.pop("algo", "lora").lower(), given.pop("preset", "full" if is_lycoris else "attn-mlp")
    if algorithm == "tlora":
        raise UserError(
            "network_args: algo=tlora: kohya's scripts give LyCORIS no noise levels, so that all of its ranks act at "
            "all of them. A T-LoRA is algo=lora here, and adapter.tlora_min_rank=1",
            code="unsupported",
        )
    if algorithm not in _KINDS or preset not in _PRESETS:
        allowed = f"algo={'|'.join(_KINDS)} and preset={'|'.join(_PRESETS)}"
        raise UserError(f"network_args: algo={algorithm} preset={preset}: there are {allowed}", code="unsupported")
    kind = "dora" if _is_on(given.pop("dora_wd", "")) else _KINDS[algorithm]
    kind = "rslora" if _is_on(given.pop("rs_lora", "")) else kind
    alpha = strength(kind, rank, alpha)
    found: dict[str, Any] = {"adapter.rank": rank, "adapter.alpha": alpha, "adapter.kind": kind} | _MODULES.get(
        module, {}
    )
    if not number("network_args: conv_dim", given.get("conv_dim", "1")):  # LyCORIS then takes the network's own rank
        given = {name: value for name, value in given.items() if name not in ("conv_dim", "conv_alpha")}
    found["adapter.targets"] = "attention+ff+conv" if "conv_dim" in given else _PRESETS[preset]
    of_conv = given.pop("conv_dim", str(rank)), given.pop("conv_alpha", str(alpha if is_lycoris else KOHYA_ALPHA))
    numbers = [number(f"network_args: conv_{name}", text) for name, text in zip(("dim", "alpha"), of_conv, strict=True)]
    numbers[1] = strength(kind, int(numbers[0]), numbers[1])
    for name, own, usual in zip(("rank", "alpha"), numbers, (rank, alpha), strict=True):
        if "conv" in found["adapter.targets"] and own != usual:
            found[f"adapter.{name}_pattern"] = dict.fromkeys(WITH_KERNEL, int(own) if name == "rank" else own)
    if dropout := number("network_args: dropout", given.pop("dropout", "0")):
        found["adapter.dropout"] = dropout
    if module in _BLOCKS:
        found = {path: value for path, value in found.items() if not path.endswith("_pattern")}
        found["adapter.targets"] = _BLOCKS[module]
    for name in [name for name in given if name in _RATIOS]:
        found |= {path: json.loads(text) for path, text in ratio(name, given.pop(name), _RATIOS[name]).values}
    return found


def strength(kind: str, rank: int, alpha: float) -> float:
    """The alpha that counts there: for a LoKr of whole matrices the rank, as its additions are multiplied by 1."""
    return rank if kind == "lokr" and rank >= WHOLE else alpha


def doubt(kind: str, rank: int, alpha: float) -> str:
    """The loss of an alpha that LyCORIS reads in some layers of a LoKr alone; empty where nothing is."""
    if kind != "lokr" or strength(kind, rank, alpha) == rank:
        return ""
    return (
        f"of a LoKr of rank {rank} some layers are two whole matrices, which LyCORIS multiplies by 1; here alpha / "
        "rank counts in all layers: alpha = rank gives both the same"
    )


def encoders(module: str, of_family: Sequence[str]) -> tuple[str, ...]:
    """The text encoders that a network of kohya's scripts is added to, of those of a family."""
    return tuple(of_family) if module in _MODULES else tuple(of_family[:1]) if module in _WITH_TEXTS else ()


def reach(found: dict[str, Any], names: Sequence[str], rank: int) -> None:
    """Adds the LoRA to text encoders, too: all their layers, where those of the denoiser are named."""
    found |= {f"adapter.ranks.{name}": rank for name in names}
    if isinstance(targets := found["adapter.targets"], list):
        found["adapter.targets"] = [*targets, *(f"{name}.*" for name in names)]


def parted(arguments: Sequence[str]) -> dict[str, str]:
    """Arguments of a network, such as `conv_dim=4`, by name."""
    return {name.strip(): value.strip() for name, _, value in (each.partition("=") for each in arguments)}


def has_ratio(given: Mapping[str, str]) -> bool:
    """True where LoRA+ gives B another rate than A."""
    return any(given.get(name, "").lower() not in NOTHING_ASKED for name in _RATIOS)


def lost(given: Mapping[str, str]) -> dict[str, str]:
    """The arguments of a network that ask for what is not here."""
    known = {*_KNOWN, *_RATIOS, *_SAME}
    if given.get("algo", "lora").lower() in ("loha", "lokr"):  # rows of one length, and the root, are of a LoRA alone
        known -= {"dora_wd", "rs_lora"}
    elif _is_on(given.get("dora_wd", "")):
        known -= {"rs_lora"}
    others = {name: value for name, value in given.items() if name not in known}
    return {name: value for name, value in others.items() if not _is_off(name, value.lower())}


def _is_off(name: str, text: str) -> bool:
    """True for a value that asks for nothing, such as 0.0 for 0."""
    off = _OFF.get(name)
    numbers = re.fullmatch(r"-?\d+(\.0*)?", text) and off and re.fullmatch(r"-?\d+", off)
    return text in (off, "none", "") or bool(numbers and float(text) == float(off or 0))


def _is_on(text: str) -> bool:
    return text.lower() in ("true", "1")


_KNOWN = ("algo", "preset", "dora_wd", "rs_lora", "conv_dim", "conv_alpha", "dropout")
_RATIOS = {
    "loraplus_lr_ratio": "*.lora_B.*",
    "loraplus_unet_lr_ratio": "unet.*.lora_B.*",
    "loraplus_text_encoder_lr_ratio": "text_encoder*.lora_B.*",
}


def ratio(key: str, text: str, pattern: str) -> Meaning:
    """A factor of the learning rate of some weights: kohya's ratio of LoRA+ (B over A), MindOne's `group_lr_scaler`."""
    if text.lower() in NOTHING_ASKED:
        return Meaning()
    return one("optimizer.learning_rate_factors", json.dumps({pattern: number(key, text)}))


def network(key: str, text: str, look: Callable[[str], str | None]) -> Meaning:
    """kohya's `network_module` with all that says what it is: `network_dim`, `network_alpha`, `network_args`.

    Its LoRA is added to the text encoders, too, unless `network_train_unet_only` is set.
    """
    if text.lower() in NOTHING_ASKED:
        return Meaning((), (f"{key} has no effect: no network is asked for",))
    rank, alpha = _number(look, "network_dim", KOHYA_RANK), _number(look, "network_alpha", KOHYA_ALPHA)
    settings = kohya(text, listed(look("network_args") or ""), int(rank), alpha or rank)
    both = ("text_encoder", "text_encoder_2")
    reached = encoders(text, both if look("model.family") == "sdxl" else both[:1])
    reach(settings, () if _is_on(look("network_train_unet_only") or "") else reached, int(rank))
    if _is_on(look("network_train_text_encoder_only") or ""):
        settings[f"adapter.ranks.{'transformer' if text in _BLOCKS else 'unet'}"] = None
    said = doubt(settings["adapter.kind"], int(rank), settings["adapter.alpha"])
    values = (("adapter.name", "lora"), *((path, _text(value)) for path, value in settings.items()))
    return Meaning(values, (f"network_alpha: {said}",) if said else ())


def beside(key: str, text: str, look: Callable[[str], str | None]) -> Meaning:
    """A name that `network_module` reads; alone it sets what it says, of a LoRA that is there."""
    if text.lower() in NOTHING_ASKED:
        return Meaning((), (f"{key} has no effect: it asks for nothing",))
    if (look("network_module") or "none").lower() not in NOTHING_ASKED:
        return Meaning()
    alone = {"network_dim": "adapter.rank", "network_alpha": "adapter.alpha", "network_dropout": "adapter.dropout"}
    if key not in alone:
        raise UserError(f"{key} belongs to a network: add network_module=networks.lora", setting=key)
    return Meaning((("adapter.name", "lora"), (alone[key], text)))


def in_diffusers(part: str) -> str:
    """A pattern of diffusers' names for a part of Stability's: attention's products are `attn` and `attn.out_proj`
    there, `to_q`, `to_k`, `to_v` and `to_out.0` here."""
    for theirs, ours in (("attn.out_proj", "to_out.0"), ("out_proj", "to_out.0"), ("attn", "to_")):
        part = part.replace(theirs, ours)
    return f"*{part}*"


def filters(key: str, text: str) -> Meaning:
    """Stable Cascade's `module_filters`: parts of the names of the layers that get an addition, whose alpha is 1."""
    parts = [part.strip(" '\"") for part in text.strip("[] ").split(",") if part.strip()]
    targets = json.dumps([in_diffusers(part) for part in parts])
    values = (("adapter.name", "lora"), ("adapter.targets", targets))
    return Meaning(values, implied=(("adapter.alpha", lambda: "1"),))


def layers(key: str, text: str) -> Meaning:
    """diffusers' `lora_layers`: ends of layers' names, with commas between."""
    return Meaning((("adapter.name", "lora"), ("adapter.targets", json.dumps([p.strip() for p in text.split(",")]))))


def _number(look: Callable[[str], str | None], name: str, usual: float) -> float:
    text = look(name)
    return usual if text is None or text.lower() in NOTHING_ASKED else number(name, text)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)

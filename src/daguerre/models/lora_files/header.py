"""Headers of files of LoRAs: kohya's `ss_*`, Stability's modelspec 1.0.1, and the base that a LoRA was trained on.

Sources: kohya-ss/sd-scripts train_network.py, library/sai_model_spec.py and library/train_util.py;
https://github.com/Stability-AI/ModelSpec; of Stable Cascade Nerogar/OneTrainer resources/sd_model_spec.
"""

import hashlib
import io
import json
from base64 import b64encode
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from PIL import Image
from torch import Tensor, nn

from daguerre import documents
from daguerre.checkpoint.safetensors import encode
from daguerre.models.export.about import About
from daguerre.models.lora_files.addition import DIFF, DOWN, Addition
from daguerre.models.network import Architecture, architecture_of, facts_of
from daguerre.models.weights import file_digests, seals

BASE = "daguerre.base"
"""Key of a header: JSON of {component: {place, digest}} of the weights that were not trained."""
TLORA = "daguerre.tlora"
"""Key of a header: JSON of {min_rank, alpha} of a LoRA of which not all ranks act at all noise levels."""
_ARCHITECTURE = "modelspec.architecture"
_OF_MODEL = ("ss_base_model_version", "ss_v2")
"""sd-scripts' keys of the model."""
_OF_TENSORS = ("ss_network_", "modelspec.hash", "modelspec.implementation", "modelspec.date")
"""Keys that a file has of its own tensors, layout and time: another file with the same weights has its own."""
_LEGACY = (0x100000, 0x110000)
"""Bytes of a file that its old, short hash is of."""
_THUMBNAIL_PX = 256
"""The longer side of a thumbnail, as the spec recommends."""


def _model(networks: Mapping[str, nn.Module], about: About) -> Architecture | None:
    """The model with the denoiser among these networks; None where nothing says which it is."""
    known = [(network, facts_of(network)) for network in networks.values()]
    by_class, said = architecture_of(known, about.prediction), about.architecture
    if said is None:
        return by_class
    # Models of several families can have one class. A file's header says less of a model than the facts of the class.
    alike = [by_class, *(model for _, facts in known for model in facts.other_models)]
    return next((model for model in alike if model and model.modelspec == said.modelspec), said)


def modelspec(networks: Mapping[str, nn.Module], about: About, kind: str = "lora") -> dict[str, str]:
    """Of a file of this kind for diffusion networks: the spec's required keys, the others that are known, and the
    base."""
    model = _model(networks, about)
    found = {
        **of_model(networks, about, kind),
        "modelspec.implementation": model.implementation if model else "diffusers",
        "modelspec.title": about.title or {"lora": "LoRA", "controlnet": "ControlNet"}[kind],
        "modelspec.date": datetime.now(UTC).isoformat(timespec="seconds"),
        "modelspec.trigger_phrase": about.trigger_phrase,
        seals.VERSION: version("daguerre"),
        BASE: json.dumps(public(about.base)) if about.base else "",
        TLORA: json.dumps(about.tlora) if about.tlora else "",
    }
    return {**about.kept, **{name: value for name, value in found.items() if value}}


def of_model(networks: Mapping[str, nn.Module], about: About, kind: str) -> dict[str, str]:
    """modelspec's keys of the model that a file of this kind is for: lora, controlnet, or textual-inversion.

    The spec requires a resolution: of images of a size that nobody knows it is left out all the same.
    """
    model = _model(networks, about)
    height, width = about.size_px or (0, 0)
    found = {
        "modelspec.sai_model_spec": "1.0.1",
        _ARCHITECTURE: f"{model.modelspec}/{kind}" if model else "",
        "modelspec.resolution": f"{width}x{height}" if width else "",
        "modelspec.prediction_type": {"eps": "epsilon", "v": "v"}.get(about.prediction, ""),
        "modelspec.thumbnail": _thumbnail(about.image),
    }
    return {name: value for name, value in found.items() if value}


def _thumbnail(image: Path | None) -> str:
    """A small JPEG of the image as a data URL; empty without one."""
    if image is None:
        return ""
    with Image.open(image) as opened:
        small = opened.convert("RGB")
    small.thumbnail((_THUMBNAIL_PX, _THUMBNAIL_PX))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{b64encode(file.getvalue()).decode()}"


def public(base: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """A base without the folders of this machine: of a path the last name, of a model on the hub its name."""
    return {name: {**own, "place": _name(own.get("place", ""))} for name, own in base.items()}


def _name(place: str) -> str:
    path = Path(place).expanduser()
    return path.name if path.is_absolute() or path.exists() else place


def architecture(metadata: Mapping[str, str]) -> str:
    """The model that a header says that its file is for; empty where it does not."""
    return metadata.get(_ARCHITECTURE, metadata.get("ss_base_model_version", "")).removesuffix("/lora")


def base(metadata: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The base that a header names, by component; empty where it names none that can be read."""
    try:
        found = documents.parse(metadata.get(BASE, "{}"))
    except ValueError:
        return {}
    owns = [*found.values()] if isinstance(found, dict) else [None]
    known = all(isinstance(own, dict) and all(isinstance(each, str) for each in own.values()) for own in owns)
    return found if known else {}


def tlora(metadata: Mapping[str, str]) -> dict[str, float]:
    """`min_rank` and `alpha` of the T-LoRA that a header says its file is; {} for all others."""
    try:
        found = documents.parse(metadata.get(TLORA, "{}"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def about(metadata: Mapping[str, str], title: str) -> About:
    """The facts that a header tells; of its title and base those of kohya's, too. `title` is that of a file without."""
    try:
        width, height = map(int, metadata["modelspec.resolution"].split("x"))
    except (ValueError, KeyError):
        width, height = 0, 0
    named = metadata.get(_ARCHITECTURE, "").partition("/")[0]
    kohya_keys = {name: metadata[name] for name in _OF_MODEL if name in metadata}
    return About(
        title=metadata.get("modelspec.title") or metadata.get("ss_output_name") or title,
        base=base(metadata),
        size_px=(height, width) if width else None,
        trigger_phrase=metadata.get("modelspec.trigger_phrase", ""),
        prediction={"epsilon": "eps", "v": "v"}.get(metadata.get("modelspec.prediction_type", ""), ""),
        architecture=Architecture(named, kohya_keys) if named else None,
        kept={
            name: text
            for name, text in metadata.items()
            if name.startswith(("ss_", "modelspec.")) and not name.startswith(_OF_TENSORS)
        },
    )


def kohya(networks: Mapping[str, nn.Module], main: list[Addition], alpha: float, about: About) -> dict[str, str]:
    """`ss_*`, by which sd-scripts, A1111 and other programs show, sort and choose files.

    Args:
        networks: all of the model.
        main: the additions to its first component that has some.
        alpha: of all modules of the file.
        about: facts of the run.
    """
    ranks = {each.rank for each in main if each.rank}
    main = sorted(main, key=lambda each: DIFF in each.factors)  # what tells the kind comes first
    is_lora = all(DOWN in each.factors for each in main)
    first = next(iter(public(about.base).values()), {})
    found = {
        "ss_network_module": "networks.lora" if is_lora else "lycoris.kohya",
        "ss_network_dim": "Dynamic" if len(ranks) > 1 else "".join(map(str, ranks)),
        "ss_network_alpha": str(alpha),
        "ss_network_args": json.dumps(_arguments(main, alpha)),
        **(model.kohya if (model := _model(networks, about)) else {}),
        "ss_output_name": about.title,
        "ss_sd_model_name": first.get("place", ""),
        "ss_resolution": str((about.size_px[1], about.size_px[0])) if about.size_px else "",
        "ss_steps": "" if about.step is None else str(about.step),
        "ss_epoch": "" if about.epoch is None else str(int(about.epoch)),
        "ss_tag_frequency": json.dumps(about.tags) if about.tags else "",
        **_of_base(next(iter(about.base.values()), {}).get("place", "")),
    }
    return {name: value for name, value in found.items() if value}


def _of_base(place: str) -> dict[str, str]:
    """Hashes of a base that is one file, as sd-scripts and A1111 know it: the old, short one and its SHA-256."""
    path = Path(place).expanduser()
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        file.seek(_LEGACY[0])
        short = hashlib.sha256(file.read(_LEGACY[1] - _LEGACY[0])).hexdigest()[:8]
    return {"ss_sd_model_hash": short, "ss_new_sd_model_hash": file_digests.sha256(path)}


def _arguments(main: list[Addition], alpha: float) -> dict[str, str]:
    """Arguments of the network module: LyCORIS' algorithm, or the rank of convolutions."""
    if DIFF in main[0].factors:
        return {"algo": "full"}
    if "hada_w1_a" in main[0].factors:
        return {"algo": "loha"}
    if DOWN not in main[0].factors:
        return {"algo": "lokr"}
    downs = [each.factors[DOWN] for each in main if DOWN in each.factors]
    ranks = {len(down) for down in downs if down.ndim == 4 and down.shape[-1] > 1}
    return {"conv_dim": str(ranks.pop()), "conv_alpha": str(alpha)} if len(ranks) == 1 else {}


def hashes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """`sshs_model_hash` and modelspec's: SHA-256 of what follows the header. `sshs_legacy_hash`: the first 8 digits of
    that of the bytes 0x100000 to 0x110000 of a file that has nothing but the `ss_*` keys in addition to its tensors."""
    first, *raw = encode(tensors, {})
    header = json.loads(first[8:]) | {"__metadata__": {k: v for k, v in metadata.items() if k.startswith("ss_")}}
    length = len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode())
    at = 8 + length + -length % 8
    whole, short = hashlib.sha256(), hashlib.sha256()
    for chunk in raw:
        whole.update(chunk)
        begin, end = (min(max(edge - at, 0), len(chunk)) for edge in _LEGACY)
        short.update(chunk[begin:end])
        at += len(chunk)
    return {
        seals.KOHYA_DIGEST: whole.hexdigest(),
        "sshs_legacy_hash": short.hexdigest()[:8],
        seals.DIGEST: f"0x{whole.hexdigest()}",
    }

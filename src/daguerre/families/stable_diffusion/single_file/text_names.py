"""Text encoders that a single file has in transformers' names, as some programs write them, or under the names of a
pipeline's components: in the names and the form of the original layout."""

import re
from collections.abc import Mapping

from torch import Tensor

from daguerre.checkpoint.safetensors import Later
from daguerre.families.stable_diffusion.single_file.layout import LAYOUTS, UNET, Place
from daguerre.models.parts.text.names import with_wrapper
from daguerre.models.weights.original_names import packed

_PART = r"(?:text_model\.)?(?:embeddings|encoder|final_layer_norm)\..+|text_projection\.weight"
_NAME = rf"(?:model\.|transformer\.)*({_PART})"
_FIRST = re.compile(rf"(?:text_encoder|clip_l)\.{_NAME}")
_SECOND = re.compile(rf"(?:conditioner\.embedders\.1|text_encoder_2|clip_g)\.{_NAME}")
_ONLY = re.compile(rf"cond_stage_model\.{_NAME}")
_TOKENS = "text_model.embeddings.token_embedding.weight"
_OPEN_CLIP_WIDTH = 1024
"""That of the text encoder of 2.x, which is OpenCLIP's; 1.x has OpenAI's."""


def original(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with text encoders under the names of the original layout. What the file has there already stays,
    and so does everything else."""
    layout = "sdxl" if any(name.startswith(f"{UNET}label_emb.") for name in tensors) else "sd1"
    found = _moved(dict(tensors), _SECOND, LAYOUTS["sdxl"]["text_encoder_2"])
    found = _moved(found, _FIRST, LAYOUTS[layout]["text_encoder"])
    tokens = found.get(f"{LAYOUTS['sd1']['text_encoder'].prefix}{_TOKENS}")
    is_open_clip = tokens is not None and tuple(tokens.shape[1:]) == (_OPEN_CLIP_WIDTH,)
    return _moved(found, _ONLY, LAYOUTS["sd2"]["text_encoder"]) if is_open_clip else found


def _moved(tensors: dict[str, Tensor], named: re.Pattern[str], place: Place) -> dict[str, Tensor]:
    """The tensors of one encoder in its place, if it is empty."""
    own = {with_wrapper(match[1]): name for name in tensors if (match := named.fullmatch(name))}
    links = {place.prefix + link.original: link for link in place.links(own)} if own else {}
    if links.keys() & tensors.keys():
        return tensors
    network = {name: tensors[of] for name, of in own.items()}
    # Without a part of what is fused the original is missing, and is named so.
    made = {name: packed(link, network, None) for name, link in links.items() if network.keys() >= {*link.names}}
    used = {own[part] for name in made for part in links[name].names}
    rest = {name: tensor for name, tensor in tensors.items() if name not in used}
    return rest | {name: each.make() if isinstance(each, Later) else each for name, each in made.items()}

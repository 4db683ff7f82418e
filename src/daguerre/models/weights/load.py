"""Reads one pretrained network from a folder in diffusers' layout, in float32 and whole.

A weight that is missing, does not fit or would stay random is an error. Under `torch.device("meta")` a network is built
from its config, without memory and without reading weights. Folders are found by models/weights/resolve.py.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from diffusers import ConfigMixin
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from daguerre import documents
from daguerre.errors import UserError
from daguerre.models.weights import beside, files, single_files
from daguerre.models.weights.resolve import without_weights

# Their bars and notices would tear our progress line, and what they warn of is an error here.
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()


def config(kind: Any, folder: Path) -> dict[str, Any]:
    """The numbers of the network of class `kind` whose config.json is in `folder`."""
    try:
        if issubclass(kind, ConfigMixin):
            # `local_files_only` everywhere: the libraries would ask the hub for what a folder lacks.
            found = dict(kind.load_config(folder, local_files_only=True))
            return {name: value for name, value in found.items() if not name.startswith("_")}
        return _config(kind, folder).to_dict()
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder} cannot be read as the config of a {kind.__name__}: {error}", code="damaged"
        ) from error


def _config(kind: Any, folder: Path) -> Any:
    """transformers' own, without the code for attention that a stranger's may name, which the library would fetch and
    run."""
    made = kind.config_class.from_pretrained(folder, local_files_only=True)
    made._attn_implementation = None
    return made


def build(kind: Any, numbers: dict[str, Any]) -> Any:
    """The network of class `kind` with these numbers and with weights from torch's random state."""
    if issubclass(kind, ConfigMixin):
        return kind(**numbers)
    return kind(kind.config_class(**{key: value for key, value in numbers.items() if "attn_impl" not in key}))


def load(kind: Any, folder: Path, variant: str | None = None, ignored: Sequence[str] = ()) -> Any:
    """The network of class `kind` in `folder`, on the CPU in float32. UserError if a weight is missing, or others
    change what it means; patterns of those that are left out are `ignored`."""
    # First: transformers would import the quantiser's library, or ask for it.
    files.check_whole(folder)
    variant = variant if variant in files.variants(folder) else None
    if without_weights():
        return build(kind, config(kind, folder))
    files.check_numbers(folder, variant, ignored)
    try:
        if issubclass(kind, ConfigMixin):
            options = {"torch_dtype": torch.float32, "low_cpu_mem_usage": False}  # True needs accelerate
        else:
            options = {"dtype": torch.float32, "config": _config(kind, folder)}
        # It fills the weights at random before it reads them.
        with torch.random.fork_rng(devices=[]), _all_in_float32(kind):
            net, info = kind.from_pretrained(
                folder,
                local_files_only=True,
                use_safetensors=True,
                variant=variant,
                output_loading_info=True,
                **options,
            )
    except documents.MISREAD as error:
        # Both libraries put a general text before the error that says what is wrong.
        reason = str(error.__cause__ or error).strip()
        raise UserError(
            f"{folder} cannot be read as {kind.__name__}: {reason}. If the weights were truncated, copy or download "
            "them again",
            code="damaged",
        ) from error
    if wrong := [*info["missing_keys"], *info["mismatched_keys"]]:
        raise UserError(
            f"{folder} does not have all weights of the {kind.__name__} that its config.json describes; missing or "
            f"of another shape: {_first(wrong)}. Copy the folder again",
            code="damaged",
        )
    stray, _ = beside.without(dict.fromkeys(info["unexpected_keys"]), ignored)
    beside.check(folder, {}, {*net.state_dict()}, single_files.reader().unused(stray, set()), prefixes=[""])
    return net


@contextmanager
def _all_in_float32(kind: Any) -> Iterator[None]:
    """Within the context diffusers does not ask which weights of a class stay float32, for which it needs accelerate:
    all are read so."""
    kept = getattr(kind, "_keep_in_fp32_modules", None)
    if kept is None:
        yield
        return
    kind._keep_in_fp32_modules = None
    try:
        yield
    finally:
        kind._keep_in_fp32_modules = kept


def seeded(make: Callable[[], Any], seed: int, setting: str) -> Any:
    """`make()`, a network with torch's initial weights drawn from `seed`; torch's random state is left as it was.
    UserError if its library cannot build it of the numbers in `setting`, such as `model.unet`."""
    try:
        # Two networks of one seed are equal whichever was made first, and what is drawn later does not depend on them.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make()
    except (StrictDataclassError, ValueError, TypeError, IndexError) as error:
        raise UserError(
            f"{setting}: a network with these settings cannot be built: {error}", setting=setting
        ) from error


def fill(net: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Gives `net` the weights that were read from `path`, in float32. UserError unless all are there, and no others."""
    beside.check_names(path, tensors)
    own = numbers_of(net)
    spare = net.state_dict().keys() - own.keys()
    odd = sorted((own.keys() ^ tensors.keys()) - spare)
    odd += sorted(name for name in own.keys() & tensors.keys() if own[name].shape != tensors[name].shape)
    if odd:
        raise UserError(
            f"{path} does not have the weights of this {type(net).__name__}; missing, unknown or of another shape: "
            f"{_first(odd)}"
        )
    beside.check(path, tensors, {*own}, ())
    net.load_state_dict({name: value.float() for name, value in tensors.items()}, strict=False)


def numbers_of(net: nn.Module) -> dict[str, Tensor]:
    """The tensors of a network that a file has: without counters, and without an output layer that is the embedding."""
    state = net.state_dict()
    tied = set[str]()
    if getattr(getattr(net, "config", None), "tie_word_embeddings", False):
        tied = {name for name, p in net.named_parameters(remove_duplicate=False)} - dict(net.named_parameters()).keys()
    return {name: value for name, value in state.items() if value.is_floating_point() and name not in tied}


def _first(names: Sequence[Any]) -> str:
    return ", ".join(map(str, names[:5])) + (" ..." if len(names) > 5 else "")

"""Reads one pretrained network from a folder in diffusers' layout, in float32 and whole, or later (deferred/).

A weight that is missing, does not fit or would stay random is an error. Under `torch.device("meta")` a network is built
from its config, without memory and without reading weights. Folders are found by models/weights/resolve.py.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import ConfigMixin
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from daguerre import deferred, documents, system
from daguerre.checkpoint.safetensors import dtype_of
from daguerre.errors import UserError
from daguerre.models.weights import beside, files, opening, seals, single_files
from daguerre.models.weights.resolve import without_weights
from daguerre.models.weights.unfilled import Unfilled

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


def _check_class(kind: Any, folder: Path) -> None:
    """UserError where the folder's config is one of another class of diffusers."""
    path = folder / "config.json"
    named = str(files.read_json(path).get("_class_name")) if path.is_file() else ""
    if isinstance(other := getattr(diffusers, named, None), type) and not issubclass(kind, other):
        raise UserError(
            f"{folder} holds a {named}, and this model has a {kind.__name__} there: give the folder of one",
            code="unsupported",
        )


def build(kind: Any, numbers: dict[str, Any]) -> Any:
    """The network of class `kind` with these numbers and with weights from torch's random state."""
    if issubclass(kind, ConfigMixin):
        return kind(**numbers)
    return kind(kind.config_class(**{key: value for key, value in numbers.items() if "attn_impl" not in key}))


def load(
    kind: Any,
    folder: Path,
    variant: str | None = None,
    ignored: Sequence[str] = (),
    say: Callable[[str], object] | None = None,
) -> Any:
    """The network of class `kind` in `folder`, on the CPU in float32. UserError if a weight is missing, or others
    change what it means; patterns of those that are left out are `ignored`. `say` gets a line about tensors of a
    denoiser or autoencoder that are not read."""
    # First: transformers would import the quantiser's library, or ask for it.
    files.check_whole(folder)
    _check_class(kind, folder)
    variant = variant if variant in files.variants(folder) else None
    if without_weights():
        return build(kind, config(kind, folder))
    for path in files.weight_files(folder, variant):
        seals.check(path, large=True)
    files.check_numbers(folder, variant, ignored)
    try:
        read = _of_diffusers if issubclass(kind, ConfigMixin) else _of_transformers
        net, info = read(kind, folder, variant)
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
    unread = single_files.reader().unused(stray, set()) if stray else []  # asking imports every family
    beside.check(folder, {}, {*net.state_dict()}, unread, prefixes=[""])
    if say is not None and issubclass(kind, ConfigMixin):  # transformers' folders have heads that an encoder has not
        for line in beside.unread(folder, unread):
            say(line)
    return net


@contextmanager
def _slices(folder: Path, variant: str | None) -> Iterator[dict[str, Any]]:
    """Within the context the tensors of a network by name, each read when it is asked for by `[...]`."""
    found = files.weight_files(folder, variant)
    if not found:
        raise OSError("there are no weights in safetensors")
    with ExitStack() as stack:
        # Read and not mapped: pages of a mapped file count as memory beside the weights that are made of them.
        opened = {path: stack.enter_context(opening.opened(path, mapped=False)) for path in found}
        yield {name: opening.Slice(path, file.get_slice(name)) for path, file in opened.items() for name in file.keys()}  # noqa: SIM118


def _of_transformers(kind: Any, folder: Path, variant: str | None) -> tuple[Any, dict[str, Any]]:
    """The network and what transformers says of its names. It makes the weights of each as it reads it."""

    def made(weights: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        found: tuple[Any, dict[str, Any]] = kind.from_pretrained(
            None, state_dict=weights, config=_config(kind, folder), dtype=torch.float32, output_loading_info=True
        )
        return found

    # It draws what a file lacks, which is an error here.
    with torch.random.fork_rng(devices=[]), _slices(folder, variant) as slices:
        if deferred.is_on():
            later = {name: _Later(each) if _defers(each) else each for name, each in slices.items()}
            net, info = made(later)
            if _are_taken(net, later.values()):
                return net, info
        return made(slices)


class _Later:
    """Stands for a slice of a file where transformers places it: a tensor of its shape and without memory, by whose
    address it is found again."""

    def __init__(self, given: Any) -> None:
        self.given, self.placed = given, list[Tensor]()

    def __getitem__(self, _: Any) -> Tensor:
        # Zeros and not NaN: weights that are to be tied are tied where they are equal.
        self.placed.append(torch.zeros((), device="cpu").expand(self.given.get_shape()))
        return self.placed[-1]


def _are_taken(net: nn.Module, given: Iterable[Any]) -> bool:
    """Defers the weights that were placed so. False where the library has done more with one than to place it, or has
    tied two that differ: the network is to be read at once then."""
    places = {each.placed[0].data_ptr(): each.given for each in given if isinstance(each, _Later) and each.placed}
    found = dict[tuple[int, ...], list[Any]]()
    for p in net.parameters():
        if (one := places.pop(p.data_ptr(), None)) is not None:
            found.setdefault(tuple(p.shape), []).append(one)
            deferred.defer(p, _weight(one))
    return all(
        any(torch.equal(one[...], other[...]) for other in found.get(tuple(one.get_shape()), ()))
        for one in places.values()
    )


def _dtype(given: Any) -> torch.dtype | None:
    """The type of a tensor or of a slice; None for one of integers, or of a type that we never write."""
    try:
        dtype = given.dtype if isinstance(given, Tensor) else dtype_of(given.get_dtype())
    except KeyError:
        return None
    return dtype if dtype.is_floating_point else None


def _defers(given: Any) -> bool:
    """True for what is read later: matrices and kernels, of floating point. The rest is small."""
    dims = given.ndim if isinstance(given, Tensor) else len(given.get_shape())
    return deferred.is_on() and dims > 1 and _dtype(given) is not None


def _weight(given: Any, used: Callable[[Tensor], None] = lambda tensor: None) -> deferred.Weight:
    dtype = _dtype(given)
    assert dtype is not None, "only such weights are deferred"
    return deferred.Weight(lambda wanted: _made(given, wanted, used), dtype)


def _made(given: Any, dtype: torch.dtype, used: Callable[[Tensor], None]) -> Tensor:
    """A tensor, or a slice of a file, in memory of its own, and of this type if it is of floating point."""
    value = given[...]  # reads a slice, into memory of its own
    made = value.to(dtype if value.is_floating_point() else value.dtype, copy=isinstance(given, Tensor))
    used(value)
    return made


def _of_diffusers(kind: Any, folder: Path, variant: str | None) -> tuple[Any, dict[str, Any]]:
    """The network and the same of diffusers' names. Its own reading needs accelerate, or holds the weights twice."""
    with torch.random.fork_rng(devices=[]), without_memory():
        net = kind.from_config(kind.load_config(folder, local_files_only=True))
    net.register_to_config(_name_or_path=str(folder))
    own, ignored = net.state_dict(), kind._keys_to_ignore_on_load_unexpected or ()
    with _slices(folder, variant) as slices:
        net._fix_state_dict_keys_on_load(slices)  # names that attention had before
        odd = [name for name in own.keys() & slices.keys() if [*own[name].shape] != slices[name].get_shape()]
        unknown = [name for name in slices.keys() - own.keys() if not any(re.search(each, name) for each in ignored)]
        info = {"missing_keys": sorted(own.keys() - slices.keys()), "mismatched_keys": sorted(odd)}
        if not any(info.values()):
            place(net, {name: each for name, each in slices.items() if name in own})
    return net.eval(), info | {"unexpected_keys": sorted(unknown)}


@contextmanager
def without_memory() -> Iterator[None]:
    """Makes networks within the context whose parameters have shapes alone, until `place` or `fill` gives them
    weights. What else a network computes when it is made (tables of positions) is there."""

    def emptied(module: nn.Module, name: str, p: nn.Parameter) -> nn.Parameter | None:
        return None if p.is_meta else nn.Parameter(p.to("meta"), p.requires_grad)

    # Its annotation leaves out what a hook may return.
    handle = register_module_parameter_registration_hook(emptied)  # type: ignore[arg-type]
    try:
        with Unfilled():
            yield
    finally:
        handle.remove()


def place(net: nn.Module, tensors: dict[str, Any], used: Callable[[Tensor], None] = lambda tensor: None) -> None:
    """Gives `net` these weights in float32, each in memory of its own, in place of those that it has: one after the
    other, so that there is never a second copy of all, or later (deferred/). `tensors` are emptied; `used` gets each
    one that was copied."""
    owners: dict[nn.Parameter, list[tuple[dict[str, Any], str]]] = {}
    for module in net.modules():
        for key, p in module._parameters.items():
            if p is not None:
                owners.setdefault(p, []).append((module._parameters, key))
    named, state = dict(net.named_parameters(remove_duplicate=False)), net.state_dict()
    for name in list(tensors):
        given = tensors.pop(name)
        if (p := named.get(name)) is None:
            state[name].copy_(_made(given, torch.float32, used))
            continue
        if _defers(given):
            fresh = deferred.parameter(_weight(given, used), p.shape, p.requires_grad)
        else:
            fresh = nn.Parameter(_made(given, torch.float32, used), p.requires_grad)
        for table, key in owners[p]:  # one for all, where weights are tied
            table[key] = fresh


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


def unfilled(kind: Any, numbers: dict[str, Any], setting: str) -> Any:
    """The network of class `kind` with these numbers, without memory for its parameters until `fill` gives it weights.
    UserError as from `seeded`."""
    with without_memory():
        return seeded(lambda: build(kind, numbers), 0, setting)


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
    where = system.mappings(path)
    place(net, dict(tensors), lambda value: system.give_back(where, value.data_ptr(), value.nbytes))


def numbers_of(net: nn.Module) -> dict[str, Tensor]:
    """The tensors of a network that a file has: without counters, and without an output layer that is the embedding."""
    state = net.state_dict()
    tied = set[str]()
    if getattr(getattr(net, "config", None), "tie_word_embeddings", False):
        tied = {name for name, p in net.named_parameters(remove_duplicate=False)} - dict(net.named_parameters()).keys()
    return {name: value for name, value in state.items() if value.is_floating_point() and name not in tied}


def _first(names: Sequence[Any]) -> str:
    return ", ".join(map(str, names[:5])) + (" ..." if len(names) > 5 else "")

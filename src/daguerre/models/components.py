"""The components of a pretrained model, each from where the settings say: the base, another place, or numbers.

Families decide which classes there are and whether they fit together.
"""

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import ConfigMixin

from daguerre import deferred
from daguerre.errors import UserError
from daguerre.models import encoders
from daguerre.models.settings import BASE, SINGLE_FILES, PretrainedSettings
from daguerre.models.weights import architectures, files, index, load, original_files, resolve, single_files
from daguerre.models.weights.files import read_json, weight_files
from daguerre.models.weights.opening import opened
from daguerre.models.weights.original_names import FileNames
from daguerre.models.weights.resolve import Options


class Wanted(NamedTuple):
    """Files of a place that a model is made of."""

    place: str
    needed: resolve.Needed
    options: Options


class ComponentLoader:
    """Opens the components of one model. All files of the base are asked for at once."""

    def __init__(self, settings: PretrainedSettings, seed: int) -> None:
        self.settings, self.seed = settings, seed
        ignored = tuple(settings.ignore_tensors)
        self.elsewhere = Options(variant=settings.variant, pickled=settings.pickled_weights, ignored=ignored)
        """The revision is the base's; other places have their own."""
        # A revision names a commit of one repository: of another place it would mean nothing.
        self.options = replace(self.elsewhere, revision=settings.revision)
        self.left_out: dict[str, Callable[[], Any]] = {}
        """Loads each network that was left out of memory (models/encoders.py)."""
        self.unread: list[str] = []
        """A line for each network in whose files there are tensors that were not read."""

    @property
    def reading(self) -> "ComponentLoader | None":
        """Itself, unless the numbers of every network are given and nothing is read."""
        return self if any(not isinstance(place, dict) for place in self.settings.places.values()) else None

    def of_base(self) -> resolve.Needed:
        """The files that are needed of the base."""
        found: dict[str, resolve.Files] = {}
        for name, value in self.settings.places.items():
            weights = value == BASE and not resolve.without_weights()
            if value == BASE or value is None or (_is_file(value) and not self.settings.files_tell_numbers):
                found[name] = resolve.network(name, self.options) if weights else resolve.CONFIG
        if not resolve.without_weights():
            named = {name: getattr(self.settings, name) for name in self.settings.tokenizers()}
            found |= {
                self.settings.folder_of(name): resolve.TOKENIZER for name, value in named.items() if value == BASE
            }
        return found

    @cached_property
    def base(self) -> Path:
        folder = resolve.locate(self.settings.pretrained_model_name_or_path, self.of_base(), self.options)
        # With components from elsewhere the variant may be theirs alone.
        if not any(isinstance(place, str) and place != BASE for place in self.settings.places.values()):
            with _named("variant"):
                files.check_variant(None if resolve.without_weights() else self.settings.variant, folder)
        return folder

    @property
    def index(self) -> dict[str, Any]:
        """The index of the base, or of the published one of its name where its files came without; {} where nothing is
        read of it, or nothing is known."""
        if not self.of_base():
            return {}
        known = architectures.find(self.settings.pretrained_model_name_or_path)
        places = [self.base, *([] if known is None else [known])]
        return next((read_json(path) for place in places if (path := index.find(place)) is not None), {})

    @property
    def is_distilled(self) -> bool:
        """True for a denoiser that was distilled to few steps, as the settings or else the index of its base say."""
        settings: Any = self.settings
        of_base = all(settings.places[name] == BASE for name in settings.networks("denoiser"))
        told: bool | None = settings.is_distilled
        return bool(self.index.get("is_distilled")) if told is None and of_base else bool(told)

    def folder(self, name: str, needed: resolve.Files) -> Path:
        """The folder of a component that is taken from the base or from another place."""
        value, own = getattr(self.settings, name), self.settings.folder_of(name)
        if value == BASE:
            return self.base / own
        with _named(name):
            root = resolve.locate(value, {"": _at_either(own, needed)}, self.elsewhere)
        return root / own if (root / own / needed[0][0]).is_file() else root

    def file(self, name: str) -> Path:
        """The single file of a component that has one of its own."""
        with _named(name):
            return resolve.file(getattr(self.settings, name), self.elsewhere)

    def config(self, name: str) -> dict[str, Any]:
        """config.json of a component: the one of its place, or of the base where it has only numbers."""
        value = getattr(self.settings, name)
        at_base = value is None or isinstance(value, dict) or _is_file(value)
        return read_json((self.base / name if at_base else self.folder(name, self._needed(name))) / "config.json")

    def network(
        self, name: str, kind: Any, decided: Mapping[str, Any] | None = None, names: FileNames | None = None
    ) -> Any:
        """The network `name`, of class `kind`, in float32 on the CPU; on the meta device where it is left out.

        `decided` are numbers that other networks decide; a network of given numbers takes them unless it says else.
        `names` are those of its authors' files; None: the layouts of Stable Diffusion's single files.
        """
        return self.made(name, partial(self._network, name, kind, decided, names))

    def made(self, name: str, make: Callable[[], Any]) -> Any:
        """`make()`, the network `name`; on the meta device where it is left out."""
        if name in self.settings.networks("autoencoder"):
            # Families work on its weights as they open it.
            make = partial(_at_once, make)
        if not encoders.is_left_out(name) or resolve.without_weights():
            return make()
        if self.of_base():
            self.base  # noqa: B018  # with its weights: networks without any ask for configs alone
        self.left_out[name] = make
        with torch.device("meta"):
            return make()

    def _network(self, name: str, kind: Any, decided: Mapping[str, Any] | None, names: FileNames | None) -> Any:
        value = getattr(self.settings, name)
        if isinstance(value, dict):
            _check_known(name, kind, value)
            return self._random(name, kind, dict(decided or {}) | value)
        if value is None:
            return self._random(name, kind, load.config(kind, self.base / name))
        if not _is_file(value):
            folder = self.folder(name, self._needed(name))
            return load.load(kind, folder, self.settings.variant, self.options.ignored, self.unread.append)
        if resolve.without_weights():
            return load.load(kind, self.base / name)
        path, numbers = self.file(name), load.config(kind, self.base / name)
        if names is not None and names.marks:
            with opened(path) as file:
                numbers |= names.told({*file.keys()})
        # Built first, to be filled: a single file has no config, and its names are those of another layout.
        net = load.unfilled(kind, numbers, f"model.{name}")
        options, state = self.elsewhere, load.numbers_of(net)
        if names is not None:
            shapes = {own: tuple(value.shape) for own, value in state.items()}
            say = self.unread.append if issubclass(kind, ConfigMixin) else None
            load.fill(net, original_files.read(path, names, shapes, options.ignored, say), path)
            return net
        found = single_files.reader().network_tensors(path, name, state, options.pickled, options.ignored)
        load.fill(net, found, path)
        return net

    def origin(self, name: str, digest: Callable[[Path], str]) -> dict[str, Any]:
        """All that decides config and weights of a network, as JSON; of its files the digests."""
        value = getattr(self.settings, name)
        of_file = _is_file(value) and self.settings.files_tell_numbers
        numbers = value if isinstance(value, dict) else {} if of_file else self.config(name)
        # Without the library's version, which changes no feature: each update of it would empty the caches.
        told = {"config": {key: given for key, given in numbers.items() if key not in _NO_NUMBERS and key[0] != "_"}}
        if self.is_random(name):
            return told | {"seed": self.seed}
        if _is_file(value):
            return told | {"file": digest(self.file(name))}
        folder = self.folder(name, self._needed(name))
        found = weight_files(folder, self.settings.variant)
        return told | {"files": {path.name: digest(path) for path in found}}

    def is_random(self, name: str) -> bool:
        """True if a network starts from random weights."""
        return not isinstance(getattr(self.settings, name), str)

    def base_has(self, name: str) -> bool:
        """True if anything is read of the base, and it has numbers of its own for a network."""
        return bool(self.of_base()) and (self.base / name / "config.json").is_file()

    def scheduler(self) -> dict[str, Any] | None:
        """The scheduler's config that the base came with; None where it has no config, or none is wanted."""
        value = self.settings.scheduler
        if value is None:
            return None
        told = self._told_by_denoiser() if value == BASE else {}
        if "_class_name" in told:
            return told
        found = self._scheduler(value)
        return {**(found or {}), **told} if found or told else None

    @property
    def says_prediction(self) -> bool:
        """True if the files of the denoiser, or a config that the settings name, say what it predicts."""
        settings = self.settings
        if settings.scheduler != BASE:
            return settings.scheduler is not None
        if any(settings.places.get(name) != BASE for name in settings.networks("denoiser")):
            told = self._told_by_denoiser()
        elif _is_file(settings.pretrained_model_name_or_path):
            told = single_files.reader().scheduler(resolve.file(settings.pretrained_model_name_or_path, self.options))
        else:
            told = self._scheduler(BASE) or {}
        return "prediction_type" in told or "_class_name" in told

    def _told_by_denoiser(self) -> dict[str, Any]:
        """The scheduler's config, or a part of it, that the place of the denoiser tells where it is not the base."""
        places = [self.settings.places.get(name) for name in self.settings.networks("denoiser")]
        place = next((Path(each) for each in places if isinstance(each, str) and each != BASE), None)
        if place is None:
            return {}
        if _is_file(str(place)):
            file = None if self.settings.files_tell_numbers else resolve.file_here(str(place), self.elsewhere)
            return {} if file is None else single_files.reader().scheduler(file)
        own = place / "scheduler" / "scheduler_config.json"
        return read_json(own) if own.is_file() else {}

    def _scheduler(self, value: str) -> dict[str, Any] | None:
        folder = self.base if value == BASE else resolve.locate(value, {}, self.elsewhere)
        is_own = value != BASE or architectures.says_scheduler(self.settings.pretrained_model_name_or_path, folder)
        for path in (folder / "scheduler" / "scheduler_config.json", folder / "scheduler_config.json"):
            if path.is_file() and is_own:
                return read_json(path)
        if value == BASE:
            own = self.settings.own_scheduler
            return None if own is None else dict(own)
        raise UserError(f"model.scheduler: {value} has no scheduler_config.json", setting="model.scheduler")

    def wanted(self) -> list[Wanted]:
        """All files that the model is made of, by place: what `train` would read."""
        settings, needed_of_base = self.settings, self.of_base()
        compares = settings.scheduler == BASE and "scheduler" not in settings.unused() and not settings.denoises_anew
        found = list[Wanted]()
        if needed_of_base or compares:
            place = settings.pretrained_model_name_or_path
            found.append(Wanted(place, {} if _is_file(place) else needed_of_base, self.options))
        for name, value in self.settings.places.items():
            if isinstance(value, str) and value != BASE:
                needed = {} if _is_file(value) else {"": _at_either(name, self._needed(name))}
                found.append(Wanted(value, needed, self.elsewhere))
        for name in self.settings.tokenizers():
            if (value := getattr(self.settings, name)) != BASE:
                own = _at_either(settings.folder_of(name), resolve.TOKENIZER)
                found.append(Wanted(value, {"": own}, self.elsewhere))
        return found

    def _needed(self, name: str) -> resolve.Files:
        return resolve.CONFIG if resolve.without_weights() else resolve.network(name, self.elsewhere)

    def _random(self, name: str, kind: Any, numbers: dict[str, Any]) -> Any:
        """A network of these numbers with weights from the seed."""
        return load.seeded(lambda: load.build(kind, numbers), self.seed, f"model.{name}")


def _at_once(make: Callable[[], Any]) -> Any:
    with deferred.deferring(False):
        return make()


def check_fits(name: str, network: Any, decided: Mapping[str, Any]) -> None:
    """UserError for a network, read from the place of component `name`, with other numbers than those which other
    networks have `decided`."""
    wrong = [
        f"{key} is {network.config[key]}, and the other networks give {value}"
        for key, value in decided.items()
        if network.config[key] != value
    ]
    if wrong:
        raise UserError(
            f"the {name} does not belong to the other networks: {'; '.join(wrong)}. Change model.{name}, or the "
            "place of the others",
            code="conflict",
            setting=f"model.{name}",
        )


_NO_NUMBERS = frozenset({"transformers_version", "torch_dtype", "dtype"})
"""Keys of a config that say nothing of the network."""


def _at_either(name: str, needed: resolve.Files) -> resolve.Files:
    """The files of a component in a pipeline's subfolder, or at the root of a place that is the component itself."""
    return tuple(tuple(file for file in names for file in (f"{name}/{file}", file)) for names in needed)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Errors of a component's place say whose it is."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"model.{name}: {error}", code=error.code, setting=f"model.{name}") from error


def _is_file(value: Any) -> bool:
    return isinstance(value, str) and value.endswith(SINGLE_FILES) and not Path(value).is_dir()


def _check_known(name: str, kind: Any, numbers: Mapping[str, Any]) -> None:
    if issubclass(kind, ConfigMixin):
        allowed = set(inspect.signature(kind.__init__).parameters) - {"self"}
    else:  # configs of transformers keep whatever they are given, read or not
        config = kind.config_class()
        allowed = config.to_dict().keys() | config.attribute_map.keys() | {"dropout", "torch_dtype"}
    if unknown := sorted(set(numbers) - allowed):
        near = {key: difflib.get_close_matches(key, allowed, n=1) for key in unknown}
        named = ", ".join(f"{key} (did you mean {near[key][0]}?)" if near[key] else key for key in unknown)
        raise UserError(
            f"model.{name}: {kind.__name__} has no {named}; it takes: {', '.join(sorted(allowed))}",
            code="unknown",
            setting=f"model.{name}",
        )

"""The contract of every family: read this before adding one.

A family is a file in families/ that says which networks there are, how images and captions become clean samples and
conditioning, how clean samples become images again, and what an export holds. It defines `Settings` (a `FamilySettings`
whose `family` is the file's name) and

    def load(settings: Settings, seed: int) -> Family

which builds the networks on the CPU in float32, or, under `torch.device("meta")`, without memory and weights. It only
reads the places that the settings name; UserError says what it looked for. Random weights are drawn from `seed` alone.
Matrices and kernels of files may be read after `load` alone (deferred/): what works on a weight there asks for it by
`deferred.value`, or reads the network by `deferred.read`. Autoencoders are whole.

`Family` is a value made of parts; nothing subclasses it. `images.encode` (image -> moments) and `text.features` (text
-> features) are pure functions, so that results may be cached by content. Everything meets in one line:

    loss_fn(net, batch) = objective.loss(nets, example)

where `example` holds what `encode_each` makes of a batch, and `nets.student` is the net.

Cond belongs to the family: `net` takes out what `encode` and `encode_prompts` put in; everybody else hands it on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from daguerre.errors import UserError
from daguerre.models import compatibility, encoders, interpolation
from daguerre.models.network import Architecture, Network, architecture_of, block_classes
from daguerre.models.settings import reachable
from daguerre.samplers.guidance import CLASSIFIER_FREE, Guidance
from daguerre.types import (
    IMAGE,
    NUMBERS,
    OF_IMAGES,
    OF_TEXTS,
    REFERENCES,
    SEEN,
    TOKENS,
    Batch,
    Cond,
    Latents,
    Prompt,
    References,
    as_seen,
    waits,
)

if TYPE_CHECKING:
    from daguerre.models.components import ComponentLoader
    from daguerre.models.controlnets.controlled import ControlNets
    from daguerre.models.parts.text.encoder import TextEncoder
    from daguerre.objectives.objective import Objective
    from daguerre.samplers.settings import SamplingSettings

Moments = Mapping[str, Tensor]
"""Outputs of an image encoder by name; the leading dim of every tensor is B. Holds no randomness."""


class ImageCodec(Protocol):
    """Images to clean samples and back: an autoencoder, or the images themselves (models/pixel_codec.py)."""

    def latent_shape(self, pixel_shape: tuple[int, ...]) -> tuple[int, ...]:
        """(C, h, w) of the clean sample of an image (3, H, W). UserError if images of that size do not fit."""

    def random_inputs(self, seed: int, keys: np.ndarray, pixel_shape: tuple[int, ...]) -> dict[str, Tensor]:
        """The random numbers that a batch needs, on the CPU, by `daguerre.keys`; keys [B, 3], pixel_shape (3, H, W)."""

    def encode(self, pixels_BCHW: Tensor) -> Moments:
        """Moments of uint8 images, float32. A pure function of each image: no random input, no other row."""

    def latents(self, moments: Moments, random_inputs: Mapping[str, Tensor]) -> Tensor:
        """Clean samples [B, C, h, w] float32, as the objective noises them, of what `encode` gave."""

    def decode(self, latents: Latents) -> Tensor:
        """Images [B, H, W, 3] uint8 of clean samples, on their device. Image i depends on its own row, prompt and seed
        alone."""


class Enlarging(ImageCodec, Protocol):
    """A codec of images that are generated, which have other sizes than those that are trained on."""

    def trained_px(self, size_px: tuple[int, int]) -> tuple[int, int]:
        """Height and width of the training images whose clean samples have the shape that those of a generated image of
        this height and width have."""

    def generated_px(self, size_px: tuple[int, int]) -> tuple[int, int]:
        """Height and width of the image that is generated in place of one that is trained on."""


class TextConditioner(Protocol):
    """Captions to conditioning."""

    @property
    def encoders(self) -> tuple[TextEncoder, ...]:
        """The text encoders that it reads, each with its tokenizer: those that can learn new tokens, and by which
        prompts with new tokens are found. () where none can."""

    def tokens(self, texts: Sequence[str]) -> Cond:
        """Texts as numbers, on the CPU. Called by several threads."""

    def features(self, tokens: Cond, trained: Collection[str] = ()) -> Cond:
        """Conditioning of texts, by tokens on any device. A pure function of each text; a batch with a long prompt only
        pads the others. Gradients flow through the text encoders among the components `trained` alone."""

    def truncated(self, texts: Sequence[str]) -> dict[int, str]:
        """Texts that are longer than is read, by index, with a message ("cut to 77 tokens")."""

    def files(self) -> dict[str, bytes]:
        """Files that belong to the weights (a tokenizer's), by relative path, for checkpoints."""


@runtime_checkable
class ReferenceText(TextConditioner, Protocol):
    """A TextConditioner that reads the reference images of a sample with its caption; others need none of this."""

    def tokens_of(self, texts: Sequence[str], references: Sequence[Tensor]) -> Cond:
        """As `tokens`, of texts with these images [B, 3, h, w] uint8 in the size that it sees, in their order: all that
        `features` reads of them is among the tokens. The empty text is read with them, too. Called by several
        threads."""


class Exporter(Protocol):
    """Writes what the networks' usual library opens."""

    def __call__(self, family: Family, folder: Path, objective: Objective, sampling: SamplingSettings) -> list[str]:
        """Puts the export, with the CURRENT weights, in place of `folder`: the old content or the new one is there at
        any moment. Returns messages for the user: where the library cannot do what the run does."""


@runtime_checkable
class Cacheable(Protocol):
    """An ImageCodec or TextConditioner whose results can be cached; others need none of this."""

    @property
    def networks(self) -> Mapping[str, nn.Module]:
        """The networks that `encode` or `features` reads, by component. They are left out of memory where results are
        cached; what else calls them is within `encoders.present`."""

    def rules(self) -> Mapping[str, Any]:
        """All that decides the results other than weights and configs of the networks, as JSON."""


def cached(features: Mapping[str, Tensor], half: str) -> dict[str, Tensor]:
    """The cached features of images (`OF_IMAGES`) or texts by their own names, in float32; {} where there are none."""
    # Rows of 16 bits are widened here, once: all that reads features then computes as without a cache.
    own = _named(features, half)
    return {name: value.float() if value.is_floating_point() else value for name, value in own.items()}


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _nothing(*_: Any) -> Cond:
    return {}


@dataclass(frozen=True, eq=False)
class Family:
    """Networks around one `net`, and what leads into it and out of it."""

    networks: Mapping[str, Network]
    """Every network by its component name, trained or frozen, with its role and its facts (models/network.py)."""
    net: nn.Module
    """net(x_BCHW, c_noise_B, cond) -> y_BCHW. Holds all that is trained and nothing that is frozen. Its state-dict
    names are `COMPONENT.` and the library's own name in that component, so that an export only drops the prefix."""
    images: ImageCodec
    exporter: Exporter
    _: KW_ONLY
    text: TextConditioner | None = None
    """None for a family that reads no captions."""
    batch_numbers: Callable[[Batch], Cond] = _nothing
    """Conditioning of a batch that the host knows without its images, such as their sizes: rows on the CPU. Made with
    the draws, so that nothing waits for it."""
    batch_condition: Callable[[Batch, Moments], Cond] = _nothing
    """Conditioning of a batch besides its texts, also of the moments of its images: rows on the family's device (those
    of another one are waited for in every update)."""
    prompt_condition: Callable[[Sequence[Prompt], tuple[int, ...], bool], Cond] = _nothing
    """Conditioning of prompts besides their texts, for images (3, H, W); True asks for the unguided side."""
    prompt_images: Collection[str] = ()
    """Names of the images of a prompt that `prompt_condition` reads."""
    encodes: bool = True
    """False for a family that makes images of clean samples, and no clean samples of images."""
    references: References | None = None
    """The reference images of a sample that its conditioning reads, and in which sizes; None for none."""
    prompt_references: References | None = None
    """The reference images of a prompt, where it may have others than the samples that are trained on; None: these."""
    reference_condition: Callable[[Moments], Cond] = _nothing
    """Conditioning by reference images, by what the image encoder makes of each: `reference.NAME`, `reference_2.NAME`
    and so on, of those that there are. Prompts have it on both sides of guidance."""
    layout: Callable[[Batch], Sequence[Hashable]] | None = None
    """By the draws of a batch, a key of each row, where not all rows can be computed together, such as the length of
    captions that must not be padded. Reference images of other sizes are apart anyway."""
    uncached_images: str = ""
    """Reason for which `batch_condition` needs the images themselves, so moments do not stand in for them."""
    output: Enlarging | None = None
    """Images that are generated, where they have other sizes than those that are trained on, of which the same clean
    samples are made; None: `images` is for both."""
    guidance: Guidance = CLASSIFIER_FREE
    """What a guidance scale does to the denoiser: as the settings' class says, unless these weights take another."""
    distilled: str = ""
    """The base to train in place of weights that were distilled to few steps, which plain training undoes: they are
    sampled alone. Empty for all others."""
    controlnets: ControlNets | None = None
    """The ControlNets that can be added to its denoiser; None for families without."""
    pretrained: ComponentLoader | None = None
    """Source of the pretrained components; None for networks that always start from random weights."""
    make_net: Callable[[Mapping[str, nn.Module]], nn.Module] | None = None
    """Makes the net in which these components are trained; None for a family that always trains all it has."""
    trained: frozenset[str] = frozenset()
    """The components that are trained: those in `net`."""

    @property
    def components(self) -> dict[str, nn.Module]:
        """The module of each network."""
        return {name: network.module for name, network in self.networks.items()}

    @property
    def unread(self) -> list[nn.Parameter]:
        """Parameters of all networks that no output depends on."""
        return [parameter for network in self.networks.values() for parameter in network.unread]

    @property
    def block_classes(self) -> frozenset[str]:
        """Class names of the blocks of all networks."""
        return block_classes(self.networks.values())

    @property
    def uneven(self) -> frozenset[str]:
        """The frozen networks that encode reference images, an assistant, which is never called as a whole, and text
        encoders that wait in the host's memory. No mesh splits them: its devices gather parts of a network together,
        and samples on one device may have more reference images than those on another."""
        # Only a text that reads images runs unequally often: plain captions are one call on every device.
        readers = [self.images, *([self.text] if isinstance(self.text, ReferenceText) else [])]
        held = [reader.networks for reader in readers if self.references is not None and isinstance(reader, Cacheable)]
        unequal = frozenset(name for networks in held for name in networks)
        every = self.networks.items()
        return unequal | {n for n, own in every if own.role == "assistant" or encoders.waiting(own.module) is not None}

    @property
    def device(self) -> torch.device:
        # As few parameters as possible are looked at: this is asked for several times in every update.
        there = (network for network in self.components.values() if not encoders.is_elsewhere(network))
        devices = (p.device for network in there for p in network.parameters() if not waits(p))
        return next((device for device in devices if device.type != "meta"), torch.device("meta"))

    @property
    def generates(self) -> bool:
        """True if it generates images from prompts: it reads texts, and one of its components denoises."""
        return self.text is not None and any(network.role == "denoiser" for network in self.networks.values())

    @property
    def trainable(self) -> tuple[str, ...]:
        """The components that adapters can reach, the one first that is trained by default; () for a family
        that always trains all it has."""
        return reachable({name: network.spec for name, network in self.networks.items()})

    @property
    def trained_readers(self) -> list[str]:
        """The text encoders among what is trained: they run inside the net."""
        return [name for name in sorted(self.trained) if self.networks[name].role == "text_encoder"]

    def architecture(self, prediction: str) -> Architecture | None:
        """The model by the names that headers of files have for it, by what its denoiser predicts; None without."""
        return architecture_of(((network.module, network.facts) for network in self.networks.values()), prediction)

    def to(self, device: torch.device | str) -> Self:
        """Moves every network, in place, and returns the family. What is left out of memory stays so."""
        for network in (*self.components.values(), self.net):
            encoders.moved(network, device)
        return self

    def training(self, names: Iterable[str]) -> Self:
        """The same networks with these components trained: they are in the new net and require gradients. All others
        are frozen, in evaluation mode, and outside the net. UserError for a component that cannot be trained here."""
        wanted = frozenset(names)
        # Families with one net, such as the autoencoder's, have nothing to choose: all of it is trained.
        if self.make_net is None:
            if wanted != self.trained:
                every = ", ".join(self.components)
                raise UserError(f"this family always trains {every} together", code="unsupported")
            return self
        whole = [name for name, network in self.networks.items() if network.trainable]
        if odd := sorted(wanted - {*whole}):
            able = ", ".join(whole)
            raise UserError(f"{', '.join(odd)} cannot be trained in this family; there are: {able}", code="unsupported")
        for name, network in self.components.items():
            network.requires_grad_(name in wanted)
            if name not in wanted:
                network.eval()
        # No gradient ever reaches them: as trained ones they would be saved, averaged and counted for nothing.
        for parameter in self.unread:
            parameter.requires_grad_(False)
        inside = {name: network for name, network in self.components.items() if name in wanted}
        return replace(self, net=self.make_net(inside), trained=wanted)

    def latent_shape(self, pixel_shape: tuple[int, ...]) -> tuple[int, ...]:
        """(C, h, w) of the clean sample of an image (3, H, W). UserError if images of that size do not fit."""
        return self.images.latent_shape(pixel_shape)

    @property
    def generated(self) -> ImageCodec:
        """The codec of images that are generated, or start from one."""
        return self.output or self.images

    def trained_px(self, size_px: tuple[int, int]) -> tuple[int, int]:
        """Height and width at which a generated image would be trained on: those of further images of it."""
        return size_px if self.output is None else self.output.trained_px(size_px)

    def generated_px(self, size_px: tuple[int, int]) -> tuple[int, int]:
        """Height and width of the image that is generated in place of one that is trained on."""
        return size_px if self.output is None else self.output.generated_px(size_px)

    def random_inputs(self, seed: int, keys: np.ndarray, pixel_shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Random inputs of `encode`, on the CPU, by `daguerre.keys`; keys [B, 3], pixel_shape (3, H, W)."""
        return self.images.random_inputs(seed, keys, pixel_shape)

    def told(self, batch: Batch) -> dict[str, Tensor]:
        """All that `encode` reads of a batch which is no image and not random, on the CPU: the tokens of captions whose
        features are not cached, and numbers."""
        is_cached = any(name.startswith(OF_TEXTS) for name in batch.features)
        tokens = {} if is_cached else self._tokens(batch.texts, batch.seen)
        return {TOKENS + name: rows for name, rows in tokens.items()} | self.numbers(batch)

    def _tokens(self, texts: Sequence[str], references: Sequence[Tensor]) -> Cond:
        if isinstance(self.text, ReferenceText):
            return self.text.tokens_of(texts, [pixels.cpu() for pixels in references])
        return {} if self.text is None else self.text.tokens(texts)

    def numbers(self, batch: Batch) -> dict[str, Tensor]:
        """The numbers among what is `told`: those that belong to one image of the batch."""
        return {NUMBERS + name: rows for name, rows in self.batch_numbers(batch).items()}

    def encode(self, batch: Batch) -> tuple[Tensor, Cond]:
        """`encode_each` for the image that is trained on alone."""
        return self.encode_each(batch)[IMAGE]

    @torch.no_grad()
    def encode_each(self, batch: Batch, targets: Iterable[str] = ()) -> dict[str, tuple[Tensor, Cond]]:
        """Clean samples [B, C, h, w] float32, as the objective noises them, and their conditioning, by name: of the
        image that is trained on (`IMAGE`), and of `targets` of the batch, which have the same captions.

        No gradient flows into either, and autocast does not reach in. `batch` is on the family's device and
        `batch.draws` holds `random_inputs` and what is `told`, which is made here where it is missing; cached features
        of `batch` stand in for what they were made of. Texts stay tokens where a text encoder is trained, which runs
        inside the net. Sample i depends on its own row alone.
        """
        device = self.device
        is_told = any(name.startswith((TOKENS, NUMBERS)) for name in batch.draws)
        told = batch.draws if is_told else {name: rows.to(device) for name, rows in self.told(batch).items()}
        with torch.autocast(device.type, enabled=False):
            texts = cached(batch.features, OF_TEXTS) or self._of_tokens(_named(told, TOKENS))
            of_references = self.reference_condition(self._of_references(batch))
        batch = replace(batch, draws={**batch.draws, **told})
        # Captions are read once for all images of a sample.
        found = {IMAGE: self._of_image(batch, texts, of_references)}
        return found | {name: self._of_image(batch.of(name), texts, of_references) for name in targets}

    def _of_references(self, batch: Batch) -> Moments:
        """Moments of the reference images, each under the name of its image: no noise is ever added to them."""
        found: dict[str, Tensor] = {}
        for name in REFERENCES if self.references is not None else ():
            moments = cached(batch.features, f"{name}.")
            if not moments and name in batch.images:
                moments = dict(self.images.encode(batch.images[name]))
            found |= {f"{name}.{moment}": rows for moment, rows in moments.items()}
        return found

    def _of_image(self, batch: Batch, texts: Cond, of_references: Cond) -> tuple[Tensor, Cond]:
        """Clean samples of the image that is trained on, and their conditioning with that of the captions."""
        device = self.device
        with torch.autocast(device.type, enabled=False):
            # The draw from the posterior comes after the cache, so that each epoch has its own, as without one.
            moments = cached(batch.features, OF_IMAGES) or self.images.encode(batch.pixels_BCHW)
            x0 = self.images.latents(moments, batch.draws)
        more = {**_named(batch.draws, NUMBERS), **self.batch_condition(batch, moments), **of_references}
        return x0, {**texts, **{name: rows.to(device) for name, rows in more.items()}}

    def _of_tokens(self, tokens: Cond) -> Cond:
        """Conditioning of captions, as `encode` has it."""
        if self.text is None:
            return {}
        return tokens if self.trained_readers else self.text.features(tokens)

    @torch.no_grad()
    def encode_null(self, text: str = "") -> Cond:
        """Conditioning [1, ...] of the empty caption, or of a text, by the names that captions have in a batch's."""
        with torch.autocast(self.device.type, enabled=False):
            return self._of_tokens(self._tokens([text], ()))

    @torch.no_grad()
    def encode_images(self, pixels_BCHW: Tensor, seeds: Sequence[int]) -> Tensor:
        """Clean samples [B, C, h, w] float32 of uint8 images [B, 3, H, W] on the family's device, from which others are
        generated. Row i is a function of its image and seed alone."""
        # Drawn by the image's seed in place of the run's: row i must not depend on the batch.
        keys, shape = np.zeros((1, 3), dtype=np.int64), tuple(pixels_BCHW.shape[1:])
        rows = [self.generated.random_inputs(seed, keys, shape) for seed in seeds]
        drawn = {name: torch.cat([row[name] for row in rows]).to(pixels_BCHW.device) for name in rows[0]}
        with torch.autocast(pixels_BCHW.device.type, enabled=False):
            return self.generated.latents(self.generated.encode(pixels_BCHW), drawn)

    @torch.no_grad()
    def encode_prompts(
        self, prompts: Sequence[Prompt], pixel_shape: tuple[int, ...], guided: bool = False
    ) -> tuple[Cond, Cond | None]:
        """Conditioning of prompts for images (3, H, W), one row each, on the family's device, equal to what `encode`
        makes of captions; where `guided`, also that of the side which guidance leads away from, in the same shapes.
        Reference images are as many in each prompt, of the same sizes. UserError for an image that this family does not
        read."""
        assert self.text is not None, "only families that generate are asked"
        pictures = self._prompt_pictures(prompts)
        texts = [prompt.text for prompt in prompts] + [prompt.negative for prompt in prompts] * guided
        texts += interpolation.ends(prompts)
        with torch.autocast(self.device.type, enabled=False):
            tokens = self._tokens(
                texts, [torch.cat([rows] * (len(texts) // len(prompts))) for rows in as_seen(pictures)]
            )
            # Both sides in one call: texts are filled up to one length, and attention has the same shapes on both.
            both = interpolation.between(self.text.features(tokens, self.trained), prompts)
            of_pictures = self.reference_condition(self._encoded(pictures))
        sides = []
        for number in range(1 + guided):
            rows = slice(number * len(prompts), (number + 1) * len(prompts))
            more = self.prompt_condition(prompts, pixel_shape, number == 1)
            of_images = {name: values.to(self.device) for name, values in more.items()}
            sides.append({**{name: values[rows] for name, values in both.items()}, **of_images, **of_pictures})
        return sides[0], sides[1] if guided else None

    def _prompt_pictures(self, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        """The reference images of prompts [B, 3, h, w] uint8 by name, and those that a text encoder sees in another
        size. UserError for images that are not read."""
        rule = self.prompt_references or self.references
        names = () if rule is None else (*rule.names, *SEEN.values())
        if odd := sorted({name for prompt in prompts for name in prompt.images} - {*self.prompt_images, *names}):
            known = ", ".join([*sorted(self.prompt_images), *names[:1]]) or "text alone"
            raise UserError(
                f"this model does not read {', '.join(odd)} with a prompt: remove it (it reads {known})",
                code="unsupported",
            )
        held = [name for name in names if name in prompts[0].images]
        if rule is not None and len(held) < rule.least:
            raise UserError("this model reads a reference image with each prompt: give reference=FILE", code="missing")
        stacked = {name: np.stack([prompt.images[name] for prompt in prompts]) for name in held}
        return {name: torch.from_numpy(rows).permute(0, 3, 1, 2) for name, rows in stacked.items()}

    def _encoded(self, pictures: Mapping[str, Tensor]) -> Moments:
        """Moments of reference images, each under the name of its image."""
        read = {name: rows for name, rows in pictures.items() if name in REFERENCES}
        each = {name: self.images.encode(rows.to(self.device)) for name, rows in read.items()}
        return {f"{name}.{moment}": rows for name, own in each.items() for moment, rows in own.items()}

    @torch.no_grad()
    def decode(self, latents: Latents) -> np.ndarray:
        """Images [B, H, W, 3] uint8 of clean samples."""
        # In float32, whatever the caller's autocast: SDXL's autoencoder overflows in float16.
        with torch.autocast(latents.x0_BCHW.device.type, enabled=False):
            return self.generated.decode(latents).cpu().numpy()

    def export(self, folder: Path, objective: Objective, sampling: SamplingSettings) -> list[str]:
        """Writes what the networks' usual library opens, with the current weights, in place of `folder`; returns
        messages for the user."""
        return self.exporter(self, folder, objective, sampling)

    def compatibility_warnings(self, objective: Objective, null: bool = True) -> list[str]:
        """Warnings before this objective is trained from these weights, a line each; `null`: also of the empty text."""
        if self.pretrained is None:
            return []
        return compatibility.compatibility_warnings(self.pretrained, self.trained, objective, null)

    def files(self) -> dict[str, bytes]:
        """Files that belong to the weights (a tokenizer's), by relative path, for checkpoints."""
        return {} if self.text is None else self.text.files()

    def truncated(self, texts: Sequence[str]) -> dict[int, str]:
        """Texts that are longer than the family reads, by index, with a message ("cut to 77 tokens")."""
        return {} if self.text is None else self.text.truncated(texts)

"""Memory and time of images that are generated, found by generating a batch on fake tensors: shapes without memory.

It is the code of a real batch on the real networks: prompts are read, the sampler steps, latents are decoded. Weights
are counted one by one; what is computed is added up operation by operation, as for a step of training (memory/peak.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from daguerre.assembly.parts import Components
from daguerre.config.config import Config
from daguerre.data.loading.collate import absent
from daguerre.data.plan.buckets import Bucket
from daguerre.formatting import counted
from daguerre.generation import generate
from daguerre.generation.generate import ImageRequest
from daguerre.memory.estimate import Target
from daguerre.memory.host import CASTS, WIDE_BYTES, Host, networks_read, programs, widened
from daguerre.memory.peak import CAPTION, Peak, without_memory
from daguerre.memory.report import format_size, wrap
from daguerre.models import encoders
from daguerre.samplers.settings import SamplingSettings
from daguerre.training.memory_tracker import Live, use_cuda_types
from daguerre.training.performance import peak_rates
from daguerre.training.performance.work import NOTHING, Watched, Work
from daguerre.types import Latents, Prompt, waits

_STEPS = 3
"""Steps that are computed: from the second one on each takes what the one before took."""
_NONE: Mapping[str, object] = MappingProxyType({})
_STAGES = ("prompts are read", "the sampler steps", "images are decoded")


@dataclass(frozen=True)
class Stage:
    """A part of a batch that was computed."""

    bytes: int
    """Most bytes in addition to what is held."""
    work: Work
    sent: int
    """Bytes of blocks that were copied to the device meanwhile."""


@dataclass(frozen=True)
class Batch:
    """The fullest moment of a batch of images, and what generating it takes of the machine."""

    target: Target
    held: Mapping[str, int]
    """Bytes on the device that stay, by component."""
    stages: Sequence[Stage]
    """Parts of the batch in their order; the sampler takes `_STEPS` steps at most."""
    repeats: float
    """Times that the sampler takes so many."""
    awaited: int
    """Bytes of text encoders that are copied to the device before they compute."""
    machine: Host
    """Memory of the host."""
    compute: torch.dtype
    images: str
    """The images, in words."""

    @property
    def made(self) -> dict[str, int]:
        """Most bytes in addition to what is held, by what is done."""
        return dict(zip(_STAGES, (stage.bytes for stage in self.stages), strict=True))

    @property
    def host(self) -> Host:
        """The share of the host, and the seconds of the batch."""
        rates = peak_rates.assumed(self.target.card, self.target.on_gpu, self.compute)
        # Blocks are copied while others compute.
        reads, steps, decodes = (max(each.work.seconds(rates), each.sent / rates.link) for each in self.stages)
        seconds = self.awaited / rates.link + reads + steps * self.repeats + decodes
        return replace(self.machine, rates=rates, seconds=seconds)

    @property
    def peak(self) -> Peak:
        """The same as the peak of a step."""
        size = self.target.given.sampling.batch_size
        return Peak(size, sum(self.held.values()), max(self.made.values()), 0, 0)

    @property
    def fits(self) -> bool:
        """True if it has room on the device and in the host, or the room is not known."""
        return self.fits_device and self.host.fits(self.target.ram)

    @property
    def fits_device(self) -> bool:
        """True if it has room on the device, or the room is not known."""
        return self.target.card is None or self.target.left(self.peak) >= 0

    def sections(self) -> dict[str, list[str]]:
        """Text for a terminal."""
        held = [f"{name:<30}{format_size(size):>12}" for name, size in self.held.items() if size]
        seconds, count = self.host.seconds, self.target.given.sampling.batch_size
        time = f"{'an image':<30}{seconds / count:>10.3g} s"
        said = f"computed, not measured: {self.host.rates}; without reading networks and writing files"
        return {
            "Bytes a device": [*held, f"{'in all':<30}{format_size(self.peak.held):>12}"],
            "A batch": [*wrap(self.images), *self._rows()],
            "The machine": self.host.lines(self.target.ram),
            "Time": [time, *wrap(said)],
        }

    def _rows(self) -> Iterator[str]:
        target, peak = self.target, self.peak
        yield from (f"{f'made while {stage}':<34}{format_size(size):>12}" for stage, size in self.made.items())
        rows = {"peak of all tensors": peak.whole}
        if target.on_gpu:
            rows |= {"besides tensors, an estimate": target.taken(peak) - peak.whole, "used in all": target.taken(peak)}
        yield from (f"{name:<34}{format_size(size):>12}" for name, size in rows.items())
        if target.card is not None:
            free = target.left(peak)
            verdict = f"fits, {format_size(free)} free" if free >= 0 else f"DOES NOT FIT: {format_size(-free)} too much"
            yield f"{'device':<34}{format_size(target.card):>12}  {verdict}"

    def document(self) -> dict[str, object]:
        target, peak = self.target, self.peak
        found: dict[str, object] = {
            "batch_size": peak.micro,
            "device": "cuda" if target.on_gpu else "cpu",
            "held_bytes": dict(self.held),
            "made_bytes": dict(self.made),
            "peak_bytes": peak.whole,
            "taken_bytes": target.taken(peak),
            "host": self.host.document(),
        }
        return found | ({} if target.card is None else {"card_bytes": target.card, "fits": self.fits_device})


def batch(target: Target, config: Config, parts: Components, say: Callable[[str], None] = lambda stage: None) -> Batch:
    """A batch of the largest images of a config that acts, by parts that were outlined, which are used up."""
    target.laid_out(parts)
    held, waiting = _held(parts)
    sampling = config.sampling
    few = sampling if isinstance(sampling.timestep_spacing, list) else _of_few_steps(sampling)
    say(f"computing {counted(sampling.batch_size, 'image')} with {counted(few.num_inference_steps, 'step')}")
    stages = _stages(parts, config, few, target.on_gpu)
    base = programs(config, target.on_gpu)
    trained = _of_checkpoint(config, parts)
    reading = {"programs": base, **networks_read(config, parts, target.on_gpu), "checkpoint": trained}
    working = {
        "programs": base,
        "tensors": 0 if target.on_gpu else sum(held.values()) + max(each.bytes for each in stages),
        CASTS: 0 if target.on_gpu else widened(parts),
        "networks that wait": waiting,
    }
    rates = peak_rates.assumed(target.card, target.on_gpu, parts.numerics.compute)
    machine = Host(reading, working, {}, rates, 0.0, None, doing="while images are generated")
    repeats = sampling.num_inference_steps / few.num_inference_steps
    awaited = sum(map(encoders.held_bytes, filter(encoders.waiting, parts.family.components.values())))
    height, width = generate.image_size(config, "sample")
    images = (
        f"{counted(sampling.batch_size, 'image')} of {height}x{width} px (height x width) at once, "
        f"{counted(sampling.num_inference_steps, 'step')} of {sampling.sampler}, "
        f"{parts.family.guidance.described(sampling.guidance_scale)}, {parts.precision} on "
        f"{'a GPU' if target.on_gpu else 'a CPU'}"
    )
    return Batch(target, held, stages, repeats, awaited, machine, parts.numerics.compute, images)


def _of_few_steps(sampling: SamplingSettings) -> SamplingSettings:
    return sampling.model_copy(update={"num_inference_steps": min(sampling.num_inference_steps, _STEPS)})


def _held(parts: Components) -> tuple[dict[str, int], int]:
    """Bytes of weights and buffers on the device by component, and of those that wait in the host's memory."""
    held, waiting, known = dict[str, int](), 0, set[int]()
    for name, network in {**parts.family.components, "adapters": parts.net}.items():
        own = {id(t): t for t in [*network.parameters(), *network.buffers()] if id(t) not in known}
        known |= own.keys()
        is_waiting = encoders.waiting(network) is not None
        away = sum(t.nbytes for t in own.values() if is_waiting or waits(t))
        held[name], waiting = sum(t.nbytes for t in own.values()) - away, waiting + away
    return held, waiting


def _of_checkpoint(config: Config, parts: Components) -> int:
    """Bytes of the weights and averages that are read of a checkpoint while networks are read."""
    sizes = {name: p.numel() for name, p in parts.net.named_parameters() if name in parts.attached.names}
    return sum(sizes.values()) * WIDE_BYTES * (1 + config.ema.enabled)


class _Mixed(FakeTensorMode):
    """Only what has no numbers makes more of these: noise levels, masks and prompts are real, as samplers and
    tokenizers read them."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[object] = (), kwargs: Mapping[str, object] = _NONE
    ) -> Any:
        name = func._overloadpacket.__name__
        leaves = tree_leaves((args, kwargs))
        # Qwen-Image's table of places is no buffer, and stays on the meta device.
        without = any(isinstance(leaf, FakeTensor) or (isinstance(leaf, Tensor) and leaf.is_meta) for leaf in leaves)
        if without or name.startswith(("empty", "new_empty")):
            return super().__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **kwargs)


@dataclass(frozen=True)
class _Blank:
    """A codec whose images are blank, as what has no memory cannot be shown."""

    codec: Any
    begins: Callable[[], None]
    """Called before it decodes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.codec, name)

    def decode(self, latents: Latents) -> Tensor:
        self.begins()
        made = self.codec.decode(latents)
        return torch.zeros(tuple(made.shape), dtype=made.dtype)


def _stages(parts: Components, config: Config, sampling: SamplingSettings, on_gpu: bool) -> list[Stage]:
    """Reading prompts, the steps of the sampler, and decoding, of one batch without memory."""
    if on_gpu:
        for module in (parts.net, *parts.family.components.values()):
            use_cuda_types(module)
    request, live, found = _request(config, parts), Live(), list[Stage]()
    with FakeTensorMode(allow_non_fake_inputs=True), live:
        without_memory(parts)
    base, watched = live.now, Watched()
    live.reset()

    def ended(stage: int) -> None:
        """The end of a stage, if it is the next one: networks are called, and images decoded, several times."""
        if len(found) == stage:
            done, sent = _added(found), sum(swap.sent_bytes for swap in parts.swaps.values())
            work = Work(Counter(watched.work.launches) - Counter(done.work.launches))
            found.append(Stage(live.peak - base, work, sent - done.sent))
            live.reset()

    place = "images" if parts.family.output is None else "output"
    blank: Any = {place: _Blank(parts.family.generated, lambda: ended(1))}
    seen = replace(parts, family=replace(parts.family, **blank))
    hook = parts.net.register_forward_pre_hook(lambda *_: ended(0))
    requests = [replace(request, number=i, seed=i) for i in range(sampling.batch_size)]
    with _Mixed(allow_non_fake_inputs=True), live, watched, torch.no_grad():
        for _ in generate.generate_batch(seen, sampling, requests):
            pass
        ended(2)
    hook.remove()
    return found


def _added(stages: Sequence[Stage]) -> Stage:
    return Stage(0, sum((each.work for each in stages), NOTHING), sum(each.sent for each in stages))


def _request(config: Config, parts: Components) -> ImageRequest:
    """An image with as much text as is read, and the images that are needed with it."""
    size_px, sampling = generate.image_size(config, "sample"), config.sampling
    rule = parts.family.prompt_references or parts.family.references
    needed = {**parts.attached.images, **(dict.fromkeys(rule.names, rule) if rule and rule.least else {})}
    blank = absent(needed, 1, Bucket(*parts.family.trained_px(size_px)))
    images = {name: rows[0].permute(1, 2, 0).numpy() for name, rows in blank.items()}
    text = "" if getattr(config.model, "long_prompts", False) else CAPTION
    return ImageRequest(0, Prompt(text, sampling.negative_prompt, images), 0, size_px, sampling.guidance_scale)

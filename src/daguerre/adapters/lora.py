"""LoRA and its kin, computed by peft: small matrices are added to frozen layers and trained.

kind     effect on a layer's weight W                                            source
lora     W + alpha / rank * B A                                                  Hu et al. 2021, arXiv 2106.09685
rslora   W + alpha / sqrt(rank) * B A                                            Kalajdzievski 2023, arXiv 2312.03732
dora     m * (W + alpha / rank * B A) / norm of its rows; m is trained, too      Liu et al. 2024, arXiv 2402.09353
loha     W + alpha / rank * (B1 A1) o (B2 A2), elementwise                       Hyeon-Woo et al. 2021, arXiv 2108.06098
lokr     W + alpha / rank * (C kron D), C or D a product of rank `rank`          Yeh et al. 2023, arXiv 2309.14859
boft     W R, R orthogonal and made of blocks [rank, rank]                       Liu et al. 2023, arXiv 2311.06243

Of lora and rslora fewer ranks may act the noisier a sample is: T-LoRA (lora_parts/noise_ranks.py).
What is added starts without effect, so that training starts from the base. Only the additions are trained and saved, in
float32; the base keeps its weights, computes without dropout and has no gradients. The export is the file that
diffusers' `load_lora_weights` reads, and of the kinds that diffusers does not have peft's own folders.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import diffusers
import torch
from peft import (
    BOFTConfig,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    PeftConfig,
    inject_adapter_in_model,
)
from peft.tuners.boft import layer as boft
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from daguerre import keys
from daguerre.adapters.adapter import Trainable, in_none
from daguerre.adapters.lora_parts import forward, from_file, inits, noise_ranks
from daguerre.adapters.lora_parts.layers import FROM_BASE, IN_PEFT_LORA, PRESETS, Numbers, chosen, numbers, wrapped
from daguerre.adapters.lora_parts.noise_ranks import NoiseRanks
from daguerre.adapters.settings import AdapterSettings, Part
from daguerre.checkpoint.export import replaced
from daguerre.errors import UserError
from daguerre.models.frozen import keep_evaluating
from daguerre.models.lora_files import forms, kohya, peft, read
from daguerre.models.lora_files.addition import DIFFUSERS_FILE, KOHYA_FILE, Addition
from daguerre.models.lora_files.strangers import no_weight
from daguerre.settings import FREE, Unused

if TYPE_CHECKING:
    from daguerre.models.export.about import About
    from daguerre.models.family import Family
    from daguerre.models.network import Network
    from daguerre.objectives.objective import Objective
    from daguerre.samplers.settings import SamplingSettings

DENSE = ("lora", "rslora")
"""Kinds whose effect is a product of two matrices alone."""
REFUSED = {
    "oft": "peft's OFT is no identity when it starts on 3x3 convolutions, so that training would not start from the "
    "base; boft is the rotation that does",
    "vera": "its random matrices are shared between layers, which peft cannot put into a network of diffusers; lora "
    "with a small rank, or lokr, has as few numbers",
    "randlora": "peft's merged weights differ from what it trains by 0.4 percent; loha is of full rank, too",
    "locon": "that is kind=lora with targets=attention+ff+conv",
}
"""Kinds that other programs have, and why not here."""
IN_KOHYA = (*DENSE, "loha", "lokr")
"""Kinds that sd-scripts, ComfyUI and A1111 compute as peft does. DoRA they divide by the norms of other rows."""
setattr(boft, "_FBD_CUDA", False)  # noqa: B010 (peft would compile a kernel when a run starts; its products of blocks do without)


Rank = Annotated[int | None, Field(ge=1)]


class Settings(AdapterSettings):
    """Trains small additions to linear layers and convolutions."""

    part: ClassVar[Part] = "layers"
    of_weights = frozenset(
        {"kind", "rank", "ranks", "rank_pattern", "targets", "init", "lora_fa", "tlora_min_rank", "tlora_alpha"}
    )

    name: Literal["lora"] = "lora"
    """Name of the adapter."""
    kind: Literal["lora", "rslora", "dora", "loha", "lokr", "boft"] = "lora"
    """What is added: a product of two matrices (lora; rslora divides alpha by the square root of the rank), the same
    and the length of each row (dora), an elementwise (loha) or Kronecker product (lokr), or a rotation (boft)."""
    rank: int = Field(16, ge=1)
    """Rank of the additions, in the component that is trained by default (of a pipeline the UNet). Of boft the size of
    a block, which must divide a layer's inputs."""
    alpha: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Additions are multiplied by alpha / rank (rslora: by alpha / sqrt(rank)). null: by 1, in every component."""
    ranks: dict[str, Rank] = Field({})
    """Ranks of other components, such as {text_encoder: 8}; null: nothing is added to it."""
    rank_pattern: dict[str, Rank] = Field({})
    """Ranks of layers by patterns of their names, such as {"attn2.to_?": 8}: the first that fits counts. null: nothing
    is added to these layers."""
    alpha_pattern: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field({})
    """Alphas of layers by patterns of their names, in place of alpha: the first that fits counts."""
    targets: str | list[str] = "attention"
    """Layers that get an addition: attention, ff, conv and all, several joined by + (attention+ff), or a list of ends
    of their names, also patterns, such as [to_q, to_v] or ["attn2.to_?"]."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of a layer's inputs that its addition does not see, in training."""
    dropout_pattern: dict[str, Annotated[float, Field(ge=0, lt=1)]] = Field({})
    """Dropouts of layers by patterns of their names, in place of dropout: the first that fits counts."""
    init: Literal["default", "gaussian", "pissa", "pissa_niter_16", "olora", "orthogonal"] = "default"
    """Start of A and B. default: A uniform as in a linear layer; gaussian: A normal of deviation 1 / rank; of both B is
    zero. orthogonal: both normal, in directions whose product is zero. pissa: the largest singular values of the weight
    (pissa_niter_16 estimates them, in a fraction of the time); olora: the first columns of its QR decomposition. The
    last ones are saved at twice the rank, as a difference from the start."""
    lora_fa: bool = False
    """Whether A stays as it starts, and B alone is trained (LoRA-FA, Zhang et al. 2023, arXiv 2308.03303): half of the
    gradients and moments."""

    tlora_min_rank: int | None = Field(None, ge=1)
    """Ranks that act on pure noise; the less noise, the more act, up to all on clean images (T-LoRA), in training and
    in images. Of the denoiser alone: a text encoder knows no noise. null: all act everywhere."""
    tlora_alpha: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Exponent of the share of the way from pure noise to clean that gives the share of the other ranks. Above 1 more
    of them wait for the end."""

    trigger_phrase: str | None = Field(None, json_schema_extra=FREE)
    """The words that prompts need, for the headers of files (modelspec.trigger_phrase). null: the captions that the
    recipe gives all images, such as instance_prompt."""

    unused_when: ClassVar[tuple[Unused, ...]] = (
        Unused(("alpha", "alpha_pattern"), lambda own: own.kind == "boft", "a rotation has no strength"),
        Unused(
            ("dropout", "dropout_pattern"),
            lambda own: own.kind not in IN_PEFT_LORA,
            "peft drops inputs of lora, rslora and dora only",
        ),
        Unused(
            ("init", "lora_fa"),
            lambda own: own.kind not in IN_PEFT_LORA,
            "only lora, rslora and dora have the factors A and B",
        ),
        Unused(
            (noise_ranks.SETTING,),
            lambda own: own.kind not in DENSE,
            "ranks can act by themselves in lora and rslora alone: DoRA divides by rows of one length, and other kinds "
            "are no sum over ranks",
        ),
        Unused(("tlora_alpha",), lambda own: own.tlora_min_rank is None, "tlora_min_rank asks for T-LoRA"),
    )

    @field_validator("kind", mode="before")
    @classmethod
    def _sound(cls, kind: Any) -> Any:
        if why := REFUSED.get(str(kind)):
            raise ValueError(f"{kind}: {why}")
        return kind

    @model_validator(mode="after")
    def _init_of_the_product(self) -> Self:
        if self.kind == "dora" and self.init in FROM_BASE:
            raise ValueError(
                f"init={self.init} takes a part of the weight as the addition, and kind=dora divides by the length of "
                "both together: use init=default, gaussian or orthogonal, or kind=lora or rslora"
            )
        return self

    @field_validator("targets")
    @classmethod
    def _known(cls, targets: str | list[str]) -> str | list[str]:
        if isinstance(targets, str) and (wrong := [part for part in targets.split("+") if part not in PRESETS]):
            raise ValueError(
                f"{', '.join(wrong)}: allowed: {', '.join(PRESETS)}, several joined by +, or a list of layers' names"
            )
        if not targets:
            raise ValueError("nothing would be trained: name at least one layer")
        return targets

    @property
    def reads_weights(self) -> bool:
        """DoRA and the inits that take a part of a weight."""
        return self.kind == "dora" or self.subtracts

    @property
    def subtracts(self) -> bool:
        """True of an init that takes a part of the weight as the addition."""
        return self.init in FROM_BASE

    def reaches(self, trainable: Sequence[str]) -> tuple[str, ...]:
        """The components that have a rank."""
        return tuple(self.by_component(trainable))

    def by_component(self, trainable: Sequence[str]) -> dict[str, int]:
        """The ranks of all components."""
        ranks = dict.fromkeys(trainable[:1], self.rank) | self.ranks
        return {name: rank for name, rank in ranks.items() if rank is not None}


@dataclass(frozen=True, eq=False)
class LoRA(Trainable):
    """Networks with additions."""

    net: nn.Module
    names: frozenset[str]
    networks: Mapping[str, Any]
    """The components that have additions."""
    components: Mapping[str, nn.Module]
    """All of the model."""
    kind: str
    trigger_phrase: str | None = None
    """The words that prompts need; None: as the recipe's captions say."""
    pipeline: str = ""
    """The class of diffusers' pipelines of the model; empty where it has none."""
    noise_ranks: NoiseRanks | None = None
    """The ranks of the denoiser that act by noise level; None: all act."""
    float32 = True

    def export(self, folder: Path, objective: Objective, sampling: SamplingSettings, about: About) -> list[str]:
        """The file that diffusers' `load_lora_weights` reads, with the ranks and alphas in its header; of a kind that
        diffusers does not have, a folder of each component for peft's `PeftModel.from_pretrained`. Next to it the file
        for kohya's trainer, ComfyUI and A1111, if they compute this kind as it was trained."""
        if self.trigger_phrase is not None:
            about = replace(about, trigger_phrase=self.trigger_phrase)
        if self.noise_ranks is not None:
            about = replace(about, tlora=self.noise_ranks.numbers)
        both = {name: inits.whole(network) for name, network in self.networks.items()}
        additions = {
            name: _additions(self.networks[name], own) for name, (own, _) in both.items() if self.kind != "boft"
        }
        with replaced(folder) as fresh, self.detached():
            if self.for_diffusers:
                forms.write("diffusers", fresh / DIFFUSERS_FILE, self.components, additions, about)
            else:  # peft's own config has what makes the shapes of the factors
                for component, (tensors, config) in both.items():
                    peft.write_component(fresh / component, tensors, config)
                if additions:
                    forms.compare(fresh, self.components, additions)
            lines = []
            if self.kind in IN_KOHYA and all(map(kohya.has_names, self.networks.values())):
                forms.write("kohya", fresh / KOHYA_FILE, self.components, additions, about)
                lines = [f"{folder.name}/{KOHYA_FILE}: {line}" for line in kohya.notices(self.components, additions)]
            card = _CARD if self.for_diffusers else _PEFT_CARD.replace("COMPONENT", next(iter(both)))
            # Not all of diffusers' pipelines read LoRAs: StableCascadePriorPipeline does not.
            if self.for_diffusers and self.pipeline and not hasattr(getattr(diffusers, self.pipeline, None), _READS):
                card = _UNREAD_CARD.format(pipeline=self.pipeline)
                lines.append(f"{folder.name}/: diffusers' {self.pipeline} reads no LoRA: {_MERGE}")
            if (fresh / KOHYA_FILE).exists():
                card += _KOHYA_CARD
            if self.noise_ranks is not None:
                card += noise_ranks.CARD
                lines.append(f"{folder.name}/: {noise_ranks.ELSEWHERE}")
            (fresh / "README.md").write_text(card, encoding="utf-8")
        return lines

    def unseen(self, captions: Callable[[int], Sequence[str]]) -> list[str]:
        phrases = [phrase.strip() for phrase in (self.trigger_phrase or "").split(",") if phrase.strip()]
        missing, count = in_none(phrases, captions)
        return [
            f"the trigger_phrase {phrase!r} is in none of the first {count} captions, so it calls up nothing "
            "of what is learnt: write it into them, or set data.captions.prefix or data.captions.text "
            "(docs/trouble.md#the-trigger-word)"
            for phrase in missing
        ]

    def start_from(self, path: Path) -> list[str]:
        """Takes up a file in any layout that `models/lora_files/read.py` reads."""
        if any(inits.START in network.peft_config for network in self.networks.values()):
            raise UserError(
                f"init_from={path}: this recipe's init starts from a part of the base's weights: set init=default",
                code="conflict",
                setting="init_from",
            )
        lines = from_file.noise_ranks(path, self.noise_ranks)
        with self.detached():
            found = read.read(path, self.components, all_ranks=True)
        return from_file.take_up(path, found, self.networks) + lines

    def follow(self, objective: Objective) -> None:
        """Tells T-LoRA what pure noise is called."""
        if self.noise_ranks is not None:
            self.noise_ranks.follow(objective)

    def again(self) -> Callable[[], AbstractContextManager[object]]:
        """Blocks that are computed again have the ranks of their pass."""
        return nullcontext if self.noise_ranks is None else self.noise_ranks.again()

    @property
    def for_diffusers(self) -> bool:
        """True of kinds that diffusers has."""
        return self.kind in IN_PEFT_LORA

    def merge(self) -> None:
        """W with what is added, in place of W. UserError for T-LoRA."""
        if self.noise_ranks is not None:
            raise no_weight("this run's LoRA")
        for network in self.networks.values():
            for layer in wrapped(network).values():
                layer.merge()

    @contextmanager
    def detached(self) -> Iterator[None]:
        """The layers themselves stand in the places of those with additions."""
        places: list[tuple[nn.Module, str, Any]] = []
        for network in self.networks.values():
            for place, layer in wrapped(network).items():
                above, _, last = place.rpartition(".")
                places.append((network.get_submodule(above), last, layer))
        for owner, name, layer in places:
            setattr(owner, name, layer.get_base_layer())
        try:
            yield
        finally:
            for owner, name, layer in places:
                setattr(owner, name, layer)

    @property
    def strengths(self) -> tuple[float, ...]:  # type: ignore[override]
        """Half of a rotation, or of lengths of rows, is no number that peft multiplies by."""
        return (0.0, 0.5) if self.kind in IN_KOHYA else (0.0,)

    @contextmanager
    def at(self, strength: float) -> Iterator[None]:
        """0: the base; else what is added times a number."""
        layers: list[Any] = []  # BOFT has no number to multiply by, and at 0 and 1 none is needed
        if strength not in (0, 1):
            layers = [layer for network in self.networks.values() for layer in wrapped(network).values()]
        before = [dict(layer.scaling) for layer in layers]
        try:
            for layer, own in zip(layers, before, strict=True):
                layer.scaling |= {name: scale * strength for name, scale in own.items()}
            with nullcontext() if strength else self.detached():
                yield
        finally:
            for layer, own in zip(layers, before, strict=True):
                layer.scaling |= own


_CARD = """\
---
library_name: diffusers
tags: [lora]
---

A LoRA trained with Daguerre, for the base model that it was trained on:

```python
pipe.load_lora_weights("path/to/this/folder")
```

`lora_adapter_metadata` in the file's header holds ranks and alphas; a program that does not read it takes alpha = rank.
"""
_READS = "load_lora_weights"
_MERGE = "`daguerre convert export RUN format=diffusers out=FOLDER` writes a pipeline that has it in its weights"
_UNREAD_CARD = f"""\
---
library_name: diffusers
tags: [lora]
---

A LoRA trained with Daguerre, for the base model that it was trained on. diffusers' {{pipeline}} reads no LoRA:
{_MERGE}.
"""
_KOHYA_CARD = f"""
`{KOHYA_FILE}` is the same for ComfyUI, A1111 and kohya's scripts.
"""
_PEFT_CARD = """\
---
library_name: peft
---

An adapter trained with Daguerre, for the base model that it was trained on:

```python
name = "COMPONENT"
setattr(pipe, name, PeftModel.from_pretrained(getattr(pipe, name), f"path/to/this/folder/{name}"))
```

and the other folders the same way. diffusers' `load_lora_weights` does not have this kind.
"""


def _additions(network: nn.Module, trained: Mapping[str, Tensor]) -> list[Addition]:
    """Additions to the layers of a component, of what peft has trained of it."""
    factors: dict[str, dict[str, Tensor]] = {}
    for name, value in trained.items():
        layer, factor = re.split(r"\.(?=lora_|hada_|lokr_)", name)
        factors.setdefault(layer, {})[factor] = value.detach()
    layers: dict[str, Any] = dict(network.named_modules())
    return [Addition(name, own, layers[name].scaling[inits.ADAPTER]) for name, own in factors.items()]


def attach(settings: Settings, model: Family, seed: int) -> LoRA:
    """Freezes the components that it reaches, and gives their layers additions. UserError for targets that are not
    there, and for layers to which this kind cannot be added."""
    networks, names, used = {}, set[str](), set[str]()
    for component, rank in settings.by_component(model.trainable).items():
        network: Any = model.components[component]
        targets = chosen(component, model.networks[component], settings, rank, used)
        if not targets:
            raise _without_targets(component, model.networks[component], settings)
        before = {id(p) for p in network.parameters()}
        others = [p for p in network.parameters() if p.requires_grad]
        with warnings.catch_warnings():
            # Two additions to a layer are what some inits want, and their files are made without peft's way back.
            warnings.filterwarnings(
                "ignore", "Already found a `peft_config`|Using Rank-Stabilized LoRA with", UserWarning
            )
            _inject(settings, _config(settings, rank, targets), network, targets, component, seed)
        networks[component] = network
        names |= {f"{component}.{name}" for name, p in network.named_parameters() if id(p) not in before}
        for p in others:  # of another adapter: peft freezes all but its own
            p.requires_grad_(True)
        keep_evaluating(network)
    if not networks:
        raise UserError(
            "a LoRA cannot be used here: this family has no frozen network to add it to", code="unsupported"
        )
    asked = [] if isinstance(settings.targets, str) else settings.targets
    patterns = (*asked, *settings.rank_pattern, *settings.alpha_pattern, *settings.dropout_pattern)
    if idle := [pattern for pattern in patterns if pattern not in used]:
        wrong = ", ".join(idle)
        raise UserError(
            f"the LoRA's targets {wrong} are no linear layers or convolutions of {', '.join(networks)} that get an "
            "addition",
            code="unknown",
        )
    pipeline = getattr(model.pretrained and model.pretrained.settings, "pipeline_class", "")
    ranks = noise_ranks.begin(settings, {name: model.networks[name] for name in networks})
    return LoRA(
        model.net, frozenset(names), networks, model.components, settings.kind, settings.trigger_phrase, pipeline, ranks
    )


def _without_targets(component: str, network: Network, settings: Settings) -> UserError:
    listed = () if isinstance(settings.targets, str) else settings.targets
    asked, kinds = ", ".join(listed) or settings.targets, [*network.facts.layers, "all"]
    way = f"set targets to what it has ({', '.join(kinds)}, several joined by +, or a list of layers' names)"
    if listed and {*listed} <= {*kinds}:
        way = f"a list is one of layers' names, and these are kinds of layers: set targets={'+'.join(listed)}"
    return UserError(
        f"no layer of the LoRA's targets ({asked}) is in {component}: {way}, or ranks.{component}=null",
        code="empty",
    )


def _inject(
    settings: Settings, config: PeftConfig, network: nn.Module, targets: Mapping[str, Numbers], name: str, seed: int
) -> None:
    """Wraps the layers of a component; their random weights follow from the seed and its name."""
    with torch.random.fork_rng(devices=[]), inits.unchanged(network, targets if settings.subtracts else ()):
        torch.manual_seed(int(keys.words(seed, f"lora {name}", 0, count=1)[0] >> 1))
        inject_adapter_in_model(config, network)
        layers = wrapped(network)
        assert layers.keys() == targets.keys(), "peft has wrapped other layers than it was asked to"
    if isinstance(config, LoraConfig) and settings.subtracts:
        inits.subtract_start(network, config)
    for place, layer in layers.items():
        if (share := targets[place].dropout) != settings.dropout:
            layer.lora_dropout[inits.ADAPTER] = nn.Dropout(share)
        if settings.lora_fa:
            layer.lora_A.requires_grad_(False)
    forward.lighten(layers.values())


def _config(settings: Settings, rank: int, targets: Mapping[str, Numbers]) -> PeftConfig:
    """peft's config of one component. Every number that is not the usual one stands under its layer's name."""
    usual = numbers(settings, rank, settings.alpha, settings.dropout)
    ranks = {re.escape(name): own.rank for name, own in targets.items() if own.rank != usual.rank}
    alphas = {re.escape(name): own.alpha for name, own in targets.items() if own.alpha != usual.alpha}
    if settings.kind == "boft":
        return BOFTConfig(boft_block_size=rank, target_modules=list(targets))
    if settings.kind in ("loha", "lokr"):
        kind: Any = LoHaConfig if settings.kind == "loha" else LoKrConfig
        return kind(r=rank, alpha=usual.alpha, rank_pattern=ranks, alpha_pattern=alphas, target_modules=list(targets))
    return LoraConfig(
        r=rank,
        lora_alpha=usual.alpha,  # type: ignore[arg-type]  # any number
        lora_dropout=settings.dropout,
        rank_pattern=ranks,
        alpha_pattern=alphas,
        use_rslora=settings.kind == "rslora",
        use_dora=settings.kind == "dora",
        init_lora_weights=True if settings.init == "default" else settings.init,  # type: ignore[arg-type]
        target_modules=list(targets),
    )

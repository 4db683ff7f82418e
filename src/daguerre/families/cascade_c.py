"""Stage C of Stable Cascade: text to the latents of an EfficientNet, at a 32nd of an image's sides.

Pernias et al. 2023 (arXiv 2306.00637). What decodes these latents is the previewer, or Stage B and Stage A, which are
themselves trained as the family cascade_b.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field
from transformers import CLIPVisionModelWithProjection

from daguerre.families.cascade import export, facts, net, numbered_loras, sizes
from daguerre.families.cascade import load as cascade_load
from daguerre.families.cascade.codec import Compressed, Decoder, Generated, Preview
from daguerre.families.cascade.controlnets.beside_stage_c import OfStageC
from daguerre.families.cascade.decoding import DecodingSettings, Stages
from daguerre.families.cascade.image_prompts import ImagePrompts
from daguerre.families.cascade.settings import READS, STABILITY, CascadeSettings
from daguerre.models.components import ComponentLoader
from daguerre.models.export.diffusers import PipelineExporter
from daguerre.models.family import Family
from daguerre.models.parts.text import encoder as text_encoder
from daguerre.models.parts.text.conditioning import TextConditioning
from daguerre.models.settings import BASE, Component, ComponentSpec
from daguerre.settings import FREE, Unused
from daguerre.types import IMAGE_PROMPT

FACTS = facts.FACTS
NUMBERED_LORAS = numbered_loras


class Settings(CascadeSettings):
    """Stage C of Stable Cascade."""

    family: Literal["cascade_c"] = "cascade_c"
    """Name of the family."""
    prior: Component = BASE
    """Stage C, by diffusers' name."""
    size: Literal["3.6B", "1B"] | None = None
    """Size of a prior that starts from random weights (prior=null). null: the base's."""
    image_prompts: bool = True
    """Train and generate with CLIP's embedding of images, too; off: the network never gets one."""
    image_encoder: Component = BASE
    """CLIP's image encoder with its projection, frozen."""
    image_embedding_dropout: float = Field(0.9, ge=0, le=1)
    """Share of samples whose image embedding is left out (zeros), independent of captions."""
    resolution_multiple: float = Field(42.67, gt=0, le=128, json_schema_extra=FREE)
    """Pixels of a generated image for each cell of the latent, rounded up; images that are trained on have 32. So what
    was trained at 768 px generates at 1024 px (diffusers' name and value)."""
    decode: DecodingSettings = DecodingSettings()
    """What makes images of latents."""
    previewer: Component = Field(f"{STABILITY}/previewer.safetensors", json_schema_extra=FREE)
    """The previewer: small and quick, with a quarter of the detail of what is trained on."""
    decoder: Component = STABILITY
    """Stage B, for decode=stages: a folder or hub id with `decoder`, such as the pipeline of a run of cascade_b, or a
    single file."""
    vqgan: Component = STABILITY
    """Stage A, for decode=stages."""

    pipeline_class: ClassVar[str] = "StableCascadePriorPipeline"
    usual: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "data": {"resolution": 768},
        "sampling": {"sampler": "euler_ancestral", "num_inference_steps": 20, "guidance_scale": 4.0, "shift": 2.0}
        | {"height": 1024, "width": 1024},
    }
    decoding: ClassVar[tuple[str, ...]] = ("decode", "previewer", "decoder", "vqgan", "resolution_multiple")
    components: ClassVar[Mapping[str, ComponentSpec]] = {
        "prior": ComponentSpec("denoiser", trainable=True),
        **CascadeSettings.components,
        "image_encoder": ComponentSpec("image_encoder"),
        "previewer": ComponentSpec("autoencoder"),
        "decoder": ComponentSpec("autoencoder"),
        "vqgan": ComponentSpec("autoencoder"),
    }
    unused_when: ClassVar[tuple[Unused, ...]] = (
        *CascadeSettings.unused_when,
        Unused(("size",), lambda own: own.prior is not None, "the size is that of model.prior, unless that is null"),
        Unused(("image_encoder", "image_embedding_dropout"), lambda own: not own.image_prompts, "image_prompts is off"),
        Unused(("previewer",), lambda own: own.decode.name == "stages", "decode is stages"),
        Unused(("decoder", "vqgan"), lambda own: own.decode.name == "previewer", "decode is previewer"),
    )

    @property
    def places(self) -> Mapping[str, Any]:
        """Of the networks that these settings use."""
        return {name: place for name, place in super().places.items() if name not in self.unused()}


def load(settings: Settings, seed: int) -> Family:
    """The family of these settings. Raises UserError if something is missing or does not fit together."""
    components = ComponentLoader(settings, seed)
    encoder = text_encoder.load(components, "text_encoder", "tokenizer", READS)
    texts = TextConditioning((encoder,))
    networks = {"prior": cascade_load.network(components, "prior", sizes.STAGE_C.get(settings.size or ""))}
    networks |= texts.networks
    networks["effnet"] = cascade_load.network(components, "effnet")
    prompts = ImagePrompts(networks["prior"].config.clip_image_in_channels)
    if settings.image_prompts:
        networks["image_encoder"] = components.network("image_encoder", CLIPVisionModelWithProjection)
        prompts = ImagePrompts(prompts.width, networks["image_encoder"])
    decoder: Decoder
    if settings.decode.name == "previewer":
        networks["previewer"] = cascade_load.network(components, "previewer")
        decoder = Preview(networks["previewer"])
    else:
        networks |= {name: cascade_load.network(components, name) for name in ("decoder", "vqgan")}
        decoder = Stages(networks["decoder"], networks["vqgan"], texts, settings.decode)
    cascade_load.check_widths(settings.components, networks, encoder)
    images = Compressed(networks["effnet"], decoder, prompts, settings.image_embedding_dropout)
    return net.family(
        components, "prior", networks, images, texts, _exporter(settings, prompts),
        output=Generated(images, settings.resolution_multiple),
        batch_condition=prompts.of_batch, prompt_condition=prompts.of_prompts,
        prompt_images=(IMAGE_PROMPT,) if settings.image_prompts else (),
        controlnets=OfStageC(
            "prior", networks["prior"], networks["effnet"], lambda: "effnet" in components.left_out,
            tuple(settings.ignore_tensors),
        ),
    )  # fmt: skip


def _exporter(settings: Settings, prompts: ImagePrompts) -> PipelineExporter:
    """The networks that StableCascadePriorPipeline has; and the EfficientNet, for training on."""
    index: dict[str, Any] = {"resolution_multiple": settings.resolution_multiple}
    documents: dict[str, Mapping[str, Any]] = {}
    if prompts.encoder is not None:
        side = prompts.encoder.config.image_size
        index |= {"image_encoder": ["transformers", "CLIPVisionModelWithProjection"]}
        index |= {"feature_extractor": ["transformers", "CLIPImageProcessor"]}
        documents["feature_extractor/preprocessor_config.json"] = {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": side},
            "crop_size": {"height": side, "width": side},
        }
    return PipelineExporter(
        settings, index, {}, documents=documents,
        unlisted=("effnet", "previewer"), left_out=("decoder", "vqgan"), result="image_embeddings",
        unknown=export.UNKNOWN,
    )  # fmt: skip

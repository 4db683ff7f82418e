"""Networks of diffusers and transformers with the facts that families give them."""

from torch import nn

from daguerre.distributed.mesh import Mesh
from daguerre.distributed.sharding_rules import DEFAULT, Rules
from daguerre.families.stable_diffusion.facts import CONTROLNET, UNET
from daguerre.models.network import Facts, Network, block_classes
from daguerre.models.parts.facts import CLIP_IMAGE, CLIP_TEXT, KL_AUTOENCODER, T5
from daguerre.models.placement import Placement, of_net, placement

FACTS: dict[str, Facts] = {
    "UNet2DConditionModel": UNET,
    "ControlNetModel": CONTROLNET,
    "AutoencoderKL": KL_AUTOENCODER,
    "CLIPTextModel": CLIP_TEXT,
    "CLIPTextModelWithProjection": CLIP_TEXT,
    "CLIPVisionModelWithProjection": CLIP_IMAGE,
    "T5EncoderModel": T5,
}


def known(module: nn.Module) -> Network:
    return Network(module, "denoiser", FACTS[type(module).__name__])


def placed(module: nn.Module, mesh: Mesh, rules: Rules = DEFAULT) -> Placement:
    """Places of the parameters of such a network."""
    return placement(known(module), rules, mesh)


def placed_children(net: nn.Module, mesh: Mesh) -> Placement:
    """Places of the parameters of a net whose children are such networks."""
    return of_net(net, {name: known(module) for name, module in net.named_children()}, DEFAULT, mesh)


BLOCKS = block_classes(Network(nn.Module(), "denoiser", facts) for facts in FACTS.values())
HEADS = {facts.heads for facts in FACTS.values()}

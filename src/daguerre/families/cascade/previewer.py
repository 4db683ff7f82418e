"""The previewer of Stable Cascade: a small decoder from Stage C's latents to images, with the names that Stability
publishes (16 MB). Shape letters: B samples, C channels, H and W height and width."""

from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn

FACTOR = 8
"""By how much it enlarges each side."""


class Previewer(ModelMixin, ConfigMixin):
    """Latents [B, 16, h, w] to images [B, 3, 8 h, 8 w], RGB in about [0, 1]."""

    @register_to_config
    def __init__(self, latent_channels: int = 16, hidden_channels: int = 512, out_channels: int = 3) -> None:
        super().__init__()
        width = hidden_channels
        layers: list[nn.Module] = [nn.Conv2d(latent_channels, width, 1), *_after(width)]
        layers += [nn.Conv2d(width, width, 3, padding=1), *_after(width)]
        for before, after in ((width, width // 2), (width // 2, width // 4), (width // 4, width // 4)):
            layers += [nn.ConvTranspose2d(before, after, 2, stride=2), *_after(after)]
            layers += [nn.Conv2d(after, after, 3, padding=1), *_after(after)]
        self.blocks = nn.Sequential(*layers, nn.Conv2d(width // 4, out_channels, 1))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.blocks(x_BCHW)


def _after(channels: int) -> list[nn.Module]:
    return [nn.GELU(), nn.BatchNorm2d(channels)]

"""diffusers' ZImageTransformer2DModel, for text alone: its forward pass on a batch of texts with a mask.

The library's own takes a list of texts without their padding, so that the host would have to know their lengths, which
are on the device and waited for. Shape letters: B samples, C channels, H and W height and width of latents, T tokens of
text, S tokens of the image, D features.
"""

from typing import Any

import torch
from diffusers import ZImageTransformer2DModel
from diffusers.models.transformers.transformer_z_image import SEQ_MULTI_OF
from torch import Tensor, nn
from torch.nn.functional import pad

from daguerre.models.network import stands_for

PATCH = 2
"""Side of the square of latent pixels that is one token."""
_SIZE = f"{PATCH}-1"


@stands_for(ZImageTransformer2DModel)
class TextToImage(ZImageTransformer2DModel):
    """The transformer of Z-Image. The sequence is the image and behind it the text, each filled up to a multiple of 32
    tokens by a learnt one; the image's place is behind the text that is filled up so."""

    @property
    def most_tokens(self: Any) -> int:
        """Most tokens of a text for which there are places on the first axis, with one behind them for the image."""
        return int((self.config.axes_lens[0] - 2) // SEQ_MULTI_OF * SEQ_MULTI_OF)

    @property
    def most_side(self: Any) -> int:
        """Most tokens to a side of an image."""
        return int(min(self.config.axes_lens[1:]))

    def forward(self: Any, x_BCHW: Tensor, time_B: Tensor, text_BTD: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """The velocity [B, C, H, W], with the library's sign, of noisy latents at the time 0 (clean) to 1 (noise).
        `mask_BT` is True for tokens of text and False for the padding behind them; None: all are text."""
        time_BD = self.t_embedder((1 - time_B) * self.t_scale).type_as(x_BCHW)
        # On the device; of one row where all texts have one length.
        length_B = torch.full((1,), text_BTD.shape[1], device=x_BCHW.device) if mask_BT is None else mask_BT.sum(1)
        end_B1 = -(-length_B // SEQ_MULTI_OF)[:, None] * SEQ_MULTI_OF
        tokens_BSD = _tokens(x_BCHW)
        n_image = tokens_BSD.shape[1]
        image_BSD = self._filled(
            self.all_x_embedder[_SIZE], self.x_pad_token, tokens_BSD, length_B.new_full((1,), n_image)
        )
        text_BTD = self._filled(self.cap_embedder, self.cap_pad_token, text_BTD, length_B)
        image_rope, text_rope = self._rotary(end_B1, x_BCHW.shape, image_BSD.shape[1], text_BTD.shape[1])
        is_text_BT = None if mask_BT is None else torch.arange(text_BTD.shape[1], device=end_B1.device) < end_B1
        for layer in self.noise_refiner:
            image_BSD = self._through(layer, image_BSD, None, image_rope, time_BD)
        for layer in self.context_refiner:
            text_BTD = self._through(layer, text_BTD, is_text_BT, text_rope)
        whole_BSD = torch.cat([image_BSD, text_BTD], 1)
        rope = torch.cat([image_rope, text_rope.expand(len(image_rope), -1, -1)], 1)
        seen_BS = None if is_text_BT is None else pad(is_text_BT, (image_BSD.shape[1], 0), value=True)
        for layer in self.layers:
            whole_BSD = self._through(layer, whole_BSD, seen_BS, rope, time_BD)
        y_BSD = self.all_final_layer[_SIZE](whole_BSD[:, :n_image], c=time_BD)
        b, _, height, width = x_BCHW.shape
        y = y_BSD.view(b, height // PATCH, width // PATCH, PATCH, PATCH, self.out_channels)
        return y.permute(0, 5, 1, 3, 2, 4).reshape(b, self.out_channels, height, width)

    def _filled(self: Any, embedder: nn.Module, token_1D: Tensor, rows_BTD: Tensor, length_B: Tensor) -> Tensor:
        """[B, T, D] of T a multiple of 32: what is embedded, and the learnt token in place of all behind a length."""
        rows_BTD = pad(rows_BTD, (0, 0, 0, -rows_BTD.shape[1] % SEQ_MULTI_OF))
        is_own_BT = torch.arange(rows_BTD.shape[1], device=length_B.device) < length_B[:, None]
        return torch.where(is_own_BT[..., None], embedder(rows_BTD), token_1D)

    def _rotary(self: Any, end_B1: Tensor, shape: tuple[int, ...], n_image: int, n_text: int) -> tuple[Tensor, Tensor]:
        """[B or 1, S, D] and [1, T, D] complex: text has its place in the order on the first of three axes, from 1 on;
        the image has one place behind it, and rows and columns. What fills the image up is at 0."""
        rows, columns = (torch.arange(size // PATCH, device=end_B1.device) for size in shape[2:])
        grid_S2 = torch.cartesian_prod(rows, columns)
        behind_BS = (end_B1 + 1).expand(-1, len(grid_S2))
        image_BS3 = torch.cat([behind_BS[..., None], grid_S2.expand(len(end_B1), -1, -1)], 2)
        image_BS3 = pad(image_BS3, (0, 0, 0, n_image - len(grid_S2)))
        text_1T3 = pad(torch.arange(1, n_text + 1, device=end_B1.device)[None, :, None], (0, 2))
        found = [self.rope_embedder(ids.flatten(0, 1)).unflatten(0, ids.shape[:2]) for ids in (image_BS3, text_1T3)]
        return found[0], found[1]

    def _through(self: Any, layer: nn.Module, *given: Tensor | None) -> Tensor:
        if torch.is_grad_enabled() and self.gradient_checkpointing:
            y: Tensor = self._gradient_checkpointing_func(layer, *given)
            return y
        return layer(*given)


def _tokens(x_BCHW: Tensor) -> Tensor:
    """[B, S, 4 C]: squares of pixels row by row, the channels of a pixel side by side."""
    b, channels, height, width = x_BCHW.shape
    x = x_BCHW.view(b, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return x.permute(0, 2, 4, 3, 5, 1).reshape(b, -1, PATCH**2 * channels)

"""Writes previewer_bright.safetensors: a random previewer of the recorded one's size whose images show the latent. The
recorded one draws every latent black. Run once, with src on PYTHONPATH."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from daguerre.families.cascade.previewer import Previewer

torch.manual_seed(0)
network = Previewer(hidden_channels=16)
for module in network.modules():
    if isinstance(module, torch.nn.BatchNorm2d):
        module.momentum = None  # statistics are means over all batches
latent_BCHW = torch.randn(256, 16, 4, 4)
last = network.blocks[-1]
with torch.no_grad():
    network.train()(latent_BCHW)
    made_BCHW = network.eval()(latent_BCHW)
    mean, std = (each((0, 2, 3)) for each in (made_BCHW.mean, made_BCHW.std))
    last.weight *= (0.2 / std)[:, None, None, None]
    last.bias.copy_((last.bias - mean) * 0.2 / std + 0.5)
save_file(network.state_dict(), Path(__file__).parent / "previewer_bright.safetensors")

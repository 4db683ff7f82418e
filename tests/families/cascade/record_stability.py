"""Writes stability.npz and one .safetensors a network: what Stability's own code makes of tiny networks of its own. Run
once, outside of the tests, in a clone of Stability-AI/StableCascade (7a7d341):

    pip install --no-deps torchvision==0.26.0
    python .../tests/families/cascade/record_stability.py CLONE

torchvision's compiled operators are not needed, so a build for any device will do. The clone's `torchtools` and
`modules.controlnet`, which nothing here computes with, are stood in for. `DIGESTS` in test_cascade_networks.py are the
files'.
"""

import hashlib
import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

HERE = Path(__file__).parent
_library = torch.library.Library("torchvision", "DEF")
_library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from torchvision.models import efficientnet as tv  # noqa: E402


class VectorQuantize(nn.Module):
    def __init__(self, width, k):
        super().__init__()
        self.codebook = nn.Embedding(k, width)


def modules(clone):
    package = ModuleType("modules")
    package.__path__ = [str(Path(clone) / "modules")]
    sys.modules["modules"] = package
    for name, content in (
        ("torchtools", {}),
        ("torchtools.nn", {"VectorQuantize": VectorQuantize}),
        ("modules.controlnet", {"ControlNetDeliverer": object}),
    ):
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(content)
    named = ("common", "stage_a", "stage_b", "stage_c", "previewer", "effnet")
    return SimpleNamespace(**{name: importlib.import_module(f"modules.{name}") for name in named})


def lively(network):
    """Weights that are no longer zero anywhere, in evaluation mode."""
    for parameter in network.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    for name, buffer in network.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(std=0.1)
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 2.0)
    return network.eval()


def tiny_efficientnet(m):
    kinds = [(tv.FusedMBConvConfig, 1, 1, 8, 8, 1), (tv.FusedMBConvConfig, 4, 2, 8, 8, 2)]
    kinds += [(tv.FusedMBConvConfig, 4, 2, 8, 16, 1), (tv.MBConvConfig, 4, 2, 16, 16, 2)]
    kinds += [(tv.MBConvConfig, 6, 1, 16, 16, 1), (tv.MBConvConfig, 6, 2, 16, 24, 1)]
    setting = [kind(expand, 3, stride, before, after, count) for kind, expand, stride, before, after, count in kinds]
    backbone = tv.EfficientNet(setting, dropout=0.2, norm_layer=_norm, last_channel=32)
    whole = lambda weights=None: tv.efficientnet_v2_s()  # noqa: E731
    m.effnet.torchvision = SimpleNamespace(models=SimpleNamespace(efficientnet_v2_s=whole))
    with torch.device("meta"):
        published = m.effnet.EfficientNetEncoder().state_dict()
    m.effnet.torchvision.models.efficientnet_v2_s = lambda weights=None: backbone
    made = m.effnet.EfficientNetEncoder()
    made.mapper[0] = nn.Conv2d(32, 16, 1, bias=False)
    return made, "\n".join(f"{name} {tuple(value.shape)}" for name, value in published.items())


def _norm(channels):
    return nn.BatchNorm2d(channels, eps=1e-3)


def main(clone):
    m = modules(clone)
    torch.manual_seed(0)
    widths = {"c_hidden": [16, 16], "nhead": [1, 1], "blocks": [[1, 2], [2, 1]], "c_cond": 16}
    clip = {"c_clip_text": 24, "c_clip_text_pooled": 20, "c_clip_img": 12}
    found = {}
    c, fresh_c = (m.stage_c.StageC(**widths, **clip) for _ in range(2))
    b_numbers = {"c_hidden": [8, 8, 16, 16], "nhead": [-1, -1, 1, 1], "blocks": [[1, 1, 2, 1], [1, 2, 1, 1]]}
    b_numbers |= {"block_repeat": [[1, 1, 1, 1], [3, 3, 2, 2]], "c_cond": 16, "c_clip": 20}
    b = m.stage_b.StageB(**b_numbers)
    wide = {"c_hidden": [64, 64], "nhead": [1, 1], "blocks": [[1, 2], [2, 1]], "c_cond": 64, **clip}
    b_wide = b_numbers | {"c_hidden": [32, 64, 64, 64], "c_cond": 64}
    for stage, network in (("c", m.stage_c.StageC(**wide)), ("b", m.stage_b.StageB(**b_wide))):
        spreads = [f"{name} {value.double().std(correction=0):.5f}" for name, value in network.state_dict().items()]
        found[f"fresh_{stage}"] = np.array("\n".join(spreads))
    a = m.stage_a.StageA(bottleneck_blocks=2, c_hidden=16, codebook_size=8)
    effnet, names = tiny_efficientnet(m)
    networks = {"prior": c, "decoder": b, "vqgan": a, "effnet": effnet, "previewer": m.previewer.Previewer(16, 16)}
    for name, network in networks.items():
        tensors = {key: value.contiguous() for key, value in lively(network).state_dict().items()}
        save_file(tensors, HERE / f"{name}.safetensors")
    r = torch.tensor([0.2, 0.9])
    given = {"x_c": torch.randn(2, 16, 3, 4), "x_b": torch.randn(2, 4, 16, 16), "pooled": torch.randn(2, 1, 20)}
    given |= {"text": torch.randn(2, 5, 24), "image": torch.randn(2, 1, 12), "effnet_in": torch.randn(2, 3, 64, 96)}
    given |= {"latent": torch.randn(2, 16, 2, 3), "pixels": torch.rand(2, 3, 16, 24)}
    with torch.no_grad():
        made = {"prior": c(given["x_c"], r, given["text"], given["pooled"], given["image"])}
        made |= {"decoder": b(given["x_b"], r, given["latent"], given["pooled"])}
        made |= {"fresh": fresh_c(given["x_c"], r, given["text"], given["pooled"], given["image"])}
        encoded = a.encode(given["pixels"])[0]
        made |= {"encoded": encoded, "decoded": a.decode(encoded)}
        made |= {"effnet": effnet(given["effnet_in"]), "previewed": networks["previewer"](given["latent"])}
    assert made["fresh"].abs().max() == 0
    found |= {f"given/{name}": value.numpy() for name, value in given.items()}
    found |= {f"made/{name}": value.numpy() for name, value in made.items()} | {"effnet_names": np.array(names)}
    np.savez_compressed(HERE / "stability.npz", **found)
    for path in sorted([*HERE.glob("*.safetensors"), HERE / "stability.npz"]):
        print(path.name, hashlib.sha256(path.read_bytes()).hexdigest()[:16], path.stat().st_size)


if __name__ == "__main__":
    main(sys.argv[1])

"""Writes controlnet_*.safetensors and controlnet.npz: ControlNets of Stability's own code beside the recorded Stage C,
what it predicts with them and their gradients, and what its filters make of a picture. Run once, outside of the tests,
in a clone of Stability-AI/StableCascade (7a7d341):

    pip install --no-deps torchvision==0.26.0 opencv-python-headless==5.0.0.93 kornia==0.9.0 kornia_rs==0.2.0
    python .../tests/families/cascade/record_controlnet.py CLONE

What modules/controlnet.py imports and does not need here is stood in for, and its numbers of channels (1280, 4096 * 4,
1024 and 24) are small ones. `DIGESTS` in test_cascade_controlnets.py are the files'.
"""

import hashlib
import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "conditions"))

import record_stability  # noqa: E402
import scenes  # noqa: E402
from record_stability import lively, tv  # noqa: E402

BLOCKS = [0, 1, 4, 5]
KINDS = {"grey": (1, "effnet"), "holes": (4, "effnet"), "colour": (3, "effnet"), "simple": (16, "simple")}
KINDS["latent"] = (16, "large")
SIZES = {"4096 * 4": "20", "1024": "12", "1280": "12", "c_in, 24,": "c_in, 4,", "range(8)": "range(2)"}


def tiny_efficientnet(weights=None):
    kinds = [(tv.FusedMBConvConfig, 1, 1, 4, 4, 1), (tv.FusedMBConvConfig, 4, 2, 4, 4, 2)]
    kinds += [(tv.FusedMBConvConfig, 4, 2, 4, 8, 1), (tv.MBConvConfig, 4, 2, 8, 8, 1)]
    kinds += [(tv.MBConvConfig, 6, 1, 8, 8, 1), (tv.MBConvConfig, 6, 2, 8, 8, 1)]
    setting = [kind(expand, 3, stride, before, after, count) for kind, expand, stride, before, after, count in kinds]
    norm = lambda channels: nn.BatchNorm2d(channels, eps=1e-3)  # noqa: E731
    return tv.EfficientNet(setting, dropout=0.2, norm_layer=norm, last_channel=12)


def code(clone):
    """Stability's modules, those of their own with small numbers of channels."""
    folder = Path(clone) / "modules"
    for name, content in (
        ("core", {}),
        ("core.utils", {"load_or_fail": None}),
        ("insightface", {}),
        ("insightface.app", {}),
        ("insightface.app.common", {"Face": None}),
        ("modules", {"__path__": [str(folder)]}),
        ("modules.cnet_modules", {"__path__": [str(folder / "cnet_modules")]}),
        ("modules.cnet_modules.pidinet", {"PidiNetDetector": None}),
        ("modules.cnet_modules.face_id", {}),
        ("modules.cnet_modules.face_id.arcface", {"FaceDetector": None, "ArcFaceRecognizer": None}),
    ):
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(content)
    text = (folder / "controlnet.py").read_text()
    for theirs, small in SIZES.items():
        assert theirs in text, theirs
        text = text.replace(theirs, small)
    control = sys.modules["modules.controlnet"] = ModuleType("modules.controlnet")
    control.__package__ = "modules"
    exec(compile(text, "controlnet.py", "exec"), vars(control))  # noqa: S102
    control.torchvision.models.efficientnet_v2_s = tiny_efficientnet
    return control, importlib.import_module("modules.stage_c"), importlib.import_module("modules.effnet")


def filters(control, effnet_module):
    """What the filters make of a picture [0, 1]; `effnet` is the recorded encoder's."""
    pixels = torch.from_numpy(scenes.scene(96, 128)).permute(2, 0, 1)[None].float() / 255
    found = {"canny": control.CannyFilter("cpu", resize=48)(pixels)[0, 0].numpy()}
    found["canny_224"] = control.CannyFilter("cpu")(pixels)[0, 0].numpy()
    control.np.random.choice = lambda of: of[0]
    blur = control.torchvision.transforms.GaussianBlur
    control.torchvision.transforms.GaussianBlur = lambda kernel: blur(kernel, (0.7, 0.7))
    found["qr"] = control.QRFilter("cpu")(pixels)[0, 0].numpy()
    found["qr_plain"] = control.QRFilter("cpu", resize=None, blobify=False)(pixels)[0, 0].numpy()
    own = control.SREffnetFilter.__new__(control.SREffnetFilter)
    own.device, own.scale_factor = "cpu", 0.5
    normalize = control.torchvision.transforms.Normalize
    own.effnet_preprocess = normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    own.effnet, _ = record_stability.tiny_efficientnet(SimpleNamespace(effnet=effnet_module))
    own.effnet.load_state_dict(load_file(HERE / "effnet.safetensors"))
    own.effnet.eval()
    latent, picture = own(pixels)
    found |= {"latent": latent[0].numpy(), "latent_picture": picture[0].mul(255).round().byte().numpy()}
    inpaint = control.InpaintFilter.__new__(control.InpaintFilter)
    inpaint.device, inpaint.saliency_model = "cpu", None
    inpaint.thresold, inpaint.p_outpaint = [0.04, 0.4], 0.4
    mask = torch.zeros(1, 1, 96, 128, dtype=torch.bool)
    mask[:, :, 20:60, 30:90] = True
    control.torchvision.transforms.functional.resize = lambda x, *_, **__: x
    found["holes"] = inpaint(pixels, mask=mask)[0].numpy()
    return found


def main(clone):
    control, stage_c, effnet_module = code(clone)
    with np.load(HERE / "stability.npz") as file:
        given = (torch.from_numpy(file[f"given/{name}"]) for name in ("x_c", "text", "pooled", "image"))
        x, text, pooled, image = given
    widths = {"c_hidden": [16, 16], "nhead": [1, 1], "blocks": [[1, 2], [2, 1]], "c_cond": 16}
    network = stage_c.StageC(**widths, c_clip_text=24, c_clip_text_pooled=20, c_clip_img=12)
    network.load_state_dict(load_file(HERE / "prior.safetensors"))
    network.eval().requires_grad_(False)
    found = {}
    for number, (name, (channels, mode)) in enumerate(KINDS.items()):
        torch.manual_seed(number)
        own = control.ControlNet(c_in=channels, c_proj=16, proj_blocks=BLOCKS, bottleneck_mode=mode)
        lively(own)
        for projection in own.projections:  # an EfficientNet's features are small
            projection[2].weight.data *= 30 if mode == "effnet" else 1
        tensors = {key: value.contiguous() for key, value in own.state_dict().items()}
        save_file(tensors, HERE / f"controlnet_{name}.safetensors")
        hint = torch.rand(2, channels, *((64, 64) if mode == "effnet" else (3, 4))).half().float()
        own.backbone.eval()
        y = network(x, torch.tensor([0.2, 0.9]), text, pooled, image, cnet=own(hint))
        y.square().sum().backward()
        found |= {f"{name}/hint": hint.numpy(), f"{name}/y": y.detach().numpy()}
        found |= {f"{name}/grad/{key}": p.grad.numpy() for key, p in own.named_parameters() if p.grad.numel() <= 600}
    with torch.no_grad():
        found |= {f"filter/{name}": value for name, value in filters(control, effnet_module).items()}
    np.savez_compressed(HERE / "controlnet.npz", **found)
    for path in sorted([*HERE.glob("controlnet_*.safetensors"), HERE / "controlnet.npz"]):
        print(path.name, hashlib.sha256(path.read_bytes()).hexdigest()[:16], path.stat().st_size)


if __name__ == "__main__":
    main(sys.argv[1])

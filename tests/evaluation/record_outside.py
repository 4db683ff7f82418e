"""Writes outside.npz: what other codes make of the same images and vectors. Run once, outside of the tests:

    pip install --no-deps torch-fidelity==0.4.0 torchmetrics==1.9.0 lightning-utilities==0.15.3 clean-fid==0.1.35 \
        scipy==1.17.1
    python tests/evaluation/record_outside.py

torch-fidelity is imported module by module, as its package needs torchvision; its network gets the weights that
`networks.inception.path=random` means. `DIGEST` in recorded_metrics.py is the file's.
"""

import hashlib
import sys
import tempfile
import types
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import torch
from outside_inputs import images, pair, vectors, vgg_weights
from scipy import linalg

from daguerre.evaluation.networks import inception

FILE = Path(__file__).parent / "outside.npz"


def fidelity():
    """The modules of torch-fidelity that are compared with."""
    package = types.ModuleType("torch_fidelity")
    package.__path__ = list(find_spec("torch_fidelity").submodule_search_locations)
    sys.modules |= {"torch_fidelity": package, "torchvision": MagicMock(), "torch_fidelity.utils": MagicMock()}
    from torch_fidelity import feature_extractor_inceptionv3, interpolate_compat_tensorflow, metric_prc

    del sys.modules["torchvision"]  # torchmetrics asks whether it is there
    return feature_extractor_inceptionv3, interpolate_compat_tensorflow, metric_prc


def clean_resize(pixels):
    from cleanfid.resize import build_resizer

    return build_resizer("clean")(pixels).transpose(2, 0, 1)


def lpips(first, second):
    """torchmetrics' LPIPS with random weights; torchvision's VGG16 is written down here."""
    from torchmetrics.functional.image import lpips as module

    layers = []
    for width, before, count in ((64, 3, 2), (128, 64, 2), (256, 128, 3), (512, 256, 3), (512, 512, 3)):
        for number in range(count):
            layers += [torch.nn.Conv2d(width if number else before, width, 3, padding=1), torch.nn.ReLU()]
        layers.append(torch.nn.MaxPool2d(2))
    features = torch.nn.Sequential(*layers)
    weights = {name: torch.from_numpy(value) for name, value in vgg_weights().items()}
    own = {name.removeprefix("features."): value for name, value in weights.items() if name.startswith("features.")}
    features.load_state_dict(own)
    module._get_tv_model_features = lambda *_: features
    network = module._LPIPS(pretrained=False, net="vgg")
    network.load_state_dict({name: value for name, value in weights.items() if name.startswith("lin")}, strict=False)
    a, b = (torch.from_numpy(one).permute(2, 0, 1)[None].float() / 127.5 - 1 for one in (first, second))
    return float(network(a, b))


def main():
    torch.set_num_threads(1)
    network, interpolation, prc = fidelity()
    with torch.device("meta"):
        ours = inception.Inception()
    weights = inception.random_weights(ours)
    weights |= {"fc.weight": torch.zeros(1008, 2048), "fc.bias": torch.zeros(1008)}
    with tempfile.NamedTemporaryFile(suffix=".pth") as file:
        torch.save(weights, file.name)
        theirs = network.FeatureExtractorInceptionV3("compat", ["2048"], feature_extractor_weights_path=file.name)
    batches = [torch.from_numpy(one).permute(2, 0, 1)[None].contiguous() for one in images()]
    found = {"inception": np.concatenate([theirs(batch)[0].numpy() for batch in batches])}
    names = {name: list(value.shape) for name, value in theirs.state_dict().items()}
    found["names"] = np.array([f"{name} {shape}" for name, shape in names.items()])
    small = images()[0]
    tf = interpolation.interpolate_bilinear_2d_like_tensorflow1x(
        batches[0].float(), size=(299, 299), align_corners=False
    )
    found |= {"tensorflow": tf[0, :, ::13, ::13].numpy(), "pillow_bicubic": clean_resize(small)[:, ::13, ::13]}

    from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure
    from torchmetrics.image.fid import _compute_fid
    from torchmetrics.image.kid import poly_mmd

    first, second = vectors()
    means, covariances = [x.mean(0) for x in (first, second)], [np.cov(x.T) for x in (first, second)]
    asked = [torch.from_numpy(x) for x in (means[0], covariances[0], means[1], covariances[1])]
    found["fid"] = np.array(float(_compute_fid(*asked)))
    root = linalg.sqrtm(covariances[0] @ covariances[1])
    apart = means[0] - means[1]
    found["fid_scipy"] = np.array(apart @ apart + np.trace(covariances[0] + covariances[1]) - 2 * np.trace(root.real))
    found["kid"] = np.array(float(poly_mmd(torch.from_numpy(first[: len(second)]), torch.from_numpy(second))))
    found["precision_recall"] = np.array(
        prc.calculate_precision_recall_full(torch.from_numpy(first), torch.from_numpy(second), neighborhood=3)
    )
    a, b = (torch.from_numpy(one).permute(2, 0, 1)[None].double() for one in pair())
    found["psnr"] = np.array(float(peak_signal_noise_ratio(a, b, data_range=255.0)))
    # Its mean takes in reflected borders; Wang et al. take the places where the window fits.
    _, table = structural_similarity_index_measure(a, b, data_range=255.0, return_full_image=True)
    found["ssim"] = np.array(float(table[..., 5:-5, 5:-5].mean()))
    found["lpips"] = np.array([lpips(*pair()), lpips(images()[0], images()[0][::-1].copy())])
    np.savez_compressed(FILE, **found)
    print(hashlib.sha256(FILE.read_bytes()).hexdigest())


if __name__ == "__main__":
    main()

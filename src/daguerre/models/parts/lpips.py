"""LPIPS of files: version 0.1 with VGG16, published as `vgg.pth` of the package lpips and `vgg16-397923af.pth` of
torchvision in one folder, or one file that holds both. The network is objectives/networks/lpips.py.
"""

from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from daguerre import digests
from daguerre.models.weights import pickled
from daguerre.objectives.networks import lpips

_TRUNK_SHA256 = "397923af"
"""First digits of torchvision's file, which its name has."""
_LIN_SHA256 = "05bddf2a99783f1974778be82de9f9a2832bc90e839809e74ba5cf44339c028a"
"""`digests.of_tensors` of the weights of version 0.1."""


class Weights(NamedTuple):
    """The weights of a place."""

    tensors: dict[str, Tensor]
    """float32, by our names."""
    digest: str
    """SHA-256 of them."""
    published: bool
    """They are known to be the published ones: of the trunk by the digest of torchvision's own file. In a file of
    another form they may be, too."""


def read(place: str) -> Weights | None:
    """The weights of a folder or file; None where there is no file. UserError where it holds something else."""
    path = Path(place).expanduser()
    if (tensors := pickled.of_place(path)) is None:
        return None
    wanted = lpips.weights(tensors, place)
    # The file's own digest, which its name has: torchvision publishes none of the tensors.
    trunk = any(digests.sha256([each]).startswith(_TRUNK_SHA256) for each in pickled.files_of(path))
    lin = digests.of_tensors({name: tensor for name, tensor in wanted.items() if name.startswith("lin.")})
    return Weights(wanted, digests.of_tensors(wanted), trunk and lin == _LIN_SHA256)

"""What each optimizer says that it keeps of a parameter, against what it really allocates."""

import pytest
import torch
from torch import nn

from daguerre import plugins
from daguerre.training.optimizers import adamw_8bit
from daguerre.training.optimizers.optimizer import build

NAMES = plugins.names("optimizers")
SHAPES = {"unet.kernel": (16, 8, 3, 3), "unet.matrix": (40, 24), "unet.bias": (40,), "text.embedding": (100, 16)}
CHANGES = [
    {},
    {"adafactor": {"beta1": 0.9}, "muon": {"adamw_for": ["text.*"]}, "prodigy": {"beta1": 0.0}},
]


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_keeps_as_many_bytes_as_it_says(name, changes):
    if name == "adamw_8bit":
        pytest.importorskip(
            "bitsandbytes", reason="the state of adamw_8bit is compared where bitsandbytes is installed"
        )
    module = plugins.find("optimizers", name)
    settings = module.Settings(**changes.get(name, {}))
    torch.manual_seed(0)
    trained = {key: nn.Parameter(torch.randn(shape)) for key, shape in SHAPES.items()}
    parts = [adamw_8bit.part(settings, trained)] if name == "adamw_8bit" else build(settings, trained).parts
    for p in trained.values():
        p.grad = torch.randn_like(p)
    for part in parts:
        part.step(torch.zeros((), dtype=torch.bool))
    entries = {p: part.optimizer.state[p] for part in parts for p in part.parameters}
    for key, p in trained.items():
        kept = [value for slot, value in entries[p].items() if torch.is_tensor(value) and not slot.startswith("qmap")]
        found = sum(value.untyped_storage().nbytes() for value in kept)
        assert module.state_bytes(settings, key, SHAPES[key]) == found, key


def test_moments_of_eight_bits_are_about_two_bytes_a_number():
    settings = adamw_8bit.Settings()
    assert adamw_8bit.state_bytes(settings, "unet.bias", (320,)) == 8 * 320
    assert adamw_8bit.state_bytes(settings, "unet.matrix", (1280, 1280)) == 1280 * 1280 * 2 + 2 * 4 * 6400

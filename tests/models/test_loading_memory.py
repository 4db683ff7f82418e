"""Loading a network takes the memory of the network and hardly more: each weight is read straight to its place.

Real numbers of real processes, as the kernel counts them (Linux).
"""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import save_file
from torch import nn
from transformers import T5Config, T5EncoderModel

from daguerre import system
from daguerre.models.weights import load, original_files, unfilled

LARGE = {"num_layers": 2, "num_single_layers": 4, "attention_head_dim": 128, "num_attention_heads": 16}
SMALL = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
FLUX = {"joint_attention_dim": 1024, "pooled_projection_dim": 64}
T5 = {"feed_forward_proj": "gated-gelu", "is_encoder_decoder": False, "num_heads": 16}
LARGE_T5 = {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "vocab_size": 32128}
SMALL_T5 = {"d_model": 64, "d_ff": 128, "num_layers": 2, "vocab_size": 300, "d_kv": 4}


def write(folder: Path, kind: str, large: bool, shards: int = 3) -> dict[str, torch.Tensor]:
    """A network in bfloat16, in shards or in one file (0); its weights."""
    with torch.device("meta"):
        if kind == "t5":
            made = T5EncoderModel(T5Config(**T5, **(LARGE_T5 if large else SMALL_T5)))
            config, stem = made.config.to_dict(), "model"
        else:
            made = FluxTransformer2DModel(**FLUX, **(LARGE if large else SMALL))
            config, stem = dict(made.config), "diffusion_pytorch_model"
    names = [name for name in made.state_dict() if name != "encoder.embed_tokens.weight"]
    shapes = {name: tuple(made.state_dict()[name].shape) for name in names}
    # Numbers that differ from one tensor to the next; drawn ones would take their time.
    state = {name: torch.full(shape, 2.0**-6 * (1 + i % 64), dtype=torch.bfloat16) for i, (name, shape) in
             enumerate(shapes.items())}  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if not shards:
        save_file(state, folder / f"{stem}.safetensors", metadata={"format": "pt"})
        return state
    index = {}
    for number in range(shards):
        part = {name: state[name] for name in names[number::shards]}
        file = f"{stem}-{number + 1:05d}-of-{shards:05d}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    document = json.dumps({"metadata": {}, "weight_map": index})
    (folder / f"{stem}.safetensors.index.json").write_text(document, encoding="utf-8")
    return state


def read(folder: Path, kind: str) -> nn.Module:
    """The network by the code that a recipe's loading calls: of a folder, or of one file with the numbers of another
    place (`single`)."""
    if kind == "t5":
        return load.load(T5EncoderModel, folder)
    if kind == "shards":
        return load.load(FluxTransformer2DModel, folder)
    numbers = load.config(FluxTransformer2DModel, folder)
    net = load.unfilled(FluxTransformer2DModel, numbers, "model.transformer")
    path = folder / "diffusion_pytorch_model.safetensors"
    shapes = {name: tuple(value.shape) for name, value in load.numbers_of(net).items()}
    load.fill(net, original_files.read(path, None, shapes), path)
    return net


@pytest.mark.parametrize("kind", ["shards", "t5", "single"])
def test_every_weight_is_read_and_none_stays_without_memory(tmp_path, kind):
    state = write(tmp_path / "net", kind, large=False, shards=0 if kind == "single" else 3)
    torch.manual_seed(3)
    net = read(tmp_path / "net", kind)
    assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(3))  # nothing was drawn
    found = net.state_dict()
    for name, value in state.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], value.float()), name
    assert all(p.requires_grad for p in net.parameters())
    if kind == "t5":  # weights that are tied stay one
        assert net.encoder.embed_tokens.weight is net.shared.weight
    assert kind == "single" or not net.training


_MEASURES = """
import sys
sys.path[:0] = [{folder!r}]
import torch
from daguerre import deferred
from test_loading_memory import Path, read

def status():
    lines = (line.split() for line in open("/proc/self/status"))
    return {{words[0]: int(words[1]) * 1024 for words in lines if words[0] in ("VmHWM:", "VmRSS:")}}

open("/proc/self/clear_refs", "w").write("5")  # from here on the peak counts
later = sys.argv[3] == "True"
with deferred.deferring(later):
    net = read(Path(sys.argv[1]), sys.argv[2])
if later:
    for p in net.parameters():
        deferred.store(p, torch.bfloat16)
    deferred.read(net)
found = status()
print(found["VmHWM:"], found["VmRSS:"], sum(p.nbytes for p in net.parameters()))
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel counts the peak")
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("kind", ["shards", "t5", "single"])
def test_the_peak_is_what_is_held_afterwards(tmp_path, kind, later):
    """In float32, and of a frozen network that is used in 16 bits, without any float32 beside it."""
    write(tmp_path / "net", kind, large=True, shards=0 if kind == "single" else 3)
    script = _MEASURES.format(folder=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "net"), kind, str(later)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    peak, afterwards, size = map(int, done.stdout.split())
    assert size > 0.8e9
    assert afterwards > size
    assert peak - afterwards <= 0.1 * size, (peak, afterwards, size)


def _resident() -> int:
    words = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return (int(words[1]) - int(words[2])) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is glibc")
def test_wide_weights_leave_no_holes_between_the_narrow_ones_that_are_made_of_them():
    before, kept = _resident(), list[torch.Tensor]()
    with system.large_pieces_apart():
        for size in range(2 << 20, 7 << 20, 1 << 20):
            for _ in range(2):
                kept.append(torch.ones(size).to(torch.int8))
    assert _resident() - before <= 1.1 * sum(each.nbytes for each in kept)


def test_what_has_memory_is_filled_beside_networks_without():
    with unfilled.outlining():
        layer, real = nn.Linear(2, 3), torch.zeros(3, device="cpu")
        assert nn.init.uniform_(layer.weight) is layer.weight
        nn.init.uniform_(real, 1, 2)
        real.normal_(10, 1)
    assert layer.weight.is_meta
    assert (real > 4).all()

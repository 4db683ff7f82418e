"""Blocks compiled each for itself: refusals, and (`make test-long`) the numbers and the names."""

import copy

import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.models.resnet import ResnetBlock2D
from known_networks import BLOCKS
from tiny_models import TEXT_WIDTH, TINY_UNET
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.testing import CompileCounter

from daguerre.errors import UserError
from daguerre.kernels import available, blocks, channels_last
from daguerre.training.performance import flops

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
"""torch.compile imports what torch deprecates, and looks at the gradients of tensors that have none."""


def test_a_network_without_blocks_is_refused():
    with pytest.raises(UserError, match="no block of the networks"):
        blocks.compile_blocks(nn.Linear(2, 2), BLOCKS, CPU)


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr(blocks.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler"):
        blocks.compile_blocks(UNet2DConditionModel(**TINY_UNET, cross_attention_dim=TEXT_WIDTH), BLOCKS, CPU)


def test_compiled_code_is_kept_unless_a_place_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for given in (None, blocks.default_cache_dir(), "/elsewhere"):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        if given:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", given)
        blocks._keep_what_is_compiled(None)
        own = str(tmp_path / "daguerre" / "compiled")
        assert blocks.os.environ["TORCHINDUCTOR_CACHE_DIR"] == (given if given == "/elsewhere" else own)
        blocks._keep_what_is_compiled(str(tmp_path / "named"))
        assert blocks.os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "named")


@pytest.fixture
def compiler(monkeypatch):
    """Counts what is compiled, and compiles nothing."""
    torch.compiler.reset()
    counter, real = CompileCounter(), torch.compile
    monkeypatch.setattr(blocks, "_keep_what_is_compiled", lambda place: None)
    monkeypatch.setattr(
        blocks.torch, "compile", lambda function, dynamic, options: real(function, backend=counter, dynamic=dynamic)
    )
    return counter


@pytest.mark.long  # of the quick tests, a copy computes with its own weights
def test_blocks_that_are_alike_share_code_and_what_is_not_trained_is_not_compiled(compiler):
    net = UNet2DConditionModel(**TINY_UNET, cross_attention_dim=TEXT_WIDTH).train()
    there = blocks.compile_blocks(net, BLOCKS, CPU)
    given = torch.randn(2, 4, 8, 8), torch.tensor([3.0, 7.0]), torch.randn(2, 5, TEXT_WIDTH)
    with torch.no_grad():
        plain = net(*given).sample
    flops.count(lambda: net(*given).sample.sum().backward())
    assert compiler.frame_count == 0
    trained = net(*given).sample
    first = compiler.frame_count
    assert 0 < first < there
    net(*given)
    assert compiler.frame_count == first, "nothing is compiled twice"
    torch.testing.assert_close(trained, plain)


@pytest.mark.long
def test_every_size_of_images_is_compiled(compiler):
    """torch gives up after eight of one code, in silence, unless it is told otherwise."""
    channels = [32, 64]
    net = nn.Sequential(*[ResnetBlock2D(in_channels=c, temb_channels=None) for c in channels])
    blocks.compile_blocks(net, BLOCKS, CPU)
    for size in range(4, 16):
        for c, block in zip(channels, net, strict=True):
            block(torch.randn(1, c, size, size, requires_grad=True), None)
    assert compiler.frame_count == len(channels) * 12


def test_more_sizes_than_can_be_are_an_error(compiler, monkeypatch):
    monkeypatch.setattr(blocks, "SHAPES", 3)
    block = ResnetBlock2D(in_channels=32, temb_channels=None)

    def run(size):
        return block(torch.randn(1, 32, size, size, requires_grad=True), None)

    with torch._dynamo.config.patch(recompile_limit=3):
        blocks.compile_blocks(nn.Sequential(block), BLOCKS, CPU)
        for size in (4, 5, 6):
            run(size)
        with pytest.raises(FailOnRecompileLimitHit):
            run(7)


def test_a_gpu_without_triton_is_refused(monkeypatch):
    monkeypatch.setattr(available, "installed", lambda: False)
    with pytest.raises(UserError, match="needs Triton on a GPU"):
        blocks.compile_blocks(
            UNet2DConditionModel(**TINY_UNET, cross_attention_dim=TEXT_WIDTH), BLOCKS, torch.device("cuda")
        )


@pytest.mark.long
def test_a_copy_computes_with_its_own_weights(monkeypatch):
    monkeypatch.setattr(blocks, "_keep_what_is_compiled", lambda place: None)
    net = UNet2DConditionModel(**TINY_UNET, cross_attention_dim=TEXT_WIDTH).eval()
    blocks.compile_blocks(net, BLOCKS, CPU)
    given = torch.randn(2, 4, 8, 8), torch.tensor([3.0, 7.0]), torch.randn(2, 5, TEXT_WIDTH)
    with torch.no_grad():
        before = net(*given).sample
        twin = copy.deepcopy(net)
        for p in twin.down_blocks.parameters():
            p.zero_()
        assert torch.equal(net(*given).sample, before)
        assert not torch.equal(twin(*given).sample, before)


@pytest.mark.long
@pytest.mark.parametrize("recomputed", [False, True])
def test_compiled_blocks_compute_the_same(tmp_path, monkeypatch, recomputed):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    torch.compiler.reset()
    torch.manual_seed(0)
    net = UNet2DConditionModel(**TINY_UNET, cross_attention_dim=TEXT_WIDTH).train()
    channels_last.enable(net)
    compiled = copy.deepcopy(net)
    if recomputed:
        compiled.enable_gradient_checkpointing()
    assert blocks.compile_blocks(compiled, BLOCKS, CPU) > 0
    assert compiled.state_dict().keys() == net.state_dict().keys()
    x, text = torch.randn(2, 4, 8, 8), torch.randn(2, 5, TEXT_WIDTH)
    for one in (net, compiled):
        one(x, torch.tensor([3.0, 7.0]), text).sample.square().mean().backward()
    for ours, theirs in zip(compiled.parameters(), net.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)
    assert any((tmp_path / "daguerre" / "compiled").rglob("*")), "compiled code is kept for the next run"

"""Blocks compiled each for itself: refusals, and (`make test-long`) the numbers and the names."""

import copy
from functools import partial

import pytest
import torch
from diffusers import UNet2DConditionModel
from tiny_models import TEXT_WIDTH, TINY_UNET
from torch import nn
from torch._dynamo.testing import CompileCounter

from daguerre.errors import UserError
from daguerre.kernels import blocks, channels_last
from daguerre.training import flops

CPU = torch.device("cpu")


def test_a_network_without_blocks_is_refused():
    with pytest.raises(UserError, match="no block of the networks"):
        blocks.compile_blocks(nn.Linear(2, 2), CPU)


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr(blocks.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler"):
        blocks.compile_blocks(UNet2DConditionModel(**TINY_UNET, cross_attention_dim=TEXT_WIDTH), CPU)


def test_compiled_code_is_kept_unless_a_place_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for given in (None, blocks.default_cache_dir(), "/elsewhere"):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        if given:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", given)
        blocks._keep_what_is_compiled()
        own = str(tmp_path / "daguerre" / "compiled")
        assert blocks.os.environ["TORCHINDUCTOR_CACHE_DIR"] == (given if given == "/elsewhere" else own)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_blocks_of_a_kind_share_code_and_what_is_not_trained_is_not_compiled(monkeypatch):
    torch.compiler.reset()
    monkeypatch.setattr(blocks, "_keep_what_is_compiled", lambda: None)
    compiler = CompileCounter()
    monkeypatch.setattr(blocks.torch, "compile", partial(torch.compile, backend=compiler))
    net = UNet2DConditionModel(**TINY_UNET, cross_attention_dim=TEXT_WIDTH).train()
    there = blocks.compile_blocks(net, torch.device("cuda"))
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_copy_computes_with_its_own_weights(monkeypatch):
    monkeypatch.setattr(blocks, "_keep_what_is_compiled", lambda: None)
    net = UNet2DConditionModel(**TINY_UNET, cross_attention_dim=TEXT_WIDTH).eval()
    blocks.compile_blocks(net, CPU)
    given = torch.randn(2, 4, 8, 8), torch.tensor([3.0, 7.0]), torch.randn(2, 5, TEXT_WIDTH)
    with torch.no_grad():
        before = net(*given).sample
        twin = copy.deepcopy(net)
        for p in twin.down_blocks.parameters():
            p.zero_()
        assert torch.equal(net(*given).sample, before)
        assert not torch.equal(twin(*given).sample, before)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
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
    assert blocks.compile_blocks(compiled, CPU) > 0
    assert compiled.state_dict().keys() == net.state_dict().keys()
    x, text = torch.randn(2, 4, 8, 8), torch.randn(2, 5, TEXT_WIDTH)
    for one in (net, compiled):
        one(x, torch.tensor([3.0, 7.0]), text).sample.square().mean().backward()
    for ours, theirs in zip(compiled.parameters(), net.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)
    assert any((tmp_path / "daguerre" / "compiled").rglob("*")), "compiled code is kept for the next run"

"""T-LoRA: its authors' ranks at every time, of each sample by itself, and what has no such ranks is refused."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from test_lora import config, prediction
from test_lora_kinds import plain, trained

from daguerre.adapters.lora_parts.forward import cast_together
from daguerre.adapters.lora_parts.noise_ranks import NoiseRanks
from daguerre.assembly.parts import Components, build
from daguerre.errors import UserError
from daguerre.models.lora_files import read
from daguerre.models.lora_files.addition import DIFFUSERS_FILE, KOHYA_FILE
from daguerre.objectives import edm, eps, flow
from daguerre.types import Prompt

GIVEN = ("adapter.name=lora", "adapter.rank=8", "adapter.alpha=5", "adapter.targets=attention+conv")
TLORA = (*GIVEN, "adapter.tlora_min_rank=2", "adapter.tlora_alpha=0.5")
TIMES = (10.0, 500.0)
"""Those at which `prediction` asks."""


@pytest.fixture(scope="module")
def own(base: Path) -> Components:
    """Tests leave it as it is."""
    return trained(plain(base, *TLORA))


@pytest.fixture(scope="module")
def file(own: Components, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Its files, and what was said about them."""
    folder = tmp_path_factory.mktemp("file") / "lora"
    return folder, own.attached.export(folder, own.objective, None)


def following(objective, min_rank=1, alpha=1.0) -> NoiseRanks:
    found = NoiseRanks(min_rank, alpha)
    found.follow(objective)
    return found


@pytest.mark.parametrize("alpha", [1.0, 0.5, 2.0])
def test_the_ranks_of_every_timestep_are_the_authors(alpha):
    """T-LoRA's trainer_sdxl.py, get_mask_by_timestep: int(((T - t) / T) ** alpha * (R - R_min)) + R_min of a timestep
    that is a tensor of whole numbers."""
    for rank, least in [(4, 1), (11, 1), (16, 2), (65, 1), (64, 8)]:
        kept = following(eps.build(eps.Settings()), least, alpha).acting(torch.arange(1000.0), rank)
        whole = [((1000 - t) / 1000) ** alpha * (rank - least) for t in torch.arange(1000)]
        assert kept.sum(1)[0] == rank
        assert not (kept[:, 1:] & ~kept[:, :-1]).any(), "the first ones act"
        # A root is rounded otherwise for one number than for many.
        edges = [alpha == 0.5 and abs(each - each.round()) < 1e-5 for each in whole]
        assert sum(edges) < 50
        for count, each, edge in zip(kept.sum(1).tolist(), whole, edges, strict=True):
            assert edge or count == int(each) + least


def test_of_a_flow_pure_noise_is_1():
    sigma = torch.tensor([0.0, 0.25, 0.5, 0.99, 1.0])
    auto = following(flow.build(flow.Settings()).with_noise_conditioning("auto", 1.0))
    assert auto.acting(sigma, 5).sum(1).tolist() == [5, 4, 3, 1, 1]
    scaled = following(flow.build(flow.Settings()).with_noise_conditioning("auto", 1000.0))
    assert torch.equal(scaled.acting(1000 * sigma, 5), auto.acting(sigma, 5))


def test_a_network_that_is_given_ln_of_sigma_has_no_pure_noise():
    made = edm.build(edm.Settings())
    with pytest.raises(UserError, match=r"ln\(sigma\), which ends nowhere: set model.noise_conditioning"):
        following(made)
    assert following(made.with_noise_conditioning("timestep", 1000.0)).acting(torch.tensor([999.0]), 8).sum() == 1


def check_each_sample(found: torch.Tensor, full: Components) -> None:
    """Fails where a sample is not what a plain LoRA makes of it whose other ranks are taken out by hand."""
    with torch.no_grad():
        assert (found - prediction(full)).abs().amax((1, 2, 3)).min() > 1e-2
        counts = [math.floor((1 - time / 1000) ** 0.5 * (8 - 2)) + 2 for time in TIMES]
        assert 8 > counts[0] > counts[1]
        for sample, count in enumerate(counts):  # fewer from one to the next
            for name, p in full.net.named_parameters():
                if "unet" in name and "lora_B" in name:
                    p[:, count:] = 0
            torch.testing.assert_close(found[sample], prediction(full)[sample], rtol=1e-5, atol=1e-5)


def test_each_sample_has_the_ranks_of_its_time_at_every_strength(own, base):
    full, found = trained(plain(base, *GIVEN)), prediction(own)
    check_each_sample(found, full)
    with own.attached.at(0.5), full.attached.at(0.5):
        half = prediction(own)
        torch.testing.assert_close(half[1], prediction(full)[1], rtol=1e-5, atol=1e-5)
    assert (half - found).abs().max() > 1e-2


@pytest.mark.long
def test_other_starts_and_the_root_have_them_too(base):
    more = ("adapter.kind=rslora", "adapter.targets=attention", "adapter.init=pissa")
    check_each_sample(prediction(trained(plain(base, *TLORA, *more))), trained(plain(base, *GIVEN, *more)))


def gradients(parts: Components, times: list[list[float]]) -> dict[str, torch.Tensor]:
    """Of a loss with a pass for each row of times."""
    cond, _ = parts.family.encode_prompts([Prompt("a red dog"), Prompt("")], (3, 16, 16))
    x = torch.randn(2, *parts.family.latent_shape((3, 16, 16)), generator=torch.Generator().manual_seed(2))
    parts.net.train().zero_grad()
    sum(parts.net(x, torch.tensor(each), cond).square().mean() for each in times).backward()
    parts.net.eval()
    return {name: p.grad for name, p in parts.net.named_parameters() if p.grad is not None}


def test_blocks_that_are_computed_again_have_the_ranks_of_their_pass(own, base):
    """Also those of the first of two passes before a backward pass."""
    times = [[900.0, 20.0], [100.0, 999.0]]
    kept = gradients(own, times)
    again = gradients(trained(plain(base, *TLORA, "training.gradient_checkpointing=true")), times)
    assert kept.keys() == again.keys()
    assert all(torch.equal(again[name], wanted) for name, wanted in kept.items())


def test_ranks_that_do_not_act_learn_nothing(own):
    of_b = [grad for name, grad in gradients(own, [[999.0, 999.0]]).items() if "lora_B" in name]
    assert of_b
    for grad in of_b:
        assert grad[:, :2].abs().max() > 0
        assert not grad[:, 2:].any()


def test_factors_that_are_cast_together_have_the_same_ranks(own, base):
    """As on a GPU."""
    together = trained(plain(base, *TLORA))
    assert cast_together(together.family.networks.values())
    exact = prediction(own)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = prediction(own), prediction(together)
    assert 0 < (found - exact).norm() < 2 * (expected - exact).norm() < 0.05 * exact.norm()


def test_text_encoders_know_no_noise(base):
    ranks = "adapter.ranks={{unet: {}, text_encoder: 4}}"
    parts = plain(base, *TLORA, ranks.format(8))
    layers = {name: getattr(each, "noise_ranks", None) for name, each in parts.net.named_modules() if "q_proj" in name}
    assert layers
    assert not any(layers.values())
    with pytest.raises(UserError, match="nothing is added to the denoiser"):
        plain(base, *TLORA, ranks.format("null"))


def test_files_say_what_they_are_and_are_added_to_no_weights(own, file):
    folder, (line,) = file
    assert "let all ranks act at all noise levels" in line
    assert "It is a T-LoRA" in (folder / "README.md").read_text()
    for name in (DIFFUSERS_FILE, KOHYA_FILE):
        with safe_open(folder / name, "pt") as opened:
            assert json.loads(opened.metadata()["daguerre.tlora"]) == {"min_rank": 2, "alpha": 0.5}
        with pytest.raises(UserError, match="is a T-LoRA, which adds something else at each noise level"):
            read.read(folder / name, own.family.components)
    with pytest.raises(UserError, match="no weight holds it"), own.attached.merged():
        pass


def test_a_run_starts_from_a_file_with_the_same_ranks_alone(own, file, base, tmp_path):
    again = plain(base, *TLORA)
    (said,) = again.attached.start_from(file[0])
    assert "start from the LoRA in" in said
    torch.testing.assert_close(prediction(again), prediction(own), rtol=1e-5, atol=1e-5)
    plain_one = plain(base, *GIVEN)
    with pytest.raises(UserError, match=r"set adapter.tlora_min_rank=2, adapter.tlora_alpha=0.5"):
        plain_one.attached.start_from(file[0])
    plain_one.attached.export(tmp_path / "lora", plain_one.objective, None)
    assert "all ranks of which act" in again.attached.start_from(tmp_path / "lora")[1]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([*TLORA, "adapter.kind=dora"], "DoRA divides by rows of one length"),
        ([*TLORA, "adapter.kind=lokr"], "no sum over ranks"),
        ([*TLORA, "adapter.tlora_min_rank=8"], "all ranks are 8, so that all act always"),
        ([*TLORA, "adapter.rank_pattern={to_q: 1}"], "to_q has 1: set it to that or less"),
        ([*TLORA, "objective.name=edm"], "ln\\(sigma\\), which ends nowhere"),
        ([*GIVEN, "adapter.tlora_alpha=2"], "tlora_min_rank asks for T-LoRA"),
    ],
)
def test_what_cannot_be_is_refused(given, said, base):
    with torch.device("meta"), pytest.raises(UserError, match=said):
        build(config("sd", base, *given, lora=False), torch.device("cpu"))

"""Terms of the objective `autoencoder`: each counts, the discriminator learns in the same update, and the balance is a
function of global batches."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from losses import loss_of
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional

from daguerre.data.sources import shapes
from daguerre.errors import UserError
from daguerre.objectives import adversarial
from daguerre.objectives import autoencoder as objective
from daguerre.objectives.adversarial import AdversarialSettings, Balance
from daguerre.objectives.autoencoder import Autoencoder, Reconstructed
from daguerre.objectives.networks.discriminator import PatchDiscriminator
from daguerre.types import LossTerms

SMALL = {"channels": 8, "layers": 2}


class Tiny(Autoencoder):
    """Two convolutions with a codebook's terms."""

    latent_terms = frozenset({"codebook"})

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.out = nn.Conv2d(3, 6, 3, 2, 1), nn.ConvTranspose2d(6, 3, 4, 2, 1)
        self.book = nn.Parameter(torch.ones(6))

    @property
    def last_layer(self) -> Any:
        return self.out.weight

    def forward(self, x_BCHW: Tensor, c_noise_B: Tensor, cond: Any) -> Reconstructed:
        z = self.first(x_BCHW)
        term = (self.book[:, None, None] - z.detach()).square().flatten(1).mean(1)
        return Reconstructed(self.out(z), {"codebook": term})


class Distance(nn.Module):
    """In place of LPIPS: the squared difference of gradients of images."""

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return (first - second).diff(dim=2).square().mean((1, 2, 3))


def pictures(start: int, count: int) -> Tensor:
    """Images [count, 3, 64, 64] in [-1, 1] of the source `shapes`."""
    source = shapes.open_source(shapes.Settings(), "train")
    made = [source.record(start + i).image for i in range(count)]
    return torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2).float() / 127.5 - 1


Others = dict[str, nn.Module]
"""The further networks of a loss by role."""


def built(**settings: Any) -> tuple[objective.Reconstruction, Tiny, Others]:
    """The objective, a net, and the further networks of the loss; a discriminator is in the net, too."""
    own = objective.Settings.model_validate(settings)
    made, net = objective.build(own), Tiny()
    networks: Others = {}
    if own.adversarial is not None:
        torch.manual_seed(1)
        networks["discriminator"] = PatchDiscriminator(own.adversarial.channels, own.adversarial.layers)
        net.add_module("discriminator", networks["discriminator"])
    if own.perceptual is not None:
        networks["lpips"] = Distance()
    return made, net, networks


def gradients(net: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    net.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


class TestDiscriminator:
    def test_it_tells_images_from_blurred_ones(self) -> None:
        """Trained for 120 updates by the term's own loss; asked of 64 images that it has not seen."""
        torch.manual_seed(0)
        net = PatchDiscriminator(channels=8, layers=2)
        optimizer = torch.optim.AdamW(net.parameters(), 2e-3, betas=(0.5, 0.9))

        def blurred(images: Tensor) -> Tensor:
            small = functional.interpolate(images, scale_factor=0.5, mode="area")
            return functional.interpolate(small, scale_factor=2, mode="bilinear")

        seen = pictures(0, 160)[:, :, 16:48, 16:48]
        for step in range(120):
            images = seen[torch.arange(16 * step, 16 * step + 16) % len(seen)]
            loss = adversarial.discriminator_loss(net, images, blurred(images))[0].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        held_out = pictures(1000, 64)[:, :, 16:48, 16:48]
        with torch.no_grad():
            real, fake = (adversarial.judged(net, each, False) for each in (held_out, blurred(held_out)))
        right = torch.cat([real > 0, fake < 0]).float().mean()
        assert right >= 0.9

    def test_what_it_says_of_an_image_depends_on_that_image_alone(self) -> None:
        net, images = PatchDiscriminator(**SMALL), pictures(0, 3)
        torch.testing.assert_close(net(images)[1:2], net(images[1:2]), rtol=1e-4, atol=1e-5)
        assert net(images).shape == (3, 1, 16, 16)

    def test_without_learning_only_the_images_get_gradients(self) -> None:
        net, images = PatchDiscriminator(**SMALL), pictures(0, 1).requires_grad_()
        assert torch.equal(net(images, False), net(images, True))
        adversarial.judged(net, images, learns=False).sum().backward()
        assert all(p.grad is None for p in net.parameters())
        assert images.grad is not None
        assert images.grad.abs().max() > 0


class TestOneBackwardPass:
    def test_each_side_gets_its_own_gradient(self) -> None:
        """The autoencoder's is that of its terms and of weight x balance x the judgement, the discriminator's that of
        its hinge loss alone: as two networks with two losses would have them."""
        made, net, others = built(adversarial={"weight": 0.7, **SMALL}, codebook_weight=2.0)
        judge = others["discriminator"]
        made.learnt.weight = torch.tensor(3.0)
        x = pictures(0, 4)
        found = gradients(net, loss_of(made, net, x, {}, {}, **others).loss_B.mean())
        again, terms = net(x, x, {})
        its = 0.5 * (functional.relu(1 - judge(x)) + functional.relu(1 + judge(again.detach()))).mean((1, 2, 3))
        of_judge = gradients(net, its.mean())
        error = (again - x).abs().mean((1, 2, 3)) + (again - x).square().mean((1, 2, 3)) + 2.0 * terms["codebook"]
        of_net = gradients(net, (error - 0.7 * 3.0 * judge(again).mean((1, 2, 3))).mean())
        for name, gradient in found.items():
            own = of_judge if name.startswith("discriminator.") else of_net
            torch.testing.assert_close(gradient, own[name], rtol=1e-4, atol=1e-7)

    def test_before_its_start_nothing_comes_of_it(self) -> None:
        made, net, others = built(adversarial={"start_steps": 2, **SMALL})
        plain, bare, _ = built()
        x = pictures(0, 2)
        found = gradients(net, loss_of(made, net, x, {}, {}, **others).loss_B.mean())
        alone = gradients(bare, loss_of(plain, bare, x, {}, {}).loss_B.mean())
        for name, gradient in found.items():
            assert torch.equal(gradient, alone[name] if name in alone else torch.zeros_like(gradient)), name
        for _ in range(2):
            made.learnt.absorb(lambda value: value, torch.tensor(False))
        after = gradients(net, loss_of(made, net, x, {}, {}, **others).loss_B.mean())
        assert after["discriminator.head.weight"].abs().max() > 0


class TestBalance:
    def observed(self, made: Any, net: Any, others: Others, *parts: Tensor) -> Tensor:
        learnt = Balance(made.settings.adversarial)
        for x in parts:
            learnt.observe(loss_of(made, net, x, {}, {}, **others), torch.ones(len(x)))
        learnt.absorb(lambda value: value, torch.tensor(False))
        return learnt.weight

    def test_it_is_the_quotient_of_gradients_at_the_last_layer_however_a_batch_is_cut(self) -> None:
        made, net, others = built(adversarial=SMALL)
        x = pictures(0, 4)
        again, judge = net(x, x, {})[0], others["discriminator"]
        of_errors, of_judgement = (
            torch.autograd.grad(loss, net.out.weight, retain_graph=True)[0].norm()
            for loss in ((again - x).abs().mean() + (again - x).square().mean(), -judge(again).mean())
        )
        expected = of_errors / (of_judgement + 1e-4)
        assert expected > 0
        torch.testing.assert_close(self.observed(made, net, others, x), expected, rtol=1e-4, atol=0)
        torch.testing.assert_close(self.observed(made, net, others, x[:1], x[1:]), expected, rtol=1e-4, atol=0)

    def test_a_skipped_update_and_numbers_that_are_not_finite_leave_it(self) -> None:
        learnt = Balance(AdversarialSettings.model_validate(SMALL))
        learnt.weight = torch.tensor(2.0)
        for value, skip in ((1.0, True), (float("nan"), False)):
            terms = LossTerms(torch.ones(1), torch.zeros(1), observed={"gradients": torch.full((2, 3), value)})
            learnt.observe(terms, torch.ones(1))
            learnt.absorb(lambda total: total, torch.tensor(skip))
            assert learnt.weight == 2.0
        assert learnt.updates == 2

    def test_its_state_comes_back(self) -> None:
        learnt, fresh = (Balance(AdversarialSettings.model_validate(SMALL)) for _ in range(2))
        learnt.weight, learnt.updates = torch.tensor(0.37), 12
        fresh.load_state(copy.deepcopy(learnt.state()))
        assert (fresh.weight, fresh.updates) == (learnt.weight, 12)
        with pytest.raises(UserError, match=r"objective\.adversarial: the checkpoint holds no state"):
            fresh.load_state({})

    def test_a_fixed_weight_measures_nothing(self) -> None:
        made, net, others = built(adversarial={"adaptive": False, "weight": 0.25, **SMALL})
        terms = loss_of(made, net, pictures(0, 2), {}, {}, **others)
        assert not terms.observed
        assert terms.metrics["adversarial_weight"].tolist() == [0.25, 0.25]


EVERY: dict[str, Any] = {
    "absolute_weight": 2.0,
    "square_weight": 4.0,
    "codebook_weight": 1.0,
    "perceptual": {"path": "here", "weight": 4.0},
    "adversarial": {"weight": 1.0, "adaptive": False, **SMALL},
}
"""All terms, each of a weight that shows."""


def trained(without: dict[str, Any]) -> tuple[objective.Reconstruction, Tiny, Others]:
    """A net after 40 updates by all terms but for what is changed."""
    given = {name: value for name, value in {**EVERY, **without}.items() if value is not None}
    made, net, others = built(**given)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    seen = pictures(0, 64)[:, :, ::2, ::2]
    for step in range(40):
        images = seen[torch.arange(8 * step, 8 * step + 8) % 64]
        loss = loss_of(made, net, images, {}, {}, **others).loss_B.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return made, net, others


@pytest.fixture(scope="module")
def whole() -> tuple[objective.Reconstruction, Tiny, Others]:
    return trained({})


@pytest.mark.long
@pytest.mark.parametrize(
    ("without", "measure"),
    [
        pytest.param({"absolute_weight": 0.0}, "absolute_error", marks=pytest.mark.long),
        pytest.param({"square_weight": 0.0}, "square_error", marks=pytest.mark.long),
        ({"codebook_weight": 0.0}, "codebook"),
        pytest.param({"perceptual": None}, "lpips", marks=pytest.mark.long),
        ({"adversarial": None}, "told_apart"),
    ],
)
def test_without_a_term_what_it_is_for_comes_out_worse(
    without: dict[str, Any], measure: str, whole: tuple[objective.Reconstruction, Tiny, Others]
) -> None:
    """On images that were not trained on, all judged by the discriminator of the net that all terms have trained."""
    made, net, others = whole
    x = pictures(500, 16)[:, :, ::2, ::2]

    def measured(own: Tiny) -> float:
        with torch.no_grad():
            if measure == "told_apart":
                again = own(x, x, {})[0]
                return float(-adversarial.judged(others["discriminator"], again, False).mean())
            return float(loss_of(made, own, x, {}, {}, **others).metrics[measure].mean())

    worse, best = measured(trained(without)[1]), measured(net)
    assert worse - best > 0.02 * abs(best), (worse, best)


class TestRefusals:
    def test_terms_that_this_net_does_not_have(self) -> None:
        made, net, _ = built(kl_weight=1e-3)
        with pytest.raises(UserError, match=r"objective\.kl_weight has no effect.*\(codebook_weight\)"):
            made.check(net)

    def test_settings_that_do_not_go_together(self) -> None:
        with pytest.raises(ValidationError, match="mask weighs the errors of pixels"):
            objective.Settings.model_validate({"mask": {}, "adversarial": {}})
        with pytest.raises(ValidationError, match="nothing would be learnt"):
            objective.Settings(absolute_weight=0, square_weight=0)
        assert objective.Settings.model_validate({"perceptual": {"path": "x"}}).in_use().perceptual is None


def test_psnr_is_that_of_the_definition() -> None:
    x = torch.zeros(2, 3, 8, 8)
    again = x + torch.tensor([0.2, 3.0])[:, None, None, None]
    expected = [10 * np.log10(4 / 0.04), 10 * np.log10(4 / 1.0)]
    assert objective.psnr(again, x).tolist() == pytest.approx(expected, rel=1e-5)

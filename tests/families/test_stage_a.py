"""Stage A of Stable Cascade in training: the terms of its codebook, whose side each of them moves, and what they do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from losses import loss_of
from tiny_cascade import VQGAN
from torch import Tensor

from daguerre.data.sources import shapes
from daguerre.families import stage_a
from daguerre.objectives import autoencoder as objective

BOOK = "vqgan.vquantizer.embedding.weight"


def pictures(start: int, count: int) -> Tensor:
    """Images [count, 3, 32, 32] in [-1, 1] of the source `shapes`."""
    source = shapes.open_source(shapes.Settings(), "train")
    made = np.stack([source.record(start + i).image[::2, ::2] for i in range(count)])
    return torch.from_numpy(made).permute(0, 3, 1, 2).float() / 127.5 - 1


def net() -> torch.nn.Module:
    return stage_a.load(stage_a.Settings(vqgan=VQGAN), seed=3).net.train()


def test_terms_are_distances_to_the_nearest_vector_and_each_moves_its_own_side() -> None:
    own, x = net(), pictures(0, 3)
    found = own(x, torch.zeros(3), {}).latent_terms
    z = own.vqgan.encode((x + 1) / 2, return_dict=False)[0]
    book = own.vqgan.vquantizer.embedding.weight
    places = (z.permute(0, 2, 3, 1)[..., None, :] - book).square().sum(-1).argmin(-1)
    assert len(places.unique()) > 1
    wanted = (book[places].permute(0, 3, 1, 2) - z).square().flatten(1).mean(1)
    for name, term in found.items():
        torch.testing.assert_close(term, wanted, rtol=1e-4, atol=1e-5)
        own.zero_grad()
        term.sum().backward(retain_graph=True)
        moved = {key for key, p in own.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
        if name == "codebook":
            assert moved == {BOOK}
        else:
            assert moved
            assert {key.split(".")[1] for key in moved} <= {"in_block", "down_blocks"}


def test_gradients_of_the_image_pass_straight_through_and_evaluation_quantises_nothing() -> None:
    own, x = net(), pictures(0, 2)
    z = own.vqgan.encode((x + 1) / 2, return_dict=False)[0]
    own(x, torch.zeros(2), {}).images_BCHW.sum().backward()
    assert own.vqgan.vquantizer.embedding.weight.grad is None
    assert own.vqgan.in_block[1].weight.grad.abs().max() > 0
    own.eval()
    again = own(x, torch.zeros(2), {}).images_BCHW
    z = own.vqgan.encode((x + 1) / 2, return_dict=False)[0]
    torch.testing.assert_close(again, own.vqgan.decode(z, return_dict=False)[0] * 2 - 1)


@pytest.mark.long  # of the quick tests, the distances and whose side each moves
@pytest.mark.parametrize("term", ["codebook", pytest.param("commitment", marks=pytest.mark.long)])
def test_without_a_term_latents_lie_further_from_their_vectors(term: str) -> None:
    """On images that were not trained on, after 30 updates."""
    distances = {}
    for weight in (None, 0.0):
        own = net()
        made = objective.build(objective.Settings.model_validate({f"{term}_weight": weight}))
        optimizer = torch.optim.Adam(own.parameters(), 3e-3)
        seen = pictures(0, 64)
        for step in range(30):
            loss = loss_of(made, own, seen[torch.arange(8 * step, 8 * step + 8) % 64], {}, {}).loss_B.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            distances[weight] = float(loss_of(made, own.eval(), pictures(500, 16), {}, {}).metrics[term].mean())
    assert distances[0.0] > 1.05 * distances[None], distances

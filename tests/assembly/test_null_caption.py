"""The empty caption's conditioning is that of a batch with empty captions, whatever the other captions are."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import tiny_families
import torch
from quick_cases import chosen

from daguerre.assembly import loss_networks, null_caption, parts
from daguerre.bench import inputs
from daguerre.config import config as configs
from daguerre.errors import UserError
from daguerre.objectives.objective import Needs
from daguerre.objectives.wrapper import DiffusionWrapper
from daguerre.types import IMAGE


@dataclass(frozen=True, eq=False)
class LeadsAway(DiffusionWrapper):
    """The inner loss; it is also given the empty caption."""

    needs = Needs(null=True)

    def loss(self, nets, example):
        return self.inner.loss(nets, example)


RECIPES = {"sd": "sd15_lora", "sdxl": "sdxl_lora", "flux": "flux_lora", "z_image": "z_image_lora"}


def made(family: str, folder, *more: str) -> tuple[parts.Components, object]:
    model = tiny_families.settings(family, folder / "model")
    own = [f"model.{name}={value}" for name, value in model.items() if name != "family"]
    given = ["data.source=folder", f"data.path={folder}", "data.resolution=64", "training.device=cpu"]
    config = configs.load(RECIPES[family], [*own, *given, "training.weights_dtype=float32", *more]).config
    found = parts.build(config)
    return replace(found, objective=LeadsAway(found.objective.diffusion)), inputs.image_shape(config)


@pytest.mark.parametrize("family", chosen(sorted(RECIPES), lambda family: family in ("sd", "flux")))
def test_it_is_that_of_a_batch_with_empty_captions(family, tmp_path):
    built, shape = made(family, tmp_path)
    batch = inputs.random_batch(built, 2, shape)
    example = built.example(batch)
    empty = replace(batch, texts=["", ""])
    expected = built.family.encode(replace(empty, draws=built.draws(empty)))[1]
    cond, null = example.cond[IMAGE], example.null[IMAGE]
    assert cond.keys() == null.keys()
    assert all(cond[name].shape == null[name].shape for name in cond)
    for name, rows in expected.items():
        length = rows.shape[1:2].numel() if rows.ndim > 1 else 0
        found = null[name][:, :length] if rows.ndim > 1 else null[name]
        torch.testing.assert_close(found, rows, rtol=1e-6, atol=1e-6)
        if rows.ndim == 3 and null[name].shape[1] > length:  # filled up, and said so
            assert torch.equal(null[f"{name}_mask"].sum(1), torch.full((2,), length))
    assert built.null.rows is not None
    kept = built.null.rows
    built.example(batch)
    assert built.null.rows is kept, "it is encoded once"
    moved = example.map(lambda rows: rows[:1])
    assert all(len(rows) == 1 for rows in moved.null[IMAGE].values())


def test_shorter_texts_are_filled_up_on_both_sides():
    text = torch.ones(2, 3, 4)
    cond, null = null_caption.beside({"text": text, "size": torch.zeros(2)}, {"text": torch.ones(1, 5, 4)})
    assert cond["text"].shape == null["text"].shape == (2, 5, 4)
    assert cond["text_mask"].tolist() == [[True] * 3 + [False] * 2] * 2
    assert null["text_mask"].all()
    assert float(cond["text"][:, 3:].abs().sum()) == 0
    masked = {"text": text, "text_mask": torch.tensor([[True, True, False]] * 2)}
    cond, null = null_caption.beside(masked, {"text": torch.ones(1, 3, 4)})
    assert torch.equal(cond["text_mask"], masked["text_mask"])
    assert null["text_mask"].all()


@pytest.mark.parametrize("more", [["adapter.train=[unet, text_encoder]"], ["adapter.ranks={text_encoder: 4}"]])
def test_a_trained_text_encoder_has_none_to_keep(more, tmp_path):
    recipe = "sd15" if "train" in more[0] else "sd15_lora"
    place = tiny_families.settings("sd", tmp_path / "model")["pretrained_model_name_or_path"]
    given = [f"pretrained_model_name_or_path={place}", "data.source=folder", f"data.path={tmp_path}"]
    config = configs.load(recipe, [*given, "data.resolution=64", *more]).config
    built = parts.outline(config)
    with pytest.raises(UserError, match="text_encoder is trained"):
        loss_networks.check(config, LeadsAway(built.objective.diffusion), built.family, built.net)

"""The student with other weights: the reference is the model before update 1 to the bit, the average its averages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tiny_models import write_sd

from daguerre.assembly import loss_networks, parts
from daguerre.assembly.parts import Components
from daguerre.assembly.roles import in_training
from daguerre.bench import inputs
from daguerre.config import config as configs
from daguerre.config.config import Config
from daguerre.errors import UserError
from daguerre.memory import static
from daguerre.objectives.objective import AVERAGE, REFERENCE, Needs
from daguerre.objectives.wrapper import DiffusionWrapper
from daguerre.training import step
from daguerre.training.state import TrainState, evaluating
from daguerre.types import IMAGE


@dataclass(frozen=True, eq=False)
class Compares(DiffusionWrapper):
    """The inner loss, after passes of the other networks, whose distances from the student it notes."""

    needs = Needs(networks=(REFERENCE, AVERAGE))

    def loss(self, nets, example):
        at = (nets_input := example.clean[IMAGE]), example.draws.c_noise, example.cond[IMAGE]
        others = {role: nets[role](*at) for role in self.needs.networks}
        terms = self.inner.loss(nets, example)
        with torch.no_grad():
            y = nets.student(*at)
        apart = {role: (y - other).abs().flatten(1).amax(1) for role, other in others.items()}
        assert nets_input.shape == y.shape
        return replace(terms, metrics=apart)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("base")
    own = f"pretrained_model_name_or_path={write_sd(folder / 'sd')}"
    data = ["data.source=folder", f"data.path={folder}", "data.resolution=16", "training.device=cpu"]
    return [own, *data]


USUAL = {"training.weights_dtype": "float32", "training.mixed_precision": "auto", "ema.decay": "0.5"}


def begun(base: list[str], recipe: str, *more: str) -> tuple[Config, Components, TrainState]:
    given = USUAL | dict(each.split("=") for each in more)
    given |= {"ema.enabled": "true", "optimizer.learning_rate": "1e-2"}
    config = configs.load(recipe, [*base, *(f"{name}={value}" for name, value in given.items())]).config
    made = parts.build(config, trains=True)
    made = replace(made, objective=Compares(made.objective.diffusion))
    state = parts.begin(config, made)
    return config, in_training(made, state), state


def update(made: Components, state: TrainState, batch: Any, loss_fn: Any = None) -> dict[str, float]:
    """One update of the loop; its means."""
    state.net.train()
    step.update(
        state, [batch], loss_fn or made.loss, learning_rate=1e-2, max_grad_norm=None, autocast=made.autocast
    )  # fmt: skip
    return state.meter.read()


def apart(made: Components, batch: Any) -> dict[str, float]:
    with made.autocast():
        return {role: float(v.max()) for role, v in made.loss(made.net, batch).metrics.items()}


LORAS = [
    [],
    ["adapter.init=pissa"],
    ["adapter.kind=dora", "adapter.dropout=0.5"],
    ["adapter.kind=lokr", "training.mixed_precision=bf16"],
    ["adapter.rank=4", "training.weights_dtype=bfloat16"],
]


@pytest.mark.parametrize(
    ("recipe", "more"),
    [("sd15_lora", LORAS[3]), ("sd15", ["training.weights_dtype=bfloat16"]),
     # What has less of its own: the cases above have LoRA, averages in 16 bits and casts of their own.
     *(pytest.param("sd15_lora", more, marks=pytest.mark.long) for more in (*LORAS[:3], LORAS[4])),
     *(pytest.param("sd15", more, marks=pytest.mark.long)
       for more in ([], ["training.mixed_precision=bf16"], ["adapter.train=[unet, text_encoder]"]))],
)  # fmt: skip
def test_the_reference_is_the_model_before_update_1(recipe: str, more: list[str], base: list[str]) -> None:
    config, made, state = begun(base, recipe, *more)
    batch = inputs.random_batch(made, 2, inputs.image_shape(config))
    at = (torch.randn(2, *made.family.latent_shape((3, 16, 16))), torch.tensor([3.0, 500.0]))
    cond = made.example(batch).cond[IMAGE]
    with torch.no_grad(), made.autocast():
        first = made.net.eval()(*at, cond)
    for _ in range(3):
        values = update(made, state, batch)
    with torch.no_grad(), made.autocast():
        assert torch.equal(made.others[REFERENCE](*at, cond), first)
        assert not torch.equal(made.net.eval()(*at, cond), first)
        assert torch.equal(made.others[REFERENCE](*at, cond), first)
    assert values["learning/reference"] > 0
    assert not any(module.training for module in made.net.modules())


@pytest.mark.parametrize(
    ("recipe", "more"),
    [("sd15_lora", ["training.mixed_precision=bf16"]),
     *(pytest.param(recipe, more, marks=pytest.mark.long) for recipe, more in
       (("sd15", []), ("sd15", ["training.mixed_precision=bf16"]), ("sd15", ["training.weights_dtype=bfloat16"]),
        ("sd15_lora", []), ("sd15_lora", ["training.weights_dtype=bfloat16"])))],
)  # fmt: skip
def test_passes_of_others_change_no_bit_of_an_update(recipe: str, more: list[str], base: list[str]) -> None:
    weights = []
    for compares in (True, False):
        config, made, state = begun(base, recipe, *more)
        loss_fn = made.loss if compares else replace(made, objective=made.objective.inner, others={}).loss
        batch = inputs.random_batch(made, 2, inputs.image_shape(config))
        for _ in range(2):
            update(made, state, batch, loss_fn)
        weights.append({name: p.clone() for name, p in state.trained.items()} | dict(state.ema.averages))
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_the_average_is_the_averaged_student_and_in_validation_the_student_itself(base: list[str]) -> None:
    config, made, state = begun(base, "sd15")
    batch = inputs.random_batch(made, 2, inputs.image_shape(config))
    update(made, state, batch)
    update(made, state, batch)
    at = (torch.randn(2, *made.family.latent_shape((3, 16, 16))), torch.tensor([3.0, 500.0]))
    cond = made.example(batch).cond[IMAGE]
    with torch.no_grad():
        found, reference = (made.others[role](*at, cond) for role in (AVERAGE, REFERENCE))
        raw = made.net.eval()(*at, cond)
        made.net.train()
    assert not torch.equal(found, raw)
    with evaluating(state), torch.no_grad():
        assert torch.equal(made.net(*at, cond), found)
        assert torch.equal(made.others[AVERAGE](*at, cond), found)
        assert torch.equal(made.others[REFERENCE](*at, cond), reference)
        assert apart(made, batch)[AVERAGE] == 0
    assert apart(made, batch)[AVERAGE] > 0
    held = {name: p.clone() for name, p in state.trained.items()}
    made.others[AVERAGE](*at, cond)
    assert all(torch.equal(p, held[name]) for name, p in state.trained.items())


def test_plan_counts_the_first_weights(base: list[str]) -> None:
    config, made, state = begun(base, "sd15_lora")
    mesh = config.mesh.resolved(1, 1)
    taken = static.count(config, made, mesh).bytes_of("reference")
    assert taken == sum(p.nbytes for p in state.parameters) > 0
    assert static.count(config, replace(made, objective=made.objective.inner), mesh).bytes_of("reference") == 0


@pytest.mark.parametrize(
    ("recipe", "more", "why"),
    [
        (
            "sd15_textual_inversion",
            ["ema.enabled=true"],
            "with words that only the student has learnt: remove adapters.tokens",
        ),
        ("sd15_controlnet", ["ema.enabled=true"], "has not learnt what the network of this adapter reads"),
        ("sd15", ["ema.enabled=false"], "ema.enabled is false"),
    ],
)
def test_what_cannot_be_compared_is_refused(recipe: str, more: list[str], why: str, base: list[str]) -> None:
    config = configs.load(recipe, [*base, *more]).config
    made = parts.outline(config)
    objective = Compares(made.objective.diffusion)
    with pytest.raises(UserError, match=why):
        loss_networks.check(config, objective, made.family, made.net)

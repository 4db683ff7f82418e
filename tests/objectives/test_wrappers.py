"""The contract of every loss around diffusion, found by its file: each setting of the objective inside acts, or is
refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from daguerre import plugins
from daguerre.objectives.networks.teacher import TEACHER, Teacher, TeacherSettings
from daguerre.objectives.objective import AVERAGE, REFERENCE, Example, Nets
from daguerre.objectives.wrapper import DiffusionWrapper, WrapperSettings
from daguerre.samplers.guidance import CLASSIFIER_FREE
from daguerre.types import IMAGE, REJECTED

NAMES = [
    name
    for name in plugins.names("objectives")
    if issubclass(plugins.find("objectives", name).Settings, WrapperSettings)
]
GIVEN: dict[str, dict[str, Any]] = {TEACHER: {"path": "a_model"}}
"""Fields that some of them need."""
SHAPE = (2, 4, 4)
KEYS = np.array([[1, 0, 0], [2, 0, 0]], dtype=np.int64)


def settings(name: str, **more: Any) -> Any:
    kind = plugins.find("objectives", name).Settings
    needed = {field: value for field, value in GIVEN.items() if field in kind.model_fields}
    return kind.model_validate({**needed, **more})


def loss(own: Any) -> torch.Tensor:
    """Of two samples, by a student and frozen networks that are apart; the right half of each image is masked."""
    made: DiffusionWrapper = plugins.find("objectives", own.name).build(own)
    draws = made.draws(3, KEYS, SHAPE).tensors
    if own.mask is not None:
        draws["element_weight"] = torch.tensor([1.0, 1.0, 0.0, 0.0]).expand(2, 1, 4, 4)
    torch.manual_seed(0)
    clean = {name: torch.randn(2, *SHAPE) for name in (IMAGE, REJECTED)}
    cond, null = ({name: {"text": torch.full((2, 1), value)} for name in clean} for value in (1.0, 0.0))

    def net(factor: float) -> Any:
        return lambda x, c_noise, cond: torch.sin(factor * x) + 0.1 * cond["text"][:, :, None, None]

    others = {REFERENCE: net(1.5), AVERAGE: net(0.9), TEACHER: Teacher(net(2.0), CLASSIFIER_FREE)}
    nets = Nets(net(0.7), others, CLASSIFIER_FREE)
    return made.loss(nets, Example(clean, cond, made.drawn.of(draws), null=null)).loss_B


@pytest.mark.parametrize("name", NAMES)
class TestWrapper:
    def test_settings_say_whether_it_compares_with_the_first_student(self, name):
        kind = plugins.find("objectives", name)
        for own in (settings(name), *([kind.Settings()] if "teacher" in kind.Settings.model_fields else [])):
            assert own.refers == (REFERENCE in kind.build(own).needs.networks)

    def test_its_loss_is_a_finite_number_of_each_sample(self, name):
        found = loss(settings(name))
        assert found.shape == (2,)
        assert found.dtype == torch.float32
        assert found.isfinite().all()

    def test_settings_survive_being_dumped(self, name):
        own = settings(name)
        assert own.name == name
        assert type(own).model_validate(own.model_dump(mode="json")) == own

    @pytest.mark.parametrize(
        "inside",
        [{"weighting": {"name": "min_snr"}}, {"noise": {"input_perturbation": 0.5}}, {"noise": {"offset": 0.5}}],
        ids=["weighting", "input_perturbation", "offset"],
    )
    def test_a_setting_of_the_objective_inside_acts_or_is_refused(self, name, inside):
        try:
            own = settings(name, diffusion={"name": "eps", **inside})
        except ValidationError:
            return
        assert not torch.allclose(loss(own), loss(settings(name)))

    def test_a_mask_acts_or_is_refused_and_is_named_around(self, name):
        with pytest.raises(ValidationError, match=r"diffusion.mask has no effect: .*(remove it|set objective.mask)"):
            settings(name, diffusion={"name": "eps", "mask": {}})
        if "mask" in settings(name).unused():
            with pytest.raises(ValidationError, match="remove it"):
                settings(name, mask={})
            return
        assert not torch.allclose(loss(settings(name, mask={"outside_weight": 0.0})), loss(settings(name)))

    def test_without_a_loss_no_further_network_is_made(self, name):
        if TEACHER not in type(settings(name)).model_fields:
            pytest.skip("has no teacher")
        own = settings(name, teacher=GIVEN[TEACHER])
        assert own.networks == {TEACHER: TeacherSettings(path="a_model")}
        assert own.in_use().networks == {}

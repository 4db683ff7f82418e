"""Messages that say what to write in place of what was given."""

from typing import Any

import pytest

from daguerre.cli.options import generate_options
from daguerre.errors import UserError
from daguerre.evaluation.evaluate import measure
from daguerre.evaluation.metrics import shapes
from daguerre.evaluation.settings import EvaluationSettings


def test_a_lora_without_its_strength() -> None:
    with pytest.raises(UserError, match=r"use='\{style\.safetensors: 1\}'"):
        generate_options.read(["runs/x", "prompt=a", "use=style.safetensors"])


def test_a_number_of_images_that_no_metric_takes_is_refused() -> None:
    nothing: Any = None
    settings = EvaluationSettings(metrics={"shapes": shapes.Settings()}, num_images=50)
    with pytest.raises(UserError, match=r"num_images=50 has no effect: the samples of shapes"):
        measure(settings, nothing)

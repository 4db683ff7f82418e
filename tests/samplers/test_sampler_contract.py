"""The contract of samplers, over all files of samplers/."""

import diffusers
import pytest

from daguerre import plugins
from daguerre.contracts.samplers import SamplerContract
from daguerre.samplers.settings import SCHEDULERS


@pytest.mark.parametrize("name", plugins.names("samplers"))
class TestSampler(SamplerContract):
    """All."""


def test_schedulers_of_configs_are_samplers_here() -> None:
    assert set(SCHEDULERS.values()) <= set(plugins.names("samplers"))
    assert {"EulerAncestralDiscreteScheduler", "UniPCMultistepScheduler", "LCMScheduler"} <= set(SCHEDULERS)
    assert all(hasattr(diffusers, name) for name in SCHEDULERS)

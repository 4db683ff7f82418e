"""Ways of writing trackers that mean nothing are refused by name, not by a fault of ours."""

from __future__ import annotations

import pytest

from daguerre.config import config as configs
from daguerre.config.errors import ConfigError


@pytest.mark.parametrize("own", ["1", "a", "[1]", "true"])
def test_a_tracker_whose_settings_are_no_mapping_is_refused(own):
    with pytest.raises(ConfigError, match=r"logging\.trackers\.wandb"):
        configs.load("quickstart", [f"logging.trackers={{wandb: {own}}}"])


def test_a_tracker_is_switched_by_true_or_false_alone():
    with pytest.raises(ConfigError, match=r"tensorboard = \"maybe\"\n +allowed: true or false"):
        configs.load("quickstart", ["tensorboard=maybe"])

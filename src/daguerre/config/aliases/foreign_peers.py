"""Configs of kohya's scripts, OneTrainer, ai-toolkit and SimpleTuner: which one a file is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

KOHYA, ONETRAINER, AI_TOOLKIT, SIMPLETUNER = "kohya's sd-scripts", "OneTrainer", "ai-toolkit", "SimpleTuner"
FORMATS = (".toml", ".env", ".sh")
"""Formats of files in which recipes are never written."""

_SIGNS: dict[str, tuple[tuple[str, ...], ...]] = {
    SIMPLETUNER: (("model_family", "model_type"), ("data_backend_config",), ("model_type", "train_batch_size")),
    ONETRAINER: (("base_model_name", "training_method"), ("model_type", "training_method")),
    AI_TOOLKIT: (("job", "config"),),
    KOHYA: (
        ("datasets",),
        ("pretrained_model_name_or_path", "output_name"),
        ("pretrained_model_name_or_path", "train_data_dir"),
        ("pretrained_model_name_or_path", "dataset_config"),
        ("pretrained_model_name_or_path", "optimizer_type"),
        ("pretrained_model_name_or_path", "network_module"),
    ),
}


def trainer(tree: Mapping[str, Any]) -> str | None:
    """Whose config a mapping is; None for everybody else's."""
    names = {str(name).lstrip("-").replace("-", "_") for name in tree}
    inner = {name for value in tree.values() if isinstance(value, Mapping) for name in value}
    for name, groups in _SIGNS.items():
        known = names | inner if name == KOHYA else names
        if any(known.issuperset(group) for group in groups):
            return name
    return None


def is_format(path: Path) -> bool:
    """Whether a file is in a format that no recipe has."""
    return path.suffix in FORMATS

"""Decides what a model takes from the captions of its data (`model.words=captions`), before its networks are built."""

from daguerre.config.config import Config
from daguerre.data import vocabulary


def fixed(config: Config) -> Config:
    """The config with what the captions decide, as a run records it; as it is where they decide nothing. UserError for
    data whose captions cannot be listed."""
    model = config.model.of_captions(lambda: vocabulary.texts(config.data))
    return config if model is config.model else config.model_copy(update={"model": model})

"""The families whose networks come from pretrained places, and the components that these have between them.

For commands that are about no family in particular: what is fetched, and which family a pipeline is of.
"""

from functools import lru_cache

from daguerre import plugins
from daguerre.models.settings import DenoiserSettings, PretrainedSettings


@lru_cache(maxsize=1)
def pretrained() -> dict[str, type[PretrainedSettings]]:
    """Their settings by name."""
    found = {name: plugins.find("families", name).Settings for name in plugins.names("families")}
    return {name: settings for name, settings in found.items() if issubclass(settings, PretrainedSettings)}


def networks() -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for settings in pretrained().values() for name in settings.networks()))


def tokenizers() -> tuple[str, ...]:
    """The folders of tokenizers."""
    found = (settings.folder_of(name) for settings in pretrained().values() for name in settings.tokenizers())
    return tuple(dict.fromkeys(found))


def pipelines() -> dict[str, str]:
    """The family of each class of pipelines that generate images by diffusion."""
    able = {name: each for name, each in pretrained().items() if issubclass(each, DenoiserSettings)}
    return {kind: name for name, each in able.items() for kind in (each.pipeline_class, *each.further_classes)}

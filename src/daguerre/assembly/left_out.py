"""The networks that a run on a cache needs no memory for. Known from its config alone."""

from daguerre.config.config import Config
from daguerre.models import encoders


def components(config: Config) -> tuple[str, ...]:
    """The components that a run with this cache may leave out of memory: encoders that are not trained."""
    if config.cache.path is None:
        return ()
    reached = {name for own in config.adapters.values() for name in own.reaches(config.model.trainable())}
    # Without a choice, too: whether this half can be cached is known once the cache is opened.
    roles = [role for role, asked in encoders.ROLES.items() if getattr(config.cache, asked) is not False]
    names = [name for name in config.model.networks(*roles) if name not in reached] if roles else []
    return tuple(names)

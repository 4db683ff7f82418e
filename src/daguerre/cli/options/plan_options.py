"""The options of `plan` other than settings."""

from pydantic import Field

from daguerre.settings import Settings
from daguerre.training.settings import Size


class Options(Settings):
    """Options of `plan` other than the recipe's settings."""

    devices: int = Field(1, ge=1)
    nodes: int = Field(1, ge=1)
    card: Size | None = None
    ram: Size | None = None

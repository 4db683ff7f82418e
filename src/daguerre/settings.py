"""The base of every settings class, the classes of resume, and durations.

A settings class is a frozen pydantic model that lives next to the code it configures; its fields are
documented by the string below each. This file holds what they share and no setting of its own.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

FREE: dict[str, Any] = {"resume": "free"}
"""`Field(json_schema_extra=FREE)`: may change on resume; it does not touch what is learnt."""
ELASTIC: dict[str, Any] = {"resume": "elastic"}
"""May change on resume: the global batches stay equal, who computes them changes.
A field without a mark is an identity field: on resume it must equal the run's."""


class Settings(BaseModel):
    """A frozen group of settings in which an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        protected_namespaces=(),
    )


_UNITS = {"step": "steps", "steps": "steps", "sample": "samples", "samples": "samples"}
_UNITS |= {"epoch": "epochs", "epochs": "epochs"}
_SCALES = {"": 1, "k": 1_000, "M": 1_000_000, "B": 1_000_000_000}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kMB]?)\s+([a-z]+)\s*")


class Duration(str):
    """A length of training: `"20k steps"`, `"1.5M samples"` or `"3 epochs"`; steps are optimizer updates.

    Its text is kept as written; `number` and `unit` are what it means.
    """

    number: int
    unit: str

    def __new__(cls, text: str) -> Duration:
        match = _DURATION.fullmatch(text)
        if match is None or match[3] not in _UNITS:
            raise ValueError(
                f"{text!r} is not a duration: write a number and a unit, such as "
                "'20k steps', '1.5M samples' or '3 epochs'"
            )
        count = Decimal(match[1]) * _SCALES[match[2]]
        if count != int(count):
            raise ValueError(f"{text!r} is not a whole number of {_UNITS[match[3]]}")
        self = super().__new__(cls, text)
        self.number, self.unit = int(count), _UNITS[match[3]]
        return self

    def steps(self, global_batch_size: int, samples_per_epoch: int | None) -> int:
        """Optimizer updates that cover this duration, rounded up."""
        if self.unit == "steps":
            return self.number
        if self.unit == "epochs" and samples_per_epoch is None:
            raise ValueError(f"{str(self)!r}: this source is endless and has no epochs; give steps or samples")
        samples = self.number * (samples_per_epoch or 0) if self.unit == "epochs" else self.number
        return -(-samples // global_batch_size)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(
            cls,
            core_schema.str_schema(),
            serialization=core_schema.plain_serializer_function_ser_schema(str),
        )

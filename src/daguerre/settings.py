"""The base of every settings class, the classes of resume, durations, and the mark of sections that a plug-in defines.

A settings class is a frozen pydantic model that lives next to the code it configures; its fields are
documented by the string below each (`documentation`). This file holds what they share and no setting of its own.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, lru_cache
from itertools import pairwise
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from daguerre import plugins
from daguerre.credentials import redact
from daguerre.errors import UserError

ADDRESS = AfterValidator(redact)
"""`Annotated[str, ADDRESS]`: a path or an address, also in lists and maps. What is secret in it never gets into the
settings, nor wherever they are written or shown; `credentials.whole` has it for who opens the address."""
ROOTS = "DAGUERRE_ROOTS"
"""Environment variable: a JSON list of the folders and addresses below which a recipe reads and writes
(storage/roots.py); without it, anywhere."""
FREE: dict[str, Any] = {"resume": "free"}
"""`Field(json_schema_extra=FREE)`: may change on resume; it does not touch what is learnt."""
ELASTIC: dict[str, Any] = {"resume": "elastic"}
"""May change on resume: the global batches stay equal, who computes them changes.
A field without a mark is an identity field: on resume it must equal the run's."""


class Unused(NamedTuple):
    """Fields that other fields of the same group can leave without effect."""

    fields: tuple[str, ...]
    when: Callable[[Any], bool]
    """Whether they have no effect in a group; gets the settings object."""
    why: str


class WithoutEffect(ValueError):
    """Fields of a group are given that have no effect; `fields` says why of each, and what to do."""

    def __init__(self, fields: dict[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {text}" for name, text in fields.items()))
        self.fields = fields


class Settings(BaseModel):
    """A frozen group of settings in which an unknown key is an error, and so is a key that has no effect."""

    unused_when: ClassVar[tuple[Unused, ...]] = ()
    """What is refused where it is given, and left out where the settings are written."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        protected_namespaces=(),
    )

    around: ClassVar[frozenset[str]] = frozenset()
    """Fields that a recipe sets in the section around this one, for all sections like it."""

    @model_validator(mode="after")
    def _refuse_unused(self) -> Self:
        given = {name: why for name, why in self.unused().items() if name in self.model_fields_set}
        if given:
            raise WithoutEffect({name: f"{why}: remove it{self.way_to_use(name)}" for name, why in given.items()})
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        found = handler(schema)
        properties = handler.resolve_ref_schema(found).get("properties", {})
        for name, text in documentation(cls).items():
            if name in properties:
                properties[name]["description"] = text
        return found

    @model_serializer(mode="wrap")
    def _without_unused(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        unused = self.unused()
        return {name: value for name, value in handler(self).items() if name not in unused}

    def unused(self) -> dict[str, str]:
        """The fields that others of the group leave without effect, and why."""
        return {name: why for fields, when, why in reversed(self.unused_when) if when(self) for name in fields}

    def way_to_use(self, field: str) -> str:
        """Another way out of an unused field than to remove it; empty without one."""
        return ""


@cache
def documentation(cls: type[Settings]) -> dict[str, str]:
    """The strings below the fields of a class, by field; without the fields that have none.

    They are read when they are asked for. Pydantic's `use_attribute_docstrings` looks for them in the source of every
    class that is imported: a quarter of the time that it takes to import the settings.
    """
    classes = [each for each in reversed(cls.__mro__) if issubclass(each, Settings)]
    found = {name: text for each in classes for name, text in _strings(each).items()}
    own = {name: field.description or found.get(name) for name, field in cls.model_fields.items()}
    return {name: text for name, text in own.items() if text}


@cache
def _strings(cls: type[Settings]) -> dict[str, str]:
    """The string below each field that a class itself annotates; "" for those without one."""
    try:
        node: ast.Module | ast.ClassDef | ast.FunctionDef = _tree(sys.modules[cls.__module__])
    except (KeyError, OSError, TypeError):  # not of a file
        return {}
    for name in cls.__qualname__.replace(".<locals>", "").split("."):
        named = (each for each in ast.walk(node) if isinstance(each, ast.ClassDef | ast.FunctionDef))
        if (found := next((each for each in named if each.name == name), None)) is None:
            return {}
        node = found
    lines = pairwise([*node.body, ast.Pass()])
    fields = ((line.target, below) for line, below in lines if isinstance(line, ast.AnnAssign))
    return {field.id: _text(below) for field, below in fields if isinstance(field, ast.Name)}


@lru_cache(maxsize=8)
def _tree(module: ModuleType) -> ast.Module:
    return ast.parse(inspect.getsource(module))


def _text(line: ast.stmt) -> str:
    """The string that a line is; "" for any other line."""
    value = line.value.value if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) else None
    return inspect.cleandoc(value) if isinstance(value, str) else ""


class Choice(Settings):
    """A section whose `name` decides which of its other fields act."""

    acts_with: ClassVar[dict[str, tuple[str, ...]]] = {}
    """The names with which a field acts; a field that is missing here always acts."""
    instead: ClassVar[dict[str, str]] = {}
    """Alternatives to removing a field, by field."""

    name: str

    def acts(self, field: str) -> bool:
        """True if `field` has an effect under this section's name."""
        return self.name in self.acts_with.get(field, (self.name,))

    def unused(self) -> dict[str, str]:
        found = super().unused()
        for field in self.acts_with:
            if not self.acts(field):
                found[field] = f"no effect with {self.name!r}"
        return found

    def way_to_use(self, field: str) -> str:
        if self.acts(field):
            return ""  # something else than the name leaves it without effect
        if field in self.instead:
            return f"; {self.instead[field]}"
        return f", or set name to {' or '.join(self.acts_with[field])}"


_UNITS = {"step": "steps", "steps": "steps", "sample": "samples", "samples": "samples"}
_UNITS |= {"epoch": "epochs", "epochs": "epochs"}
_SCALES = {"": 1, "k": 1_000, "M": 1_000_000, "B": 1_000_000_000}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kMB]?)\s+([a-z]+)\s*")


class Duration(str):
    """A length of training: `"20k steps"`, `"1.5M samples"` or `"3 epochs"`; steps are optimizer updates.
    `"100 epochs up to 64k samples"` follows the size of the data, as far as that.

    Its text is kept as written; `number` and `unit` are what it means.
    """

    number: int
    unit: str
    at_most: Duration | None
    """The limit of a length that follows the data: such a one has to become `plain` before it is counted."""

    def __new__(cls, text: str) -> Duration:
        whole, (text, limits, limit) = text, str.partition(text, " up to ")  # TypeError for what is no text
        match = _DURATION.fullmatch(text)
        if match is None or match[3] not in _UNITS:
            raise UserError(
                f"{text!r} is not a duration: write a number and a unit, such as "
                "'20k steps', '1.5M samples' or '3 epochs'"
            )
        at_most = cls(limit) if limits else None
        if at_most is not None and (_UNITS[match[3]] != "epochs" or at_most.unit == "epochs" or at_most.at_most):
            raise UserError(
                f"{whole!r} is not a duration: `up to` limits epochs by steps or samples, such as "
                "'100 epochs up to 64k samples'"
            )
        count = Decimal(match[1]) * _SCALES[match[2]]
        if count != int(count):
            raise UserError(f"{text!r} is not a whole number of {_UNITS[match[3]]}")
        self = super().__new__(cls, whole)
        self.number, self.unit, self.at_most = int(count), _UNITS[match[3]], at_most
        return self

    def plain(self, samples_per_epoch: int | None, global_batch_size: int) -> Duration:
        """The length that this one is with data of this size: the epochs in samples, or the limit if that is less."""
        if self.at_most is None:
            return self
        limit = self.at_most.number * (global_batch_size if self.at_most.unit == "steps" else 1)
        samples = limit if samples_per_epoch is None else self.number * samples_per_epoch
        return self.at_most if samples >= limit else Duration(f"{samples} samples")

    def steps(self, global_batch_size: int, samples_per_epoch: int | None) -> int:
        """Optimizer updates that cover this duration, rounded up."""
        if self.unit == "steps":
            return self.number
        if self.unit == "epochs" and samples_per_epoch is None:
            raise UserError(
                f"{str(self)!r}: an endless source and a mix of sources have no epochs; use steps or samples",
                code="conflict",
                setting="training.duration",
            )
        samples = self.number * (samples_per_epoch or 0) if self.unit == "epochs" else self.number
        return -(-samples // global_batch_size)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(
            cls,
            core_schema.str_schema(),
            serialization=core_schema.plain_serializer_function_ser_schema(str),
        )


def interval(value: Duration | None) -> Duration | None:
    """Refuses an interval of nothing, which would go by with every update; for `field_validator`."""
    if value is not None and not all(each.number for each in (value, value.at_most) if each is not None):
        raise UserError(f"{str(value)!r} is no interval: write null for none, or '1 steps' for every update")
    return value


@dataclass(frozen=True)
class Named:
    """Annotation of a setting that is the name of a plug-in without settings of its own."""

    kind: str

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(schema) | {"enum": list(plugins.names(self.kind))}


@dataclass(frozen=True)
class Plugin:
    """Annotation of a section that one of a folder's plug-ins validates; `key` is the field that names it."""

    kind: str
    key: str
    base: type[Settings]
    """What the `Settings` of all plug-ins of the kind start from."""
    default: str | None = None
    """The plug-in where a recipe names none."""

    def settings_class(self, name: Any) -> type[Settings]:
        """The `Settings` of the plug-in `name`; UserError lists what exists, and what may stand in this section."""
        self.check(name)
        found = self._settings(name)
        if not issubclass(found, self.base):
            raise UserError(f"{name} cannot stand in this section: choose {', '.join(self.able())}", code="unknown")
        return found

    def check(self, name: Any) -> None:
        """UserError if there is no plug-in `name`, which may be the value of a setting of one that there is."""
        if not plugins.exists(self.kind, name):
            # No code of an outside plug-in runs for a wrong name: it runs where the plug-in is chosen.
            ours = [each for each in plugins.names(self.kind) if each not in plugins.outside(self.kind)]
            able = [(each, own) for each in ours if issubclass(own := self._settings(each), self.base)]
            fields = ((each, *pair) for each, own in able for pair in own.model_fields.items())
            found = [(each, key) for each, key, of in fields if name in get_args(of.annotation)]
            meant = (f"{self.key}={each} and {key}={name}" for each, key in found)
            plugins.check(self.kind, name, " or ".join(meant))

    def able(self) -> list[str]:
        """The plug-ins that may stand in this section."""
        return [each for each in plugins.names(self.kind) if issubclass(self._settings(each), self.base)]

    def _settings(self, name: str) -> type[Settings]:
        found: type[Settings] = plugins.find(self.kind, name).Settings
        return found

    def choose(self, value: Any) -> Any:
        """A section's values to its plug-in's settings; errors keep their places for `config.errors.translate`."""
        if not isinstance(value, dict):
            return value
        if self.key not in value and self.default is not None:
            value = {self.key: self.default, **value}
        if self.key not in value:
            inner = [{"type": "missing", "loc": (self.key,), "msg": "", "input": value}]
            raise PydanticCustomError("plugin", "invalid section", {"errors": inner})
        try:
            settings_class = self.settings_class(value[self.key])
        except ValueError as error:
            inner = [{"type": "value_error", "loc": (self.key,), "input": value[self.key], "ctx": {"error": error}}]
            raise PydanticCustomError("plugin", "{text}", {"text": str(error), "errors": inner}) from None
        try:
            return settings_class.model_validate(value)
        except ValidationError as error:
            context = {"text": str(error), "errors": error.errors(include_url=False)}
            raise PydanticCustomError("plugin", "{text}", context) from None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.choose, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(schema)

"""Documents that verbs print with `--json`: one on stdout, also of a refusal; everything for people goes to stderr.

docs/json.md describes the documents, docs/output.schema.json is their JSON Schema (`printed`). Programs that read them
pass over keys that they do not know: later versions may add some.
"""

import json
import sys
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, TypeAdapter

from daguerre import __version__, errors
from daguerre.config.errors import ConfigError
from daguerre.credentials import scrub
from daguerre.errors import UserError
from daguerre.evaluation.result import Row
from daguerre.formatting import Verbatim

FLAG = "--json"
Number = int | float
Bytes = dict[str, Number]


class Part(BaseModel):
    """A part of a document. A key that has a default is left out where it has no value."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Document(Part):
    """The keys of every document."""

    daguerre: str = __version__
    """The version that printed it."""
    verb: str


class Problem(Part):
    """One of several things that are wrong with a recipe or its overrides."""

    path: str
    text: str


class Error(Part):
    """A refusal."""

    code: errors.Code
    """Its kind: stable, where the words of the message may change."""
    message: str
    setting: str | None = None
    """Dotted path of the setting to change, if it is one."""
    exit_code: int
    problems: list[Problem] | None = None


class Refused(Document):
    """Any verb that cannot do what it was asked for."""

    error: Error


class Mesh(Part):
    """The devices by axis, between nodes (dcn) and inside them (ici)."""

    devices: int
    nodes: int
    dcn: dict[str, int]
    ici: dict[str, int]
    batch_parts: int


class Group(Part):
    """Parameters of one pattern that are split in one way."""

    component: str
    pattern: str
    split: str
    parameters: int
    all_numbers: int
    numbers: int
    """On the fullest device."""


class NotSplit(Part):
    """A parameter that is not split as a rule says."""

    parameter: str
    why: str


class Parameter(Part):
    """A parameter, with `--all`."""

    name: str
    shape: list[int]
    tensor_dim: int | None
    fsdp_dim: int | None
    by_rule: bool
    numbers_per_device: int
    bytes_per_device: Bytes


class Step(Part):
    """The memory of a training step; the last three keys with `card`."""

    micro_batch: int
    accumulation: int
    global_batch: int
    device: Literal["cuda", "cpu"]
    precision: str
    held_bytes: Number
    passes_bytes: Number
    update_bytes: Number
    gathered_bytes: Number
    peak_bytes: Number
    taken_bytes: Number
    card_bytes: Number | None = None
    fits: bool | None = None
    largest_micro_batch: int | None = None


class Host(Part):
    """Memory and disk of a node, and time."""

    memory_bytes: Number
    reading: Bytes
    training: Bytes
    drawing: Bytes
    """While prompts of sample images are read by encoders whose results a cache has."""
    disk: Bytes
    seconds_per_update: float | None
    updates: Number | None
    updates_at_most: bool = False
    """Their number depends on the images, and this is its limit."""
    hours: float | None
    assumed: str
    """The rates that the time assumes."""


class Fitting(Part):
    """A command that has room, if the recipe has none."""

    command: str
    overrides: list[str]
    micro_batch: int
    taken_bytes: Number
    host: Host | None = None


class Plan(Document):
    """`plan RECIPE`."""

    verb: Literal["plan"] = "plan"
    recipe: str
    mesh: Mesh
    rules: list[tuple[str, list[str]]]
    groups: list[Group]
    not_split: list[NotSplit]
    bytes_per_device: Bytes
    parameters: list[Parameter] | None = None
    step: Step
    host: Host | None = None
    fitting: Fitting | None = None


class ImagesPlan(Document):
    """`plan RECIPE --generate`."""

    verb: Literal["plan"] = "plan"
    recipe: str
    batch_size: int
    device: Literal["cuda", "cpu"]
    held_bytes: Bytes
    made_bytes: Bytes
    peak_bytes: Number
    taken_bytes: Number
    host: Host
    card_bytes: Number | None = None
    fits: bool | None = None


class Finding(Part):
    """One line of `doctor`."""

    group: str
    status: Literal["ok", "note", "broken"]
    what: str
    text: str
    fix: str | None = None
    """The command or the step that mends it."""


class Findings(Document):
    """`doctor`."""

    verb: Literal["doctor"] = "doctor"
    findings: list[Finding]


class Card(Part):
    """A card on which a recipe trains."""

    card_gb: int
    settings: str
    """Overrides with which it does; empty for the recipe as it is."""


class Recipe(Part):
    """A shipped recipe."""

    name: str
    description: str
    cards: list[Card]
    settings: dict[str, Any] | None = None
    """Those of `recipes NAME`, with what the recipe extends."""


class Recipes(Document):
    """`recipes` and `recipes NAME`."""

    verb: Literal["recipes"] = "recipes"
    recipes: list[Recipe]


class Table(Part):
    """The numbers of one metric."""

    count: int
    """Images that were measured."""
    rows: list[Row]
    note: str | None = None
    warning: str | None = None
    asked: int | None = None
    """Images that were asked for, where there were fewer."""
    made_with: dict[str, Any] | None = None
    """Settings, networks and reference."""


class Evaluation(Part):
    """One evaluation; a sweep has one for each guidance scale."""

    folder: str
    complete: bool
    """False if other processes still have images to make; there are no tables then."""
    guidance_scale: float | None = None
    tables: dict[str, Table]


class Evaluations(Document):
    """`evaluate RUN|PIPELINE|FOLDER`."""

    verb: Literal["evaluate"] = "evaluate"
    evaluations: list[Evaluation]


class ComparedRow(Part):
    """One number of two evaluations."""

    name: str
    a: float
    b: float
    share: bool
    better: Literal["higher", "lower", ""]
    low: float | None = None
    """Interval of b - a at 95 %, where there is one."""
    high: float | None = None
    verdict: str


class ComparedTable(Part):
    """The numbers of one metric that was measured in one way for both."""

    rows: list[ComparedRow]
    warning: str | None = None


class Comparison(Document):
    """`evaluate A B`."""

    verb: Literal["evaluate"] = "evaluate"
    a: str
    b: str
    images: int
    tables: dict[str, ComparedTable]
    not_compared: list[str]


class OutcomeNumber(Part):
    """One number of what an adapter learnt, copied or forgot."""

    value: float
    base: float | None = None
    """The number of the base, if it has one."""
    low: float | None = None
    """Interval at 95 %: of the value, or of its difference from the base's."""
    high: float | None = None


class OutcomeWeights(Part):
    """A saved update at a strength."""

    step: int
    strength: float


class OutcomeCell(OutcomeWeights):
    """Its numbers."""

    numbers: dict[str, OutcomeNumber]
    behind: list[float] | None = None
    """Interval of the best balance less this one's."""
    destroyed: bool
    """The base's prompts are drawn no nearer to the base's images than unrelated ones."""


class Outcome(Document):
    """`compare RUN`."""

    verb: Literal["compare"] = "compare"
    run: str
    page: str
    images: int
    """Of each of the three lists of prompts."""
    features: str
    """The network that compares."""
    unrelated: float
    """Drift of images of unrelated prompts."""
    cells: list[OutcomeCell]
    best: OutcomeWeights | None
    """The best balance of learning and keeping; null where there is one cell, or none has learnt and kept
    the base."""


Printed: TypeAlias = Refused | Plan | ImagesPlan | Findings | Recipes | Evaluations | Comparison | Outcome
printed: TypeAdapter[Printed] = TypeAdapter(Printed)


def write(document: Document) -> None:
    """Prints a document on stdout."""
    head = {"daguerre": document.daguerre, "verb": document.verb}
    text = json.dumps(head | document.model_dump(mode="json", exclude_unset=True), indent=2, ensure_ascii=False)
    sys.stdout.write(Verbatim(f"{text}\n"))


def write_refusal(verb: str, error: UserError) -> None:
    """Prints the document of a command that was refused."""
    found: dict[str, Any] = {"code": error.code, "message": str(error), "exit_code": error.exit_code}
    found |= {"setting": error.setting} if error.setting else {}
    if isinstance(error, ConfigError):
        found["problems"] = [{"path": each.path, "text": scrub(each.text)} for each in error.problems]
    write(Refused(verb=verb, error=Error.model_validate(found)))


def for_people(asked: bool) -> AbstractContextManager[object]:
    """Within the block, what is printed goes to stderr if a document is asked for."""
    return redirect_stdout(sys.stderr) if asked else nullcontext()


def schema() -> str:
    """The JSON Schema of all documents, as docs/output.schema.json holds it."""
    return json.dumps(printed.json_schema(mode="serialization"), indent=1)

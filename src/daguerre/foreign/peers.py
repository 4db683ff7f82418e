"""Keys and folders that the configs of kohya's scripts, OneTrainer, ai-toolkit and SimpleTuner have in common.

Keys that mean what they mean on the command line are read by its tables; folders of images become a source, or a mix.
"""

import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any

from daguerre import plugins
from daguerre.errors import UserError
from daguerre.foreign import base_models as models
from daguerre.foreign.names.values import prompt_lines
from daguerre.foreign.reader import REQUIRED, Reading, Tables, generic
from daguerre.formatting import shown

OWN: dict[str, str] = Tables("peers")["own"]
OF_A_SOURCE: dict[str, Any] = {"caption_dropout": 0.0, "held_out_fraction": 0}
PROMPT_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "w": ("width", int),
    "h": ("height", int),
    "s": ("num_inference_steps", int),
    "l": ("guidance_scale", float),
    "d": ("seed", int),
    "n": ("negative_prompt", str),
}
"""Options behind a prompt of kohya's and ai-toolkit's, our settings of sampling, and what they are."""
_OF_CAPTION_FILES = ("captions.lines", "caption_extension")
ONE_RATE = "this optimizer has one rate for all parameters"
IMAGES = (".jpg", ".jpeg", ".png", ".webp")
_PATHS = ("image_dir", "path", "folder_path", "dataset_path", "instance_data_dir", "dataset_name")
"""Keys that give the path of a folder, below its own place in the config."""
WHAT_TO_DO = "convert the config where they are, or set it by hand"
NO_FILE = "it names a file that is not on this machine: its settings are lost; convert the config where it is"


def carry_known(reading: Reading, keys: Iterable[str]) -> None:
    """Reads keys that are our own, or that mean here what they mean on the command line."""
    for key in keys:
        if key in OWN:
            reading.carry(key, OWN[key])
        else:
            reading.alias(key)


def huber(reading: Reading) -> None:
    """Carries the threshold of sd-scripts' Huber losses, which SimpleTuner has taken over, where one is chosen."""
    names = ("huber_c", "huber_schedule", "huber_scale")
    if reading.get("loss_type") not in ("huber", "smooth_l1"):
        reading.note(names, "no effect without loss_type=huber or smooth_l1")
        return
    if reading.get("huber_schedule", "snr") == "snr":
        reading.notice("huber_scale", "no effect with huber_schedule=snr")
    for name in names:
        reading.carry(name, f"objective.loss.{name}")


def asks(value: Any) -> bool:
    """True for a value that asks for anything."""
    return value not in (None, "", 0, False, "none", "None", "null", "false", "False") and value not in ([], {})


def words(given: Any) -> list[str]:
    """The words of a list of arguments, which may be written as a text."""
    if isinstance(given, int | float):
        return [str(given)]
    return shlex.split(given) if isinstance(given, str) else [str(each) for each in given or []]


def number(value: Any, usual: float = 1) -> float:
    """A number, whether it is written as one or as text; the usual one for nothing. UserError for anything else, and
    for one that is not finite."""
    try:
        found = math.nan if value is True else float(value or usual)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise UserError(f"{shown(value)} is no finite number", code="damaged")
    return found


def share(given: Any) -> Any:
    """The number that `10%` or the text of a number is; anything else as it is."""
    found = re.fullmatch(r"\s*(\d*\.?\d+)(%?)\s*", given) if isinstance(given, str) else None
    return float(found[1]) / (100 if found[2] else 1) if found else given


def check_switches(reading: Reading, names: Sequence[str]) -> None:
    """UserError for a switch, wherever it stands, whose value is neither on nor off: their programs take any word for
    on, or stop."""
    for key, value in reading.whole.items():
        if key.rpartition(".")[2] in names and not isinstance(value, bool) and value not in (None, "", REQUIRED):
            raise UserError(f"{key} is {shown(value)}, and must be true or false", code="damaged")


def prompts(lines: Sequence[str]) -> tuple[dict[str, Any], str]:
    """The settings of sampling that prompts give together with the options behind them, such as `--w 768`, and a remark
    on the options that were left out: those that differ between prompts, are no number, or have no counterpart."""
    parted = [re.split(r"\s--(?=\w+(?:\s|$))", line) for line in lines]
    options = [dict((*option.split(None, 1), "")[:2] for option in rest if option.strip()) for _, *rest in parted]
    values: dict[str, Any] = {"sampling.prompts": [parts[0].strip() for parts in parted]}
    left_out = {name for each in options for name in each}
    for name, (path, kind) in PROMPT_OPTIONS.items():
        given = {each.get(name) for each in options}
        if len(given) == 1 and (value := given.pop()):
            try:
                values[f"sampling.{path}"] = kind(value)
            except (ValueError, OverflowError):
                continue
            left_out.discard(name)
    names = ", ".join(f"--{name}" for name in sorted(left_out))
    return values, f"left out {names}: one setting for all prompts" if left_out else ""


def sample_prompts(reading: Reading) -> None:
    """Carries the prompts of a `sample_prompts` that sd-scripts and musubi-tuner read: those of a text file that is on
    this machine, without its comments, or the text itself, which programs around them write into a file."""
    text = str(reading.get("sample_prompts") or "")
    path = Path(text).expanduser() if "\n" not in text else Path()
    if path.suffix == ".txt" and path.is_file():
        text = path.read_text(encoding="utf-8", errors="replace")
    elif path.suffix in (".txt", ".toml", ".json"):
        return
    if lines := prompt_lines(text.splitlines()):
        reading.carry_all("sample_prompts", *prompts(lines))


def not_there(what: str, trainer: str) -> UserError:
    """The error for a config that trains what no recipe can say."""
    text = f"this config of {trainer} trains {what}, which is not supported yet: no recipe was written"
    return UserError(text, code="unsupported")


def no_dropout(reading: Reading, key: str, kind: str) -> None:
    """Refuses a dropout of inputs for a kind of LoRA that has none."""
    if kind in ("loha", "lokr") and asks(reading.get(key)):
        reading.refuse(key, f"peft has no dropout of inputs for {kind}")


def encoders(family: str) -> tuple[str, ...]:
    """Names of the language models, or CLIPs, of a family; not of what a model has between these and the denoiser."""
    found = plugins.find("families", family).Settings.text_encoders()
    return tuple(name for name in found if name.startswith("text_encoder"))


def denoiser(family: str) -> str:
    """Name of the network of a family that is trained by default."""
    found: str = plugins.find("families", family).Settings.trainable()[0]
    return found


@dataclass
class Folder:
    """A folder of images in a config of theirs."""

    key: str
    """Where it stands in the config: the dotted path before its own keys."""
    path: Any
    repeats: float = 1
    caption: str | None = None
    """Of every image that has none of its own; "" where these are trained without one."""
    regular: bool = False
    """True for class images, which are taken as often as all others together."""
    name: str = ""
    place: str = "data"
    setting: str = "path"
    """The setting of its source that says where it is."""
    settings: dict[str, Any] = field(default_factory=dict)
    guesses: list[str] = field(default_factory=list)
    """What its images or captions would have decided, where it is not on this machine."""

    @property
    def is_here(self) -> bool:
        """True if the folder is on this machine."""
        return Path(str(self.path)).expanduser().is_dir()

    @property
    def count(self) -> int:
        """Number of images in it; 0 where it is not on this machine."""
        return sum(path.suffix.lower() in IMAGES for path in self._found("*"))

    @property
    def captioned(self) -> bool:
        """True if there are caption files next to its images."""
        own = self.settings.get("caption_extension")
        endings = {own} if own else {".txt", ".json", ".jsonl"}
        return any(path.suffix in endings for path in self._found("*"))

    @property
    def uncaptioned(self) -> int:
        """Number of images that have no caption file, in a folder where others have one, and no metadata.jsonl."""
        files, ending = self._found("*"), self.settings.get("caption_extension") or ".txt"
        of_images = {path.with_suffix("") for path in files if path.suffix == ending}
        if not of_images or any(path.name == "metadata.jsonl" for path in files):
            return 0
        images = (path for path in files if path.suffix.lower() in IMAGES)
        return sum(not {path, path.with_suffix("")} & of_images for path in images)

    def _found(self, pattern: str) -> list[Path]:
        """Its files, of folders inside it too where its trainer reads them."""
        folder = Path(str(self.path)).expanduser()
        if not self.is_here:
            return []
        return [*(folder.rglob if self.settings.get("recursive", True) else folder.glob)(pattern)]

    def lacks(self, word: str) -> bool:
        """True unless each of its caption files has a word in it."""
        return not self._captions or not all(word in caption for caption in self._captions)

    def number_with(self, words: Sequence[str]) -> int:
        """Number of caption files with one of some words in them."""
        return sum(any(word in caption for word in words) for caption in self._captions)

    @cached_property
    def _captions(self) -> list[str]:
        return [file.read_text(encoding="utf-8", errors="replace") for file in self._found("*.txt")]


def lay(reading: Reading, folders: Sequence[Folder]) -> None:
    """Gives each folder its place in the recipe, and says of what kind it is; how often each is taken is its weight."""
    if not folders:
        reading.assume({"data.source": "folder", "data.path": REQUIRED})
        reading.assume({f"data.{name}": value for name, value in OF_A_SOURCE.items()})
        return
    if len(folders) > 1:
        reading.assume({"data.source": "mix"})
        names: set[str] = set()
        for folder in folders:
            folder.name = _named(folder, names)
            folder.place = f"data.sources.{folder.name}"
    for folder in folders:
        captions = folder.caption if folder.caption and not folder.captioned else None
        if captions and not folder.is_here:
            folder.guesses.append(
                "captions.text is the caption of all its images, whether they have caption files or not"
            )
        values = {"source": "folder", folder.setting: folder.path, **OF_A_SOURCE, **folder.settings}
        values |= {"captions.text": captions} if captions else {}
        if values.get("captions.text") is not None:  # then nothing is read beside the images
            values = {name: value for name, value in values.items() if name not in _OF_CAPTION_FILES}
        if len(folders) == 1 and folder.repeats not in (1, 1.0):
            values["repeats"] = max(1, round(folder.repeats))
        reading.assume({f"{folder.place}.{name}": value for name, value in values.items()})
    if len(folders) > 1:
        reading.assume({"data.weights": weights(folders)})
    for folder in folders:
        _say_guesses(reading, folder, among_others=len(folders) > 1)
        if folder.caption is not None and "captions.text" not in folder.settings and (number := folder.uncaptioned):
            caption = f"the caption {folder.caption!r}" if folder.caption else "an empty caption"
            _lose_path(reading, folder, f"{number} of its images have no caption file: they are trained with {caption} "
                "there, and left out here; write files for them")  # fmt: skip


def _say_guesses(reading: Reading, folder: Folder, among_others: bool) -> None:
    """Lists the path of a folder as lost where its files, which are not on this machine, decide more than the path."""
    if folder.is_here or folder.path == REQUIRED:
        return
    counted = ["data.weights takes all folders as if they had one image each"] if among_others else []
    guesses = "; ".join([*folder.guesses, *counted])
    if guesses:
        _lose_path(reading, folder, f"its files are not on this machine: {guesses}; {WHAT_TO_DO}")


def _lose_path(reading: Reading, folder: Folder, why: str) -> None:
    """Lists the path of a folder, which is carried all the same, as lost."""
    reading.assume_over({f"{folder.place}.{folder.setting}": folder.path})
    for name in _PATHS:
        reading.refuse(f"{folder.key}.{name}", why)


def by_reference(places: Sequence[Any]) -> Any:
    """The value of `reference_dir` or `reference_column`: the place of the reference images, or of each of several."""
    names = ["reference", *(f"reference_{number}" for number in range(2, len(places) + 1))]
    return places[0] if len(places) == 1 else dict(zip(names, places, strict=True))


def _named(folder: Folder, taken: set[str]) -> str:
    """A name for a source that no other has."""
    plain = re.sub(r"\W+", "_", folder.name or Path(str(folder.path)).name).strip("_").lower() or "images"
    name = next(n for n in (plain, *(f"{plain}_{i}" for i in range(2, 10_000))) if n not in taken)
    taken.add(name)
    return name


def weights(folders: Sequence[Folder]) -> dict[str, float]:
    """Shares of the folders: images times repeats, class images as often as all others together. Where one is
    not on this machine, all are taken as equally large."""
    counted = all(folder.is_here for folder in folders)
    shares = {folder.name: folder.repeats * (max(folder.count, 1) if counted else 1) for folder in folders}
    others, regular = (sum(shares[f.name] for f in folders if f.regular == kind) for kind in (False, True))
    factor = others / regular if regular and others else 1
    return {f.name: float(f"{shares[f.name] * (factor if f.regular else 1):.6g}") for f in folders}


def updates_of(folders: Sequence[Folder], epochs: Any, batch: Any, accumulation: Any) -> str | None:
    """The updates of so many epochs, where the images are on this machine."""
    numbers = (epochs, batch or 1, accumulation or 1)
    if not all(isinstance(n, int | float) for n in numbers) or not folders or not all(f.count for f in folders):
        return None
    seen = sum(f.count * f.repeats for f in folders if not f.regular) * (1 + any(f.regular for f in folders))
    return f"{max(1, -int(-(seen * epochs) // (numbers[1] * numbers[2])))} steps"


def length(reading: Reading, key: str, path: str, folders: Sequence[Folder], sizes: tuple[Any, Any]) -> None:
    """Carries a number of epochs; a mix has none, so that they become updates there, of batches of these sizes."""
    epochs = reading.get(key)
    if epochs != REQUIRED and number(epochs) <= 0:
        raise UserError(f"{key} is {shown(epochs)}, and must be above 0", code="damaged")
    if len(folders) < 2:
        reading.carry(key, path, f"{epochs} epochs")
    elif steps := updates_of(folders, epochs, *sizes):
        reading.carry(key, path, steps, "epochs of these folders, on one device")
    else:
        reading.refuse(key, f"a mix of sources has no epochs, and its images cannot be counted from here: set {path}")


@dataclass(frozen=True)
class Keys:
    """The keys that a trainer's code reads and its converter does not: each by its name, none by a pattern."""

    version: str
    """Of the trainer's code."""
    idle: dict[str, str]
    """What sets nothing here, and why."""
    lost: dict[str, tuple[Any, str]]
    """What changes what is learnt, and nothing here does: (its usual value, or a list of several; what it is)."""

    @classmethod
    @cache
    def of(cls, trainer: str, flow: bool = False) -> "Keys":
        """From TRAINER_keys.yaml, where `{a,b}.{c,d}` is four names; `flow`: as models of flow matching read them, of
        which the section `flow` says what is otherwise."""
        table = Tables(f"{trainer}_keys")
        above = table["below"] or ""
        idle, lost = _listed(above, table)
        own_idle, own_lost = _listed(above, table["flow"] if flow else {})
        idle = {name: why for name, why in idle.items() if name not in own_lost} | own_idle
        return cls(table["version"], idle, {name: row for name, row in lost.items() if name not in own_idle} | own_lost)

    def row(self, name: str) -> str:
        """The key whose row a key has: its own, or that of the group in which it stands; empty for none."""
        parts = name.split(".")
        above = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        return next((each for each in above if each in self.names), "")

    @cached_property
    def names(self) -> frozenset[str]:
        """All of them."""
        return frozenset((*self.idle, *self.lost))


def _listed(above: str, table: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, tuple[Any, str]]]:
    """The names in the lists `idle` and `lost` of a table."""
    idle = {above + name: why for why, rows in table.get("idle", {}).items() for row in rows for name in spread(row)}
    lost = {
        above + name: (usual, why) for why, rows in table.get("lost", {}).items() for row, usual in rows.items()
        for name in spread(row)
    }  # fmt: skip
    return idle, lost


def spread(row: str) -> list[str]:
    """The names that a text with braces stands for, as a shell reads them."""
    parts = [part.split(",") for part in re.split(r"[{}]", row)]
    return ["".join(name) for name in product(*parts)]


def is_usual(value: Any, usual: Any) -> bool:
    """True for a value that is the usual one, or one of several, whether it is written as a number or as text."""
    return value is None or any(_same(value, each) for each in (usual if isinstance(usual, list) else [usual]))


def _same(value: Any, usual: Any) -> bool:
    if isinstance(value, bool) or isinstance(usual, bool):
        return str(value).lower() == str(usual).lower()
    try:
        return float(value) == float(usual)
    except (TypeError, ValueError):
        return value == usual or (usual is None and str(value).lower() in ("", "none", "null"))


def finish(reading: Reading, tables: Tables) -> None:
    """Says of each key that is left why it sets nothing here, or what is lost by it; fills in what the trainer does
    where no key says otherwise."""
    keys = Keys.of(tables.path.stem, models.is_flow(str(reading.values.get("model.family", "sd"))))
    for key, value in list(reading.rest.items()):
        name = keys.row(generic(key))
        if name in keys.idle:
            reading.notice(key, keys.idle[name])
        elif name in keys.lost:
            usual, why = keys.lost[name]
            if is_usual(value, usual) and name == generic(key):
                reading.notice(key, "its usual value there, which asks for nothing more")
            else:
                reading.refuse(key, why)
        elif value in (None, {}, []):
            reading.notice(key, "nothing is given")
        else:
            reading.refuse(key, f"{keys.version} reads no such key: misspelt, or of another version")
    reading.assume(tables["unasked"])

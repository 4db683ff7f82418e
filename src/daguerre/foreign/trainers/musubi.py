"""musubi-tuner's configs and commands: what several keys mean together. Each by itself is in musubi.yaml.

Options that it has in common with sd-scripts mean what they mean there, and are read by kohya.py.
"""

from pathlib import Path
from typing import Any

from daguerre import documents
from daguerre.errors import UserError
from daguerre.foreign import base_models as models
from daguerre.foreign import flows, kohya_saves, peers
from daguerre.foreign.peers import Folder
from daguerre.foreign.reader import REQUIRED, Reading, Tables
from daguerre.foreign.trainers import kohya

TRAINER = "musubi-tuner"
TABLES = Tables("musubi")
PLACES = ("general.", "datasets.*.")
"""Where settings of data sets stand."""


def convert(reading: Reading) -> None:
    """Reads the options of a program that trains, with the data sets that they name."""
    peers.check_switches(reading, TABLES["switches"])
    family = _model(reading)
    reading.assume({"run_name": REQUIRED, "output_dir": REQUIRED})
    folders = _folders(reading)
    if peers.asks(reading.get("dataset_config")) and not folders:
        reading.refuse("dataset_config", peers.NO_FILE)
    peers.lay(reading, folders)
    most = max((_references(reading, folder, family) for folder in folders), default=0)
    reading.assume_over({"model.references": most} if most else {})
    kohya.shadowed(reading, [folder.key for folder in folders], {})
    _sizes(reading, [folder.key for folder in folders])
    flows.sd_scripts(reading, "sigma", 1.0)
    flows.precision(reading, "mixed_precision")
    sizes = (kohya.first(reading, "batch_size", 1, PLACES), reading.get("gradient_accumulation_steps"))
    for key in kohya.everywhere(reading, "batch_size", PLACES):
        reading.carry(key, "training.per_device_batch_size")
    kohya.schedule(reading, folders, sizes)
    kohya.optimizer(reading)
    kohya_saves.lengths(reading, folders, sizes)
    reading.take(TABLES["last"])
    peers.sample_prompts(reading)
    peers.carry_known(reading, [*peers.OWN, *TABLES["alias"]])
    reading.take(TABLES["otherwise"])
    peers.finish(reading, TABLES)
    flows.finish(reading)


def _model(reading: Reading) -> str:
    """The base, its parts that are files of their own, and what of it is trained. The family."""
    module, program = (str(reading.get(key) or "") for key in ("network_module", "program"))
    name = module.rpartition(".lora_")[2] or program.partition("_train")[0]
    older = next((key for key in TABLES["older_versions"] if reading.get(key) is True), "")
    version = str(reading.get("model_version") or TABLES["older_versions"].get(older, ""))
    bases = TABLES["versions"] | TABLES["networks"]
    place = TABLES["versions"].get(version) or TABLES["networks"].get(name)
    if version in TABLES["others"] or (name and name not in TABLES["networks"]):
        raise peers.not_there(TABLES["others"].get(version, f"a model of the kind {name}"), TRAINER)
    if place is None:
        what = "data sets alone" if "dit" not in reading.whole else "no network_module and no model_version"
        raise UserError(
            f"this file of {TRAINER} has {what}, so that it does not say which model is trained: write the whole "
            f"command, with the name of its program, into a file that ends in .sh; known are {', '.join(bases)}"
        )
    family = models.base(place).family
    reading.assume({"model.family": family, "model.pretrained_model_name_or_path": place, "objective.name": "flow"})
    for key in ("model_version", older):
        reading.carry(key, "model.pretrained_model_name_or_path", place)
    for key, path in TABLES["parts"].items():
        if peers.asks(reading.get(key)):
            reading.carry(key, path)
    if peers.asks(module):
        kohya.network(reading, family, peers.denoiser(family))
    reading.take(TABLES["network"])
    return family


def _folders(reading: Reading) -> list[Folder]:
    """The data sets: folders of images, or lists of images with their captions."""
    found = []
    for prefix in reading.numbered("datasets"):
        folder, table = (reading.get(f"{prefix}.image_{name}") for name in ("directory", "jsonl_file"))
        if folder is None and table is None:
            reading.take({"*": {"refused": "videos are not trained on"}}, f"{prefix}.")
            continue
        ending = _inherited(reading, prefix, "caption_extension")
        settings: dict[str, Any] = {"recursive": False, "captions.lines": "joined"}
        settings |= {"caption_extension": ending} if ending else {}
        if table is not None:
            settings = {"source": "jsonl", "image_column": "image_path", "caption_column": "caption"}
            settings |= _reference_columns(reading, str(table))
        repeats = peers.number(_inherited(reading, prefix, "num_repeats", 1))
        found.append(Folder(prefix, folder if table is None else table, repeats, settings=settings))
        for name in ("image_directory", "image_jsonl_file"):
            reading.within(f"{prefix}.{name}", "path of its source")
    return found


def _reference_columns(reading: Reading, table: str) -> dict[str, Any]:
    """The columns of control images in a list of images, of a family that reads reference images: those of its first
    line, or the one that there is where the list is not on this machine."""
    if models.references(str(reading.values["model.family"])) is None:
        return {}
    try:
        with Path(table).expanduser().open(encoding="utf-8") as file:
            first = documents.parse(file.readline())
    except (OSError, ValueError):
        first = {"control_path": ""}
    if not isinstance(first, dict):
        return {}
    found = [name for name in ("control_path", "control_path_0") if name in first]
    found += [name for number in range(1, 10) if (name := f"control_path_{number}") in first]
    return {"reference_column": peers.by_reference(found)} if found else {}


def _references(reading: Reading, folder: Folder, family: str) -> int:
    """Carries the folder of control images of a data set, which are reference images here. The most of an image."""
    columns = folder.settings.get("reference_column")
    if columns is not None:
        return 1 if isinstance(columns, str) else len(columns)
    key = f"{folder.key}.control_directory"
    place = reading.get(key)
    if not peers.asks(place):
        return 0
    if models.references(family) is None:
        reading.refuse(key, f"the family {family} reads no reference images")
        return 0
    there = Path(str(place)).expanduser()
    if any(each.stem.endswith(("_0", "_0000")) for each in (there.iterdir() if there.is_dir() else ())):
        way = "move the pictures of each number to a folder of its own, without the number in their names, and set"
        reading.refuse(key, f"several pictures of an image are numbered there: {way} reference_dir to these folders")
        return 1
    kept = reading.get(f"{folder.key}.no_resize_control") is True
    why = "" if kept else "they are brought to the size of their image there, and keep their own here"
    reading.carry(key, f"{folder.place}.reference_dir", why=why)
    reading.notice(f"{folder.key}.no_resize_control", "each keeps its size" if kept else "in reference_dir")
    return 1


def _inherited(reading: Reading, prefix: str, name: str, default: Any = None) -> Any:
    """A setting of a data set, or that of [general]."""
    return reading.get(f"{prefix}.{name}", reading.get(f"general.{name}", default))


def _sizes(reading: Reading, prefixes: list[str]) -> None:
    """One resolution for all data sets: an area with buckets, without them the one shape that all images are cut to."""
    on = any(reading.get(key) is True for key in kohya.everywhere(reading, "enable_bucket", PLACES))
    given = {str(_inherited(reading, prefix, "resolution", [960, 544])) for prefix in prefixes}
    first = kohya.first(reading, "resolution", [960, 544], PLACES)
    area = kohya.side(first)
    for key in kohya.everywhere(reading, "resolution", PLACES):
        if len(given) <= 1 and area:
            reading.carry(key, "data.resolution", area)
        reading.refuse(key, "data sets of several sizes are not supported; data.buckets.resolutions sorts by size")
    reading.assume({"data.resolution": area or REQUIRED})
    flat = isinstance(first, list) and area and first[0] != first[-1]
    one = [f"{first[0]}/{first[-1]}"] if flat else "square"
    for key in kohya.everywhere(reading, "enable_bucket", PLACES):
        reading.carry(key, "data.buckets.aspects", "auto" if on else one)
    reading.assume({"data.buckets.aspects": "auto" if on else one})

"""The JSON of kohya's GUI (bmaltais/kohya_ss): its fields to the arguments of sd-scripts, as the GUI makes them.

kohya.py reads the arguments; what became of one is said of the field that it came from. Each field by itself is in
kohya_gui.yaml.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from daguerre.errors import UserError
from daguerre.foreign import files, kohya_saves, peers
from daguerre.foreign.names import lora
from daguerre.foreign.reader import Line, Reading, Tables
from daguerre.foreign.trainers import kohya
from daguerre.formatting import shown

TRAINER = "kohya's GUI"
TABLES = Tables("kohya_gui")
OFF = (None, "", False)


@dataclass
class _Arguments(Reading):
    """The arguments that the GUI would give to a program of sd-scripts."""

    defaulted: frozenset[str] = frozenset()
    """Those of fields that the file does not have: what they set is what the GUI does without being asked."""

    def carry_all(self, key: str, values: Mapping[str, Any], why: str = "") -> None:
        super().carry_all(key, values, why)
        if key in self.defaulted:
            self.assumed |= values


@dataclass
class _Fields:
    """The fields of a file, with the GUI's defaults for those that it lacks, and what is passed on of them."""

    reading: Reading
    tab: str
    arguments: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, list[str]] = field(default_factory=dict)
    """Fields by the argument that they are passed on in."""

    def get(self, name: str) -> Any:
        usual = TABLES["defaults"] | TABLES["defaults_of"].get(self.tab, {})
        value = self.reading.get(name)
        value = usual.get(name) if value is None else value
        if isinstance(value, list):
            raise UserError(f"{name} is {shown(value)}, and must be one value", code="damaged")
        return _number(value) if name in _words("numbers") and value is not None else value

    def put(self, argument: str, value: Any, *names: str) -> None:
        """Passes a value on, unless the GUI leaves it out."""
        keeps = self.tab in ("dreambooth", "finetune") and argument in TABLES["kept_at_0"] and value is not False
        self.origin.setdefault(argument, []).extend(names)
        if value not in ([], {}) and (value not in OFF or (keeps and value == 0 and value != "")):
            self.arguments[argument] = value

    @property
    def defaulted(self) -> frozenset[str]:
        """Arguments that come from no field of the file."""
        found = {name for name, origin in self.origin.items() if not any(key in self.reading.whole for key in origin)}
        return frozenset(found - self.reading.whole.keys())


def convert(reading: Reading) -> None:
    peers.check_switches(reading, ("sdxl", "sdxl_checkbox"))
    for key, what in TABLES["others"].items():
        if reading.get(key) is True:
            raise peers.not_there(f"a model of {what}", TRAINER)
    fields = _Fields(reading, _tab(reading))
    for name in (*_words("same"), *TABLES["renamed"]):
        passed = name not in _listed(TABLES["not_passed"].get(fields.tab, []))
        if passed or name not in reading.rest:
            fields.put(TABLES["renamed"].get(name, name), fields.get(name) if passed else None, name)
        else:
            reading.notice(name, "this tab of the GUI passes it on to no program")
    _model(fields)
    _lengths(fields)
    _noise(fields)
    for name in TABLES["lists"]:
        fields.put(name, str(fields.get(name) or "").replace('"', "").split(), name)
    lost = _network(fields) if fields.tab == "lora" else {}
    _samples(fields)
    _extra(fields)
    reading.take(TABLES["idle"])
    inner = _inner(fields)
    reading.values, reading.assumed = inner.values | reading.values, inner.assumed
    _tell(fields, inner.lines, lost)


def _tab(reading: Reading) -> str:
    """The tab that a file is of, by a field that it alone has."""
    found = (tab for tab, names in TABLES["tabs"].items() if any(name in reading.whole for name in names))
    return next(found, "dreambooth")


def _words(table: str) -> list[str]:
    return _listed(TABLES[table])


def _listed(lines: Sequence[Any]) -> list[str]:
    return [name for line in lines for name in (line if isinstance(line, list) else [line])]


def _number(value: Any) -> Any:
    """The number of a field, which older versions wrote as text; 0 for another text. UserError for one that is not
    finite."""
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        return 0
    if not math.isfinite(number):
        raise UserError(f"{value} is no finite number", code="damaged")
    return int(number) if number == int(number) and "e" not in value.lower() and "." not in value else number


def _model(fields: _Fields) -> None:
    """The family, what is trained of it, and the attention."""
    attention = fields.get("xformers")
    attention = "xformers" if attention is True else attention
    named = attention if attention in ("xformers", "sdpa") else ""
    fields.put(named or "xformers", bool(named), "xformers")
    if not fields.get("caption_extension"):
        fields.put("caption_extension", ".caption", "caption_extension")
    if fields.reading.get("use_8bit_adam") is True and "optimizer" not in fields.reading.whole:
        fields.put("optimizer_type", "AdamW8bit", "use_8bit_adam")
    rates = [fields.get(f"learning_rate_te{number}") or 0 for number in (1, 2)]
    if fields.tab == "dreambooth":  # train_db.py trains the text encoder unless it is told not to
        on = any(rates) if _is_sdxl(fields.reading) else fields.get("stop_text_encoder_training") != -1
        fields.put("train_text_encoder", on)
        if fields.get("stop_text_encoder_training") == -1:
            fields.arguments.pop("stop_text_encoder_training", None)
    if fields.tab == "lora" and (fields.get("stop_text_encoder_training") or 0) > 0:
        fields.arguments.pop("stop_text_encoder_training")
        fields.reading.notice("stop_text_encoder_training", "the GUI ignores it for networks")
    for name in ("learning_rate_te", "learning_rate_te1", "learning_rate_te2"):
        if (name == "learning_rate_te") is _is_sdxl(fields.reading):
            fields.arguments.pop(name, None)
            fields.reading.notice(name, f"of {'Stable Diffusion 1 and 2' if name[-1] == 'e' else 'SDXL'} alone")
    fields.put("use_object_template", fields.get("template") == "object template", "template")
    fields.put("use_style_template", fields.get("template") == "style template")


def _is_sdxl(reading: Reading) -> bool:
    return reading.get("sdxl") is True or reading.get("sdxl_checkbox") is True


def _lengths(fields: _Fields) -> None:
    """The run's length: updates, else epochs, which the GUI counts itself; the warm-up, a percentage of it."""
    steps, epochs = fields.get("max_train_steps") or 0, fields.get("max_train_epochs") or 0
    counted = not fields.get("dataset_config")
    if not steps and not epochs and counted:
        fields.put("max_train_epochs", fields.get("epoch"), "epoch")
    else:
        fields.reading.notice("epoch", f"{'max_train_epochs' if epochs else 'max_train_steps'} is the run's length")
    if fields.tab == "finetune" and fields.get("flip_aug") and counted and not epochs:  # as its two images were one
        for name in ("max_train_steps", "max_train_epochs"):
            if name in fields.arguments:
                fields.arguments[name] = math.ceil(fields.arguments[name] / 2)
    warmup, percent = fields.get("lr_warmup_steps") or 0, fields.get("lr_warmup") or 0
    fields.arguments.pop("lr_warmup_steps", None)
    if warmup:
        fields.put("lr_warmup_steps", int(warmup))
        fields.reading.notice("lr_warmup", "lr_warmup_steps counts")
    else:
        fields.put("lr_warmup_steps", percent / 100)


def _noise(fields: _Fields) -> None:
    """One kind of noise of two, in the tab of networks."""
    kinds: dict[str, tuple[str, ...]] = {
        "Original": ("noise_offset", "noise_offset_random_strength", "adaptive_noise_scale")
    }
    kinds |= {"Multires": ("multires_noise_iterations", "multires_noise_discount")}
    chosen = fields.get("noise_offset_type") or "Original"
    for kind, names in kinds.items() if fields.tab == "lora" else ():
        for name in names if kind != chosen else ():
            fields.arguments.pop(name, None)
            fields.reading.notice(name, f"no effect with noise_offset_type={chosen}")
    if not fields.get("multires_noise_iterations"):
        fields.arguments.pop("multires_noise_discount", None)
        fields.reading.notice("multires_noise_discount", "no effect: multires_noise_iterations is 0")


def _network(fields: _Fields) -> dict[str, str]:
    """The network of a `LoRA_type`; the fields that ask for what is not here, and their values."""
    name = str(fields.get("LoRA_type"))
    found = TABLES["network"].get(TABLES["older"].get(name, name))
    if found is None:
        raise peers.not_there(f"a network of LoRA_type {name}", TRAINER)
    called = {key: TABLES["arguments_of_network"].get(key, key) for key in found["fields"]}
    called |= {key: key for key in fields.reading.whole if key.startswith("loraplus_")}
    given = {name: str(fields.get(key)) for key, name in called.items() if fields.get(key) not in OFF}
    given |= {"algo": found["algo"]} if "algo" in found else {}
    lost = lora.lost(given)
    fields.put("network_module", found["module"], "LoRA_type")
    fields.put("network_args", [f"{key}={value}" for key, value in given.items() if key not in lost], *called)
    for key in {key for each in TABLES["network"].values() for key in each["fields"]} - set(called):
        fields.reading.notice(key, f"not of LoRA_type {name}")
    for key in ("train_on_input", "constrain", "rescaled", "unit"):
        fields.reading.notice(key, f"not of LoRA_type {name}")
    text, unet = (fields.get(key) or 0 for key in ("text_encoder_lr", "unet_lr"))
    fields.arguments.pop("text_encoder_lr", None)
    fields.put("text_encoder_lr", [float(text)] * 2 if text else None)
    fields.put("network_train_unet_only", bool(unet and not text), "text_encoder_lr")
    fields.put("network_train_text_encoder_only", bool(text and not unet), "unet_lr")
    older = fields.reading.get("lora_network_weights")
    fields.put("network_weights", older or fields.get("network_weights"), "lora_network_weights")
    return {key: lost[name] for key, name in called.items() if name in lost}


def _samples(fields: _Fields) -> None:
    """Prompts of the images that a run makes: the lines of a field, each with options behind it."""
    reading, text = fields.reading, str(fields.get("sample_prompts") or "")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    if not lines or not (fields.get("sample_every_n_steps") or fields.get("sample_every_n_epochs")):
        reading.note(["sample_prompts", "sample_sampler"], "no images are made there")
        fields.arguments.pop("sample_sampler", None)
    kohya_saves.samples(reading, fields.get)
    reading.note(["sample_every_n_steps", "sample_every_n_epochs"], "images are generated at each save")
    reading.carry_all("sample_prompts", *peers.prompts(lines))


def _extra(fields: _Fields) -> None:
    """`additional_parameters`: options of the command line, which count before fields."""
    given = files.options(files.words_of(str(fields.get("additional_parameters") or "").replace('"', "")))
    if not given:
        fields.reading.notice("additional_parameters", "nothing is given")
    for name, value in given.items():
        fields.put(name, value, "additional_parameters")


def _inner(fields: _Fields) -> _Arguments:
    """The arguments, with the data sets of the folders, read as sd-scripts' are."""
    beside = {key: value for key, value in fields.reading.whole.items() if key.startswith(("datasets.", "general."))}
    for key in beside:
        fields.origin[key] = [key]
    inner = _Arguments(fields.arguments | beside, defaulted=fields.defaulted)
    kohya.convert(inner, "sdxl" if _is_sdxl(fields.reading) else "sd")
    inner.finish()
    return inner


def _tell(fields: _Fields, lines: Sequence[Line], lost: Mapping[str, str]) -> None:
    """Says of each field what became of the argument that it was passed on in."""
    reading, said = fields.reading, {line.key: line for line in lines}
    for key, value in lost.items():
        reading.refuse(key, f"{shlex.quote(value)} is not supported")
    for argument, names in fields.origin.items():
        for name in names:
            if line := said.get(argument):
                reading.echo(name, line)
    for names in fields.origin.values():
        for name in names:
            reading.notice(name, "the GUI passes nothing on for this value")

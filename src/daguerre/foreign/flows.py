"""Models of flow matching in configs of other trainers: how times are drawn there, and in which notation guidance is.

Times are noise levels s, of x = (1 - s) x0 + s eps. All of these trainers take the plain squared error of eps - x0.
"""

import math
from collections.abc import Sequence
from typing import Any

from daguerre import plugins
from daguerre.foreign import base_models as models
from daguerre.foreign import peers
from daguerre.foreign.reader import REQUIRED, Reading, leaves
from daguerre.objectives.settings import ResolutionShiftSettings

TIMES, SCHEDULE = "objective.times", "objective.schedule"
BY_SIZE = f"{SCHEDULE}.resolution_shift"
TOKEN_PX = 16
"""Side in pixels of the square of an image that is one token, of all these models."""
_LATENT_PX = {"flux2": 16, "qwen_image_21": 16}
"""Side of the square that is one latent, where it is not 8: there these latents are what a token is."""
_LINES = {"flux_shift": (4096, 1.15), "qwen_shift": (8192, 0.9), "krea2_shift": (6400, 1.15)}
_LINES["flux2_shift"] = _LINES["flux_shift"]
"""kohya's shifts that follow the size: the number of tokens at the upper end of a line in ln shift, and ln shift there.
The lower end is 0.5 at 256 tokens."""
_WEIGHTED = ("sigma_sqrt", "cosmap")
"""kohya's weighting_scheme that weights the loss, whatever the law of times is."""


def times(law: str, mean: float = 0.0, std: float = 1.0) -> dict[str, Any]:
    """The law of training times: uniform, or the sigmoid of a normal number."""
    usual = {"name": law} | {name: value for name, value, off in (("mean", mean, 0), ("std", std, 1)) if value != off}
    return {f"{TIMES}.{name}": value for name, value in usual.items()}


def shift(factor: Any) -> dict[str, Any]:
    """One shift of times for all sizes."""
    return {f"{SCHEDULE}.shift": factor}


def own_shift(reading: Reading, dynamic: bool = False) -> dict[str, Any]:
    """The shift of the base's own scheduler; `dynamic`: by size, with FLUX's numbers where its scheduler has none."""
    config = _scheduler(reading) | ({"use_dynamic_shifting": True} if dynamic else {})
    # Late: it loads torch, before which `train` refuses a second run on one folder.
    from daguerre.models.schedulers.flow_matching import flow_of

    return {path: value for path, value in leaves(flow_of(config, TOKEN_PX), "objective") if "shift" in path}


def of_tokens(high: tuple[float, float], token_px: int) -> dict[str, Any]:
    """A shift by size, from 0.5 at 256 tokens to `high` (tokens, ln shift)."""
    tokens, mu = high
    line = {"low_px": 16.0 * token_px, "high_px": math.sqrt(tokens) * token_px, "low_mu": 0.5, "high_mu": mu}
    fields = ResolutionShiftSettings.model_fields
    given = {name: value for name, value in line.items() if value != fields[name].default}
    return {f"{BY_SIZE}.{name}": value for name, value in {"name": "linear_mu", **given}.items()}


def sd_scripts(reading: Reading, usual: str, usual_shift: float) -> None:
    """`timestep_sampling` of kohya's programs, with the numbers that it reads; `usual`: where it is not given."""
    kind, scheme = (
        str(reading.get(key, off)) for key, off in (("timestep_sampling", usual), ("weighting_scheme", "none"))
    )
    std = peers.number(reading.get("sigmoid_scale"), 1)
    moved = shift(peers.number(reading.get("discrete_flow_shift"), usual_shift))
    law = times("uniform") if kind in ("uniform", "sigma") else times("logit_normal", std=std)
    if kind == "sigma" and scheme == "logit_normal":  # the place in a list of levels that falls from 1 to 0
        law = times(
            "logit_normal", -peers.number(reading.get("logit_mean"), 0), peers.number(reading.get("logit_std"), 1)
        )
    if kind in _LINES:
        latent = _LATENT_PX.get(str(reading.values["model.family"]), 8)
        moved = of_tokens(_LINES[kind], latent if kind == "flux2_shift" else 2 * latent)
    elif kind not in ("sigma", "shift"):
        moved = {}
    values = law | moved
    if kind not in ("sigma", "uniform", "sigmoid", "shift", *_LINES):
        reading.refuse("timestep_sampling", "this law of times is not available: set objective.times")
    if scheme in _WEIGHTED or (scheme == "mode" and kind == "sigma"):
        reading.refuse("weighting_scheme", "this weight, or law, of noise levels is not available for flow")
    reading.assume(values)
    reading.carry_all("timestep_sampling", values)
    reading.notice(
        "discrete_flow_shift", f"in {SCHEDULE}" if kind in ("sigma", "shift") else f"{kind} does not read it"
    )
    logit = kind == "sigma" and scheme == "logit_normal"
    reading.note(
        ["logit_mean", "logit_std"], f"in {TIMES}" if logit else "weighting_scheme=logit_normal alone reads it"
    )
    reading.notice("mode_scale", "weighting_scheme=mode alone reads it")
    reading.notice("sigmoid_scale", f"in {TIMES}" if kind not in ("sigma", "uniform") else f"{kind} does not read it")
    reading.notice("weighting_scheme", "the loss is not weighted")


def guided(family: str, scale: Any) -> Any:
    """A guidance scale neg + scale (pos - neg) in the notation of a family's own pipeline."""
    off = getattr(plugins.find("families", family).Settings.guidance, "off", 1.0)
    return scale - 1 + off if isinstance(scale, int | float) else scale


def negative(reading: Reading, family: str, key: str, scale: Any) -> None:
    """Leaves out a negative prompt where nothing is computed for it: at this scale, or in a network that guides
    itself."""
    guidance = plugins.find("families", family).Settings.guidance
    if peers.asks(reading.get(key)) and not guidance.runs_null(peers.number(guided(family, scale), 4.0)):
        reading.notice(key, "images are generated without an unguided side, which alone reads it")


def precision(reading: Reading, key: str) -> None:
    """Takes bf16 in place of float16, which no model of flow matching here computes in."""
    if str(reading.get(key)).lower() in ("fp16", "float16", "float_16"):
        reading.assume_over({"training.mixed_precision": "bf16"})
        reading.refuse(key, "activations of these models exceed the range of float16: bf16 is set")


def embedded(reading: Reading, family: str, key: str) -> None:
    """Carries the guidance that a network reads as a number while it trains, of a family that has one."""
    if "training_guidance" in plugins.find("families", family).Settings.model_fields:
        reading.carry(key, "model.training_guidance")
    reading.notice(key, "this network reads no guidance")


def cached(reading: Reading, images: Sequence[str], texts: Sequence[str]) -> None:
    """Keeps what is kept there: latents of images, by these keys (or patterns of keys), and features of captions."""
    kinds = {"images": images, "texts": texts}
    found = {kind: [key for each in keys for key in reading.keys(each)] for kind, keys in kinds.items()}
    on = {kind: [key for key in keys if reading.get(key) is True] for kind, keys in found.items()}
    for kind, keys in on.items():
        other = next(each for each in kinds if each != kind)
        for key in keys:
            reading.carry_all(key, {"cache.path": "auto"} | ({} if on[other] else {f"cache.{other}": False}))
    for keys in found.values():
        reading.note(keys, "another key keeps them, or nothing is kept")


def finish(reading: Reading) -> None:
    """Says what these trainers do with such models unasked: the base of a LoRA is stored in 16 bits, and images are
    generated with the shift of the base's pipeline, which may not be that of the training."""
    family, size = str(reading.values["model.family"]), reading.values.get("data.resolution")
    if "adapters.lora.name" in reading.values and reading.values.get("training.mixed_precision") in ("bf16", "auto"):
        reading.assume({"training.weights_dtype": "bfloat16"})
        frozen = [n for n in peers.encoders(family) if reading.values.get(f"adapters.lora.ranks.{n}") is None]
        reading.assume({"training.frozen_precision": "bf16"} if frozen else {})
    given = {path.removeprefix("objective."): value for path, value in reading.values.items()}
    settings = plugins.find("families", family).Settings
    sampled = settings.schedulers.sampling_of(_scheduler(reading))
    own = {path.removeprefix("objective."): value for path, value in own_shift(reading).items()}
    if not sampled and {path: value for path, value in given.items() if path in own} != own and isinstance(size, int):
        line = {path.rpartition(".")[2]: value for path, value in own.items() if "resolution_shift" in path}
        found = ResolutionShiftSettings.model_validate(line).factor(size**2) if line else own["schedule.shift"]
        sampled = {"shift": float(f"{found:.6g}")}
    reading.assume({f"sampling.{name}": value for name, value in sampled.items()})
    if terminal := _scheduler(reading).get("shift_terminal"):
        reading.assume({f"{SCHEDULE}.terminal": terminal})


def _scheduler(reading: Reading) -> dict[str, Any]:
    """The config of the base's scheduler, or of the family's first base."""
    place = reading.values.get("model.pretrained_model_name_or_path", REQUIRED)
    family = str(reading.values["model.family"])
    own = place if models.base(place).family == family else models.of_family(family)
    return models.scheduler(models.numbers(own)) or {}

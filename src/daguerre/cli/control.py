"""Ask a run that trains to save, sample, evaluate, pause or stop.

usage: daguerre control RUN ACTION [key=value ...]

RUN is the folder of a run, or its address in an object store. The run looks between two updates, so this works for one
that trains anywhere: in another terminal, as a job of SLURM, on another machine. The weights that it trains are the
same to the bit, whatever is asked. The command waits for the answer.

  daguerre control runs/mine save          a checkpoint now, with images and export
  daguerre control runs/mine sample prompt="a red fox" seed=3      images now, into samples/asked/
  daguerre control runs/mine evaluate      the loss on held-out samples, and the metric of the data, now
  daguerre control runs/mine change prompts='["a fox", "a hen"]'   other prompts and settings of sampling from here on
  daguerre control runs/mine pause         no update until `continue`; the model stays in memory, and samples at will
  daguerre control runs/mine continue
  daguerre control runs/mine release       saves, frees the device and ends: `daguerre train` (or the queue) goes on
  daguerre control runs/mine stop          the same, for good

Options
  prompt, prompts, sampler, num_inference_steps, guidance_scale, height ...   settings of `sampling`, for sample and
                    change; what is left out is as in the recipe
  strength          of adapters, for sample: 0 is the base, 1 (the default) what was trained
  within            seconds after which an action that the run has not taken is taken back, 600 by default
"""

import difflib
from typing import Any

from daguerre import errors
from daguerre.checkpoint.actions import EXPIRES_SECONDS, KINDS, WITH_VALUES, Kind
from daguerre.config import options, overrides
from daguerre.errors import UserError
from daguerre.remote import actions
from daguerre.samplers.settings import SamplingSettings


def run(arguments: list[str]) -> int:
    """Exit code 0 if it was done; UserError, also for what the run refuses."""
    words = options.split(arguments)
    if len(words.bare) != 2:
        given = " ".join(words.bare) or "nothing"
        raise UserError(f"`daguerre control` takes a run and an action, you gave {given}; actions: {', '.join(KINDS)}")
    place, name = words.bare
    if name not in KINDS:
        raise UserError(f"there is no action {name!r}: choose {', '.join(KINDS)}", code="unknown")
    kind: Kind = next(each for each in KINDS if each == name)
    values = _values(kind, words.overrides)
    seconds = float(values.pop("within", EXPIRES_SECONDS))
    answer = actions.wait(place, actions.ask(place, kind, values, seconds), seconds)
    if answer.state == "refused":
        raise UserError(f"{place}: {kind}: {answer.reason}", code="failed")
    print(f"{kind}: {answer.reason}")
    return errors.DONE


def _values(kind: Kind, given: tuple[str, ...]) -> dict[str, Any]:
    """The values of `key=value`, typed as the settings are. UserError for a key that has no effect."""
    kinds = {name: field.annotation for name, field in SamplingSettings.model_fields.items()} | {"prompt": str}
    kinds |= {"strength": float} if kind == "sample" else {}
    kinds = {"within": float} | (kinds if kind in WITH_VALUES else {})
    values: dict[str, Any] = {}
    for override in given:
        key, text = overrides.pair(override)
        key = key.removeprefix("sampling.")
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, n=1)
            meant = f"; did you mean {near[0]}?" if near else f": there are {', '.join(kinds)}"
            raise UserError(f"{kind} has no option {key}{meant}", code="unknown")
        values[key] = overrides.typed(text, kinds[key])
    if "within" in values and not (isinstance(values["within"], int | float) and values["within"] > 0):
        raise UserError(f"within={values['within']}: give seconds, a number above 0")
    if (prompt := values.pop("prompt", None)) is not None:
        if "prompts" in values:
            raise UserError("prompt and prompts: give one of them", code="conflict")
        values["prompts"] = [prompt]
    if kind == "change" and not values.keys() - {"within"}:
        raise UserError("change: give the settings, such as prompts='[\"a fox\"]' or guidance_scale=4", code="missing")
    return values

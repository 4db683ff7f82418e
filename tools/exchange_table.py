#!/usr/bin/env python3
"""Measures the exchange table of docs/adapters.md: LoRAs of every kind, as other programs apply what we write.

    .venv/bin/python tools/exchange_table.py            # prints the table
    .venv/bin/python tools/exchange_table.py --write    # puts it into docs/adapters.md, between its marks

For each case a tiny SD and a tiny SDXL get additions with random numbers, which are exported as a run exports them.
Each program gives the merged weights of the layers that it changes: diffusers and peft themselves, ComfyUI and
sd-scripts by their formulas (tests/support/foreign_readers.py). A cell compares them with the weights that the trained
networks have: `exact` to within 2e-6 of the largest change of the weights, else the largest difference as a share of
it, or how many of the changed layers the program finds.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "src")]

import foreign_readers as readers  # noqa: E402
import torch  # noqa: E402
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline  # noqa: E402
from tiny_models import write_sd, write_sdxl  # noqa: E402

from daguerre.assembly.parts import Components, build  # noqa: E402
from daguerre.config import config as configs  # noqa: E402
from daguerre.models.lora_files import forms  # noqa: E402
from daguerre.models.lora_files.read import read  # noqa: E402

PIPELINES: dict[str, Any] = {"sd": StableDiffusionPipeline, "sdxl": StableDiffusionXLPipeline}
ENCODERS = {"sd": ["text_encoder"], "sdxl": ["text_encoder", "text_encoder_2"]}
CONV, MIXED = "adapter.targets=attention+ff+conv", 'adapter.rank_pattern={"attn2.to_?": 3, "mid_block.*": 2}'
TEXTS, ALL = "text encoders", "all layers"
CASES: dict[str, tuple[str, ...]] = {
    "alpha = rank": (),
    "alpha ≠ rank": ("adapter.alpha=2.5",),
    "mixed ranks": (MIXED, "adapter.alpha=2.5"),
    "mixed alphas": ('adapter.alpha_pattern={"attn2.to_?": 6, "ff.net.2": 1.5}', "adapter.targets=attention+ff"),
    "convolutions": (CONV, MIXED, "adapter.alpha=2.5"),
    TEXTS: ("adapter.alpha=2.5", "adapter.ranks.text_encoder=2"),
    ALL: ("adapter.alpha=2.5", "adapter.targets=all"),
    "rsLoRA": ("adapter.kind=rslora", "adapter.alpha=2.5"),
    "DoRA": ("adapter.kind=dora", "adapter.alpha=2.5"),
    "LoHa": ("adapter.kind=loha", "adapter.alpha=2.5"),
    "LoKr": ("adapter.kind=lokr", "adapter.alpha=2.5"),
}
FILES = {
    "kohya.safetensors": ("diffusers", "ComfyUI", "sd-scripts"),
    "pytorch_lora_weights.safetensors": ("diffusers", "ComfyUI"),
    "": ("peft",),
}
"""The files of a run, and the programs that read each; "" are peft's folders."""
HEADER = [f"`{name}`: {reader}" if name else f"folders: {reader}" for name, own in FILES.items() for reader in own]
EXACT = 2e-6
BEGIN, END = "<!-- exchange table: tools/exchange_table.py --write -->", "<!-- end of the exchange table -->"
Measured = dict[str, str]
"""Cells by column."""


def trained(kind: str, base: Path, case: str) -> Components:
    """A model with additions that have an effect."""
    given = [f"model.pretrained_model_name_or_path={base}", "adapter.name=lora", "adapter.rank=4", *CASES[case]]
    given += [f"adapter.ranks.{name}=2" for name in ENCODERS[kind] if case in (TEXTS, ALL)]
    tree = {
        "run_name": "x",
        "model": {"family": kind},
        "objective": {"name": "eps"},
        "data": {"source": "folder", "path": str(base), "resolution": 16},
        "training": {"duration": "1 steps", "global_batch_size": 1},
    }
    parts = build(configs.load("lora", [*dict.fromkeys(given)], whole=tree).config, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in parts.net.named_parameters():
            if name in parts.attached.names:
                p.add_(torch.randn(p.shape, generator=generator) * 0.1)
    return parts


def measured(kind: str, base: Path, case: str, folder: Path) -> dict[str, tuple[float, int, int] | str]:
    """By column: the largest difference as a share, layers found, and all of them; or why there is none."""
    parts = trained(kind, base, case)
    parts.attached.export(folder, parts.objective, None)  # type: ignore[arg-type]
    components = ["unet", *ENCODERS[kind]]
    before = readers.weights_of(PIPELINES[kind].from_pretrained(base), components)
    with parts.attached.merged():
        model: Any = type("Model", (), parts.family.components)
        wanted = readers.changed(before, readers.weights_of(model, components))
    peft = folder
    if not any(folder.glob("*/adapter_config.json")):  # a run writes peft's folders of kinds alone that diffusers lacks
        plain = PIPELINES[kind].from_pretrained(base)
        networks = {name: getattr(plain, name) for name in components}
        peft = folder.with_name(f"{folder.name}, peft")
        forms.write("peft", peft, networks, read(folder / "pytorch_lora_weights.safetensors", networks))
    found: dict[str, tuple[float, int, int] | str] = {}
    for (name, reader), column in zip(((n, r) for n, own in FILES.items() for r in own), HEADER, strict=True):
        place = folder / name if name else peft
        found[column] = "no file"
        if place.exists():
            try:
                theirs = readers.READERS[reader](place, PIPELINES[kind].from_pretrained(base), before)
            except ValueError:
                found[column] = "refused"
            else:
                found[column] = compared(before, wanted, theirs)
    return found


def compared(before: readers.Weights, wanted: readers.Weights, theirs: readers.Weights) -> tuple[float, int, int]:
    """The largest difference as a share of the largest change; layers that were found, of how many."""
    extra = theirs.keys() - wanted.keys()
    assert not extra, f"layers that were not trained: {sorted(extra)[:3]}"
    effect = max(float((value - before[key]).abs().max()) for key, value in wanted.items())
    off = max(float((theirs.get(key, before[key]) - value).abs().max()) for key, value in wanted.items())
    return off / effect, len(theirs), len(wanted)


def cell(results: list[tuple[float, int, int] | str]) -> str:
    """Of SD and SDXL together: the worse one."""
    if isinstance(results[0], str):
        assert len(set(results)) == 1
        return results[0]
    known = [each for each in results if not isinstance(each, str)]
    off, found, of = max(known)[0], sum(each[1] for each in known), sum(each[2] for each in known)
    if found < of:
        return f"{found} of {of} layers"
    return "exact" if off <= EXACT else f"off by {off:.1g}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings and bars of the libraries."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def table(kinds: tuple[str, ...] = ("sd", "sdxl"), cases: tuple[str, ...] = tuple(CASES)) -> str:
    """The table in Markdown."""
    lines = [f"| | {' | '.join(HEADER)} |", f"|---|{'---|' * len(HEADER)}"]
    with tempfile.TemporaryDirectory() as temporary, quiet():
        bases = {"sd": write_sd, "sdxl": write_sdxl}
        for kind in kinds:
            bases[kind](Path(temporary) / kind)
        for case in cases:
            each = [measured(kind, Path(temporary) / kind, case, Path(temporary) / f"{kind} {case}") for kind in kinds]
            cells = [cell([results[column] for results in each]) for column in HEADER]
            lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Prints the table, or writes it."""
    found = table()
    print(found)
    if "--write" in sys.argv[1:]:
        path = ROOT / "docs" / "adapters.md"
        head, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
        path.write_text(f"{head}{BEGIN}\n{found}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()

"""docs/sdxl-descendants.md: its commands are runs that could start, and its table is what recipes say and export."""

import re
import shlex
from pathlib import Path

import data_sets
import pytest
from tiny_models import write_sdxl

from daguerre import errors, plugins
from daguerre.cli import main
from daguerre.config import config
from daguerre.families.stable_diffusion.single_file import save

DOCS = (Path(__file__).parents[2] / "docs" / "sdxl-descendants.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```$", DOCS, flags=re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]
ROWS = re.findall(
    r"^\| `(\w+)`, `(\w+)` \| (.+?) \| .*\(`(\w+)`\) \| (.+?) \| `(\w+)`, (\d+) steps, guidance ([\d.]+)",
    DOCS,
    re.MULTILINE,
)


def test_the_page_has_the_recipes():
    assert [row[0] for row in ROWS] == ["illustrious", "noobai_eps", "noobai_v", "pony"]
    assert len(COMMANDS) == 6


@pytest.mark.parametrize(("full", "lora", "base", "objective", "levels", "sampler", "steps", "guidance"), ROWS)
def test_a_row_is_what_both_recipes_say_and_export(full, lora, base, objective, levels, sampler, steps, guidance):
    for name in (full, lora):
        chosen = config.load(name, ["run_name=x"]).config
        place = chosen.model.pretrained_model_name_or_path
        assert place == (base if "/" in base else "stabilityai/stable-diffusion-xl-base-1.0")
        assert chosen.objective.name == objective
        is_zero = levels == "zero terminal SNR"
        assert chosen.objective.schedule.zero_terminal_snr == is_zero
        sampling = chosen.sampling
        found = (sampling.sampler, sampling.num_inference_steps, sampling.guidance_scale)
        assert found == (sampler, int(steps), float(guidance))
        assert bool(chosen.adapters["lora" if name == lora else "full"])
        diffusion = plugins.find("objectives", objective).build(chosen.objective).diffusion
        exported = chosen.model.schedulers.scheduler_of(diffusion, sampling).config
        assert exported["prediction_type"] == {"eps": "epsilon", "v": "v_prediction"}[objective]
        assert exported["rescale_betas_zero_snr"] == is_zero
        assert exported["timestep_spacing"] == "trailing"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("descendants_docs")
    base = write_sdxl(folder / "base")
    for name in re.findall(r"pretrained_model_name_or_path=(\w[\w.-]+\.safetensors)", DOCS):
        save.write(folder / name, base)
    data_sets.folder(folder / "my_images", 30)
    return folder


@pytest.mark.parametrize(
    "command",
    [pytest.param(each, marks=[] if "objective.name=flow" in each else [pytest.mark.long]) for each in COMMANDS],
)
def test_the_run_could_start(command, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    program, *words = shlex.split(command)
    assert program == "daguerre"
    assert main.run([*words, "--dry-run"]) == errors.DONE, capsys.readouterr().err

"""kohya's ranks, alphas and learning rates by block: which layers each block has, by sd-scripts' rule."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import recipe_values
import torch
from diffusers import UNet2DConditionModel
from test_convert_config import said
from test_convert_lora import KOHYA

from daguerre import architectures
from daguerre.cli import main
from daguerre.errors import UserError
from daguerre.families.stable_diffusion.lora_names import original_names
from daguerre.foreign.names import blocks

FOLDERS = {"sd": "sd1", "sdxl": "sdxl"}
COUNTS = {"sd": 25, "sdxl": 23}


@pytest.fixture(scope="module", params=FOLDERS)
def layers(request):
    """The family, and its UNet's layers by our names with those that sd-scripts has."""
    (root,) = architectures.__path__
    with torch.device("meta"):
        net = UNet2DConditionModel.from_config(
            json.loads((Path(root) / FOLDERS[request.param] / "unet/config.json").read_text())
        )
    names = [name for name, own in net.named_modules() if isinstance(own, torch.nn.Linear | torch.nn.Conv2d)]
    paths = original_names(net) if request.param == "sdxl" else {name: name for name in names}
    return request.param, {name: paths[name] for name in names}


def their_block(family: str, path: str) -> int:
    """As `get_block_index` of sd-scripts says of a layer by its name there, and `sdxl_train.py` of all of SDXL's: their
    own functions, run once on all 278 and 788 layers and SDXL's 1,680 parameters (48d368fa), gave what ours gives."""
    if family == "sdxl":
        first = {"time_embed": 0, "label_emb": 0, "input_blocks": 1, "middle_block": 10, "output_blocks": 13, "out": 22}
        head, _, rest = path.partition(".")
        return first[head] + (int(rest.partition(".")[0]) if head.endswith(("blocks", "_block")) else 0)
    if path.startswith("mid_block"):
        return 12
    side, block, kind, layer = re.match(r"(up|down)_blocks\.(\d)\.(\w+)\.(\d)", path).groups()
    return {"down": 1, "up": 13}[side] + 3 * int(block) + (2 if "samplers" in kind else int(layer))


def test_every_layer_is_in_the_block_where_sd_scripts_has_it(layers):
    family, paths = layers
    inside = {name: path for name, path in paths.items() if re.search(r"attentions|resnets|samplers", name)}
    ranks = ",".join(map(str, range(1, COUNTS[family] + 1)))
    for has_convolutions in (True, False):
        found = blocks.of_lora(family, {"block_dims": ranks}, has_convolutions).ranks
        own = inside if has_convolutions else {name: path for name, path in inside.items() if "attentions" in name}
        used = set()
        for name, path in own.items():
            meant = [pattern for pattern in found if fnmatchcase(f"unet.{name}.weight", pattern)]
            assert [found[pattern] - 1 for pattern in meant] == [their_block(family, path)], name
            used |= {*meant}
        assert used == found.keys(), "a pattern that means no layer is refused by the run"
    if family == "sdxl":
        rates = blocks.of_sdxl(",".join(f"{i + 1}e-6" for i in range(23)))
        for name, path in paths.items():
            (rate,) = [own for pattern, own in rates.items() if fnmatchcase(f"unet.{name}.bias", pattern)]
            assert round(rate * 1e6) - 1 == their_block(family, path), name


def test_weights_are_filled_cut_and_drawn_as_sd_scripts_does():
    def of(**given):
        return blocks.of_lora("sd", given, has_convolutions=False)

    few = of(down_lr_weight="3,.5,1,4", mid_lr_weight="2")
    # Blocks 0 to 3 of the way down: the first has no layers, the last no attention. The rest are 1.
    assert few.factors == {"unet.down_blocks.0.attentions.0.*": 0.5, "unet.mid_block.attentions.0.*": 2}
    assert few.left_out == []
    assert "unet.down_blocks.0.attentions.1.*" in of(down_lr_weight="1,1,0").left_out
    linear = of(up_lr_weight="linear+.25", block_lr_zero_threshold="0.7").factors
    assert linear["unet.up_blocks.3.attentions.2.*"] == 1.25
    assert linear["unet.up_blocks.2.attentions.0.*"] == pytest.approx(6 / 11 + 0.25)
    assert "unet.up_blocks.1.attentions.0.*" in of(up_lr_weight="linear+.25", block_lr_zero_threshold="0.7").left_out
    cosine = of(down_lr_weight="cosine").factors  # from 1 at the first block to 0 at the last
    assert cosine["unet.down_blocks.2.attentions.1.*"] == pytest.approx(0.4154150)
    for odd in ({"down_lr_weight": ".5"}, {"up_lr_weight": "round"}, {"block_dims": "4,4"}, {"mid_lr_weight": "x"}):
        with pytest.raises(UserError):
            of(**odd)


def converted(text: str, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ours.yaml").unlink(missing_ok=True)
    Path("x.toml").write_text(text, encoding="utf-8")
    assert main.run(["convert", "config", "x.toml", "out=ours.yaml", "--all"]) == 0
    return said(capsys.readouterr().out), recipe_values.values(Path("ours.yaml"))


def test_a_lora_by_block_is_carried(tmp_path, monkeypatch, capsys):
    ranks = ",".join(["8"] * 12 + ["0"] + ["16"] * 12)
    more = f'"block_dims={ranks}", "down_lr_weight=0,0,1,1,1,1,1,1,1,1,1,1", "up_lr_weight=1,1,1,.5"'
    text = KOHYA.replace('"loraplus_lr_ratio=4"', more).replace('pretrained_model_name_or_path = "base"', PLACE)
    lines, values = converted(text, capsys, tmp_path, monkeypatch)
    assert lines["network_args"][0] != "refused", lines["network_args"]
    ranks_of = [
        (path.removeprefix("adapters.lora.rank_pattern."), value)
        for path, value in values.items() if path.startswith("adapters.lora.rank_pattern.")
    ]  # fmt: skip
    # The first that fits counts: blocks without a LoRA, then convolutions of 3 x 3, then the others.
    assert ranks_of[0] == ("unet.down_blocks.0.resnets.0.*", None)
    assert dict(ranks_of)["conv[12]"] == 2
    assert dict(ranks_of)["unet.mid_block.attentions.0.*"] is None
    assert dict(ranks_of)["unet.up_blocks.2.attentions.1.*"] == 16
    factors = {path: value for path, value in values.items() if "learning_rate_factors" in path}
    assert factors == {
        f"optimizer.learning_rate_factors.unet.up_blocks.1.{kind}.0.*": 0.5 for kind in ("resnets", "attentions")
    }


def test_rates_of_a_full_fine_tune_of_sdxl_are_carried(tmp_path, monkeypatch, capsys):
    rates = ",".join(f"{i + 1}e-6" for i in range(23))
    text = f"{FULL}block_lr = '{rates}'\n"
    _, values = converted(text, capsys, tmp_path, monkeypatch)
    assert values["optimizer.learning_rates.unet.mid_block.attentions.0.*"] == 1.2e-5
    assert values["optimizer.learning_rates.unet.conv_out.*"] == 2.3e-5
    lines, values = converted(text.replace("1e-6,2e-6", "0,2e-6"), capsys, tmp_path, monkeypatch)
    assert lines["block_lr"][0] == "refused"
    assert "leaves a block untrained" in lines["block_lr"][1]


PLACE = 'pretrained_model_name_or_path = "stable-diffusion-v1-5/stable-diffusion-v1-5"'
FULL = """\
program = "sdxl_train.py"
pretrained_model_name_or_path = "stabilityai/stable-diffusion-xl-base-1.0"
output_name = "dogs"
output_dir = "out"
learning_rate = 1e-6
max_train_steps = 2
train_batch_size = 2
resolution = 1024
train_data_dir = "images"
"""

"""The layers that `module_filters` of Stability's code chooses, in the order of its numbers: recorded from its own
StageC and apply_lora (Stability-AI/StableCascade modules/lora.py), of small numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from diffusers.models.unets.unet_stable_cascade import StableCascadeUNet
from safetensors.torch import save_file
from torch import Tensor

from daguerre.errors import UserError
from daguerre.models.lora_files.read import read

RECORD: dict[str, list[tuple[str, list[int]]]] = json.loads((Path(__file__).parent / "lora_filters.json").read_text())
RANK = 2


@pytest.fixture(scope="module")
def network() -> StableCascadeUNet:
    kinds = ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock")
    with torch.device("meta"):
        return StableCascadeUNet(
            conditioning_dim=64, block_out_channels=(64, 64), num_attention_heads=(2, 2), switch_level=(False,),
            down_num_layers_per_block=(1, 2), up_num_layers_per_block=(2, 1), down_blocks_repeat_mappers=(1, 1),
            up_blocks_repeat_mappers=(1, 1), block_types_per_layer=(kinds, kinds), clip_text_in_channels=1280,
            clip_text_pooled_in_channels=1280, clip_image_in_channels=768, dropout=(0.0, 0.0),
        )  # fmt: skip


def numbered(rows: list[tuple[str, list[int]]]) -> dict[str, Tensor]:
    """A file whose factors B are all the number of their layer."""
    found = {}
    for number, (_, (rows_, columns)) in enumerate(rows):
        found[f"weights.{number}.lora_up"] = torch.full((rows_, RANK), number + 1.0)
        found[f"weights.{number}.lora_down"] = torch.ones(RANK, columns)
    return found


def given(folder: Path, tensors: dict[str, Tensor], filters: object) -> Path:
    save_file(tensors, folder / "lora.safetensors")
    said = {"module_filters": filters, "rank": RANK, "lora_checkpoint_path": str(folder / "lora.safetensors")}
    (folder / "lora.yaml").write_text(yaml.safe_dump(said))
    return folder / "lora.yaml"


@pytest.mark.parametrize("filters", RECORD)
def test_layers_are_those_that_the_config_chooses(filters, network, tmp_path):
    rows = RECORD[filters]
    found = read(given(tmp_path, numbered(rows), json.loads(filters)), {"prior": network})["prior"]
    numbers = {each.layer: float(each.factors["lora_B.weight"][0, 0]) for each in found}
    wanted = {}
    for number, (name, _) in enumerate(rows, 1):
        layers = [f"{name.removesuffix('.attn')}.to_{part}" for part in "qkv"] if name.endswith(".attn") else [name]
        wanted |= dict.fromkeys([each.replace(".attn.out_proj", ".to_out.0") for each in layers], float(number))
    assert numbers == wanted
    assert {each.scale for each in found} == {1 / RANK}


def test_the_same_is_added_at_each_place_of_a_kernel(network, tmp_path):
    """As Stability's `view` of one number for a kernel, which is broadcast."""
    rows = RECORD['["depthwise"]']
    for each in read(given(tmp_path, numbered(rows), ["depthwise"]), {"prior": network})["prior"]:
        change = each.change((64, 1, 3, 3))
        assert change.shape == (64, 1, 3, 3)
        assert len(change.unique()) == 1


@pytest.mark.parametrize(
    ("filters", "said"),
    [
        ([".kv_mapper"], "module_filters=.* means 6 in this model"),
        (".attn", "must be a list of parts of names"),
        ([3], "must be a list of parts of names"),
    ],
)
def test_another_config_is_refused(filters, said, network, tmp_path):
    with pytest.raises(UserError, match=said):
        read(given(tmp_path, numbered(RECORD['[".attn"]']), filters), {"prior": network})


def test_without_a_config_kinds_of_the_blocks_are_told_by_their_shapes(network, tmp_path):
    given(tmp_path, numbered(RECORD['[".attn", ".kv_mapper"]']), None)
    found = read(tmp_path / "lora.safetensors", {"prior": network})["prior"]
    assert len(found) == 6 * 5
    given(tmp_path, numbered(RECORD['["clip_"]']), None)
    with pytest.raises(UserError, match="the YAML that trained it in place of the file"):
        read(tmp_path / "lora.safetensors", {"prior": network})

"""`daguerre convert tokens`: files of new tokens of any program, written again for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import write_sd
from torch import Tensor

from daguerre import errors
from daguerre.cli import main

ROWS = {width: torch.randn(2, width, generator=torch.Generator().manual_seed(width)) for width in (768, 1024, 1280)}
LAYER = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"
FILES: dict[str, tuple[dict[str, Tensor], str]] = {
    "emb_params": ({"emb_params": ROWS[768]}, "stable-diffusion-v1"),
    "diffusers": ({"<toy>": ROWS[1024]}, "stable-diffusion-v2-512"),
    "sdxl": ({"clip_l": ROWS[768], "clip_g": ROWS[1280]}, "stable-diffusion-xl-v1-base"),
    "cascade": ({"clip_g": ROWS[1280]}, "stable-cascade-v1-prior"),
    "bundled": (
        {f"{LAYER}.lora_down.weight": torch.ones(1, 1280), "bundle_emb.<toy>.clip_l": ROWS[768]},
        "stable-diffusion-v1",
    ),
}
"""A file of each layout, and the model that it is for."""


def convert(*words: object) -> int:
    return main.run(["convert", "tokens", *map(str, words)])


def rows(folder: Path) -> list[Tensor]:
    return [load_file(file)["<toy>"] for file in sorted(folder.glob("learned_embeds*.safetensors"))]


@pytest.mark.parametrize("layout", FILES)
def test_every_layout_becomes_the_files_of_all_programs(layout, tmp_path, capsys):
    tensors, model = FILES[layout]
    save_file(tensors, tmp_path / "x.safetensors")
    assert convert(tmp_path / "x.safetensors", "name=<toy>", f"out={tmp_path / 'out'}") == errors.DONE
    assert "<toy>, 2 vectors for text_encoder" in capsys.readouterr().out
    expected = [value for name, value in tensors.items() if "lora" not in name]
    assert all(map(torch.equal, rows(tmp_path / "out"), expected))
    assert len(rows(tmp_path / "out")) == len(expected)
    with safe_open(tmp_path / "out" / "toy.safetensors", "pt") as file:
        assert file.metadata()["modelspec.architecture"] == f"{model}/textual-inversion"
        assert file.metadata()["modelspec.trigger_phrase"] == "<toy>"
    assert "load_textual_inversion" in (tmp_path / "out" / "README.md").read_text()
    again = [tmp_path / "out" / "toy.safetensors", tmp_path / "out"]
    for number, source in enumerate(again):
        assert convert(source, f"out={tmp_path / str(number)}") == errors.DONE
        assert all(map(torch.equal, rows(tmp_path / str(number)), expected))


@pytest.mark.long
def test_a_pickled_file_for_a_model_of_other_numbers(tmp_path):
    write_sd(tmp_path / "base")
    own = torch.randn(3, 48)
    torch.save({"string_to_param": {"*": own}, "name": "toy", "step": 4}, tmp_path / "toy.pt")
    given = [tmp_path / "toy.pt", f"out={tmp_path / 'out'}"]
    assert convert(*given) == errors.REFUSED
    assert convert(*given, f"base={tmp_path / 'base'}") == errors.DONE
    assert torch.equal(load_file(tmp_path / "out" / "toy.safetensors")["emb_params"], own)
    assert torch.equal(load_file(tmp_path / "out" / "learned_embeds.safetensors")["toy"], own)


@pytest.mark.parametrize(
    ("tensors", "more", "said"),
    [
        ({"emb_params": torch.zeros(1, 5)}, [], "base=FILE.safetensors. It fits none of the "),
        ({f"{LAYER}.lora_down.weight": torch.ones(1, 4)}, [], "there are no new tokens"),
        ({"emb_params": torch.full((1, 768), torch.nan)}, [], "has NaN or infinity in it"),
        ({"emb_params": torch.zeros(1, 768)}, ["out=x.safetensors"], "give a folder"),
        ({"<a>": torch.zeros(1, 768), "<b>": torch.zeros(1, 768)}, ["out=out", "name=<c>"], "cannot all be called <c>"),
    ],
)
def test_what_cannot_be_is_refused(tensors, more, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_file(tensors, "x.st.safetensors")
    assert convert("x.st.safetensors", *(more or ["out=out"])) == errors.REFUSED
    assert said in capsys.readouterr().err


def test_half_of_the_files_of_sdxl_are_no_tokens_of_sd(tmp_path, capsys):
    """Its first text encoder is as wide as that of SD 1.x: the header tells."""
    save_file(FILES["sdxl"][0], tmp_path / "toy.safetensors")
    assert convert(tmp_path / "toy.safetensors", f"out={tmp_path / 'out'}") == errors.DONE
    assert convert(tmp_path / "out" / "learned_embeds.safetensors", f"out={tmp_path / 'half'}") == errors.REFUSED
    assert "made for another model (stable-diffusion-xl-v1-base)" in capsys.readouterr().err

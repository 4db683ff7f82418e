"""Text encoders that were cut to the layer that is read: in one file they get layers that change nothing."""

import pytest
import torch
from tiny_models import write_sd
from transformers import CLIPTextModel

from daguerre.families.stable_diffusion.single_file import compatibility, load, save


@torch.no_grad()
@pytest.mark.parametrize("version", [1, 2])
def test_programs_with_all_layers_read_what_the_cut_encoder_gives(version, tmp_path, monkeypatch):
    folder = write_sd(tmp_path / "p", version=version, layers=2)
    monkeypatch.setattr(compatibility, "TEXT_LAYERS", {"sd1": 4, "sd2": 4})
    monkeypatch.setattr(compatibility, "_known", lambda numbers: numbers)  # as if the tiny one were published
    monkeypatch.setattr(compatibility, "misread_prediction", lambda numbers, unet: [])
    file = tmp_path / "model.safetensors"
    save.write(file, folder)
    cut = CLIPTextModel.from_pretrained(folder / "text_encoder", local_files_only=True)
    assert cut.config.num_hidden_layers == 2
    whole = CLIPTextModel(type(cut.config)(**cut.config.to_dict() | {"num_hidden_layers": 4 if version == 1 else 5}))
    tensors = load.network_tensors(file, "text_encoder", whole.state_dict(), pickled=False)
    whole.load_state_dict(tensors)
    ids = torch.tensor([[512, 1, 2, 3, 513, 513]])
    expected = cut(ids).last_hidden_state
    out = whole(ids, output_hidden_states=True)
    norm = next(module for name, module in whole.named_modules() if name.endswith("final_layer_norm"))
    # 1.x is read at its last layer, 2.x at the one before, and the last norm is applied to both.
    found = out.last_hidden_state if version == 1 else norm(out.hidden_states[-2])
    assert torch.equal(found, expected)
    assert load.convert(file, tmp_path) == []
    again = CLIPTextModel.from_pretrained(tmp_path / "text_encoder", local_files_only=True)
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), cut.state_dict().values(), strict=True))

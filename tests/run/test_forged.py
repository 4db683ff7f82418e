"""Files that are whole and yet are not what a run or a trainer writes: checkpoints with sound manifests, indexes of
weights that lead elsewhere, an empty pickle; and a run folder that is renamed while its run goes on."""

import json
import shutil

import pytest
import tiny_runs
import torch
from whole_store import WholeStore

from daguerre import errors
from daguerre.errors import UserError
from daguerre.models.weights import files, pickled
from daguerre.run import trainer


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run of three updates."""
    folder = tmp_path_factory.mktemp("begun")
    assert tiny_runs.train(folder, "training.duration=3 steps") == errors.DONE
    return folder


def nan(tensor):
    tensor.view(-1)[0] = float("nan")
    return tensor


FORGED = {
    "model, NaN": ("model", "weight", nan, "the saved weights have NaN or infinity in"),
    "model, shape": ("model", "weight", lambda tensor: tensor[..., None], "do not match this recipe's networks"),
    "ema, NaN": ("ema", "weight", nan, "the saved averages have NaN or infinity in"),
    "ema, shape": ("ema", "weight", lambda tensor: torch.zeros(1), "the saved averages do not match"),
    "optimizer, NaN": ("optimizer", "exp_avg_sq", nan, "the optimizer state have NaN or infinity in"),
    "optimizer, shape": ("optimizer", "exp_avg", lambda tensor: torch.zeros(1), "the optimizer state does not match"),
}


@pytest.mark.parametrize(
    "forged",
    [pytest.param(name, marks=[] if number == 0 else [pytest.mark.long]) for number, name in enumerate(FORGED)],
)
def test_a_forged_checkpoint_is_refused(begun, tmp_path, capsys, forged):
    group, ending, change, said = FORGED[forged]
    shutil.copytree(begun / "tiny", tmp_path / "tiny")
    store = WholeStore(tmp_path / "tiny" / "checkpoints")
    found = store.newest_verified().path
    held = store.load(found)
    tensors = {name: {key: each.clone() for key, each in inner.items()} for name, inner in held.tensors.items()}
    name = next(key for key in tensors[group] if key.endswith(ending))
    tensors[group][name] = change(tensors[group][name])
    shutil.rmtree(found)
    store.save(found.name, tensors, held.documents, held.files)
    assert store.newest_verified().path == found  # its manifest is sound
    assert tiny_runs.train(tmp_path, "training.duration=4 steps") == errors.REFUSED
    message = capsys.readouterr().err
    assert said in message
    assert f"{found.name}: the" in message


@pytest.mark.parametrize("name", ["/etc/passwd", "../x.safetensors", 3, None])
def test_an_index_of_weights_that_leads_elsewhere(tmp_path, name):
    text = json.dumps({"weight_map": {"a": name}})
    for file, read in (
        ("diffusion_pytorch_model.safetensors.index.json", files.read),
        ("diffusion_pytorch_model.bin.index.json", lambda folder: pickled.convert(folder, folder / "fresh")),
    ):
        folder = tmp_path / file
        (folder / "fresh").mkdir(parents=True)
        (folder / file).write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match="index"):
            read(folder)


@pytest.mark.parametrize("data", [b"", b"\x80", b"PK\x03\x04"])
def test_an_empty_pickle(tmp_path, data):
    (tmp_path / "x.ckpt").write_bytes(data)
    with pytest.raises(UserError, match=r"x\.ckpt"):
        pickled.tensors(tmp_path / "x.ckpt")


@pytest.mark.long
def test_a_folder_that_is_renamed_under_its_run(tmp_path, capsys, monkeypatch):
    after = trainer.after

    def rename(run, update, stopping):
        if update.step == 1:
            run.folder.path.rename(tmp_path / "renamed")
        return after(run, update, stopping)

    monkeypatch.setattr(trainer, "after", rename)
    assert tiny_runs.train(tmp_path, "training.duration=2 steps") != errors.DONE
    said = capsys.readouterr().err
    assert "was renamed, moved or deleted while this run was using it" in said
    assert "is not a run folder" not in said

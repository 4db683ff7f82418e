"""Every kind of the adapter `lora` from end to end: training, resume, several processes, generating, other forms."""

import forked_runs
import pytest
import torch
from adapter_runs import MESHES, Place, assert_equal
from test_lora_runs import RECIPE

from daguerre import errors
from daguerre.cli import main

pytestmark = pytest.mark.long
CONV = "targets: attention+ff+conv"
OTHERS = {
    "rslora": f"kind: rslora, alpha: 2.5, {CONV}",
    "loha": f"kind: loha, alpha: 2.5, {CONV}",
    "lokr": f"kind: lokr, alpha: 2.5, {CONV}",
    "boft": f"kind: boft, {CONV}",
    "pissa": "init: pissa, alpha: 2.5",
    "olora": "kind: rslora, init: olora, alpha: 2.5, lora_fa: true",
    "lora_fa": f"lora_fa: true, init: gaussian, alpha: 2.5, {CONV}",
    "tlora": f"tlora_min_rank: 1, alpha: 2.5, {CONV}",
}
SETTINGS = {"dora": f"kind: dora, alpha: 2.5, {CONV}", **OTHERS}
STILL = {"pissa": (".start.",), "olora": (".start.", ".lora_A."), "lora_fa": (".lora_A.",)}
"""Parts of names of what a checkpoint holds and nothing moves."""


@pytest.fixture(scope="module", params=["dora", *OTHERS])
def place(request, tmp_path_factory):
    """With the run `whole`, which was never stopped."""
    made = Place(tmp_path_factory.mktemp(request.param), "sd", RECIPE)
    made.still = STILL.get(request.param, ())
    own = f"{{name: lora, rank: 4, {SETTINGS[request.param]}, ranks: {{text_encoder: 2}}}}"
    text = made.recipe.read_text()
    before = text[text.index("adapters:") : text.index("data:")]
    made.recipe.write_text(text.replace(before, f"adapters: {{style: {own}}}\n"))
    assert made.train("whole") == errors.DONE
    return made


def test_a_stopped_run_ends_equal_to_the_bit(place):
    assert place.train("parts", "training.duration=2 steps") == errors.DONE
    assert place.train("parts", "training.duration=4 steps") == errors.DONE
    for group in ("model", "ema", "optimizer"):
        assert_equal(place.tensors("parts", group), place.tensors("whole", group))
    first, last = place.tensors("whole", step=2), place.tensors("whole")
    for name in last:
        still = any(part in name for part in place.still)
        assert torch.equal(first[name], last[name]) == still, name


def test_it_generates_and_becomes_a_whole_model(place, capsys):
    run = str(place.folder / "whole")
    assert main.run(["generate", run, "prompt=a dog", f"out={place.folder / 'drawn'}"]) == errors.DONE
    assert list((place.folder / "drawn").glob("*.png"))
    merge = ["convert", "export", run, "format=diffusers", f"out={place.folder / 'merged'}"]
    if "tlora_min_rank" in place.recipe.read_text():  # no weight holds it
        added = ["generate", str(place.folder / "base"), f"use={{{run}: 1}}", "prompt=a dog", "seed=1"]
        for command in (merge, added):
            capsys.readouterr()
            assert main.run(command) == errors.REFUSED
            assert "adds something else at each noise level" in capsys.readouterr().err
        return
    assert main.run(merge) == errors.DONE
    assert (place.folder / "merged" / "model_index.json").exists()


@pytest.mark.long
def test_two_processes_learn_what_one_does(place):
    name, mesh = "fsdp2", MESHES["fsdp2"]
    split = place.on("tensor2", MESHES["tensor2"])
    codes = forked_runs.together(place.folder, [place.on(name, mesh), split])
    log = (place.folder / f"{name}.seen.log-0").read_text()
    assert codes[0] == [0, 0], log
    losses = place.numbers("whole", "learning/loss")
    assert place.numbers(name, "learning/loss") == pytest.approx(losses, rel=1e-5)
    expected = place.tensors("whole", "ema")
    for key, value in place.tensors(name, "ema").items():
        assert (value - expected[key]).norm() <= 1e-4 * expected[key].norm(), key
    if any(".lora_A." not in key and ".lora_B." not in key for key in expected):
        assert codes[1] == [errors.REFUSED] * 2
        assert "split over the mesh's tensor axis" in (place.folder / "tensor2.seen.log-0").read_text()
    else:
        assert codes[1] == [0, 0]

"""The parity gate of benchmarks/peers.py: diffusers' loop trains what ours trains, and what does not gets no number."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from tiny_cascade import EFFNET, PREVIEWER, write_decoder, write_prior
from tiny_models import write_sd, write_sdxl
from tiny_runs import TINY

from daguerre.bench import random_model
from daguerre.errors import UserError

FILE = Path(__file__).parents[2] / "benchmarks" / "peers.py"
FOUND = importlib.util.spec_from_file_location("peers", FILE)
peers = sys.modules["peers"] = importlib.util.module_from_spec(FOUND)
FOUND.loader.exec_module(peers)
QUICK = ["rounds=1", "turn_seconds=.01", "soak_seconds=0", "budget_seconds=3000"]


def request(recipe, *given):
    return peers.read([recipe, *QUICK, *given])[0]


@pytest.fixture
def plain(monkeypatch):
    """Without measuring the machine."""
    monkeypatch.setattr(peers.bench.measured, "product_flops", lambda device, dtype: 1e11)
    monkeypatch.setattr(peers.bench.measured, "copy_bytes", lambda device: 1e10)
    monkeypatch.setattr(peers.variants, "step_flops", lambda config, parts: 1e6)


def gaps(made, gate, name="diffusers-default"):
    made["daguerre"]()
    made[name]()
    return gate.found[name]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What all start from, and the gate that has seen ours: v prediction with zero terminal SNR, in micro-batches."""
    folder = tmp_path_factory.mktemp("given")
    asked = request("quickstart", *TINY, "training.global_batch_size=4")
    made, gate = peers.makers(asked, [], folder)
    ours = made["daguerre"]()
    ours.step()  # what the gate has seen stays as it was
    return peers.given(asked.variants[0].config, folder), gate


@pytest.mark.long
def test_the_quickstart_agrees(trained):
    common, gate = trained
    gate.admit("diffusers-default", peers.Diffusers(common, best=False))
    found = gate.found["diffusers-default"]
    assert found["loss"] < 2e-6, found
    assert found["averages"] < 2e-4, found


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sd15", pytest.param("sdxl", marks=pytest.mark.long)])
def test_pretrained_models_agree(tmp_path, plain, monkeypatch, kind):
    monkeypatch.setattr(peers, "STEPS", 6)
    folder = {"sd15": write_sd, "sdxl": write_sdxl}[kind](tmp_path / "model")
    small = ["data.resolution=16", "training.global_batch_size=2", "training.per_device_batch_size=2"]
    asked = request(kind, *small, f"pretrained_model_name_or_path={folder}", "ema.enabled=true", "device=cpu")
    found = gaps(*peers.makers(asked, ["diffusers-default"], tmp_path))
    assert found["loss"] < 2e-6, found
    assert found["averages"] < 2e-4, found


@pytest.mark.long
@pytest.mark.parametrize("kind", ["cascade_c", "cascade_b"])
def test_stages_of_stable_cascade_agree(tmp_path, plain, monkeypatch, kind):
    """Stage C with the weights of P2, Stage B with pyramid noise; other weights are refused."""
    monkeypatch.setattr(peers, "STEPS", 6)
    weighting = "p2" if kind == "cascade_c" else "none"
    folder = (write_prior if kind == "cascade_c" else write_decoder)(tmp_path / "model")
    small = ["data.resolution=64", "training.global_batch_size=4", "training.per_device_batch_size=2", "data.path=x"]
    small += [] if kind == "cascade_b" else ["data.buckets.aspects=square", f"model.previewer={PREVIEWER}"]
    small += [f"pretrained_model_name_or_path={folder}", f"model.effnet={EFFNET}", "ema.enabled=true", "device=cpu"]
    asked = request(kind, *small, f"objective.weighting.name={weighting}")
    found = gaps(*peers.makers(asked, ["diffusers-default"], tmp_path))
    assert found["loss"] < 2e-6, found
    assert found["averages"] < 2e-4, found
    with pytest.raises(UserError, match="no adaptive weights"):
        peers.makers(request(kind, *small), [], tmp_path)


def test_a_published_file_that_is_not_here_keeps_its_size(tmp_path):
    """Of Stage C of one billion parameters, whose base has 3.6."""
    config = peers.bench_options.read(["cascade_c_1b", "data.path=x"]).variants[0].config
    found, said = random_model.at_hand(config, tmp_path)
    assert "random weights" in said
    assert found.model.prior["block_out_channels"] == [1536, 1536]
    assert found.model.effnet == {}


def adapted(kind, adapter, place):
    """A recipe with an adapter, and what makes it small and float32."""
    folder = {"sd15": write_sd, "sdxl": write_sdxl}[kind](place / "model")
    small = ["data.resolution=16", "training.global_batch_size=2", "training.per_device_batch_size=2", "device=cpu"]
    wide = ["weights_dtype=float32", "training.mixed_precision=no", "training.frozen_precision=no"]
    return [f"{kind}_{adapter}", *small, *wide, f"pretrained_model_name_or_path={folder}", "peers=diffusers-default"]


@pytest.mark.long
@pytest.mark.parametrize("adapter", ["lora", "controlnet"])
@pytest.mark.parametrize("kind", ["sd15", "sdxl"])
def test_adapters_agree(tmp_path, plain, monkeypatch, kind, adapter):
    """With the steps of train_text_to_image_lora(_sdxl).py and train_controlnet(_sdxl).py."""
    monkeypatch.setattr(peers, "STEPS", 6)
    found = gaps(*peers.makers(request(*adapted(kind, adapter, tmp_path)), ["diffusers-default"], tmp_path))
    assert found["loss"] < 2e-6, found
    assert found["averages"] < 2e-4, found


class Other(peers.Diffusers):
    """A loop in which the adapter acts otherwise."""

    def __init__(self, given, best):
        super().__init__(given, best)
        for layer in self.unet.modules():
            if isinstance(layer, BaseTunerLayer):
                layer.scale_layer(1.1)
        if self.controlnet is not None:
            self.controlnet.register_forward_pre_hook(self.brighter)

    def brighter(self, module, given):
        noisy, timesteps, text, picture = given
        return noisy, timesteps, text, picture * 0.5 + 0.5


@pytest.mark.long  # of the quick tests, what is not admitted gets no number
@pytest.mark.parametrize("adapter", ["lora", "controlnet"])
def test_an_adapter_that_acts_otherwise_gets_no_ratio(tmp_path, plain, monkeypatch, capsys, adapter):
    """A LoRA a tenth stronger; a ControlNet that reads other pictures."""
    monkeypatch.setattr(peers, "STEPS", 6)
    monkeypatch.setattr(peers, "Diffusers", Other)
    out = tmp_path / "peers.json"
    given = adapted("sd15", adapter, tmp_path)
    assert peers.main([*given, *QUICK, f"out={out}", "optimizer.learning_rate=1e-2"]) == 1
    ours, theirs = json.loads(out.read_text())["rows"]
    assert ours["seconds"]
    assert not theirs["seconds"]
    assert "no parity over 6 updates, so no number" in theirs["problem"]
    assert "daguerre against" not in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch.compile imports what torch deprecates
def test_the_best_of_diffusers_agrees(tmp_path):
    found = gaps(*peers.makers(request("quickstart", *TINY), ["diffusers-best"], tmp_path), "diffusers-best")
    assert found["loss"] < 1e-5, found


def other_decay(peer):
    peer.ema.decay = 0.5


def other_rate(peer):
    peer._optimizer.param_groups[0]["lr"] *= 1.01


def other_noise(peer):
    each = peer._given.ring[0]
    each.batch.draws["noise"].add_(0.01)


def not_a_number(peer):
    peer.loss = lambda: float("nan")


@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    [other_decay, *(pytest.param(each, marks=pytest.mark.long) for each in (other_rate, other_noise, not_a_number))],
)
def test_another_training_is_not_admitted(trained, fault):
    common, gate = trained
    peer = peers.Diffusers(common, best=False)
    before = common.ring[0].batch.draws["noise"].clone()
    fault(peer)
    with pytest.raises(peers.NoParity, match="so no number"):
        gate.admit("diffusers-default", peer)
    common.ring[0].batch.draws["noise"].copy_(before)
    json.dumps(gate.found, allow_nan=False)


@pytest.mark.long
def test_what_is_not_admitted_gets_no_number(tmp_path, plain, monkeypatch, capsys):
    monkeypatch.setattr(peers, "LIMITS", {torch.float32: (0.0, 0.0)})
    monkeypatch.setattr(peers, "STEPS", 2)
    out = tmp_path / "peers.json"
    code = peers.main(["quickstart", *TINY, *QUICK, f"out={out}", "peers=diffusers-default"])
    ours, theirs = json.loads(out.read_text())["rows"]
    assert ours["seconds"]
    assert not theirs["seconds"]
    assert "no parity" in theirs["problem"]
    said = capsys.readouterr().out
    assert "no parity" in said
    assert "against diffusers-default" not in said
    assert code == 1


def test_a_ratio_comes_with_parity(tmp_path, plain, monkeypatch, capsys):
    monkeypatch.setattr(peers, "STEPS", 2)
    out = tmp_path / "peers.json"
    assert peers.main(["quickstart", *TINY, *QUICK, f"out={out}", "peers=diffusers-default"]) == 0
    found = json.loads(out.read_text())
    assert 0 <= found["parity"]["diffusers-default"]["loss"] < 1e-5
    assert "daguerre against diffusers-default: " in capsys.readouterr().out


def test_weights_that_stand_still_agree_with_nothing():
    gate = peers.Gate({"weight": torch.ones(2)}, losses=[1.0], averages=[torch.ones(2)])
    with pytest.raises(peers.NoParity, match="nothing was learnt"):
        gate._refuse_standstill()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("objective.name=flow", "eps and v"),
        ("objective.weighting.name=min_snr", "not weighted"),
        ("peers=accelerate", "there is no 'accelerate'"),
        ("inputs=loader", "latents"),
        ("adapter={name: lora, targets: attention+ff}", "a LoRA of its attention layers"),
        ("adapter={name: lora, dropout: 0.1}", "without dropout"),
        ("adapter={name: lora, kind: dora}", "a LoRA of its attention layers"),
        ("adapter={name: controlnet, condition: canny, conditioning_dropout: 0.1}", "without dropout"),
    ],
)
def test_what_the_example_does_not_train_is_refused(tmp_path, capsys, given, said):
    # An adapter stands on weights of a place; that it is refused is known before they are looked for.
    networks = ["model.unet=there"] if given.startswith("adapter") else TINY
    assert peers.main(["quickstart", *networks, *QUICK, f"out={tmp_path / 'x.json'}", given]) == 2
    assert said in capsys.readouterr().err


def test_compute_types_have_limits():
    assert set(peers.LIMITS) == {torch.float32, torch.bfloat16}
    assert issubclass(peers.NoParity, UserError)

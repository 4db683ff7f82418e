"""The peak that `daguerre plan` predicts against what torch's allocator gives out in updates that are computed."""

import json
import random
import re
from bisect import bisect_right
from types import SimpleNamespace

import pytest
from measured_peak import measured
from tiny_runs import TINY
from twins import Twins, tree

from daguerre import errors, plugins
from daguerre.cli import main
from daguerre.config import config as configs
from daguerre.config.recipe import shipped
from daguerre.memory import estimate, static
from daguerre.memory.peak import Peak, largest_that_fits

NAMES = [name for name in plugins.names("optimizers") if name != "adamw_8bit"]
OWN = {"schedule_free": ["ema.enabled=false", "lr_scheduler.name=constant"], "prodigy": ["lr_scheduler.name=constant"]}
LARGER = ["training.global_batch_size=8", "training.per_device_batch_size=8", "data.resolution=64"]


def predicted(config):
    mesh = config.mesh.resolved(1, 1)
    target = estimate.of(config, mesh, None)
    parts = target.parts()
    return estimate.step(target, parts, static.count(target.config, parts, mesh)).peak


def compare(recipe, *given):
    config = configs.load(recipe, ["training.device=cpu", *given]).config
    peak = predicted(config)
    micro_batches = config.training.global_batch_size // peak.micro
    assert peak.whole == pytest.approx(measured(config, peak.micro, micro_batches), rel=0.05)


@pytest.mark.parametrize("more", [["training.global_batch_size=6"], ["optimizer.in_backward=after_norm"]])
def test_a_tiny_run_takes_what_was_predicted(more):
    """Three micro-batches, or two backward passes; activations recomputed."""
    compare("quickstart", *TINY, *more, "training.gradient_checkpointing=true")


EDIT = ["training.device=cpu", "optimizer.name=adamw", "model.transformer.num_single_layers=2"]
"""For what pictures take, whatever moves the weights: Muon's own arithmetic would be a third of a plan's work."""


def test_a_step_is_counted_with_as_many_reference_images_as_a_sample_may_have():
    one, two, three = (
        predicted(configs.load("quickstart_edit", [*EDIT, f"model.references={count}"]).config).passes
        for count in (1, 2, 3)
    )
    assert three - two == pytest.approx(two - one, rel=0.02)
    assert two > 1.2 * one


def test_reference_images_of_a_folder_are_counted_as_large_as_a_picture_may_be(tmp_path):
    """They are not resized to the bucket: a folder for 64 px may hold pictures of the family's 1 megapixel."""
    own = ["data.sources.pairs.source=folder", f"data.sources.pairs.path={tmp_path}"]
    drawn, read = (predicted(configs.load("quickstart_edit", given).config) for given in (EDIT, [*EDIT, *own]))
    assert (str(drawn.reference), str(read.reference)) == ("64x64", "1024x1024")
    assert read.passes > 10 * drawn.passes


FOLDER = [*(each for each in TINY if "checked" not in each), "data.source=folder", "data.path=x"]


@pytest.mark.parametrize(
    ("given", "gone"),
    [
        (["cache.images=false"], "text_encoder"),
        pytest.param([], "text_encoder, vae", marks=pytest.mark.long),
    ],
)
def test_a_page_names_the_encoders_that_a_cache_replaces(capsys, given, gone):
    assert main.run(["plan", "quickstart", *FOLDER, "cache.path=x", *given]) == errors.DONE
    said = " ".join(capsys.readouterr().out.split())
    assert f"not in memory while a run trains on its cache: {gone}" in said


@pytest.mark.long  # of the quick tests, the page names them
@pytest.mark.parametrize(("given", "left"), [([], set()), (["cache.images=false"], {"vae"})])
def test_on_a_cache_there_are_no_encoders(given, left):
    """Nor what they take while they encode: as if they were not in the loss."""
    config = configs.load("quickstart", ["training.device=cpu", *FOLDER]).config
    cached = configs.load("quickstart", ["training.device=cpu", *FOLDER, "cache.path=x", *given]).config
    plain, without = predicted(config), predicted(cached)
    target = estimate.of(config, config.mesh.resolved(1, 1), None)
    networks = target.parts().family.components
    gone = [p.nbytes for name in {"vae", "text_encoder"} - left for p in networks[name].parameters()]
    buffers = [b.nbytes for name in {"vae", "text_encoder"} - left for b in networks[name].buffers()]
    assert plain.held - without.held == sum(gone) + sum(buffers)
    assert without.passes <= plain.passes


@pytest.mark.long
def test_what_is_made_without_end_is_on_no_cache(capsys):
    assert main.run(["plan", "quickstart", *TINY, "cache.path=x"]) == errors.DONE
    assert "not in memory while a run trains on its cache" not in capsys.readouterr().out


def test_what_cannot_be_trained_is_refused_before_anything_is_planned(capsys):
    """A global batch that four GPUs cannot share, and a recipe to draw with."""
    assert main.run(["plan", "quickstart", *TINY, "devices=4", "training.global_batch_size=6"]) == errors.REFUSED
    told = capsys.readouterr()
    assert "the global batch of 6 samples cannot be split evenly over 4 devices" in told.err
    assert main.run(["plan", "sdxl_lightning"]) == errors.REFUSED
    assert "nothing to train. To generate images with the pretrained networks: daguerre generate sdxl_lightning" in (
        capsys.readouterr().err
    )
    assert told.out == ""


@pytest.mark.long
def test_data_need_no_name(capsys):
    """A folder that only `daguerre train` reads; other mistakes are told alone."""
    given = [*(each for each in TINY if "checked" not in each), "data.source=folder", "training.device=cpu"]
    assert main.run(["plan", "quickstart", *given]) == errors.DONE
    capsys.readouterr()
    assert main.run(["plan", "quickstart", *given, "data.resolution=x"]) == errors.REFUSED
    said = capsys.readouterr().err
    assert "data.resolution" in said
    assert "data.path" not in said


@pytest.mark.long
def test_a_page_says_what_acts(capsys):
    """Four GPUs that are not here; a setting without effect; how far the planning is."""
    given = ["devices=4", "nodes=2", "mesh.shard_frozen=true", "training.global_batch_size=8"]
    assert main.run(["plan", "quickstart", *TINY, *given]) == errors.DONE
    told = capsys.readouterr()
    assert told.err.splitlines() == [
        "planning: building the networks without weights",
        "planning: computing the memory of a device",
        "planning: computing a step with micro-batches of 2",
    ]
    lines = told.out.splitlines()
    assert max(map(len, lines)) <= 100
    said = " ".join(" ".join(lines).split())
    assert "4 devices, 2 nodes of 2" in said
    assert "mesh.shard_frozen has no effect: neither fsdp nor tensor has more than one device" in said
    assert re.search(r"bf16 on a GPU held between updates [\d.]+ MB", said)
    assert re.search(r"peak of all tensors [\d.]+ MB besides tensors 1.00 GB an estimate", said)


@pytest.mark.long
@pytest.mark.parametrize(
    "more",
    [
        ["training.global_batch_size=16"],
        ["training.global_batch_size=4"],
        ["training.global_batch_size=64", "training.per_device_batch_size=16"],
        ["training.global_batch_size=16", "training.gradient_checkpointing=true"],
        ["training.global_batch_size=16", "training.mixed_precision=bf16"],
        ["training.global_batch_size=16", "training.weights_dtype=bfloat16", "ema.post_hoc=[0.05]"],
        ["training.global_batch_size=16", "training.frozen_precision=bf16"],
        ["training.global_batch_size=16", "training.channels_last=false", "training.kernels=plain"],
    ],
)
def test_the_quickstart_takes_what_was_predicted(more):
    compare("quickstart", *more)


@pytest.mark.long
@pytest.mark.parametrize("form", ["after_norm", "at_once"])
def test_updates_in_the_backward_pass_take_what_was_predicted(form):
    given = ["training.global_batch_size=2", f"optimizer.in_backward={form}", "training.gradient_checkpointing=true"]
    given += ["training.max_grad_norm=null"] if form == "at_once" else []
    compare("quickstart", *given)
    fused, usual = (
        predicted(configs.load("quickstart", ["training.device=cpu", *some]).config).whole
        for some in (given, [each for each in given if "in_backward" not in each and "max_grad" not in each])
    )
    assert fused < usual - 15e6  # of 22 MB of gradients


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_with_each_optimizer(name):
    compare("quickstart", f"optimizer.name={name}", "training.global_batch_size=2", *OWN.get(name, []))


@pytest.mark.long
@pytest.mark.parametrize(
    "more",
    [
        [],
        ["training.gradient_checkpointing=false"],
        ["model.train_text_encoder=true"],
        ["training.weights_dtype=bfloat16"],
    ],
)
@pytest.mark.parametrize("recipe", ["sd15", "sd21", "sdxl"])
def test_a_twin_takes_what_was_predicted(recipe, more, tmp_path):
    compare(recipe, *Twins(tmp_path).overrides(recipe), *LARGER, *more)


@pytest.mark.long
@pytest.mark.parametrize(
    "more", [[], ["training.gradient_checkpointing=false"], ["training.base_precision=int8"], ["weights_dtype=float32"]]
)
@pytest.mark.parametrize("recipe", ["sd15_lora", "sdxl_lora", "sd15_controlnet", "sdxl_controlnet"])
def test_a_twin_with_an_adapter_takes_what_was_predicted(recipe, more, tmp_path):
    compare(recipe, *Twins(tmp_path).overrides(recipe), *LARGER, *more)


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["quickstart_vae", "quickstart_text"])
def test_other_trainings_take_what_was_predicted(recipe):
    compare(recipe)


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["sd15", "sd21"])
def test_fine_tuning_at_batch_two_fits_24_gb(recipe, capsys):
    """Issue 6: on a GPU, with averages and clipping on."""
    given = [recipe, "card=24GB", "training.per_device_batch_size=2"]
    assert main.run(["plan", *given, "--json"]) == errors.DONE
    step = json.loads(capsys.readouterr().out)["step"]
    assert step["device"] == "cuda"
    assert step["precision"].startswith("bf16")
    assert step["micro_batch"] == 2
    assert step["fits"]
    assert step["taken_bytes"] < 24e9
    assert step["largest_micro_batch"] >= 2


@pytest.mark.long
def test_what_does_not_fit_is_told_with_what_to_do(capsys):
    assert main.run(["plan", "sdxl", "card=24GB"]) == errors.REFUSED
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"device 24.00 GB DOES NOT FIT: [\d.]+ GB too much", said)
    assert "largest micro-batch that fits none not even one sample fits" in said
    assert "optimizer.name=adamw_8bit saves about 15.40 GB" in said
    taken = float(re.search(r"What fits ([\d.]+) GB predicted", said)[1])
    assert taken < 24
    assert "daguerre train sdxl optimizer.name=adafactor optimizer.learning_rate=1e-06" in said
    assert "training.weights_dtype=bfloat16" in said


@pytest.mark.parametrize("seed", range(8))
def test_the_largest_micro_batch_is_found_with_few_steps(seed):
    """Of peaks that are the largest of two sums, which cross anywhere."""
    draw = random.Random(seed)
    for _ in range(50):
        sums = [(draw.uniform(0, 50), draw.choice([0, 0.1, 1, 3])) for _ in range(2)]
        computed = []

        def peak(micro, sums=sums, computed=computed):
            computed.append(micro)
            return Peak(micro, held=0, passes=int(1e6 * max(a + b * micro for a, b in sums)), update=0, gathered=0)

        room = 1e6 * draw.uniform(20, 100)
        expected = bisect_right(range(1, 4097), room, key=lambda micro, peak=peak: peak(micro).whole) or None
        computed.clear()
        found = largest_that_fits(
            SimpleNamespace(peak=peak), peak(draw.choice([1, 4, 32])), lambda p, room=room: room - p.whole
        )
        assert (found.micro if found else None) == expected
        assert len(computed) <= 14, (sums, room, computed)


@pytest.mark.long
def test_the_largest_micro_batch_is_found_and_proved(capsys):
    """The next larger one does not fit."""
    limit = ["card=300MB", "training.device=cpu", "quickstart", *TINY]
    assert main.run(["plan", *limit, "--json"]) == errors.DONE
    found = json.loads(capsys.readouterr().out)["step"]
    largest = found["largest_micro_batch"]
    assert found["fits"]
    for micro, fits in ((largest, True), (largest + 1, False)):
        sizes = [f"training.global_batch_size={micro}", f"training.per_device_batch_size={micro}"]
        peak = predicted(configs.load("quickstart", [*TINY, "training.device=cpu", *sizes]).config)
        assert (peak.whole <= 300e6) is fits


@pytest.mark.long
@pytest.mark.parametrize(("recipe", "card"), [("sdxl_24gb", "24GB"), ("sd15_8gb", "8GiB")])
def test_recipes_for_small_cards_fit_with_a_margin(recipe, card, capsys):
    """A tenth of the card is left to what the prediction does not know."""
    assert main.run(["plan", recipe, f"card={card}", "--json"]) == errors.DONE
    step = json.loads(capsys.readouterr().out)["step"]
    assert step["taken_bytes"] < 0.9 * step["card_bytes"]


ADAPTERS = [name for name in shipped() if tree(name).get("adapters") and not name.startswith("quickstart")]


@pytest.mark.long
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_header_says_what_plan_says(name, capsys):
    """In whole GB; and no card is promised that has no room."""
    text = " ".join(shipped()[name].read_text(encoding="utf-8").split("# Time:")[0].replace("#", "").split())
    assert f"(`daguerre plan {name} training.device=cuda`)" in text
    assert main.run(["plan", name, "training.device=cuda", "--json"]) == errors.DONE
    taken = json.loads(capsys.readouterr().out)["step"]["taken_bytes"]
    assert int(re.search(r"= (\d+) GB", text)[1]) == round(taken / 1e9)
    assert taken < 1e9 * int(re.search(r"GPU of (\d+) GB", text)[1])

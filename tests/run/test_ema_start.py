"""`ema.path`: each place from which averages may start, by its names; what does not fit is refused."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import write_sdxl
from tiny_runs import train
from whole_store import WholeStore

from daguerre import errors
from daguerre.errors import UserError
from daguerre.families import sdxl
from daguerre.run import resume
from daguerre.training.ema import EMA, decay_at
from daguerre.training.settings import EMASettings


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    return write_sdxl(tmp_path_factory.mktemp("sdxl"))


@pytest.fixture(scope="module")
def net(pipeline):
    """UNet and one text encoder, trained; their weights are the pipeline's."""
    family = sdxl.load(sdxl.Settings(pretrained_model_name_or_path=str(pipeline)), 0)
    return family.training(["unet", "text_encoder"]).net


def weights(net):
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def assert_equal(found, net, factor=1.0):
    expected = {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name] * factor) for name, tensor in found.items())


def test_a_folder_in_diffusers_layout(pipeline, net):
    assert_equal(resume.read_averages(pipeline, net), net)


def test_a_file_of_the_nets_own_names(tmp_path, net):
    save_file(weights(net), tmp_path / "all.safetensors")
    assert_equal(resume.read_averages(tmp_path / "all.safetensors", net), net)


def test_text_encoders_of_older_files(tmp_path, pipeline, net):
    for component in ("unet", "text_encoder"):
        (tmp_path / component).mkdir()
        (file,) = (pipeline / component).glob("*.safetensors")
        wrapper = "text_model." if component == "text_encoder" else ""
        tensors = {f"{wrapper}{name}": tensor for name, tensor in load_file(file).items()}
        if wrapper:
            tensors["text_model.embeddings.position_ids"] = torch.arange(24)[None]
        save_file(tensors, tmp_path / component / file.name)
    assert_equal(resume.read_averages(tmp_path, net), net)


@pytest.mark.parametrize("renamed", [False, True])
def test_one_network_by_itself(tmp_path, pipeline, renamed):
    net = sdxl.load(sdxl.Settings(pretrained_model_name_or_path=str(pipeline)), 0).net
    folder = pipeline / "unet"
    if renamed:
        folder = tmp_path / "averages"
        folder.symlink_to(pipeline / "unet")
    assert_equal(resume.read_averages(folder, net), net)
    assert_equal(resume.read_averages(folder / "diffusion_pytorch_model.safetensors", net), net)


@pytest.mark.parametrize("averaged", [True, False])
def test_a_run_and_one_of_its_checkpoints(tmp_path, net, averaged):
    store = WholeStore(tmp_path / "checkpoints")
    for step, factor in ((1, 2.0), (2, 3.0)):
        model = {name: torch.zeros_like(p) if averaged else p * factor for name, p in weights(net).items()}
        averages = {"ema": {name: p * factor for name, p in weights(net).items()}} if averaged else {}
        store.save(f"step-{step:08d}", {"model": model, **averages}, {"state": {"step": step}})
    assert_equal(resume.read_averages(tmp_path, net), net, 3.0)
    assert_equal(resume.read_averages(tmp_path / "checkpoints" / "step-00000001", net), net, 2.0)


def test_what_does_not_fit_is_listed(tmp_path, net):
    tensors = weights(net)
    tensors["unet.conv_in.bias"] = torch.zeros(3)
    tensors["unet.more"] = tensors.pop("unet.conv_out.bias")
    save_file(tensors, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match=r"do not match the trained networks: missing unet.conv_out.bias; "
                                        r"unet.conv_in.bias is \[3\], the network has \[32\]; "
                                        r"unknown unet.more"):  # fmt: skip
        resume.read_averages(tmp_path / "other.safetensors", net)


def test_a_part_that_is_trained_too_may_not_be_missing(pipeline, net):
    with pytest.raises(UserError, match=r"missing text_encoder\..*; and \d+ more"):
        resume.read_averages(pipeline / "unet", net)


def test_places_where_there_is_nothing_are_refused(tmp_path, net):
    with pytest.raises(UserError, match="nothing found there; give a run folder"):
        resume.read_averages(tmp_path / "nowhere", net)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no weights in safetensors"):
        resume.read_averages(tmp_path / "empty", net)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="no checkpoint that can be read"):
        resume.read_averages(tmp_path, net)
    (tmp_path / "text.safetensors").write_bytes(b"none")
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        resume.read_averages(tmp_path / "text.safetensors", net)


@pytest.mark.parametrize("name", ["diffusers", "mindone", "stable_cascade"])
def test_no_warm_up_makes_them_forgotten(name):
    """From scratch each form copies the weights at first, or nearly so; averages that are old are not young again."""
    given = {"every_steps": 10} if name == "stable_cascade" else {}
    assert decay_at(EMASettings(name=name, decay=0.99, **given), 10) < 0.99
    old = EMASettings(name=name, decay=0.99, path="somewhere", **given)
    assert decay_at(old, 10) == 0.99
    assert decay_at(old, 1) == (1.0 if name == "stable_cascade" else 0.99)


def test_averages_take_over_numbers_of_any_type():
    net = torch.nn.Linear(2, 2)
    ema = EMA.of(EMASettings(), dict(net.named_parameters()))
    ema.start_from({name: torch.full_like(p, 0.5, dtype=torch.float16) for name, p in net.named_parameters()})
    assert all((average == 0.5).all() and average.dtype == torch.float32 for average in ema.averages.values())


@pytest.mark.long  # of the quick tests, those above start them without a run
def test_a_run_starts_its_averages_there(tmp_path, capsys):
    few = ["training.duration=1 step", "lr_scheduler.warmup=0 steps", "sampling.num_images=0", "data.checked_prompts=1"]
    assert train(tmp_path, *few) == errors.DONE
    first = load_file(tmp_path / "tiny" / "checkpoints" / "step-00000001" / "ema.safetensors")
    place = ["run_name=second", f"ema.path={tmp_path / 'tiny'}", "ema.decay=0.5", "seed=3"]
    assert train(tmp_path, *few, *place) == errors.DONE
    assert f"the averages start from the weights of {tmp_path / 'tiny'}" in capsys.readouterr().out
    saved = tmp_path / "second" / "checkpoints" / "step-00000001"
    average, model = (load_file(saved / f"{name}.safetensors") for name in ("ema", "model"))
    for name, value in average.items():
        torch.testing.assert_close(value, (first[name] + model[name]) / 2)

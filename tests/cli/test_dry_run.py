"""`train --dry-run` of the recipes of real models: no network, no weights, no memory; the published sizes.

What is in the headers of these recipes about sizes and memory is held to the same numbers.
"""

import re
import socket

import data_sets
import huggingface_hub
import pytest
import tiny_runs
from PIL import Image
from twins import Twins, base, shards, tree

from daguerre import errors
from daguerre.cli import main
from daguerre.config import recipe
from daguerre.models.weights import architectures

NAMES = [name for name in recipe.shipped() if base(name)]
QUICK = ("sd2_scratch_stage2", "sdxl_dreambooth_lora", "cascade_b_700m")
"""Of which `make test` plans the networks."""
UNET = {"sd1": 859_520_964, "sd2_base": 865_910_724, "sd21": 865_910_724, "sdxl": 2_567_463_684}
UNET |= {"cascade_c": 3_589_103_632, "cascade_b": 1_562_941_136}
UNET |= {"flux1_dev": 11_901_408_320, "z_image": 6_154_908_736}
UNET |= {"flux2_klein_base_4b": 3_875_544_576, "flux2_klein_base_9b": 9_078_581_248}
UNET |= {"qwen_image_21": 7_115_124_736, "qwen_image": 20_430_401_088, "qwen_image_edit_2511": 20_430_401_088}
UNET |= {"anima": 1_956_405_248, "krea2": 12_820_073_036, "flux3_klein_base": 5_538_458_368}
OF_OTHER_SIZES = {"cascade_c_1b": 1_030_785_040, "cascade_b_700m": 699_471_248}
"""Of recipes whose denoiser is not the base's."""
LORA = {"sd15_lora": 3_188_736, "sdxl_lora": 46_448_640, "sdxl_dreambooth_lora": 23_224_320}
LORA |= {"sdxl_lcm_lora": 196_751_360, "sd15_dpo_lora": 1_594_368}
LORA |= dict.fromkeys(("illustrious_lora", "noobai_eps_lora", "noobai_v_lora", "pony_lora"), 46_448_640)
LORA |= {"sdxl_pivotal": 23_224_320, "cascade_c_lora": 16_777_216}
LORA |= {"flux_lora": 26_148_864, "z_image_lora": 16_711_680}
LORA |= {"flux2_klein_4b_lora": 18_677_760, "flux2_klein_9b_lora": 31_981_568}
LORA |= {"qwen_image_21_lora": 16_777_216, "qwen_image_lora": 23_592_960, "qwen_image_edit_lora": 23_592_960}
LORA |= {"anima_lora": 27_525_120, "krea2_lora": 117_305_760}
LORA |= {"flux2_klein_edit_lora": 18_677_760, "flux3_klein_lora": 14_942_208}
"""Of rank 16 on attention: four times the 797,184 that peft counts at rank 4; of Anima and Krea 2 32,
of `sd15_dpo_lora` 8. Of `sdxl_lcm_lora` 64 on all layers: the 197 M of the published LCM-LoRA."""
CONTROLNET = {"sd15_controlnet": 361_279_120, "sdxl_controlnet": 1_251_014_160}
_PROJECTION = 1280 * 1280 + 1280 * 2048
"""Numbers between the features of a ControlNet and a block of Stage C."""
_COLOURS = 20_177_488 + 8 * _PROJECTION  # EfficientNet-V2-S
CONTROLNET |= {
    "cascade_c_controlnet_canny": _COLOURS - 2 * 9 * 24,
    "cascade_c_controlnet_inpaint": _COLOURS + 9 * 24,
    "cascade_c_controlnet_pose": _COLOURS,
    "cascade_c_controlnet_sr": 17 * 16384 + 16385 * 1024 + 16 * (9 * 1024**2 + 3072) + 1025 * 1280 + 8 * _PROJECTION,
    "cascade_c_controlnet_identity": 2 * 9 * 512 * 2048 + 2048 + 512 + 64 * (512 * 512 + 512 * 2048),
}
TOKENS = {"sd15_textual_inversion": [768], "sdxl_textual_inversion": [768, 1280], "sdxl_pivotal": [2 * 768, 2 * 1280]}
"""Numbers of the vectors of a new word, by text encoder."""
BESIDE = {"cascade_effnet": 20_197_968}
"""A component that is trained beside the denoiser."""
TRAINED = {"qwen_image": 20_336_007_616, "flux3_klein": 4_868_023_808}
"""Of recipes that train a denoiser but for what nothing reads, or reads without reference images."""
ADDED = LORA | CONTROLNET
"""Parameters beside the base's, which alone are trained."""
FROZEN = {
    "sd1": [83_653_863, 123_060_480],
    "sd2_base": [83_653_863, 340_387_840],
    "sd21": [83_653_863, 340_387_840],
    "sdxl": [83_653_863, 123_060_480, 694_659_840],
    "cascade_c": [694_659_840, 20_197_968, 303_966_208, 3_979_651],
    "cascade_b": [694_659_840, 20_197_968, 18_406_894],
    "flux1_dev": [83_819_683, 123_060_480, 4_762_310_656],
    "z_image": [83_819_683, 4_022_468_096],
    "flux2_klein_base_4b": [84_046_115, 4_022_468_096],
    "flux2_klein_base_9b": [84_046_115, 8_190_735_360],
    "qwen_image_21": [337_740_404, 8_767_123_696],
    **{kind: [126_892_531, 8_292_166_656] for kind in ("qwen_image", "qwen_image_edit_2511")},
    "krea2": [126_892_531, 4_437_815_808],
    "flux3_klein_base": [84_046_115, 4_437_815_808],
    "anima": [126_892_531, 596_049_920, 134_663_680],
}
TERM = re.compile(r"([\d,.]+) (?:M (?:trained parameters|frozen|parameters)|samples?) x ([\d.]+)")


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """An empty cache of the hub, and a network of which every use fails the test."""

    def no_network(*address, **more):
        pytest.fail(f"a dry run asked the network for {address}")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, no_network)
    monkeypatch.chdir(tmp_path)


def dry_run(name, place, capsys):
    given = []
    if tree(name)["data"].get("path") == "???":
        shards(place / "shards", labelled=False)
        given = ["data.path=shards", "training.global_batch_size=4", "training.per_device_batch_size=4"]
    if name in TOKENS:
        data_sets.folder(place / "my_toy", 3)
        given = ["data.path=my_toy"]
    given += [f"{path}={value}" for path, value in Twins(place).conditions(tree(name)).items()]
    assert main.run(["train", name, *given, "--dry-run"]) == errors.DONE
    return capsys.readouterr().out


def header(name):
    return recipe.shipped()[name].read_text(encoding="utf-8").split("\nrun_name", 1)[0].split("\nextends", 1)[0]


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long]) for name in NAMES]
)
def test_networks_files_and_data_are_told_without_any_of_them(name, offline, tmp_path, capsys):
    said = dry_run(name, tmp_path, capsys)
    kind = architectures.find(base(name)).name
    counts = [(int(all_.replace(",", "")), int(own.replace(",", ""))) for all_, own in COUNTS.findall(said)]
    denoiser = OF_OTHER_SIZES.get(name, UNET[kind])
    own = ADDED.get(name, 0 if name in TOKENS else TRAINED.get(name, denoiser))
    networks = [(denoiser, 0) if name in CONTROLNET else (denoiser + LORA.get(name, 0), own)]
    autoencoder, *encoders = FROZEN[kind]
    words = TOKENS.get(name, [0] * len(encoders))
    networks += [(autoencoder, 0), *((count + new, new) for count, new in zip(encoders, words, strict=True))]
    networks = [(count, count if count == BESIDE.get(name) else trained) for count, trained in networks]
    assert counts == networks + [(own, own)] * (name in CONTROLNET)
    assert re.search(rf"^  {re.escape(base(name))}: will be downloaded from the hub", said, flags=re.MULTILINE)
    assert f"daguerre fetch {base(name)} -o DIR" in said
    assert ("which has no checkpoint yet" in said) == bool(tree(name).get("init_from"))
    parts = {"cascade_c": ("prior", "image_encoder"), "cascade_b": ("decoder", "vqgan")}
    parts |= dict.fromkeys(
        (k for k in UNET if k.startswith(("flux", "z_", "qwen", "anima", "krea"))), ("transformer", "vae")
    )
    trained, other = parts.get(kind, ("unet", "vae"))
    places = tree(name)["model"]
    elsewhere = {part for part in (trained, "text_encoder") if "/" in str(places.get(part))}
    denoises_anew = "scratch" in name or name in OF_OTHER_SIZES
    of_base = trained not in elsewhere and not denoises_anew
    assert (f"{trained}/diffusion_pytorch_model.safetensors" in said) == of_base
    assert ("text_encoder/model.safetensors" in said) == ("text_encoder" not in elsewhere)
    for file in (f"{other}/config.json", "text_encoder/config.json"):
        assert file in said
    if tree(name)["data"].get("path") != "???" and name not in TOKENS:
        assert re.search(r"the data set '[\w/-]+' is not on this machine yet: `daguerre train` fetches it", said)
    assert ("are generated into" in said) == ("dreambooth" in name)
    assert list(tmp_path.glob("**/config.yaml")) == []


@pytest.mark.parametrize(("place", "downloads"), [(["model.vqgan=base"], True), ([], False)])
def test_a_base_that_nothing_is_read_of_is_not_named(place, downloads, offline, tmp_path, capsys):
    shards(tmp_path / "shards", labelled=False)
    given = ["data.path=shards", "training.global_batch_size=4", *place]
    assert main.run(["train", "cascade_a", *given, "--dry-run"]) == errors.DONE
    assert ("will be downloaded from the hub" in capsys.readouterr().out) == downloads


COUNTS = re.compile(r"([\d,]+) parameters, +([\d,]+) trained")


@pytest.mark.parametrize("name", NAMES)
def test_a_header_computes_the_memory_from_the_published_sizes(name):
    (memory,) = re.findall(r"^# Memory: (.*?)\n# Time:", header(name), flags=re.MULTILINE | re.DOTALL)
    memory = " ".join(memory.replace("#", "").split())
    kind = architectures.find(base(name)).name
    denoiser = OF_OTHER_SIZES.get(name, UNET[kind])
    numbers = (ADDED.get(name, denoiser), denoiser, sum(FROZEN[kind]), denoiser + sum(FROZEN[kind]))
    numbers += (FROZEN[kind][0], denoiser + sum(FROZEN[kind][1:]))
    numbers += (denoiser + BESIDE.get(name, 0), sum(FROZEN[kind]) - BESIDE.get(name, 0))
    numbers += (trained := TRAINED.get(name, denoiser), denoiser - trained)
    millions = {f"{count / 1e6:,.1f}" for count in numbers}
    found = [term.split(" M ")[0].split()[-1] for term in re.findall(r"[\d,.]+ M ", memory)]
    assert set(found) <= millions, memory
    terms = [(float(count.replace(",", "")), float(each), "M" in text) for text, count, each in _terms(memory)]
    total = sum(count * each / (1000 if is_millions else 1) for count, each, is_millions in terms)
    total += sum(map(float, re.findall(r"about ([\d.]+) GB", memory)))
    assert float(re.search(r"= (\d+) GB", memory)[1]) == pytest.approx(total, abs=0.6), memory


def _terms(text):
    return [(match[0], match[1], match[2]) for match in TERM.finditer(text)]


def test_what_the_device_has_not_is_refused_here_too(capsys):
    assert main.run(["train", "quickstart", "--dry-run", "training.max_device_memory=59GB"]) == errors.REFUSED
    assert "max_device_memory=59GB has no effect on a CPU" in capsys.readouterr().err


def refused(capsys, place, *given):
    """What `train` and `--dry-run` say of the same command, which they both refuse."""
    said = []
    for flags in ([], ["--dry-run"]):
        capsys.readouterr()
        assert main.run([*tiny_runs.arguments(place, *given), *flags]) == errors.REFUSED
        said.append(capsys.readouterr().err)
    assert said[0] == said[1]
    return said[0]


def test_what_train_refuses_of_a_run_that_exists_is_refused_here_too(tmp_path, capsys):
    tiny = ["training.duration=2 steps", "lr_scheduler.name=linear", "lr_scheduler.warmup=0 steps"]
    tiny += ["sampling.num_images=0", "data.checked_prompts=1", "checkpoint.export=false"]
    assert tiny_runs.train(tmp_path, *tiny, "resume_from_checkpoint=never") == errors.DONE
    before = sorted(path for path in tmp_path.rglob("*"))
    assert "seed: the run has 0, this command has 1" in refused(capsys, tmp_path, *tiny, "seed=1")
    assert "resume_from_checkpoint=never" in refused(capsys, tmp_path, *tiny, "resume_from_checkpoint=never")
    assert "'step-7'" in refused(capsys, tmp_path, *tiny, "resume_from_checkpoint=step-7")
    longer = [*tiny[1:], "training.duration=4 steps"]
    assert "lr_scheduler.on_new_duration" in refused(capsys, tmp_path, *longer)
    assert main.run([*tiny_runs.arguments(tmp_path, *longer, "on_new_duration=hold"), "--dry-run"]) == errors.REFUSED
    chosen = [*longer, "lr_scheduler.on_new_duration=decay", "lr_scheduler.restart_from=0.5"]
    assert main.run([*tiny_runs.arguments(tmp_path, *chosen), "--dry-run"]) == errors.DONE
    assert "the run continues from step-00000002" in capsys.readouterr().out
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_captions_that_are_cut_are_told_before_the_start(tmp_path, capsys):
    for i, caption in enumerate(["a red circle", "a red circle " * 40]):
        Image.new("RGB", (64, 64)).save(tmp_path / f"{i}.png")
        (tmp_path / f"{i}.txt").write_text(caption)
    given = ["train", "quickstart", "--dry-run", "data.source=folder", f"data.path={tmp_path}", "run_name=cut"]
    given += [f"output_dir={tmp_path / 'runs'}", "data.held_out_fraction=0", "training.global_batch_size=2"]
    assert main.run(given) == errors.DONE
    said = " ".join(capsys.readouterr().out.split())
    assert "1 of the first 2 captions are not read to their end, such as one that is cut to 32 tokens" in said
    assert "model.long_prompts=true" in said
    assert "several lines" not in said
    assert "how well the frozen autoencoder makes some of these images again" in said
    assert main.run([*given, "model.long_prompts=true"]) == errors.DONE
    assert "not read to their end" not in " ".join(capsys.readouterr().out.split())


def test_captions_of_several_lines_are_named_before_the_start(tmp_path, capsys):
    for i, caption in enumerate(["a red circle", "a red circle\na disc"]):
        Image.new("RGB", (64, 64)).save(tmp_path / f"{i}.png")
        (tmp_path / f"{i}.txt").write_text(caption)
    given = ["train", "quickstart", "--dry-run", "data.source=folder", f"data.path={tmp_path}", "run_name=lines"]
    given += [f"output_dir={tmp_path / 'runs'}", "data.held_out_fraction=0", "training.global_batch_size=2"]
    assert main.run(given) == errors.DONE
    said = " ".join(capsys.readouterr().out.split())
    assert "1 of the first 2 samples have a caption of several lines: joined" in said
    assert main.run([*given, "data.captions.lines=first"]) == errors.DONE
    assert "several lines" not in capsys.readouterr().out

"""`daguerre convert lora`, `merge`, `extract` and `resize`, beside diffusers and singular values by torch."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import foreign_loras
import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from safetensors.torch import load_file, save_file
from tiny_models import write_sd, write_sdxl
from torch import Tensor

from daguerre import errors
from daguerre.cli import main
from daguerre.families.pretrained import bases
from daguerre.families.stable_diffusion.single_file import save
from daguerre.models.lora_files.addition import DOWN, UP, Addition
from daguerre.models.lora_files.contents import contents_of
from daguerre.models.lora_files.low_rank import Keep, of_product, of_weight
from daguerre.models.lora_files.read import read

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")  # of a second adapter

PIPELINES: dict[str, Any] = {"sd": StableDiffusionPipeline, "sdxl": StableDiffusionXLPipeline}
WRITE = {"sd": write_sd, "sdxl": write_sdxl}
TARGETS = {"unet": ["to_q", "to_v", "conv1"], "text_encoder": ["q_proj", "fc1"]}
RANK = 3


class Place:
    """A base in a folder and in one file, and two LoRAs of diffusers with alphas unlike their ranks."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind, self.base = folder, kind, folder / "base"
        WRITE[kind](self.base)
        save.write(folder / "base.safetensors", self.base)
        for number, name in enumerate(("one", "two")):
            pipe = PIPELINES[kind].from_pretrained(self.base)
            foreign_loras.add(pipe, TARGETS, number, r=RANK, lora_alpha=5)
            foreign_loras.save(pipe, folder / name, [*TARGETS])
        self.lora = folder / "one" / foreign_loras.FILE

    def fused(self, **strengths: float) -> dict[str, Tensor]:
        """Weights of diffusers' pipeline with LoRAs in them, by component and layer."""
        pipe = PIPELINES[self.kind].from_pretrained(self.base)
        for name in strengths:
            pipe.load_lora_weights(self.folder / name, adapter_name=name)
        if strengths:
            pipe.set_adapters([*strengths], [*strengths.values()])
            pipe.fuse_lora(adapter_names=[*strengths])
        found = {}
        for component in TARGETS:
            for name, value in getattr(pipe, component).state_dict().items():
                if "lora_" not in name:
                    found[f"{component}.{name.replace('.base_layer.', '.').removeprefix('text_model.')}"] = value
        return found

    def weights(self, model: Path) -> dict[str, Tensor]:
        return {
            f"{component}.{name.removeprefix('text_model.')}": value
            for component in TARGETS
            for path in (model / component).glob("*.safetensors")
            for name, value in load_file(path).items()
        }


@pytest.fixture(scope="module", params=["sd", pytest.param("sdxl", marks=pytest.mark.long)])
def place(request, tmp_path_factory) -> Place:
    return Place(tmp_path_factory.mktemp(request.param), request.param)


def convert(*words: object) -> int:
    return main.run(["convert", *map(str, words)])


def off(found: dict[str, Tensor], expected: dict[str, Tensor], before: dict[str, Tensor]) -> float:
    """The largest difference as a share of the largest change."""
    assert found.keys() == expected.keys()
    apart = max(float((found[name].float() - value).abs().max()) for name, value in expected.items())
    return apart / max(float((value - before[name]).abs().max()) for name, value in expected.items())


@pytest.mark.parametrize("form", ["kohya", "peft"])
def test_lora_there_and_back(form, place, tmp_path, capsys):
    there = tmp_path / ("there" if form == "peft" else "there.safetensors")
    assert convert("lora", place.lora, f"format={form}", f"out={there}", f"base={place.base}") == errors.DONE
    assert "layers of unet and" in capsys.readouterr().out
    back, given = tmp_path / "back.safetensors", f"base={place.folder / 'base.safetensors'}"
    trained = {"ss_steps": "12", "ss_epoch": "3", "ss_tag_frequency": '{"dogs": {"dog": 4}}', "modelspec.author": "me"}
    if form == "kohya":  # what another program has written of its training
        save_file(load_file(there), there, {**trained, "ss_network_dim": "99"})
    assert convert("lora", there, "format=diffusers", f"out={back}", given) == errors.DONE
    if form == "kohya":
        metadata = contents_of(back).metadata
        assert metadata.items() >= trained.items()
        assert "ss_network_dim" not in metadata, "of the tensors there"
        capsys.readouterr()
        assert convert("lora", back, "format=peft", f"out={tmp_path / 'peft'}", given) == errors.DONE
        assert "peft's folders have no place for it: the header (modelspec.a" in capsys.readouterr().out
        again = tmp_path / "again.safetensors"
        assert convert("lora", back, "format=kohya", f"out={again}", given) == errors.DONE
        assert contents_of(again).metadata.items() >= {**trained, "ss_network_dim": str(RANK)}.items()
        assert not {"ss_resolution", "modelspec.resolution"} & contents_of(again).metadata.keys(), "no file had one"
    networks = bases.networks(place.base)
    first, last = (read(path, networks) for path in (place.lora, back))
    for component, own in first.items():
        by_layer = {each.layer: each for each in last[component]}
        assert by_layer.keys() == {each.layer for each in own}
        assert all(each.agrees(by_layer[each.layer]) for each in own)


def test_a_file_of_16_bits_stays_one_where_they_hold_its_numbers(place, tmp_path, capsys):
    half, there, back, mixed = (tmp_path / f"{name}.safetensors" for name in ("half", "there", "back", "mixed"))
    made = ["format=diffusers", f"out={half}", f"base={place.base}", "dtype=float16"]
    assert convert("lora", place.lora, *made) == errors.DONE
    rounding = float(capsys.readouterr().out.partition("differ by ")[2].split()[0])
    assert 2**-14 < rounding < 2**-11, "half of the last of 11 bits at most"
    assert {value.dtype for value in load_file(half).values()} == {torch.float16}
    assert convert("lora", half, "format=kohya", f"out={there}", f"base={place.base}") == errors.DONE
    tensors = load_file(there)
    assert {value.dtype for value in tensors.values()} == {torch.float16}
    assert convert("lora", there, "format=diffusers", f"out={back}", f"base={place.base}") == errors.DONE
    found, given = (
        {name.replace("text_model.", ""): value for name, value in load_file(path).items()} for path in (back, half)
    )
    torch.testing.assert_close(found, given, rtol=0, atol=0)  # compares types, too
    other = next(name for name in reversed(tensors) if name.endswith(".alpha"))
    save_file(tensors | {other: tensors[other] * 0.7}, there)
    assert convert("lora", there, "format=kohya", f"out={mixed}", f"base={place.base}") == errors.DONE
    wide = {name for name, value in load_file(mixed).items() if value.dtype is torch.float32}
    assert wide == {other.replace("alpha", "lora_up.weight")}, "its strength is in its numbers"


def test_the_base_of_a_run_is_its_own_and_a_run_is_a_base(place, tmp_path, capsys):
    whole, style = tmp_path / "whole", tmp_path / "style"
    (style / "adapter").mkdir(parents=True)
    shutil.copy(place.lora, style / "adapter")
    (style / "config.yaml").write_text(f"model: {{pretrained_model_name_or_path: {place.base}}}", encoding="utf-8")
    whole.mkdir()
    (whole / "pipeline").symlink_to(place.base)
    written = []
    for name, given in (("own", [style]), ("given", [place.lora, f"base={whole}"])):
        out = tmp_path / f"{name}.safetensors"
        assert convert("lora", *given, "format=kohya", f"out={out}") == errors.DONE
        assert (f"trained on {place.base}" in capsys.readouterr().out) == (name == "own")
        written.append(load_file(out))
    torch.testing.assert_close(*written, rtol=0, atol=0)
    refused = ["format=kohya", f"out={tmp_path / 'x.safetensors'}", f"base={style}"]
    assert convert("lora", style, *refused) == errors.REFUSED
    assert "nor has its pipeline/" in capsys.readouterr().err


@pytest.mark.parametrize("out", [pytest.param("merged", marks=pytest.mark.long), "merged.safetensors"])
def test_merge_is_what_diffusers_fuses(out, place, tmp_path, capsys):
    use = f"use={{{place.folder / 'one'}: 0.7, {place.folder / 'two'}: -0.5}}"
    model = place.base if out == "merged" else place.folder / "base.safetensors"
    assert convert("merge", model, use, f"out={tmp_path / out}") == errors.DONE
    said = capsys.readouterr().out
    assert "x -0.5: " in said
    assert "read back, it has what was added" in said
    made = tmp_path / out
    if out != "merged":
        assert convert("model", made, f"out={tmp_path / 'folder'}") == errors.DONE
        made = tmp_path / "folder"
    before = place.fused()
    found = {name: value for name, value in place.weights(made).items() if name in before}
    assert off(found, place.fused(one=0.7, two=-0.5), before) <= 2e-6
    assert len(list(made.iterdir())) >= len(list(place.base.iterdir())) - 1, "tokenizers and scheduler are there"


def test_new_tokens_beside_a_lora_are_told(place, tmp_path, capsys):
    for name in ("style", "tokens"):
        (tmp_path / "run" / "adapter" / name).mkdir(parents=True)
    shutil.copy(place.lora, tmp_path / "run" / "adapter" / "style")
    save_file({"<toy>": torch.zeros(1, 48)}, tmp_path / "run" / "adapter" / "tokens" / "learned_embeds.safetensors")
    assert convert("merge", place.base, f"use={{{tmp_path / 'run'}: 1}}", f"out={tmp_path / 'out'}") == errors.DONE
    said = capsys.readouterr().out
    assert f"its new tokens are left out, as they are files of their own: {tmp_path / 'run/adapter/tokens'}" in said


def test_merge_in_16_bits_says_what_rounding_takes(place, tmp_path, capsys):
    out = tmp_path / "merged"
    use = f"use={{{place.folder / 'one'}: 0.01}}"
    assert convert("merge", place.base, use, f"out={out}", "dtype=bfloat16") == errors.DONE
    share = float(capsys.readouterr().out.rpartition("to within ")[2].split()[0])
    assert 0.1 < share < 10, "of a hundredth little is left beside bfloat16's rounding of the weights"
    assert {value.dtype for value in place.weights(out).values()} == {torch.bfloat16}


@pytest.mark.long  # of the quick tests, one of 16 bits is extracted from
def test_extract_gives_back_a_merged_lora(place, tmp_path, capsys):
    assert convert("merge", place.base, f"use={{{place.lora}: 1}}", f"out={tmp_path / 'tuned'}") == errors.DONE
    base, tuned = place.folder / "base.safetensors", tmp_path / "tuned"
    for given in ([f"rank={RANK}"], ["energy=0.999999999"], ["energy=1", "rank=8"]):
        out = tmp_path / f"{given[0]}.safetensors"
        assert convert("extract", tuned, f"base={base}", *given, f"out={out}") == errors.DONE
        (found,) = [line for line in capsys.readouterr().out.splitlines() if "it differs" in line]
        assert float(found.rpartition("by ")[2].rstrip("%")) < 0.01
        again = tmp_path / f"again-{given[0]}"
        assert convert("merge", base, f"use={{{out}: 1}}", f"out={again}") == errors.DONE
        assert off(place.weights(again), place.fused(one=1.0), place.fused()) <= 1e-4
        capsys.readouterr()
    half = tmp_path / "half.safetensors"
    assert convert("extract", tuned, f"base={base}", "rank=1", f"out={half}") == errors.DONE
    assert float(capsys.readouterr().out.rpartition("by ")[2].split("%")[0]) > 10


def test_extract_of_a_model_in_16_bits_has_the_layers_that_changed_alone(place, tmp_path, capsys):
    """Each addition is off by at most twice what bfloat16's rounding takes of its layer (Eckart and Young 1936: nothing
    of that rank is nearer to the rounded change, and the true one has that rank)."""
    tuned, out = tmp_path / "tuned", tmp_path / "found.safetensors"
    assert convert("merge", place.base, f"use={{{place.lora}: 1}}", f"out={tuned}", "dtype=bfloat16") == errors.DONE
    capsys.readouterr()
    assert convert("extract", tuned, f"base={place.base}", f"rank={RANK}", f"out={out}") == errors.DONE
    assert "tensors that differ" not in capsys.readouterr().out
    networks = bases.networks(place.base)
    true, found = ({a.layer: a for own in read(path, networks).values() for a in own} for path in (place.lora, out))
    assert found.keys() == true.keys()
    rounded, plain, exact = place.weights(tuned), place.fused(), place.fused(one=1.0)
    changed = {name for name, value in exact.items() if not torch.equal(value, plain[name])}
    assert len(changed) == len(true)
    assert convert("merge", place.base, f"use={{{out}: 1}}", f"out={tmp_path / 'again'}") == errors.DONE
    again = place.weights(tmp_path / "again")
    for name in changed:
        rounding = float((rounded[name].float() - exact[name]).norm())
        assert 0 < float((again[name] - exact[name]).norm()) <= 2 * rounding


def test_extract_tells_of_what_is_no_layer(place, tmp_path, capsys):
    assert convert("merge", place.base, f"use={{{place.lora}: 1}}", f"out={tmp_path / 'tuned'}") == errors.DONE
    (path,) = (tmp_path / "tuned" / "unet").glob("*.safetensors")
    tensors = load_file(path)
    tensors["conv_in.bias"] += 1
    save_file(tensors, path, {"format": "pt"})
    given = [f"base={place.base}", "rank=3", f"out={tmp_path / 'x.safetensors'}"]
    assert convert("extract", tmp_path / "tuned", *given) == errors.DONE
    assert "1 tensors that differ are no weights of layers and not in it, such as unet.conv_in.bias" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (8, 6, 3, 3)])
def test_the_nearest_of_a_rank_is_that_of_singular_values(shape):
    generator = torch.Generator().manual_seed(0)
    change = torch.randn(shape, generator=generator)
    u, s, v = torch.linalg.svd(change.flatten(1).double(), full_matrices=False)
    for keep in (Keep(rank=3), Keep(energy=0.7), Keep(rank=2, energy=0.9), Keep(energy=1.0)):
        rank = keep.rank or len(s)
        if keep.energy is not None:
            enough = next(
                r for r in range(1, len(s) + 1) if s[:r].square().sum() >= keep.energy * s.square().sum() - 1e-9
            )
            rank = min(rank, enough)
        found = of_weight("x", change, keep)
        assert found.addition.rank == rank
        expected = (u[:, :rank] * s[:rank] @ v[:rank]).reshape(shape)
        assert (found.addition.change(shape).double() - expected).abs().max() <= 1e-5
        assert found.lost == pytest.approx(float(s[rank:].norm()), abs=1e-6)
        assert found.norm == pytest.approx(float(change.norm()))


def test_a_product_is_resized_from_its_factors():
    generator = torch.Generator().manual_seed(0)
    factors = {DOWN: torch.randn(6, 10, 3, 3, generator=generator), UP: torch.randn(9, 6, 1, 1, generator=generator)}
    given, shape = Addition("x", factors, 0.3), (9, 10, 3, 3)
    for keep in (Keep(rank=2), Keep(energy=0.6), Keep(rank=99)):
        of_factors, of_whole = of_product(given, shape, keep), of_weight("x", given.change(shape), keep)
        assert of_factors.addition.rank == min(of_whole.addition.rank, 6)
        found, expected = (each.addition.change(shape) for each in (of_factors, of_whole))
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_resize(place, tmp_path, capsys):
    for name, given in (("rank", ["rank=2"]), ("energy", ["energy=0.5"]), ("whole", ["rank=99"])):
        out = tmp_path / f"{name}.safetensors"
        assert convert("resize", place.lora, *given, f"out={out}", f"base={place.base}") == errors.DONE
        share = float(capsys.readouterr().out.rpartition("by ")[2].split("%")[0])
        assert share < 1e-3 if name == "whole" else 1 < share < 100
    ranks = {name: {len(v) for k, v in load_file(tmp_path / f"{name}.safetensors").items() if "lora_down" in k}
             for name in ("rank", "energy", "whole")}  # fmt: skip
    assert (ranks["rank"], ranks["whole"]) == ({2}, {3})
    assert min(ranks["energy"]) == 1


REFUSED = [
    (["lora"], "format must be given"),
    (["lora", "format=kohya", "out=x.safetensors"], "no LoRA given"),
    (["lora", "LORA", "format=kohya"], "no output given"),
    (["lora", "LORA", "format=kohya", "out=x"], "writes a .safetensors file"),
    (["lora", "LORA", "format=peft", "out=x.safetensors"], "a folder for each component"),
    (
        ["lora", "LORA", "format=kohya", "out=x.safetensors"],
        "published ones; as one of sd1: ",
    ),
    (["lora", "LORA", "format=kohya", "out=x.safetensors", "base=nowhere"], "there is no such place"),
    (["lora", "nowhere", "format=kohya", "out=x.safetensors"], "there is no such file"),
    (["merge", "BASE", "out=x"], "give a model and use"),
    (["merge", "BASE", "use={LORA: .nan}", "out=x"], "give a number"),
    (["merge", "LORA", "use={LORA: 1}", "out=x"], "is "),
    (["extract", "BASE", "rank=2", "out=x.safetensors"], "base=BASE"),
    (["extract", "BASE", "base=BASE", "out=x.safetensors"], "give rank=R, energy=E or both"),
    (["extract", "BASE", "base=BASE", "rank=2", "out=x.safetensors"], "there is nothing to extract"),
    (["extract", "BASE", "base=OTHER", "rank=2", "out=x.safetensors"], "is no fine-tune of"),
    (["extract", "BASE", "base=BASE", "energy=1.5", "out=x.safetensors"], "energy"),
    (["resize", "LORA", "out=x.safetensors"], "give rank=R, energy=E or both"),
    (["resize", "LORA", "rank=0", "out=x.safetensors"], "rank"),
    (["lora", "NAN", "format=kohya", "out=x.safetensors"], "nan.safetensors: unet."),
    (["lora", "NAN", "format=diffusers", "out=x.safetensors"], "has NaN or infinity in it"),
    (["resize", "NAN", "rank=2", "out=x.safetensors"], "has NaN or infinity in it"),
    (["resize", "HUGE", "rank=2", "out=x.safetensors", "base=BASE"], "huge.safetensors: what it adds to text_encoder"),
    (
        ["lora", "HUGE", "format=kohya", "out=x.safetensors", "base=BASE"],
        "huge.safetensors: what it adds to text_encoder",
    ),
    (["lora", "HUGE", "format=peft", "out=x", "base=BASE"], "huge.safetensors: what it adds to text_encoder"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_what_cannot_be_is_refused(words, said, place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    other = write_sd(tmp_path / "other", version=2) if "OTHER" in " ".join(words) else place.base
    nan, huge = tmp_path / "nan.safetensors", tmp_path / "huge.safetensors"
    tensors = load_file(place.lora)
    first = next(name for name in tensors if "unet" in name and "lora_B" in name)
    save_file(tensors | {first: tensors[first] * math.nan}, nan)
    save_file({name: tensor * 1e30 for name, tensor in tensors.items()}, huge)
    files = {"LORA": place.lora, "BASE": place.base, "OTHER": other, "NAN": nan, "HUGE": huge}
    for old, new in files.items():
        words = [word.replace(old, str(new)) for word in words] if "base=BASE" not in said else words
    assert convert(*words) == errors.REFUSED
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "x.safetensors").exists()


def test_no_weight_that_is_no_number_is_written(place, tmp_path, capsys):
    """A DoRA that takes away the rows that it gives lengths to, and what float16 cannot hold: by layer and file."""
    (file,) = (place.base / "unet").glob("*.safetensors")
    weights = load_file(file)
    layer = next(name for name in weights if name.endswith("attn1.to_q.weight")).removesuffix(".weight")
    weight = weights[f"{layer}.weight"].float()
    stem, eye, ones = f"unet.{layer}", torch.eye(len(weight)), torch.ones(len(weight))
    factors = {f"{stem}.lora_A.weight": eye, f"{stem}.lora_B.weight": -weight}
    save_file({**factors, f"{stem}.lora_magnitude_vector": ones}, tmp_path / "dora.safetensors")
    save_file({f"{stem}.diff": torch.full_like(weight, 1e5)}, tmp_path / "large.safetensors")
    for name, dtype, said in (
        ("dora", "float32", f"dora.safetensors: with it unet.{layer}.weight has NaN or infinity in it"),
        ("large", "float16", "a changed weight has values up to 1e+05, above the limit of float16"),
    ):
        out = tmp_path / f"{name}-merged.safetensors"
        use = f"use={{{tmp_path / name}.safetensors: 1}}"
        assert convert("merge", place.base, use, f"out={out}", f"dtype={dtype}") == errors.REFUSED
        assert said in capsys.readouterr().err
        assert sorted(each.name for each in tmp_path.iterdir()) == ["dora.safetensors", "large.safetensors"]
    assert main.run(["convert", "merge", str(place.base), f"use={{{tmp_path / 'large'}.safetensors: 1}}",
                     f"out={tmp_path / 'merged'}"]) == errors.DONE  # fmt: skip


def test_sums_are_converted_and_resized(place, tmp_path, capsys):
    """LyCORIS' norm and full: kohya's layout holds them, diffusers' does not; a norm has no rank."""
    layer, norm = "lora_unet_mid_block_resnets_0_conv1", "lora_unet_mid_block_resnets_0_norm1"
    (file,) = (place.base / "unet").glob("*.safetensors")
    weights = load_file(file)
    given = {f"{layer}.diff": weights["mid_block.resnets.0.conv1.weight"].float() * 0.1,
             f"{layer}.diff_b": weights["mid_block.resnets.0.conv1.bias"].float() + 1,
             f"{norm}.w_norm": weights["mid_block.resnets.0.norm1.weight"].float() * 0.1}  # fmt: skip
    save_file(given, tmp_path / "full.safetensors")
    base = f"base={place.base}"
    assert (
        convert("lora", tmp_path / "full.safetensors", "format=kohya", f"out={tmp_path / 'k.safetensors'}", base) == 0
    )
    written = load_file(tmp_path / "k.safetensors")
    assert {name.rpartition(".")[2] for name in written} == {"diff", "diff_b", "w_norm"}
    assert sorted(float(v.sum()) for v in written.values()) == sorted(float(v.sum()) for v in given.values())
    refused = convert(
        "lora", tmp_path / "full.safetensors", "format=diffusers", f"out={tmp_path / 'd.safetensors'}", base
    )
    assert refused == errors.REFUSED
    assert "a sum of a whole weight or bias cannot be written" in capsys.readouterr().err
    assert convert("resize", tmp_path / "full.safetensors", "rank=64", f"out={tmp_path / 'r.safetensors'}", base) == 0
    ends = {name.partition(".")[2] for name in load_file(tmp_path / "r.safetensors")}
    assert ends == {"lora_down.weight", "lora_up.weight", "alpha", "diff_b", "w_norm"}

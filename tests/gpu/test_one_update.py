"""One update of the recipes' twins on a GPU that is not there: nobody waits for it, nothing falls back, few launches.

What a GPU is given is decided by torch's dispatcher, which a build for CPUs has as well (fake_cuda.cpp). So defects
that no test on a CPU can see (a copy that the host waits for, a tensor on the wrong device, a kernel that gives way to
another, moments in another order than their weights) are seen here, without times and without numbers.

kernels.json has the launches of each recipe's update, as record.py finds them; one that has to launch more gets the
number of its failure.

Trained weights of 16 bits (`sd15_8gb` is such a recipe) have launches that those of 32 bits have not, and need them:
* A cast for each gradient of a LayerNorm's weight and bias (24 for its 12 norms): the kernel sums in float32, and
  autograd takes a gradient in the weight's type alone. Of weights of 32 bits the sum is the gradient.
* A copy for each two biases that are added together (13: 8 in the vector of the time, 5 in the short cut of a residual
  block): both have one tensor as their gradient, and autograd copies it where two weights would share it. Of weights
  of 32 bits each of the two is cast, and so is a tensor of its own. The copies stand for passes over whole images.
Without our kernels (`kernels=plain`) an update of that recipe has no such copy and 440 casts more: 7,711 launches, not
7,094.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import fake_cuda
import pytest
import torch
from twins import Twins, begun_from, tree

from daguerre import errors
from daguerre.cli import main
from daguerre.config import recipe

HERE = Path(__file__).parent
LAUNCHES = json.loads((HERE / "kernels.json").read_text(encoding="utf-8"))
MORE = 1.02
"""Share of the launches in the table that an update may have."""
QUICK = ("sdxl_pivotal", "quickstart_vae")
"""Adapters and new tokens of a denoiser with two text encoders, and an autoencoder: 20 s, of which 12 load torch."""
TRAINED = [name for name in recipe.shipped() if tree(name)["training"]["duration"] != "0 steps"]
TRAINED += ["sd15 model.long_prompts=true", "z_image_lora training.swap_blocks=3"]
TRAINED += ["cascade_c_lora training.capture=true training.gradient_checkpointing=true"]


@pytest.fixture(scope="module")
def library():
    return built()


def built():
    """The library, compiled once for an environment, in a folder of it that is named after the source: 6 s."""
    if torch.__version__.split("+")[0] not in fake_cuda.KNOWN or torch.version.cuda is not None:
        pytest.skip(f"needs a build for CPUs of torch {' or '.join(fake_cuda.KNOWN)}; this is {torch.__version__}")
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("needs a C++ compiler: install g++")
    digest = hashlib.sha256(fake_cuda.SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()
    folder = Path(sys.prefix) / "fake_cuda" / digest[:12]
    if (made := folder / "fake_cuda.so").exists():
        return str(made)
    built = subprocess.run([sys.executable, HERE / "fake_cuda.py", folder], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return built.stdout.splitlines()[-1]


@pytest.mark.long
def test_waits_are_seen(library):
    """Of each: how often the host waits, and how many launches there are."""
    done = subprocess.run([sys.executable, HERE / "seen.py", library], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "cpu" in found.pop("mixed")
    assert found.pop("norm")[0] == 0, "the norm of gradients that a mesh splits"
    quiet = {"product": [0, 1], "pinned": [0, 1], "filled": [0, 1], "view": [0, 0]}
    assert {name: found.pop(name) for name in quiet} == quiet
    assert {name for name, (waits, _) in found.items() if waits != 1} == set()
    assert len(found) == 10


def updates(library, folder, names):
    """The results of jobs, which are recipes with overrides, by their names; a job that fails has an `error`."""
    twins, out, found = Twins(folder), folder / "out", {}
    todo = []
    for name in names:
        own, *more = name.split()
        if (first := begun_from(own)) and not (out / first).exists():
            assert main.run(["train", first, f"output_dir={out}", *twins.overrides(first)]) == errors.DONE
        todo.append({"recipe": own, "overrides": [f"output_dir={out}", *twins.overrides(own), *more]})
    while len(found) < len(names):
        rest = len(found)
        done = subprocess.run(
            [sys.executable, HERE / "one_update.py", library],
            input=json.dumps(todo[rest:]), capture_output=True, text=True,
        )  # fmt: skip
        results = [json.loads(line) for line in done.stdout.splitlines()]
        if len(results) < len(todo) - rest:
            results.append({"error": done.stderr})
        found |= dict(zip(names[rest:], results, strict=False))
    return found


def check(name, result):
    assert "error" not in result, result["error"]
    for waits in ("waits", "validation_waits"):
        assert result[waits] == {}, f"the host waits for the device ({waits})"
    assert result["misplaced"] == [], "fused kernels walk weights and moments as they lie in memory"
    assert result["one_pass"] == result["adamw"], "every parameter of AdamW is moved by the kernel of one launch"
    launches = sum(result["kernels"].values())
    assert name in LAUNCHES, f"a recipe that is new: python tests/gpu/record.py {name}"
    assert launches <= MORE * LAUNCHES[name], f"{launches} launches an update, more than kernels.json has: {result}"


@pytest.fixture(scope="module")
def quick(library, tmp_path_factory):
    return updates(library, tmp_path_factory.mktemp("twins"), QUICK)


@pytest.mark.parametrize("name", QUICK)
def test_an_update_of_each_kind(name, quick):
    check(name, quick[name])


@pytest.fixture(scope="module")
def every(library, tmp_path_factory):
    return updates(library, tmp_path_factory.mktemp("twins"), [name for name in TRAINED if name not in QUICK])


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in TRAINED if name not in QUICK])
def test_an_update_of_every_recipe(name, every):
    check(name, every[name])

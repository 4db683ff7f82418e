"""The quickstart's images, packed into shards and read back from an object store: the same losses to the bit."""

import pytest
import tiny_runs
from faulty_store import Faults, s3  # noqa: F401

from daguerre.cli import main

COUNT = 16
PACKED = ["data.source=webdataset", "data.resolution=64", "data.shuffle=false", "data.held_out_fraction=0"]


def losses(run):
    """Every number of the training, to the last bit."""
    lines = [{k: v for k, v in line.items() if k.startswith("learning/")} for line in tiny_runs.lines(run)]
    return [line for line in lines if line]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Losses of the run on images that are drawn as they are needed."""
    folder = tmp_path_factory.mktemp("drawn")
    assert tiny_runs.train(folder) == 0
    found = losses(folder / "tiny")
    assert len([line for line in found if "learning/loss" in line]) >= 3
    return found


@pytest.mark.parametrize(
    "faults", [pytest.param(Faults(share), marks=pytest.mark.long) for share in (0, 0.3)], ids=["clean", "faulty"]
)
def test_the_quickstart_from_shards_in_a_store_has_the_same_losses(drawn, s3, tmp_path, faults):  # noqa: F811
    url = f"s3://{s3.bucket}/set/"
    assert main.run(["data", "pack", "quickstart", "-o", url, f"count={COUNT}"]) == 0
    s3.proxy.faults = faults
    given = [*PACKED, f"data.path={url}", f"data.cache_dir={tmp_path / 'shards'}", "loader.num_workers=1"]
    arguments = tiny_runs.arguments(tmp_path, *given)
    assert main.run([word for word in arguments if not word.startswith("data.checked_prompts")]) == 0
    assert losses(tmp_path / "tiny") == drawn

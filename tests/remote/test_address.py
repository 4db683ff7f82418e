"""`output_dir` as an address, in recipes."""

from __future__ import annotations

import pytest

from daguerre.config import config as configs
from daguerre.config.errors import ConfigError
from daguerre.run import storage


def test_an_address_is_taken_in_one_spelling():
    config = configs.load("quickstart", ["output_dir=S3://bucket/my runs/"]).config
    assert config.output_dir == "s3://bucket/my runs"
    assert storage.of(config.output_dir, config.run_name).name == "s3://bucket/my runs/quickstart"
    assert storage.of("gs://bucket/", "x").name == "gs://bucket/x"


def test_runs_of_one_name_in_two_places_have_folders_of_their_own():
    folders = {storage.of(place, "x").folder.path for place in ("s3://a/runs", "s3://b/runs", "gs://a/runs", "runs")}
    assert len(folders) == 4
    assert {path.name for path in folders} == {"x"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("az://container/runs", "not az://"),
        ("https://host/runs", "not https://"),
        ("s3://", "give s3://BUCKET/FOLDER"),
        ("s3://bucket//runs", "without empty parts"),
    ],
)
def test_what_cannot_hold_runs_is_refused(given, said):
    with pytest.raises(ConfigError) as caught:
        configs.load("quickstart", [f"output_dir={given}"])
    assert said in str(caught.value)
    assert "output_dir" in str(caught.value)

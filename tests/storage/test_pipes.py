"""`pipe:` values: which commands are read as an address, and that nothing is ever run."""

import pytest

from daguerre.errors import UserError
from daguerre.storage.pipes import address_in


@pytest.mark.parametrize(
    ("command", "address"),
    [
        ("aws s3 cp s3://bucket/a.tar -", "s3://bucket/a.tar"),
        ("aws s3 cp --quiet --only-show-errors s3://bucket/a.tar -", "s3://bucket/a.tar"),
        ("aws  s3 cp   's3://bucket/a b-{000..010}.tar'  - ", "s3://bucket/a b-{000..010}.tar"),
        ("gsutil cat gs://bucket/a.tar", "gs://bucket/a.tar"),
        ("gsutil -q cp gs://bucket/a.tar -", "gs://bucket/a.tar"),
        ("gcloud storage cat gs://bucket/a.tar", "gs://bucket/a.tar"),
        ("curl -s -L https://host/a.tar", "https://host/a.tar"),
        ("curl -fsSL 'https://host/a.tar?x=1&y=2'", "https://host/a.tar?x=1&y=2"),
        ("cat /data/a.tar", "/data/a.tar"),
        ("cat a{0..3}.tar", "a{0..3}.tar"),
    ],
)
def test_commands_that_only_read_a_file(command, address):
    assert address_in(f"pipe:{command}", "data.path") == address


@pytest.mark.parametrize(
    "command",
    [
        "",
        "cat",
        "cat a.tar b.tar",
        "cat a.tar | gunzip",
        "cat a.tar; rm -rf x",
        "cat a.tar && rm x",
        "cat a.tar > b",
        "cat -",
        "aws s3 cp s3://bucket/a.tar",
        "aws s3 cp s3://bucket/a.tar b.tar",
        "aws s3 cp --endpoint-url http://x s3://bucket/a.tar -",
        "aws s3 sync s3://bucket/a.tar -",
        "curl -H 'X: y' https://host/a.tar",
        "curl -o x https://host/a.tar",
        "rm -rf /",
        "cat 'a.tar",
        "gzip -dc a.tar.gz",
        "sh -c 'cat a.tar'",
    ],
)
def test_every_other_command_is_refused_and_not_run(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^data\.path: pipe:\.\.\.: ") as refused:
        address_in(f"pipe:{command}", "data.path")
    assert len(command) < 4 or command not in str(refused.value)
    assert not list(tmp_path.iterdir())

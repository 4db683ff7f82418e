"""Secrets in addresses: given in every place where an address can stand, and then looked for in every byte that was
written and in all that was printed."""

import json
import os
import re
import shlex
import sys
import threading
from base64 import b64encode
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import data_sets
import pytest
import tiny_runs

from daguerre import credentials, errors
from daguerre.checkpoint.environment import environment
from daguerre.cli import main
from daguerre.config import config
from daguerre.storage import clients

USER, PASSWORD, SIGNATURE = "planteduser", "planted-pa55word", "plantedS1gnature"
SECRETS = (USER, PASSWORD, SIGNATURE, "planted")
SIGNED = f"?sv=2024&sig={SIGNATURE}"


class Guarded(BaseHTTPRequestHandler):
    """Files for who has both the password and the signature, by ranges."""

    def __init__(self, folder, refused, *arguments):
        self.folder, self.refused = folder, refused
        super().__init__(*arguments)

    def log_message(self, *_):
        pass

    def do_GET(self):
        path, _, query = self.path.partition("?")
        pair = "Basic " + b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        file = self.folder / path.lstrip("/")
        if self.headers.get("Authorization") != pair or SIGNATURE not in query or not file.is_file():
            self.refused.append(self.path)
            self.send_error(403 if file.is_file() else 404)
            return
        data = file.read_bytes()
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        part = data[int(span[1]) : int(span[2]) + 1] if span else data
        self.send_response(206 if span else 200)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        if span:
            self.send_header("Content-Range", f"bytes {span[1]}-{int(span[1]) + len(part) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(part)

    do_HEAD = do_GET


@contextmanager
def guarded(folder):
    refused = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Guarded, folder, refused))
    server.daemon_threads = True
    threading.Thread(target=partial(server.serve_forever, poll_interval=0.01), daemon=True).start()
    try:
        yield f"http://{USER}:{PASSWORD}@127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def forgetful(monkeypatch):
    """Each test begins like a process of its own."""
    monkeypatch.setattr(credentials, "_kept", {})
    monkeypatch.delenv(credentials.VARIABLE, raising=False)
    credentials._of_environment.cache_clear()
    yield
    credentials._of_environment.cache_clear()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to work in, with the caches in it, and shards beside it that are not searched."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in ("XDG_CACHE_HOME", "HF_HOME", "TMPDIR"):
        monkeypatch.setenv(name, str(folder / name.lower()))
    return folder


def found_in(folder):
    """Files (and names of files) that hold one of the secrets."""
    bad = []
    for path in folder.rglob("*"):
        data = os.fsencode(path.name) + (path.read_bytes() if path.is_file() else b"")
        bad += [(path.relative_to(folder), secret) for secret in SECRETS if secret.encode() in data]
    return bad


def assert_clean(folder, capfd):
    said = "".join(capfd.readouterr())
    assert found_in(folder) == []
    assert not [secret for secret in SECRETS if secret in said], said
    return said


def forget():
    credentials._kept.clear()
    credentials._of_environment.cache_clear()


@pytest.mark.long
def test_a_run_on_protected_shards(place, tmp_path, capfd, monkeypatch):
    """Trained, refused without the secrets, gone on with each of the two ways to give them."""
    data_sets.shards(tmp_path / "raw", 2, 4)
    run = place / "runs" / "tiny"
    with guarded(tmp_path / "raw") as url:
        given = f"data.path={url}/part-{{00..01}}.tar{SIGNED}"
        argv = tiny_runs.arguments(
            place / "runs", "data.source=webdataset", given, "data.resolution=64", "validation.every=null",
            f"data.cache_dir={place / 'data'}", "loader.num_workers=0", "training.duration=3 steps",
            "description=drawn from " + url, "lr_scheduler.name=constant",
        )  # fmt: skip
        argv = [word for word in argv if not word.startswith(("data.checked", "validation.num"))]
        monkeypatch.setattr(sys, "argv", ["daguerre", *argv])
        assert main.run(argv) == errors.DONE, capfd.readouterr().err
        assert_clean(place, capfd)
        written = config.load(str(run)).config.data.sources["images"].path
        assert written == re.sub("//.*@", "//***@", url) + "/part-{00..01}.tar?***"

        forget()
        more = ["train", str(run), "training.duration=4 steps"]
        assert main.run(more) == errors.REFUSED
        said = assert_clean(place, capfd)
        assert "given with a user and password, or a query, here replaced by ***" in said
        assert credentials.VARIABLE in said

        assert main.run([*more, given.replace("sv=2024", "sv=2025")]) == errors.DONE, capfd.readouterr().err
        assert_clean(place, capfd)

        forget()
        monkeypatch.setenv(credentials.VARIABLE, f"https://other@host/ {given.removeprefix('data.path=')}")
        assert main.run(["train", str(run), "training.duration=5 steps"]) == errors.DONE, capfd.readouterr().err
        assert_clean(place, capfd)
    assert json.loads((run / "status.json").read_text())["step"] == 5


def test_data_verbs(place, tmp_path, capfd):
    data_sets.shards(tmp_path / "raw", 1, 4)
    with guarded(tmp_path / "raw") as url:
        shards = f"{url}/part-00.tar{SIGNED}"
        for verb in (
            ["data", "stats", shards, "out=stats.html"],
            ["data", "verify", shards],
            ["data", "index", shards],
            ["data", "show", shards, "out=show.png"],
            ["data", "pack", shards, "out=packed"],
        ):
            main.run([*verb, f"data.cache_dir={place / 'data'}"])
        assert (place / "packed" / "dataset.json").is_file(), capfd.readouterr().err
        assert (place / "stats.html").is_file()
    assert_clean(place, capfd)


DATA_VERBS = ("stats", "verify", "index", "show", "pack")
ADDRESSES = [
    f"https://{USER}:{PASSWORD}@host/x?sig={SIGNATURE}",
    f"https://{USER}:{PASSWORD}/{PASSWORD}@host:80/x?sig={SIGNATURE}",
    f"s3://{USER}:{PASSWORD}@bucket/x",
    f"s3://{USER}:{PASSWORD}/{PASSWORD}@bucket/x",
    f"s3://bucket/x?X-Amz-Signature={SIGNATURE}",
    f"az://container/x?sv=1&sig={SIGNATURE}",
    f"pipe:curl -u {USER}:{PASSWORD} https://host/x",
    f"  https://{USER}:{PASSWORD}@host/x",
    f"[https://host/x,https://{USER}:{PASSWORD}@host/x]",
]
COMMANDS = [
    pytest.param("train quickstart data.source=webdataset data.path=@", marks=pytest.mark.long),
    "train quickstart data.source=webdataset 'data.path=[a, @]'",
    "train quickstart data.path=@",
    "train quickstart output_dir=@ --dry-run",
    "train quickstart init_from=@",
    "train quickstart ema.path=@",
    "train quickstart sampling.prompts_file=@",
    "train quickstart model.pretrained_model_name_or_path=@ --dry-run",
    "train quickstart no.such.setting=@",
    "train quickstart distributed.dist_url=@",
    "train quickstart @",
    "train @",
    "@",
    "generate @ out=o",
    "generate quickstart prompts_file=@ out=o",
    "generate quickstart prompt=x out=@",
    "report @",
    "serve @",
    "serve --root @",
    "data stats @",
    "data pack @ out=o",
    "data pack a.tar out=@",
    "data show a.tar out=@",
    "fetch @",
    "fetch owner/name -o @",
    "convert model @ out=o",
    "convert config @",
    "convert ema @ width=0.1",
    "plan @",
    "plan quickstart output_dir=@",
    "bench @",
    "probe @",
    "init @",
    "init . base=@",
    "init . -o @",
    "probe quickstart model.vae=@ data.path=a",
    "launch slurm @ nodes=1",
    "launch slurm quickstart nodes=1 gpus_per_node=0 out=job-setup setup='export HTTPS_PROXY=@'",
    "launch slurm quickstart nodes=1 gpus_per_node=0 device=cpu out=job description=@",
    "train quickstart 'adapters.lora.ranks={@: 4}'",
    "train quickstart 'data.sources={@: {source: folder}}'",
    "generate quickstart prompt=x out=o 'use={@: 0.8}'",
    "generate quickstart prompt=x out=o 'controlnets={@: 1}'",
    "generate quickstart prompt=x image=@ out=o",
    "reference @ networks.inception=random out=r.safetensors",
    "reference a networks.inception=@ out=r.safetensors",
    "reference a networks.inception=random out=@",
    "compare @",
    "compare @ strengths=0.4..1.2 out=@",
    "evaluate @",
    "evaluate @ @",
    "evaluate a metrics=[psnr] against=@",
    "evaluate a reference=@ metrics=[fid] networks.inception=random",
    "evaluate a prompts_file=@ out=@",
    "convert merge 'use={@: 1, b: 1}' out=o.safetensors",
    "convert export @ out=o",
    "convert extract @ base=@ out=o.safetensors",
    "convert lora @ format=kohya out=o.safetensors",
    "convert resize @ rank=4 out=o.safetensors",
    "convert tokens @ out=o",
    "cache @",
    "cache quickstart cache.path=@ verify=true",
    "data index @",
    "data verify @",
    "publish @ owner/name",
    "recipes @",
    "doctor @",
    "queue add quickstart output_dir=@ queue=q",
    "queue add @ queue=q",
    "queue add quickstart queue=@",
    "queue list @ queue=q",
    "queue move @ first queue=q",
    "queue pause @ queue=q",
    "queue resume @ queue=q",
    "queue stop @ queue=q",
    "queue remove @ queue=q",
    "queue run @ queue=q",
    "caption @ with=wd14",
    "check @",
    "completion @",
    "--plugins @ recipes",
    "caption a with=wd14 path=@",
    "control @ save",
    "control a @",
    "control a sample prompt=@",
    "launch local @",
]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_refused_or_written_holds_none(place, capfd, monkeypatch, command, every):
    """Whatever a command makes of such addresses, none of them is seen again; faults count as failures."""
    number = COMMANDS.index(command) if command in COMMANDS else 0
    monkeypatch.setattr(credentials, "_LEAST_LENGTH", 1000)  # each is found as an address, not by its known parts
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(clients, "PATIENCE", clients.Patience(2, 0.01, 0.01, unreachable_seconds=0))
    clients.forget()
    for address in ADDRESSES if every else ADDRESSES[number % 4 :: 4]:
        words = [word.replace("@", address, 1) if "@" in word else word for word in shlex.split(command)]
        code = main.run(words)
        assert code in (errors.DONE, errors.REFUSED, errors.FAILED), (code, words)
        assert_clean(place, capfd)
        forget()


def test_a_job_takes_them_from_its_environment(place, capfd, monkeypatch):
    address = f"https://{USER}:{PASSWORD}@host/x.tar?sig={SIGNATURE}"
    given = ["data.source=webdataset", f"data.path={address}", "data.resolution=64", "validation.every=null"]
    command = ["launch", "slurm", "quickstart", "nodes=1", "gpus_per_node=0", "out=job", *given]
    assert main.run(command) == errors.DONE, capfd.readouterr().err
    assert credentials.VARIABLE in assert_clean(place, capfd)
    (word,) = re.findall(r"'(data\.path=.*)'", (place / "job").read_text())
    forget()
    assert credentials.is_cut(credentials.whole(word.removeprefix("data.path=")))
    monkeypatch.setenv(credentials.VARIABLE, address)
    assert credentials.whole(word.removeprefix("data.path=")) == address


def test_a_job_does_not_take_them_into_its_file(place, capfd):
    command = ["launch", "slurm", "quickstart", "nodes=1", "gpus_per_node=0", "out=job"]
    assert main.run([*command, f"setup=export HTTPS_PROXY=http://{USER}:{PASSWORD}@proxy"]) == errors.REFUSED
    assert "secrets are never written to files" in assert_clean(place, capfd)
    assert not (place / "job").exists()


def test_a_converted_config_holds_none(place, tmp_path, capfd):
    theirs = tmp_path / "theirs.yml"
    theirs.write_text(
        "pretrained_model_name_or_path: runwayml/stable-diffusion-v1-5\nrun_name: x\n"
        f"dataset_name: 'https://{USER}:{PASSWORD}@host/x?sig={SIGNATURE}'\n"
        f"output_dir: 's3://{USER}:{PASSWORD}@bucket/x'\ntrain_data_dir: 'gs://bucket/x?X-Goog-Signature={SIGNATURE}'\n"
        f"hf_train_files: 'https://{USER}@host/x'\nmax_train_steps: 10\nlearning_rate: 1.e-5\n"
        "per_device_batch_size: 1\nresolution: 512\nunet_checkpoint: ''\n",
        encoding="utf-8",
    )
    main.run(["convert", "config", str(theirs), "out=recipe.yaml"])
    assert_clean(place, capfd)


def test_the_recorded_command_holds_none(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["daguerre", *(f"data.path={address}" for address in ADDRESSES)])
    assert not [secret for secret in SECRETS if secret in json.dumps(environment())]


def test_every_verb_is_given_them():
    """A verb that is new is added to COMMANDS, as its words are opened or written somewhere."""
    named = {tuple(shlex.split(text)[:2]) for text in map(_text, COMMANDS)} | {("data", name) for name in DATA_VERBS}
    groups = {name for name, verb in main.verbs().items() if verb.is_group}
    for name, verb in main.verbs().items():
        below = main.verbs(name) if verb.is_group else {}
        for inner in below or [""]:
            wanted = (name, inner) if name in groups else (name,)
            assert any(found[: len(wanted)] == wanted for found in named), wanted


def _text(command):
    return command if isinstance(command, str) else command.values[0]


@pytest.mark.long  # of the quick tests, every command is given addresses
def test_statistics_of_protected_data_hold_none(place, tmp_path, capfd):
    """The file of `reference` is meant to be shared: its header, its protocol and names of folders."""
    data_sets.shards(tmp_path / "raw", 1, 4)
    with guarded(tmp_path / "raw") as url:
        given = [f"{url}/part-00.tar{SIGNED}", "num_images=4", "networks.inception=random", "out=r.safetensors"]
        code = main.run(["reference", *given, f"data.cache_dir={place / 'data'}"])
        assert code == errors.DONE, capfd.readouterr().err
    assert (place / "r.safetensors").is_file()
    assert_clean(place, capfd)
    assert b"//***@127.0.0.1" in (place / "r.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("word", "expected", "kept"),
    [
        ("https://u:pass12@h/a", "https://***@h/a", "https://u:pass12@h/a"),
        ("data.path=https://u:pass12@h/{00..01}.tar", "data.path=https://***@h/{00..01}.tar",
         "https://u:pass12@h/{00..01}.tar"),
        ("data.path=[https://u:pass12@h/{00,01}.tar,b]", "data.path=[https://***@h/{00,01}.tar,b]",
         "https://u:pass12@h/{00,01}.tar"),
        ("use={https://h/a?sig=secret99: 0.8}", "use={https://h/a?***: 0.8}", "https://h/a?sig=secret99"),
        ("https://u:pa,ss@h/a", "https://***@h/a", "https://u:pa,ss@h/a"),
        ("prompt=a sign https://h/?q=1", "prompt=a sign https://h/?q=1", None),
        ("sampling.prompts=[see https://h/?q=1]", "sampling.prompts=[see https://h/?q=1]", None),
        ("prompts_file=https://u:pass12@h/a.txt", "prompts_file=https://***@h/a.txt", "https://u:pass12@h/a.txt"),
        ("https://h/a.tar", "https://h/a.tar", None),
        ("pipe:aws s3 cp s3://b/a.tar -", "pipe:aws s3 cp s3://b/a.tar -", None),  # it names a file
        ("pipe:curl https://u:pass12@h/a", "pipe:curl https://***@h/a", "https://u:pass12@h/a"),
    ],
)  # fmt: skip
def test_words_of_the_command_line(word, expected, kept):
    assert credentials.word(word) == expected
    if kept:
        assert credentials.whole(credentials.redact(kept)) == kept


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://key:sec/ret@bucket/x", "s3://***"),
        ("s3://bucket/a@b:c", "s3://bucket/a@b:c"),
        ("https://user:123?ss@host/x", "https://***"),
        ("https://user:12#ab@host/x", "https://***"),
        ("https://host:80/x?mail=a@b", "https://host:80/x?***"),
        ("no //user:pass@host/x there", "no //***@host/x there"),
        ("a // b:c@d", "a // b:c@d"),
    ],
)
def test_secrets_with_signs_of_addresses_in_them(text, shown):
    assert credentials.scrub(text) == shown

"""Blocks of Python in docs/ that no other test runs, each with the names that it takes for granted."""

import re
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import diffusers
import test_docs
import torch
import torch.distributed as dist
from torch import nn

from daguerre import ranks
from daguerre.checkpoint.async_save import FailedSaves, Saver
from daguerre.checkpoint.retention import RetentionPolicy
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.checkpoint.shard_reader import opened
from daguerre.checkpoint.sharded import ShardedStore
from daguerre.checkpoint.shards import ShardedTensor
from daguerre.distributed.launch import environment
from daguerre.distributed.process_group import Watching, start
from daguerre.distributed.settings import DistributedSettings
from daguerre.models.reading import Reading

ELSEWHERE = {"README.md", "library.md"}
"""Pages whose blocks other tests run one after the other; files of extending.md, and its family, are run by its own."""


def blocks(page):
    found = re.findall(r"^```python\n(.*?)^```$", test_docs.TEXTS[page], re.MULTILINE | re.DOTALL)
    return [each for each in found if not each.startswith("# src/") and "trained_net.family" not in each]


def run(page, number, **names):
    exec(compile(blocks(page)[number], page, "exec"), names)  # noqa: S102
    return names


def test_there_are_no_others():
    found = {page: len(blocks(page)) for page in test_docs.TEXTS if page not in ELSEWHERE and blocks(page)}
    assert found == {"checkpoints.md": 2, "export.md": 1, "extending.md": 2, "launching.md": 1}


def test_checkpoints_are_saved_and_recovered(tmp_path):
    """What the block for many processes has saved is read by both, the next time."""
    held = torch.ones(2)
    given = {"dist": dist, "timedelta": timedelta, "ranks": ranks, "folder": RunFolder(tmp_path), "opened": opened}
    given |= {"Saver": Saver, "ShardedStore": ShardedStore, "FailedSaves": FailedSaves, "state": {"step": 1000}}
    given |= {"RetentionPolicy": RetentionPolicy, "groups": {"model": {"w": ShardedTensor.of(held)}}}
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        assert run("checkpoints.md", 1, **given)["found"].path is None
        held.zero_()
        run("checkpoints.md", 1, **given)
    finally:
        dist.destroy_process_group()
    assert torch.equal(held, torch.ones(2))
    found = run("checkpoints.md", 0, path=tmp_path)
    assert torch.equal(found["checkpoint"].tensors["model"]["w"], held)
    assert found["notices"] == []


def test_the_pipeline_is_called_as_its_class_is():
    made = mock.create_autospec(diffusers.StableDiffusionPipeline, instance=True)
    with mock.patch.object(diffusers.StableDiffusionPipeline, "from_pretrained", return_value=made) as opens:
        run("export.md", 0)
    opens.assert_called_once_with("runs/quickstart/pipeline")


def test_a_loop_of_a_rank(tmp_path):
    names = {"environment": environment, "Watching": Watching, "start": start, "settings": DistributedSettings()}
    stop = SimpleNamespace(signal=None, exit_code=0)
    names |= {"run_folder": tmp_path, "write_status": print, "stop": stop, "updates": [mock.Mock(step=1)]}
    assert run("launching.md", 0, **names)["signalled"] is None


def test_readings_of_extending():
    loaded = mock.Mock()
    found = run("extending.md", 0, Reading=Reading, replace=replace, text_encoder=loaded, components=None,
                TextConditioning=tuple)  # fmt: skip
    assert found["z_image"].layers == (-2,)
    assert len(found["text"]) == 2


def test_a_scale_of_a_layers_output():
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    before = layer(x)
    run("extending.md", 1, layers=[layer], nn=nn, torch=torch)
    nn.init.constant_(layer.scale, 2.0)
    assert torch.equal(layer(x), 2 * before)

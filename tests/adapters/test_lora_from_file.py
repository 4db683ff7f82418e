"""A LoRA that starts from a file: it has the file's effect, whatever layout and alpha, or says why it cannot."""

from pathlib import Path

import pytest
import torch
from test_lora import errors, outputs
from test_lora_kinds import EVERYWHERE, attached, networks, plain, trained

from daguerre.errors import UserError
from daguerre.models.lora_files.addition import DIFFUSERS_FILE, KOHYA_FILE

CASES = [
    ("lora", KOHYA_FILE),
    *(pytest.param(kind, DIFFUSERS_FILE, marks=pytest.mark.long) for kind in ("rslora", "dora")),
    *(pytest.param(kind, KOHYA_FILE, marks=pytest.mark.long) for kind in ("loha", "lokr")),
]


@pytest.fixture(scope="module")
def file(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA of rank 4 (2 of the text encoder) and alpha 2.5."""
    folder = tmp_path_factory.mktemp("file") / "lora"
    parts = trained(attached(base, "lora"))
    parts.attached.export(folder, parts.objective, None)
    return folder / KOHYA_FILE


@pytest.mark.long
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_it_has_the_effect_of_the_file_with_any_alpha(kind, name, base, tmp_path):
    theirs = trained(attached(base, kind))
    theirs.attached.export(tmp_path / "lora", theirs.objective, None)
    alone, expected = outputs(networks(plain(base))), outputs(networks(theirs))
    ours = attached(base, kind, "adapter.alpha=7", 'adapter.alpha_pattern={"to_q": 3}')
    (said,) = ours.attached.start_from(tmp_path / "lora" / name)
    assert "layers start from the LoRA in" in said
    assert "that it lacks" not in said
    errors(outputs(networks(ours)), expected, alone)


def test_layers_that_the_file_lacks_start_without_effect(base, tmp_path):
    theirs = trained(plain(base, "adapter.name=lora", "adapter.rank=4"))
    theirs.attached.export(tmp_path / "lora", theirs.objective, None)
    ours = attached(base, "lora")
    (said,) = ours.attached.start_from(tmp_path / "lora")
    assert "layers that it lacks start without effect" in said
    alone, expected = outputs(networks(plain(base))), outputs(networks(theirs))
    found = outputs(networks(ours))
    errors({"unet": found["unet"]}, {"unet": expected["unet"]}, alone)
    assert torch.equal(found["text_encoder"], alone["text_encoder"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([EVERYWHERE, "adapter.rank=8"], "has rank 4 in the file, and another one here: set adapter.rank"),
        (
            [EVERYWHERE, "adapter.kind=dora", "adapter.rank=4"],
            "this recipe trains lora_A.weight, lora_B.weight, lora_magnitude_vector",
        ),
        (["adapter.rank=4", "adapter.targets=[to_q]"], "this recipe trains none there: set targets and ranks"),
        (["adapter.rank=4", "adapter.init=pissa"], "set init=default"),
    ],
)
def test_what_does_not_fit_is_refused(given, said, base, file):
    parts = plain(base, "adapter.name=lora", *given)
    with pytest.raises(UserError, match=r"^init_from=") as caught:
        parts.attached.start_from(file)
    assert said in str(caught.value)


def test_full_training_starts_from_no_file(base, file):
    with pytest.raises(UserError, match=r"no adapter of this recipe starts from a file .*init_file: FILE"):
        plain(base).attached.start_from(file)

"""`model.words=captions`: a tokenizer of the words of its data, listed at the first start and held from then on."""

from __future__ import annotations

from pathlib import Path

import data_sets
import pytest
from transformers import CLIPTokenizer

from daguerre.cli import main
from daguerre.config import config as configs
from daguerre.data import vocabulary
from daguerre.data.settings import DataSettings

RECIPE = """
extends: quickstart_text
run_name: run
model:
  words: captions
  max_tokens: 16
  text_encoder: {hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2}
  image_channels: [8, 16]
data: {source: folder, resolution: 16, held_out_fraction: 0}
training: {global_batch_size: 4, duration: 2 steps}
lr_scheduler: {name: constant}
checkpoint: {every: 1 steps}
logging: {tensorboard: false}
"""


class Place:
    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        (folder / "mine.yaml").write_text(RECIPE)
        data_sets.folder(folder / "images", 4)
        for i, path in enumerate(sorted((folder / "images").glob("*.jpg"))):
            path.with_suffix(".txt").write_text(["A café, at night", "red-hot 42 pans", "it isn't", "a pan"][i])

    def train(self, *given: str) -> int:
        place = [f"output_dir={self.folder}", f"data.path={self.folder / 'images'}"]
        return main.run(["train", str(self.folder / "mine.yaml"), *place, *given])


WORDS = ["'t", ",", "-", "2", "4", "a", "at", "café", "hot", "isn", "it", "night", "pan", "pans", "red"]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_the_words_are_those_of_the_captions(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert place.train("training.duration=1 steps") == 0
    found = configs.load(str(place.run)).config.model.words
    assert found == WORDS
    tokenizer = CLIPTokenizer.from_pretrained(place.run / "pipeline" / "tokenizer")
    assert [len(tokenizer.tokenize(word)) for word in found] == [1] * len(found)
    assert len(tokenizer.tokenize("zebra")) > 1

    caption = min((place.folder / "images").glob("*.txt"))
    caption.write_text("A café, at noon")
    assert place.train() == 2
    assert "model.words: the run has" in capsys.readouterr().err
    assert place.train("allow_change=[data.captions]") == 2  # its embeddings are those of the words that it had
    caption.write_text("A café, at night")
    assert place.train() == 0


def test_a_dry_run_reads_them_too(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert place.train("--dry-run") == 0
    assert "Networks" in capsys.readouterr().out
    assert not place.run.exists()


def test_every_caption_that_may_be_drawn_is_listed(tmp_path: Path) -> None:
    data_sets.folder(tmp_path / "images", 2)
    first, second = sorted((tmp_path / "images").glob("*.jpg"))
    first.with_suffix(".txt").write_text("one, {two|three}")
    second.with_suffix(".txt").write_text("four")
    captions = {"templates": ["a {}", "the {}"], "shuffle_tags": True, "wildcards": True}
    images = {"source": "folder", "path": str(tmp_path / "images"), "captions": captions, "held_out_fraction": 0}
    settings = DataSettings.model_validate({"sources": {"images": images}, "resolution": 16})
    texts = {text for text in vocabulary.texts(settings) if text}
    assert texts == {f"{word} {own}" for word in ("a", "the") for own in ("one, {two|three}", "four")}


def test_sources_that_say_their_words_are_not_read() -> None:
    settings = DataSettings.model_validate({"sources": {"images": {"source": "shapes"}}, "resolution": 64})
    assert {"red", "circle", "background"} <= vocabulary.texts(settings)

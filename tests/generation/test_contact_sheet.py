"""The contact sheet shows the images of requests: once at the top where all have the same, else before what follows
from them."""

import io
import re

import numpy as np
import pytest
from PIL import Image

from daguerre.errors import UserError
from daguerre.generation import contact_sheet
from daguerre.generation.contact_sheet import Example
from daguerre.generation.images import InputImage, made


def grey(level: int) -> np.ndarray:
    return np.full((8, 16, 3), level, np.uint8)


def example(prompt: str, seed: int, *inputs: InputImage) -> Example:
    file = io.BytesIO()
    Image.fromarray(grey(seed)).save(file, "png")
    return Example(file.getvalue(), prompt, seed, (8, 16), f"{seed}.png", f"{seed}.png", inputs)


def captions(*examples: Example) -> list[str]:
    page = contact_sheet.page("x", examples, len(examples), "made here")
    return [text.partition(" · ")[0] for text in re.findall("<figcaption>(.*?)</figcaption>", page)]


def test_images_that_all_requests_have_stand_at_the_top_alone():
    cat, hat = made("reference", grey(9)), made("reference_2", grey(8))
    assert captions(example("a", 1, cat, hat), example("b", 2, cat, hat)) == [
        "reference",
        "reference 2",
        "seed 1",
        "seed 2",
    ]


def test_others_stand_before_what_follows_from_them():
    cat, hat = made("image", grey(9)), made("image", grey(8))
    found = captions(
        example("a", 1, cat), example("a", 2, cat), example("a", 3, hat), example("b", 4), example("c", 5, hat)
    )
    assert found == ["image", "seed 1", "seed 2", "image", "seed 3", "seed 4", "image", "seed 5"]


def test_without_such_images_there_is_nothing_more():
    assert captions(example("a", 1), example("b", 2)) == ["seed 1", "seed 2"]


def test_a_broken_file_is_refused_by_its_name():
    with pytest.raises(UserError, match=r"image=image cannot be used: "):
        captions(example("a", 1, InputImage("image", made("image", grey(1)).path, b"\x89PNG\r\n\x1a\nnothing")))

"""The contract of every condition, and their numbers beside OpenCV, scikit-image and closed forms."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scenes
import tiny_networks

from daguerre import plugins
from daguerre.conditions import blur, canny, grey, inpaint, lineart, outpaint, palette, scribble, sobel, threshold, tile
from daguerre.conditions.condition import ConditionSettings, computed
from daguerre.contracts.conditions import ConditionContract, draw
from daguerre.errors import UserError

NAMES = plugins.names("conditions")
NEEDED: dict[str, dict[str, object]] = {}
"""Settings of conditions that do not work without, by name: networks, written by the fixture."""
RANDOM = {"faces", "inpaint", "outpaint", "qr"}
LIGHT = [name for name in NAMES if name not in ("depth", "faces", "hed", "pose")]
"""Those that import no library for networks."""
OUTSIDE = Path(__file__).parent / "outside.npz"
DIGEST = "fafb26f36239ea14312c0286a93f23fe39538fe1038f247e356b531f2a478b2a"


@pytest.fixture(scope="session", autouse=True)
def _networks(tmp_path_factory):
    for name, make in (("depth", tiny_networks.depth), ("hed", tiny_networks.hed), ("pose", tiny_networks.pose)):
        NEEDED[name] = make(tmp_path_factory.mktemp(name))
    NEEDED["pose"]["threshold"] = 0.0
    networks = {name: tiny_networks.of_faces(name) for name in ("detector", "recogniser")}
    NEEDED["faces"] = {"dropout": 0.5, **networks}


def settings(name: str) -> ConditionSettings:
    return plugins.find("conditions", name).Settings(**NEEDED.get(name, {}))


@pytest.mark.parametrize("name", NAMES)
class TestCondition(ConditionContract):
    """The contract, over all files of conditions/."""

    @pytest.fixture
    def given(self, name: str) -> dict[str, object]:
        return NEEDED.get(name, {})

    def test_the_random_ones_draw_and_no_others(self, name: str) -> None:
        first, other = (computed(settings(name), scenes.scene(64, 64), draw(seed)) for seed in (3, 4))
        assert np.array_equal(first, other) == (name not in RANDOM)


DIGESTS = """
import hashlib, scenes
from daguerre import plugins
from daguerre.conditions.condition import computed, drawing
for name in {names}:
    settings = plugins.find("conditions", name).Settings()
    made = computed(settings, scenes.scene(130, 96), drawing(3, "control", (5, 1, 0)))
    print(name, hashlib.sha256(made.tobytes()).hexdigest())
"""


def test_another_process_with_other_threads_makes_the_same_images():
    here = {
        name: hashlib.sha256(computed(settings(name), scenes.scene(130, 96), draw()).tobytes()).hexdigest()
        for name in LIGHT
    }
    code = DIGESTS.format(names=LIGHT)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "3")
    environment = {"PYTHONPATH": ":".join(sys.path), **threads}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=100)
    assert dict(line.split() for line in done.stdout.splitlines()) == here, done.stderr


# ---- beside other programs


@pytest.fixture(scope="module")
def outside():
    assert hashlib.sha256(OUTSIDE.read_bytes()).hexdigest() == DIGEST
    return np.load(OUTSIDE)


def made(own: ConditionSettings, pixels: np.ndarray) -> np.ndarray:
    return computed(own, pixels, draw())[:, :, :3]


def apart(a: np.ndarray, b: np.ndarray) -> int:
    b = b[:, :, None] if b.ndim == 2 else b
    return int(np.abs(a.astype(int) - b.astype(int)).max())


@pytest.mark.parametrize("name", scenes.scenes())
class TestBesideOtherPrograms:
    def test_canny_is_opencv_to_the_bit(self, name, outside):
        for low, high in scenes.THRESHOLDS:
            mine = made(canny.Settings(low=low, high=high), scenes.scenes()[name])
            assert np.array_equal(mine, np.repeat(outside[f"canny {name} {low} {high}"][:, :, None], 3, axis=2))

    def test_blur_is_opencv_of_float32(self, name, outside):
        for sigma in scenes.SIGMAS:
            mine, theirs = made(blur.Settings(sigma_px=sigma), scenes.scenes()[name]), outside[f"blur {name} {sigma}"]
            assert apart(mine, theirs) <= 1  # where a half is rounded
            assert (mine != theirs).mean() < 1e-3

    def test_grey_is_opencv_and_sobel_is_skimage(self, name, outside):
        pixels = scenes.scenes()[name]
        assert apart(made(grey.Settings(), pixels), outside[f"grey {name}"]) <= 1
        assert apart(made(sobel.Settings(), pixels), outside[f"sobel {name}"]) <= 1

    def test_lineart_and_scribble_are_the_formulas_on_opencv(self, name, outside):
        pixels = scenes.scenes()[name]
        assert apart(made(lineart.Settings(), pixels), outside[f"lineart {name}"]) <= 1
        assert (made(scribble.Settings(), pixels)[:, :, 0] != outside[f"scribble {name}"]).mean() < 2e-3


# ---- closed forms


def test_edges_of_a_square_are_its_outline():
    pixels = np.zeros((20, 20, 3), np.uint8)
    pixels[5:15, 5:15] = 255
    edges = made(canny.Settings(), pixels)[:, :, 0] > 0
    assert not edges[8:12, 8:12].any()
    assert not edges[:3].any()
    assert all(edges[row].sum() == 2 for row in range(7, 13))
    steep = made(sobel.Settings(), np.repeat(np.repeat([[0, 255]], 8, 1), 16, 0)[:, :, None].repeat(3, 2).astype("u1"))
    assert steep[:, 6:10, 0].tolist() == [[0, round(255 / 2**0.5), round(255 / 2**0.5), 0]] * 16


def test_a_blur_keeps_what_is_even_and_the_mean():
    flat = np.full((9, 130, 3), 77, np.uint8)
    assert np.array_equal(made(blur.Settings(sigma_px=20), flat), flat)
    point = np.zeros((65, 65, 3), np.uint8)
    point[32, 32] = 255
    x = np.arange(-32, 33)
    bell = np.exp(-(x**2) / (2 * 3.0**2))
    wanted = 255 * np.outer(bell, bell) / bell.sum() ** 2
    assert apart(made(blur.Settings(sigma_px=3), point)[:, :, :1], np.rint(wanted)[:, :, None]) == 0


def test_a_palette_holds_the_mean_of_each_cell_and_few_colours():
    pixels = scenes.scene(64, 96)
    cells = made(palette.Settings(cell_px=32), pixels)
    for row, column in np.ndindex(2, 3):
        at = np.s_[32 * row : 32 * row + 32, 32 * column : 32 * column + 32]
        assert np.abs(cells[at] - pixels[at].mean((0, 1))).max() < 1.01
    few = made(palette.Settings(cell_px=4, colours=5), pixels)
    assert 2 <= len(np.unique(few.reshape(-1, 3), axis=0)) <= 5
    assert len(np.unique(made(palette.Settings(cell_px=500), pixels).reshape(-1, 3), axis=0)) == 1


def test_black_and_white_by_the_level():
    ramp = np.arange(256, dtype=np.uint8).reshape(16, 16)[:, :, None].repeat(3, 2)
    assert np.array_equal(made(threshold.Settings(level=99), ramp), (ramp > 99) * np.uint8(255))


def test_a_tile_holds_the_means_of_blocks():
    pixels = scenes.scene(64, 96)
    means = pixels.reshape(16, 4, 24, 4, 3).mean((1, 3))
    blocks = made(tile.Settings(factor=4, up="nearest"), pixels)
    assert np.abs(blocks - means.repeat(4, 0).repeat(4, 1)).max() < 1.01  # Pillow rounds along each side
    assert np.array_equal(made(tile.Settings(factor=4, down="nearest", up="nearest"), pixels)[2, 2], pixels[2, 2])


def test_a_tile_of_factor_one_is_the_image_and_a_range_is_drawn_from():
    pixels = scenes.scene(64, 64)
    assert np.array_equal(made(tile.Settings(factor=1), pixels), pixels)
    own = tile.Settings(factor=(2, 8), up="nearest", down="nearest")
    found = {made_of(own, pixels, key) for key in range(8)}
    assert len(found) > 3
    assert made_of(tile.Settings(factor=(4, 4)), pixels, 0) == made_of(tile.Settings(factor=4), pixels, 0)
    assert made_of(blur.Settings(sigma_px=(1, 9)), pixels, 0) != made_of(blur.Settings(sigma_px=(1, 9)), pixels, 1)


def made_of(own: ConditionSettings, pixels: np.ndarray, key: int) -> bytes:
    return computed(own, pixels, draw(key=(key, 0, 0))).tobytes()


def unknown(own: ConditionSettings, key: int, size=(96, 128)) -> np.ndarray:
    pixels = scenes.scene(*size)
    made = computed(own, pixels, draw(key=(key, 0, 0)))
    known = made[:, :, 3] == 255
    assert np.array_equal(made[known][:, :3], pixels[known])
    return ~known


@pytest.mark.parametrize("own", [{}, {"inverted": 1.0}, {"shapes": ["stroke"]}, {"shapes": ["box"], "holes": 1}])
def test_holes_have_the_share_that_is_asked_for(own):
    for share in (0.2, 0.6):
        found = [unknown(inpaint.Settings(share=share, **own), key).mean() for key in range(12)]
        assert np.abs(np.array(found) - share).max() < 0.05
    spread = [unknown(inpaint.Settings(**own), key).mean() for key in range(24)]
    assert 0.08 < min(spread) < 0.2
    assert 0.4 < max(spread) < 0.53
    assert not unknown(inpaint.Settings(share=0), 0).any()
    assert unknown(inpaint.Settings(share=1), 0).all()


def test_an_inverted_hole_is_known_and_the_rest_is_not():
    own = {"shapes": ["box"], "holes": 1, "share": 0.5}
    plain, inverted = (unknown(inpaint.Settings(**own, inverted=each), 2) for each in (0.0, 1.0))
    assert np.array_equal(plain, ~inverted)
    found = [unknown(inpaint.Settings(inverted=0.5, share=0.2, shapes=["box"], holes=1), k)[0, 0] for k in range(40)]
    assert 8 < sum(found) < 32  # the corner is seldom in a hole, and mostly outside of a known one


def test_around_a_rectangle_nothing_is_known():
    for key in range(20):
        lost = unknown(outpaint.Settings(share=0.36), key)
        rows, columns = np.flatnonzero(~lost.all(1)), np.flatnonzero(~lost.all(0))
        assert not lost[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].any()
        assert abs(lost.mean() - 0.36) < 0.02
    right = unknown(outpaint.Settings(share=0.25, sides=["right"]), 0)
    assert np.array_equal(right, np.broadcast_to(np.arange(128) >= 96, (96, 128)))
    corner = unknown(outpaint.Settings(share=0.5, sides=["top", "left"]), 1)
    assert corner[0].all()
    assert corner[:, 0].all()
    assert not corner[-1, -1]


@pytest.mark.parametrize(
    ("name", "own", "said"),
    [
        ("canny", {"low": 300, "high": 200}, "low=300 is above high=200"),
        ("inpaint", {"share": [0.5, 0.1]}, "0.5 is above 0.1"),
        ("inpaint", {"share": 1.5}, "less than or equal to 1"),
        ("outpaint", {"share": 1.0}, "less than 1"),
        ("tile", {"factor": 0.5}, "greater than or equal to 1"),
        ("blur", {"sigma_px": [1, 500]}, "less than or equal to 256"),
        ("palette", {"colours": 1}, "greater than or equal to 2"),
    ],
)
def test_settings_that_cannot_be_are_refused(name, own, said):
    with pytest.raises(ValueError, match=said):
        plugins.find("conditions", name).Settings(**own)


def test_an_unknown_condition_is_refused_with_the_nearest():
    with pytest.raises(UserError, match="Did you mean 'canny'"):
        plugins.find("conditions", "cany")

"""Which shapes there are follows from closed forms; which one an image goes to, from its size alone."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import settings as limits
from hypothesis import strategies as st
from quick_cases import quick_where

from daguerre.data.plan import buckets as shapes
from daguerre.data.plan.buckets import Bucket, assign, buckets, check_fractions
from daguerre.data.settings import SourceSettings
from daguerre.errors import UserError

CASCADE = ("1/1", "1/2", "1/3", "2/3", "3/4", "1/5", "2/5", "3/5", "4/5", "1/6", "5/6", "9/16")
SDXL = """512x2048 512x1984 512x1920 512x1856 576x1792 576x1728 576x1664 640x1600 640x1536 704x1472 704x1408 704x1344
768x1344 768x1280 832x1216 832x1152 896x1152 896x1088 960x1088 960x1024 1024x1024 1024x960 1088x960 1088x896 1152x896
1152x832 1216x832 1280x768 1344x768 1408x704 1472x704 1536x640 1600x640 1664x576 1728x576"""
"""Height x width, as in the appendix of the SDXL paper (arXiv 2307.01952)."""


def settings(resolution=1024, **given):
    return SourceSettings(source="test", resolution=resolution, buckets=given)


def numbers(chosen, *sizes):
    """Names of the buckets that images of these (height, width) go to; None for one that is left out."""
    every = buckets(chosen)
    found = assign(chosen, np.array([s[0] for s in sizes]), np.array([s[1] for s in sizes])).numbers
    return [str(every[n]) if n >= 0 else None for n in found]


def check_shapes(found, resolutions, step):
    assert list(found) == sorted(set(found))
    assert {bucket.mirrored for bucket in found} == set(found)
    for bucket in found:
        assert bucket.height_px % step == bucket.width_px % step == 0
        assert bucket.area_px <= max(resolutions) ** 2


def test_a_square_is_one_bucket_of_any_size():
    assert buckets(settings(500)) == (Bucket(500, 500),)
    assert buckets(settings(resolutions=(320, 256, 320))) == (Bucket(256, 256), Bucket(320, 320))


@pytest.mark.parametrize("sides", [(0, 64), (64, 0), (-1, 5)])
def test_a_bucket_without_pixels_is_refused(sides):
    with pytest.raises(ValueError, match="both sides must be 1 or more"):
        Bucket(*sides)


def test_a_bucket_is_called_width_by_height():
    assert str(Bucket(768, 512)) == "512x768"
    assert Bucket(768, 512).mirrored == Bucket(512, 768)
    assert Bucket(768, 512).aspect == 512 / 768


def test_auto_at_1024_is_sdxls_list():
    """All of it; beside it only what its longest shapes lack: the mirror images of the widest, and 1344 x 704."""
    theirs = {Bucket(*map(int, pair.split("x"))) for pair in SDXL.split()}
    ours = set(buckets(settings(aspects="auto", max_aspect=4)))
    assert theirs <= ours
    extra = {Bucket(1344, 704)} | {Bucket(high, 512) for high in (1856, 1920, 1984, 2048)} | {Bucket(1792, 576)}
    assert ours - theirs == extra
    assert len(buckets(settings(aspects="auto"))) == 21  # of aspects up to 2


@pytest.mark.parametrize(
    "resolution", quick_where(lambda px: px < 1000, [64, 100, 128, 192, 256, 320, 512, 640, 768, 1000, 1024, 1536])
)
@pytest.mark.parametrize("step", [32, 64])
@pytest.mark.parametrize("max_aspect", [1, 1.5, 2, 4])
def test_auto_holds_what_it_says_and_nothing_else(resolution, step, max_aspect):
    found = buckets(settings(resolution, aspects="auto", step=step, max_aspect=max_aspect))
    check_shapes(found, [resolution], step)
    square = resolution // step * step
    assert Bucket(square, square) in found
    assert len({bucket.aspect for bucket in found}) == len(found)
    sides = range(step, resolution**2 // step + 1, step)
    for height in sides:
        widest = resolution**2 // height // step * step
        for width in range(height, widest + 1, step):
            roomy = 10 * height * width >= 9 * resolution**2
            edge = width == widest or height == resolution**2 // width // step * step
            allowed = width <= max_aspect * height and (roomy or edge or height == width == square)
            larger = any(b.aspect == width / height and b.area_px > height * width for b in found)
            assert (Bucket(height, width) in found) == (allowed and not larger), (height, width)


def test_the_list_of_stable_cascade():
    found = buckets(settings(aspects=CASCADE))
    check_shapes(found, [1024], 64)
    wide = [str(bucket) for bucket in found if bucket.width_px >= bucket.height_px]
    # 3/4 and 4/5 both come out as 1152x896.
    assert " ".join(wide) == (
        "2304x384 2240x448 1728x576 1600x640 1408x704 1280x768 1344x768 1216x832 1152x896 1088x960 1024x1024"
    )


@limits(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(0, 63), st.fractions(Fraction(1, 6), Fraction(6), max_denominator=40))
def test_a_listed_aspect_shows_as_much_as_any_shape_could(cells, rest, aspect):
    resolution = cells * 64 + rest
    text = f"{aspect.numerator}/{aspect.denominator}"

    def seen(height, width):
        """Pixels of the largest rectangle of that aspect inside."""
        return min(height * height * aspect, Fraction(width * width) / aspect)

    try:
        found = buckets(settings(resolution, aspects=[text]))
    except UserError:
        assume(False)
    check_shapes(found, [resolution], 64)
    assert len(found) <= 2
    best = max(seen(bucket.height_px, bucket.width_px) for bucket in found)
    sides = range(64, resolution**2 // 64 + 1, 64)
    others = [(h, w) for h in sides for w in sides if h * w <= resolution**2]
    assert best == max(seen(*other) for other in others)
    equal = [other for other in others if seen(*other) == best]

    def off(height, width):
        ratio = Fraction(width, height) / aspect
        return max(ratio, 1 / ratio)

    assert min(off(b.height_px, b.width_px) for b in found) == min(off(*other) for other in equal)


def test_numbers_and_fractions_mean_the_same():
    assert buckets(settings(aspects=[0.75])) == buckets(settings(aspects=["3/4"]))
    assert buckets(settings(aspects=[1])) == (Bucket(1024, 1024),)


@pytest.mark.parametrize(
    "value", ["", "a", "1/", "/2", "0", "0/1", "1/0", "-1/2", "1/2/3", "1e3", "4:3", "9/1", "1/9", 0.0, -1.0, 8.5]
)
def test_what_is_no_aspect_is_refused(value):
    with pytest.raises(ValueError, match="aspect ratio"):
        check_fractions((value,))


@pytest.mark.parametrize("value", [math.nan, math.inf, "9" * 5000, "1e999999999", "0." + "0" * 300 + "1"])
def test_hostile_numbers_are_refused_at_once(value):
    with pytest.raises(ValueError, match="aspect ratio"):
        check_fractions((value,))


def test_fractions_come_back_as_they_were_given():
    given = (1.0, "2/3", " 9 / 16 ", 8.0, "1/8")
    assert check_fractions(given) == given
    with pytest.raises(ValueError, match="an empty list"):
        check_fractions(())


def test_settings_refuse_a_wrong_list():
    with pytest.raises(ValueError, match="'cat' is not an aspect ratio"):
        settings(aspects=["1/1", "cat"])


def test_a_step_larger_than_the_resolution_is_refused():
    with pytest.raises(UserError, match=r"data.resolution: 32 px is smaller than data.buckets.step \(64 px\)"):
        buckets(settings(32, aspects="auto"))
    with pytest.raises(UserError, match=r"data.buckets.resolutions: 48 px is smaller than data.buckets.step"):
        buckets(settings(aspects=["1/1"], resolutions=(48, 512)))


def test_an_aspect_that_the_step_cannot_make_is_refused():
    with pytest.raises(
        UserError, match=r"data.buckets.aspects: 1/6 cannot be made of steps of 64 px at a resolution of 64"
    ):
        buckets(settings(64, aspects=["1/1", "1/6"]))


def test_more_buckets_than_batches_could_fill_are_refused():
    with pytest.raises(UserError, match=r"data.buckets: more than 1,000 buckets.*raise data.buckets.step \(8 px\)"):
        buckets(settings(1024, aspects="auto", step=8))
    with pytest.raises(UserError, match=r"raise data\.buckets\.step"):
        buckets(settings(65_536, aspects="auto", step=1))


def test_the_nearest_aspect_is_taken_by_its_logarithm():
    chosen = settings(512, aspects="auto")
    every = buckets(chosen)
    rng = np.random.default_rng(0)
    heights, widths = rng.integers(1, 6000, (2, 5000))
    found = assign(chosen, heights, widths)
    distance = np.abs(np.log(widths / heights)[:, None] - np.log([b.aspect for b in every])[None])
    assert np.array_equal(distance[np.arange(5000), found.numbers], distance.min(1))
    assert found.numbers.dtype == np.int16
    assert found.left_out == {}


def test_halfway_between_two_aspects_goes_one_way():
    assert numbers(settings(512, aspects=["1/4"]), (700, 700)) == [
        "256x1024"
    ]  # 1/4 and 4: as far from the one as the other


def test_a_mirror_image_goes_to_the_mirrored_bucket():
    chosen = settings(1024, aspects="auto", max_aspect=4)
    rng = np.random.default_rng(1)
    heights, widths = rng.integers(100, 3000, (2, 1000))
    every = buckets(chosen)
    one, other = assign(chosen, heights, widths).numbers, assign(chosen, widths, heights).numbers
    assert [every[a].mirrored for a in one] == [every[b] for b in other]


def test_an_image_goes_to_the_largest_resolution_that_it_fills():
    chosen = settings(resolutions=(256, 512, 1024))
    sizes = [(2000, 3000), (1024, 1024), (1023, 3000), (512, 600), (511, 511), (256, 256), (100, 900)]
    want = ["1024x1024", "1024x1024", "512x512", "512x512", "256x256", "256x256", "256x256"]
    assert numbers(chosen, *sizes) == want
    found = assign(chosen, *np.array(sizes).T)
    assert found.enlarged.tolist() == [False] * 6 + [True]


def test_each_resolution_has_its_own_aspects():
    chosen = settings(resolutions=(512, 1024), aspects="auto")
    check_shapes(buckets(chosen), [512, 1024], 64)
    # 1344x768 is nearest at 1024 and not filled by the second; at 512 it is 640x384.
    assert numbers(chosen, (768, 1344), (760, 1330)) == ["1344x768", "640x384"]


def test_what_would_be_enlarged_is_left_out_and_counted_where_that_is_not_wanted():
    sizes = np.array([(512, 512), (511, 600), (1000, 400), (600, 512)]).T
    kept = assign(settings(512), *sizes)
    assert kept.numbers.tolist() == [0, 0, 0, 0]
    assert kept.enlarged.tolist() == [False, True, True, False]
    assert kept.left_out == {}
    left = assign(settings(512, upscale=False), *sizes)
    assert left.numbers.tolist() == [0, -1, -1, 0]
    assert left.left_out == {shapes.TOO_SMALL: 2}
    assert not left.enlarged.any()
    several = assign(settings(resolutions=(256, 512), upscale=False), *sizes)
    assert several.numbers.tolist() == [1, 0, 0, 1]


@limits(max_examples=200, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 40), st.integers(1, 40))
def test_a_resize_just_covers_the_bucket(height, width, rows, columns):
    bucket = Bucket(rows * 16, columns * 16)
    tall, wide = bucket.covering(height, width)
    assert tall >= bucket.height_px
    assert wide >= bucket.width_px
    assert tall == bucket.height_px or wide == bucket.width_px
    scale = max(bucket.height_px / height, bucket.width_px / width)
    assert abs(tall - height * scale) <= 0.5 + 1e-6 or tall == bucket.height_px
    assert abs(wide - width * scale) <= 0.5 + 1e-6 or wide == bucket.width_px


def test_an_image_is_enlarged_exactly_where_it_does_not_fill_its_bucket():
    chosen = settings(512, aspects="auto")
    every = buckets(chosen)
    rng = np.random.default_rng(2)
    heights, widths = rng.integers(100, 1500, (2, 3000))
    found = assign(chosen, heights, widths)
    for height, width, number, enlarged in zip(heights, widths, found.numbers, found.enlarged, strict=True):
        bucket = every[number]
        assert enlarged == (max(bucket.height_px / height, bucket.width_px / width) > 1)


@pytest.mark.parametrize("given", [{"aspects": "auto"}, {"upscale": False}, {"resolutions": (256, 512)}])
def test_a_size_that_is_not_known_is_an_error_where_it_decides(given):
    with pytest.raises(UserError, match=r"data.buckets: the sizes of 1 of 2 images are not in the index.*data pack"):
        assign(settings(512, **given), np.array([0, 600]), np.array([0, 600]))


def test_a_size_that_is_not_known_does_not_matter_for_one_square():
    found = assign(settings(512), np.array([0, 600]), np.array([0, 600]))
    assert found.numbers.tolist() == [0, 0]
    assert not found.enlarged.any()


def test_a_share_goes_to_any_bucket_by_its_id():
    chosen = settings(512, aspects=CASCADE, step=32)
    sizes, ids = np.full((2, 20_000), 512, np.int32), np.arange(20_000)
    square = assign(chosen, *sizes).numbers
    assert len({*square}) == 1
    share = chosen.model_copy(update={"buckets": chosen.buckets.model_copy(update={"random": 0.2})})
    found = assign(share, *sizes, ids).numbers
    counts = np.bincount(found[found != square], minlength=len(shapes.buckets(chosen)))
    assert (found != square).mean() == pytest.approx(0.2 * (1 - 1 / len(counts)), abs=0.01)
    others = counts[counts > 0]
    assert len(others) == len(counts) - 1
    assert others.min() > 0.7 * others.mean()
    assert np.array_equal(assign(share, *sizes[:, 5000:], ids[5000:]).numbers, found[5000:])
    assert np.array_equal(assign(share, *sizes).numbers, square)


def test_no_images_at_all():
    found = assign(settings(512, aspects="auto"), np.zeros(0, np.int32), np.zeros(0, np.int32))
    assert found.numbers.shape == (0,)


def test_every_image_is_assigned_or_counted():
    chosen = settings(resolutions=(256, 512), aspects=CASCADE, upscale=False)
    rng = np.random.default_rng(3)
    heights, widths = rng.integers(1, 2000, (2, 10_000)).astype(np.int32)
    found = assign(chosen, heights, widths)
    assert (found.numbers >= 0).sum() + sum(found.left_out.values()) == 10_000
    assert (found.numbers < 0).sum() == found.left_out[shapes.TOO_SMALL] > 0

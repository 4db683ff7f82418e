"""The strict tar reader: what it finds in whole archives, and what it says of damaged ones."""

import io
import random
import shutil
import subprocess
import tarfile
import time

import pytest
import tars
from quick_cases import quick_where

from daguerre.data.tar import reader

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
NAMES = [
    "plain.jpg",
    "folder/inside/a.jpg",
    "./dotted.jpg",
    "../../etc/passwd.jpg",
    "cafe\u0301.jpg",
    "caf\u00e9.jpg",
    "with space and 'quotes'.jpg",
    "two\nlines.jpg",
    "\udcff\udcfe.jpg",
    "many.dots.in.it.jpg",
]
LONG = ["d" * 90 + "/" + "f" * 90 + ".jpg", "x" * 140 + ".jpg", "ü" * 120 + "/" + "é" * 80 + ".jpg"]


def archive(names, form) -> bytes:
    return tars.packed(((name, f"data of {number}".encode() * number) for number, name in enumerate(names)), form)


def read(data: bytes, contents: reader.Contents) -> list[tuple[str, bytes]]:
    return [(m.name, data[m.offset : m.offset + m.size]) for m in contents.members]


def as_tarfile(data: bytes) -> list[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(data)) as opened:
        return [(info.name, opened.extractfile(info).read()) for info in opened if info.isreg()]


@pytest.mark.parametrize("form", FORMATS)
def test_names_and_bytes_are_those_of_tarfile(form):
    data = archive(NAMES + (LONG if form != "ustar" else LONG[:1]), FORMATS[form])
    contents = reader.contents(data)
    assert not contents.damage
    assert not contents.others
    assert read(data, contents) == as_tarfile(data)


@pytest.mark.skipif(not shutil.which("tar"), reason="no GNU tar here")
@pytest.mark.parametrize("form", ["v7", "ustar", "oldgnu", "gnu", "pax", "posix"])
def test_gnu_tars_formats(form, tmp_path):
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    names = ["a.jpg", "deep/b.jpg", *(["caf\u00e9.jpg", "n" * 150 + ".jpg"] if form not in ("v7", "ustar") else [])]
    for number, name in enumerate(names):
        (folder / name).write_bytes(bytes([number]) * 700 * number)
    (folder / "link.jpg").symlink_to("a.jpg")
    (folder / "hard.jpg").hardlink_to(folder / "a.jpg")
    subprocess.run(["tar", f"--format={form}", "-cf", tmp_path / "a.tar", "-C", folder, "."], check=True)
    data = (tmp_path / "a.tar").read_bytes()
    contents = reader.contents(data)
    assert not contents.damage
    assert sorted(read(data, contents)) == sorted(as_tarfile(data))
    assert {kind: len(found) for kind, found in contents.others.items()} == {
        "folder": 2,
        "symbolic link": 1,
        "hard link": 1,
    }


def test_sizes_that_octal_digits_cannot_hold():
    info = tarfile.TarInfo("large.jpg")
    info.size = 1 << 40
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        header = info.tobuf(form)
        assert reader.contents(header).damage == ((0, len(header)),)  # it is read, and its data is not there
    small = tarfile.TarInfo("small.jpg")
    small.size = 3
    small.pax_headers = {"size": "5"}
    data = small.tobuf(tarfile.PAX_FORMAT) + b"12345".ljust(512, b"\0") + bytes(1024)
    assert read(data, reader.contents(data)) == [("small.jpg", b"12345")]


def test_sparse_files_are_counted_and_stepped_over(tmp_path):
    if not shutil.which("tar"):
        pytest.skip("no GNU tar here")
    with (tmp_path / "holes.jpg").open("wb") as file:
        for hole in range(40):
            file.seek(hole * 100_000)
            file.write(b"x" * 5000)
    (tmp_path / "whole.jpg").write_bytes(b"y" * 600)
    for form in ("gnu", "pax"):
        command = ["tar", "-S", f"--format={form}", "-cf", "a.tar", "holes.jpg", "whole.jpg"]
        subprocess.run(command, check=True, cwd=tmp_path)
        data = (tmp_path / "a.tar").read_bytes()
        contents = reader.contents(data)
        assert not contents.damage
        assert read(data, contents) == [("whole.jpg", b"y" * 600)]
        assert len(contents.others["sparse file"]) == 1


MEMBERS = [(f"{i}.jpg", bytes([i + 1]) * 600) for i in range(5)]
WHOLE = tars.packed(MEMBERS)
STEP = 512 + 1024


def names(data: bytes) -> list[str]:
    return [member.name for member in reader.contents(data).members]


def test_a_header_whose_checksum_fails_is_a_range_and_the_rest_is_read():
    hurt = bytearray(WHOLE)
    hurt[2 * STEP + 10] ^= 1
    assert names(bytes(hurt)) == ["0.jpg", "1.jpg", "3.jpg", "4.jpg"]
    assert reader.contents(bytes(hurt)).damage == ((2 * STEP, 3 * STEP),)


@pytest.mark.parametrize("length", [512, 1024, 2048, 3 * STEP])
def test_zeros_in_the_middle_are_no_end(length):
    hurt = bytearray(WHOLE)
    hurt[STEP : STEP + length] = bytes(length)
    contents = reader.contents(bytes(hurt))
    assert contents.members[-1].name == "4.jpg"
    assert contents.damage[0][0] == STEP
    assert contents.damage[0][1] >= STEP + length


def test_a_file_that_was_never_filled():
    """As a download leaves it that made room first and then broke off."""
    whole = tars.packed([(f"{i}.jpg", bytes([i + 1]) * 6000) for i in range(9)])
    step = 512 + 6144
    hurt = whole[: 4 * step] + bytes(len(whole) - 4 * step)
    assert len(names(hurt)) == 4
    assert reader.contents(hurt).damage == ((4 * step, len(whole)),)


def test_two_archives_one_after_the_other_are_both_read_and_said():
    contents = reader.contents(WHOLE + tars.packed([("z.jpg", b"z")]))
    assert [member.name for member in contents.members] == [*(name for name, _ in MEMBERS), "z.jpg"]
    assert contents.damage == ((5 * STEP, len(WHOLE)),)


@pytest.mark.parametrize("length", [0, 1, 511, 512, 513, STEP - 1, STEP, 5 * STEP - 1, 5 * STEP, 5 * STEP + 512])
def test_an_archive_that_is_cut_says_so(length):
    contents = reader.contents(WHOLE[:length])
    assert contents.damage
    assert contents.damage[-1][1] == length
    whole = [(name, data) for number, (name, data) in enumerate(MEMBERS) if number * STEP + 512 + 600 <= length]
    assert read(WHOLE, contents) == whole


@pytest.mark.parametrize("removed", [1, 100, 512, 900])
def test_bytes_that_are_missing_within_a_member(removed):
    """What is left of the member is not taken for it, and the next header is found wherever it is."""
    at = 2 * STEP + 512 + 50
    contents = reader.contents(WHOLE[:at] + WHOLE[at + removed :])
    found = [member.name for member in contents.members]
    assert [name for name in found if name != "2.jpg"] == ["0.jpg", "1.jpg", "3.jpg", "4.jpg"]
    assert any(start <= at < end for start, end in contents.damage)
    assert "2.jpg" not in found


def test_a_long_name_whose_own_header_is_lost_takes_no_other_member_along():
    data = archive([LONG[1], "next.jpg", "last.jpg"], tarfile.GNU_FORMAT)
    hurt = bytearray(data)
    hurt[1024 + 5] ^= 1  # after the name's header and its block
    assert names(bytes(hurt)) == ["next.jpg", "last.jpg"]


def test_a_pax_record_that_is_broken_takes_its_member_along():
    data = archive(["caf\u00e9.jpg", "next.jpg"], tarfile.PAX_FORMAT)
    hurt = bytearray(data)
    hurt[512] = ord("x")
    contents = reader.contents(bytes(hurt))
    assert [member.name for member in contents.members] == ["next.jpg"]
    assert contents.damage == ((0, 1536),)


def test_signed_checksums_of_old_programs_hold():
    header = bytearray(WHOLE[:512])
    header[0:2] = b"\xe9\xe8"
    header[148:156] = b" " * 8
    total = sum(byte - 256 * (byte > 127) for byte in header)
    header[148:156] = b"%06o\0 " % total
    assert names(bytes(header) + WHOLE[512:])[0] == "\udce9\udce8jpg"


@pytest.mark.parametrize("seed", range(40))
def test_noise_raises_nothing_and_is_all_accounted_for(seed):
    draw = random.Random(seed)
    data = draw.randbytes(draw.randrange(20_000))
    contents = reader.contents(data)
    assert not contents.members
    assert contents.damage == ((0, len(data)),)


@pytest.mark.parametrize("seed", quick_where(lambda seed: seed < 50, range(200)))
def test_what_is_lost_lies_in_the_ranges(seed):
    """Without an index: a member that is not found was in a range, or is zeros at the end, as at every end."""
    draw = random.Random(seed)
    headers = [number * STEP for number in range(len(MEMBERS))]
    _, hurt = tars.damaged(WHOLE, headers, draw)
    contents = reader.contents(hurt)
    found = [member.name for member in contents.members]
    lost = [number for number, (name, _) in enumerate(MEMBERS) if name not in found]
    end = contents.members[-1].offset + contents.members[-1].size if contents.members else 0
    assert contents.damage or not lost or not hurt[end:].strip(b"\0")
    assert all(0 <= start <= end <= len(hurt) for start, end in contents.damage)
    ends = [end for _, end in contents.damage]
    assert ends == sorted(ends)


def test_thousands_of_bad_headers_take_no_long_time():
    info = tarfile.TarInfo("a.jpg")
    info.size = 1 << 30
    data = info.tobuf(tarfile.USTAR_FORMAT) * 5000
    start = time.process_time()
    assert reader.contents(data).damage == ((0, len(data)),)
    assert time.process_time() - start < 5

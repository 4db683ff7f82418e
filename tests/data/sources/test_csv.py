"""CSV and TSV files as people have them: byte order marks, quotes, line ends, ragged lines; each is read or counted."""

import csv as library
import io
import os

import numpy as np
import pytest
from faulty_store import s3  # noqa: F401 - fixture
from hypothesis import given, settings
from hypothesis import strategies as some
from PIL import Image
from pydantic import ValidationError
from reading import chosen_records

from daguerre.data.dataset import open_dataset
from daguerre.data.images.headers import Undecodable
from daguerre.data.sources import csv
from daguerre.data.table import source as table_source
from daguerre.data.table.csv import QUOTES, CsvTables
from daguerre.data.table.files import Damage, Row, file_now
from daguerre.data.table.index import Builder
from daguerre.errors import UserError


@pytest.fixture
def folder(tmp_path):
    """Four images beside the table."""
    for name in "abcd":
        Image.fromarray(np.full((20, 30, 3), ord(name), np.uint8)).save(tmp_path / f"{name}.png")
    return tmp_path


def made(path, **given):
    return csv.Settings(path=str(path), **{"resolution": 16, **given})


def opened(path, **given):
    return csv.open_source(made(path, **given), "train")


def write(folder, text, name="set.csv", encoding="utf-8"):
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode(encoding))
    return folder / name


def texts(source):
    return [source.record(i).texts["text"] for i in range(source.index.count)]


def counts(source):
    return {
        reason: (entry["count"], [example.rpartition("/")[2] for example in entry["examples"]])
        for reason, entry in source.report().items()
        if not entry["kept"]
    }


def test_a_table(folder):
    source = opened(write(folder, "file_name,caption,score\na.png,a red one,0.5\nb.png,two,-1e3\n"))
    assert texts(source) == ["a red one", "two"]
    assert source.record(0).image == (folder / "a.png").read_bytes()
    assert [source.record(i).metadata for i in range(2)] == [{"score": 0.5}, {"score": -1000.0}]
    assert source.index.numbers["score"].to_pylist() == [0.5, -1000.0]
    assert source.index.heights_px.tolist() == [20, 20]
    assert source.name(1) == f"{folder}/set.csv line 3"
    assert counts(source) == {}


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ('\ufefffile_name,caption\r\na.png,"one, ""two"""\r\nb.png,"three\r\nlines"\r\n', {}),
        ('file_name,caption\na.png,"one, ""two"""\nb.png,"three\r\nlines"', {}),
        ('\n\nfile_name,caption\n\na.png,"one, ""two"""\n\n\nb.png,"three\r\nlines"\n\n', {}),
        ('file_name;caption\na.png;"one, ""two"""\nb.png;"three\r\nlines"', {"delimiter": ";"}),
        ("file_name,caption\na.png,'one, \"two\"'\nb.png,'three\r\nlines'", {"quote": "'"}),
        ('a.png,"one, ""two"""\nb.png,"three\r\nlines"', {"columns": ["file_name", "caption"]}),
        (' file_name , caption\na.png,"one, ""two"""\nb.png,"three\r\nlines"', {}),
    ],
    ids=["bom and crlf", "no last line end", "blank lines", "semicolons", "single quotes", "no header", "spaces"],
)
def test_every_dialect(folder, text, given):
    source = opened(write(folder, text), **given)
    assert texts(source) == ['one, "two"', "three\r\nlines"]
    assert counts(source) == {}


def test_tab_separated_without_a_header(folder):
    """As the table of Conceptual Captions: captions with quotes, then addresses."""
    path = write(folder, '"quoted" at the start\ta.png\n5" disk, "x\tb.png\n', "train.tsv")
    source = opened(path, columns=["caption", "url"], quote="none")
    assert texts(source) == ['"quoted" at the start', '5" disk, "x']


def test_ragged_lines_are_counted_with_their_number(folder):
    source = opened(write(folder, "path,text,x\na.png,one,1\nb.png\nc.png,a,b,c\nd.png,four,4\n\n,,\n"))
    assert texts(source) == ["one", "four"]
    assert counts(source) == {
        "line with fewer cells than the header": (1, ["set.csv line 3"]),
        "line with more cells than the header": (1, ["set.csv line 4"]),
        "no image: the cell is empty": (1, ["set.csv line 7"]),
    }


def test_a_stray_quote_costs_its_line_alone(folder):
    text = 'path,text\na.png,one\nb.png,"two\nc.png,three\nd.png,"four"\na.png,"fi"ve\nb.png,"six\nstill six"\n'
    source = opened(write(folder, text))
    assert texts(source) == ["one", "three", "four", "six\nstill six"]
    assert counts(source) == {QUOTES: (2, ["set.csv line 3", "set.csv line 6"])}


def test_a_quote_that_is_never_closed(folder):
    lines = [f"a.png,caption {i}\n" for i in range(9_000)]  # more letters than a cell may have
    lines[7] = 'b.png,"never closed\n'
    source = opened(write(folder, "path,text\n" + "".join(lines)))
    assert source.index.count == 8_999
    assert counts(source) == {QUOTES: (1, ["set.csv line 9"])}


def test_bytes_that_are_no_text_are_counted(folder):
    lines = [b"path,text", b"a.png,caf\xe9", b"b.png,z\0ro", b"c.png,fine", b"d.png,one\rtwo", b"d.png,\xed\xa0\x80"]
    source = opened(write(folder, b"\n".join(lines)))
    assert texts(source) == ["fine"]
    assert counts(source) == {
        "line that is not UTF-8": (2, ["set.csv line 2", "set.csv line 6"]),
        "line with a zero byte": (1, ["set.csv line 3"]),
        "line that ends with a carriage return alone": (1, ["set.csv line 5"]),
    }


def test_a_cell_that_is_too_long(folder):
    source = opened(write(folder, f"path,text\na.png,{'x' * 200_000}\nb.png,fine\n"))
    assert texts(source) == ["fine"]
    assert counts(source) == {"line with a cell of more than 131,072 letters": (1, ["set.csv line 2"])}


def test_empty_captions_and_missing_images(folder):
    source = opened(write(folder, "path,text\na.png,\nb.png,  \nnone.png,x\n,x\nc.png,good\n"))
    assert texts(source) == ["good"]
    assert counts(source) == {
        "no caption (column 'text')": (2, ["set.csv line 2", "set.csv line 3"]),
        "there is no image file at the path": (1, ["set.csv line 4"]),
        "no image: the cell is empty": (1, ["set.csv line 5"]),
    }


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it is empty"),
        (b"\n\n", "it is empty"),
        (b"<!DOCTYPE html><html>", "page of HTML or XML"),
        ("path,text\na,b".encode("utf-16"), "it is UTF-16: save it as UTF-8"),
        (b"PK\x03\x04abc", "compressed or binary file"),
        (b"PAR1abc", "compressed or binary file"),
        (b"path,text\ra.png,x\r", "carriage return alone"),
        (b"path;text\na.png;x\n", r"one column, with semicolons in it \('path;text'\): set data\.delimiter=';'"),
        (b"path\ttext\na.png\tx\n", r"with tabs in it .*data\.delimiter='\\t'"),
        (b'path,"te"xt\na.png,x\n', "line 1: line with unbalanced quotes"),
        (b"path,,text\na.png,,x\n", "line 1, the header: column 2 has no name"),
        (b"path,text,text\na.png,x,y\n", "more than one column called 'text'"),
        (b"path,words\na.png,x\n", r"no column looks like .*set\.csv: path \(text\), words \(text\)"),
        (b"path,text\n", r"no row of .* can be used"),
        (b"path,text\nx,y,z\n", r"no row of .* can be used.*more cells.*set\.csv line 2"),
    ],
)
def test_what_is_no_such_table(folder, content, said):
    with pytest.raises(UserError, match=rf"(?s)^data\.(path|caption_column): .*{said}") as caught:
        opened(write(folder, content))
    assert str(caught.value).startswith(f"{caught.value.setting}: ")


def test_columns_that_do_not_fit_the_file(folder):
    path = write(folder, "a.png,one\n")
    with pytest.raises(UserError, match=r"line 1 has 2 cells, but data\.columns names 3"):
        opened(path, columns=["path", "text", "more"])
    with pytest.raises(ValidationError, match="give each name only once"):
        made(path, columns=["path", "path"])
    with pytest.raises(ValidationError):
        made(path, columns=[])


def test_csv_and_tsv_together(folder):
    write(folder, "path,text\na.png,one\n")
    write(folder, "path\ttext\nb.png\ttwo\n", "set.tsv")
    with pytest.raises(UserError, match=r"set\.tsv is a TSV file but others are not"):
        opened(folder)


def test_cells_that_look_like_numbers(folder):
    cells = ["1", " 2.5 ", "-3e2", "", "NaN", "n/a", "true", "False", "many", "1,5", "0x10", "1_000", "inf"]
    lines = [f'a.png,x{i},"{cell}",{i}' for i, cell in enumerate(cells)]
    source = opened(write(folder, "path,text,mixed,whole\n" + "\n".join(lines)))
    numbers = [1.0, 2.5, -300.0, None, None, None, 1.0, 0.0, None, None, None, None, None]
    words = [*[None] * 8, "many", "1,5", "0x10", "1_000", "inf"]
    assert source.index.numbers["mixed"].to_pylist() == numbers
    assert source.index.texts["mixed"].to_pylist() == words
    assert set(source.index.texts) == {"mixed"}
    found = [source.record(i).metadata["mixed"] for i in range(len(cells))]
    assert found == [1, 2.5, -300.0, None, None, None, True, False, "many", "1,5", "0x10", "1_000", "inf"]
    assert source.record(3).metadata["whole"] == 3


def test_filters_see_the_other_columns(folder):
    path = write(folder, "path,text,score\na.png,one,1\nb.png,two,\nc.png,three,n/a\nd.png,four,7\n")
    data = open_dataset(made(path, filters="score > 0.5", held_out_fraction=0), "train")
    assert [record.texts["text"] for record in chosen_records(data)] == ["one", "four"]
    assert data.report()["filter: no score"]["count"] == 2


def test_class_labels(folder):
    source = opened(write(folder, "path,label\na.png,0\nb.png,1\nc.png,7\nd.png,\n"), idx_to_prompt=["tench", "shark"])
    assert texts(source) == ["tench", "shark"]
    assert counts(source) == {
        "class label without a name (column 'label')": (1, ["set.csv line 4"]),
        "no caption (column 'label')": (1, ["set.csv line 5"]),
    }


def test_ids_and_rows_after_other_settings(folder):
    """An id hangs on the table's bytes and the row's place in them, not on what else can be used."""
    path = write(folder, 'path,text\na.png,"one\nb.png,two\nc.png,three\n')
    strict, loose = opened(path), opened(path, quote="none")
    assert (strict.index.count, loose.index.count) == (2, 3)
    assert strict.index.ids.tolist() == loose.index.ids.tolist()[1:]


def test_an_edited_table_is_read_anew(folder):
    path = write(folder, "path,text\na.png,one\n")
    assert texts(opened(path)) == ["one"]
    write(folder, "path,text\na.png,ONE\n")
    assert texts(opened(path)) == ["ONE"]


def test_a_table_that_was_edited_in_place_is_read_anew_and_one_that_was_touched_is_not(folder, monkeypatch):
    path = write(folder, "path,text\na.png,one\n")
    before, stat = opened(path).index.ids.tolist(), path.stat()
    path.chmod(0o600)
    monkeypatch.setattr(Builder, "__call__", lambda *given: pytest.fail("it was only touched"))
    touched = opened(path)
    assert (texts(touched), touched.index.ids.tolist()) == (["one"], before)
    monkeypatch.setattr(table_source.index_cache, "file_digest", lambda path: pytest.fail("it was compared before"))
    assert texts(opened(path)) == ["one"]
    monkeypatch.undo()
    write(folder, "path,text\na.png,ONE\n")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert texts(opened(path)) == ["ONE"]


def test_a_table_that_changed_under_a_run(folder):
    path = write(folder, "path,text\na.png,one\nb.png,two\n")
    source = opened(path)
    assert texts(source) == ["one", "two"]
    start = "path,text\na.png,one\n"
    changed = [f"{start}b.png,TWO\n", start, f'{start}b.png,"wo\n', f"{start}b.png,t,o\n", "path\n\n" * 9, "<html>", ""]
    for text in changed:
        write(folder, text)
        with pytest.raises(Undecodable, match="bytes differ from the index"):
            source.record(1)


def test_an_image_that_vanished_is_a_fault(folder):
    source = opened(write(folder, "path,text\na.png,one\n"))
    (folder / "a.png").unlink()
    with pytest.raises(FileNotFoundError):
        source.record(0)


def test_samples_are_shards_of_their_own(folder):
    source = opened(write(folder, "path,text\na.png,one\nb.png,two\nc.png,three\n"))
    assert source.index.shard_starts.tolist() == [0, 1, 2, 3]


def test_a_far_table_with_images_beside_it(folder, s3):  # noqa: F811
    s3.put("set/table.csv", b"path,text\nimages/a.png,one\ns3://bucket/set/images/a.png,two\n")
    s3.put("set/images/a.png", (folder / "a.png").read_bytes())
    source = opened("s3://bucket/set/table.csv", cache_dir=str(folder / "cache"))
    assert texts(source) == ["one", "two"]
    assert [source.record(i).image for i in range(2)] == [(folder / "a.png").read_bytes()] * 2
    assert source.is_remote


CELLS = some.text(some.characters(codec="utf-8", exclude_characters="\0"), max_size=12)


@pytest.mark.long
@settings(deadline=None, max_examples=50)
@given(some.lists(some.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=12), some.sampled_from(["\n", "\r\n"]))
def test_what_the_library_writes_is_read_back(tmp_path_factory, rows, end):
    file = io.StringIO()
    writer = library.writer(file, lineterminator=end, quoting=library.QUOTE_ALL)
    writer.writerows([("a", "b", "c"), *rows])
    path = write(tmp_path_factory.mktemp("t"), file.getvalue())
    tables, found = CsvTables(",", '"'), []
    for part in tables.parts(path, ["c", "a"], "a", "t"):
        assert not isinstance(part, Damage)
        for (offset, length, _), c, a in zip(part.spans.tolist(), *part.batch.columns, strict=True):
            assert tables.row(file_now(path), Row(offset, length), ["a", "c"]) == {"a": a.as_py(), "c": c.as_py()}
            found.append((a.as_py(), c.as_py()))
    assert found == [(a, c) for a, _, c in rows]


@settings(deadline=None, max_examples=100)
@given(some.lists(some.sampled_from(['"', ",", "\n", "\r\n", "a", "b", "é", '""', ",,", '"\n', "\r"]), max_size=30))
def test_no_line_is_lost_uncounted(tmp_path_factory, pieces):
    """Whatever the bytes: every line is part of a row, blank, or counted."""
    path = write(tmp_path_factory.mktemp("t"), "x,y\n" + "".join(pieces))
    tables = CsvTables(",", '"')
    covered, rows = set(), 0
    for part in tables.parts(path, ["x", "y"], "x", "t"):
        if isinstance(part, Damage):
            assert part.rows == 1
            covered.add(int(part.where.rpartition(" ")[2]))
            continue
        for offset, length, line in part.spans.tolist():
            raw = path.read_bytes()[offset : offset + length]
            covered |= set(range(line, line + raw.removesuffix(b"\n").count(b"\n") + 1))
            rows += 1
    lines = path.read_bytes().split(b"\n")
    blank = {i + 1 for i, line in enumerate(lines) if not line.strip(b"\r")}
    assert covered | blank | {1} == set(range(1, len(lines) + 1))

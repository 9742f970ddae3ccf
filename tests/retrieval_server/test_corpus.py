import gzip
import json
from pathlib import Path

import pytest

from retrieval_server.corpus import load_corpus
from retrieval_server.errors import CorpusError

GOOD = '{"id": "1", "contents": "\\"T\\"\\nbody"}'


def write(tmp_path: Path, text: str | bytes, name: str = "corpus.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_rows_stay_whole_and_in_order(tmp_path: Path) -> None:
    rows = [
        {"id": "b", "contents": '"B"\nbody', "url": "https://example.org", "nested": {"deep": [1, None]}},
        {"id": "a", "contents": "one line"},
        {"id": 7, "contents": "\n starts with a break"},
    ]
    corpus = load_corpus(write(tmp_path, "\n".join(json.dumps(row) for row in rows)))
    assert [json.loads(row) for row in corpus.rows] == rows
    assert corpus.contents == [row["contents"] for row in rows]
    assert len(corpus) == 3
    assert corpus.untitled == 2


def test_blank_lines_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    other = GOOD.replace('"1"', '"2"')
    path = write(tmp_path, b"\xef\xbb\xbf" + f"{GOOD}\r\n\r\n  \r\n{other}\r\n".encode())
    assert [json.loads(row)["id"] for row in load_corpus(path).rows] == ["1", "2"]


def test_gzip(tmp_path: Path) -> None:
    path = write(tmp_path, gzip.compress(GOOD.encode()), "corpus.jsonl.gz")
    shares: list[float] = []
    assert len(load_corpus(path, shares.append)) == 1
    assert shares[-1] == 1.0
    cut = write(tmp_path, gzip.compress((GOOD + "\n").encode() * 500)[:-20], "cut.jsonl.gz")
    with pytest.raises(CorpusError, match=r"cut\.jsonl\.gz"):
        load_corpus(cut)
    with pytest.raises(CorpusError, match=r"plain\.gz: reading failed"):
        load_corpus(write(tmp_path, GOOD, "plain.gz"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "2", "contents": ', "not valid JSON"),
        ("[1, 2]", "expected a JSON object, got list"),
        ('"text"', "expected a JSON object, got str"),
        ('{"contents": "x"}', "field 'id' is missing"),
        (
            '{"id": "2", "question": "q", "golden_answers": []}',
            "field 'contents' is missing (fields there: id, question",
        ),
        ('{"id": "2", "contents": null}', "field 'contents' must be a string, got NoneType"),
        ('{"id": "2", "contents": ["x"]}', "field 'contents' must be a string, got list"),
        ('{"id": "2", "contents": " \\n"}', "field 'contents' is blank"),
        ('{"id": null, "contents": "x"}', "field 'id' must be"),
        ('{"id": "", "contents": "x"}', "field 'id' must be"),
        ('{"id": true, "contents": "x"}', "field 'id' must be"),
        ('{"id": "1", "contents": "x"}', "id '1' is already used on line 1"),
        ('{"id": 1, "contents": "x"}', "id '1' is already used on line 1"),
        ('{"id": "2", "contents": "\\ud800"}', "not valid JSON"),
        ('{"id": "2", "contents": "x", "n": NaN}', "not valid JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path, f"{GOOD}\n\n{line}\n")
    with pytest.raises(CorpusError) as caught:
        load_corpus(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r":2: not valid JSON"):
        load_corpus(write(tmp_path, GOOD.encode() + b'\n{"id": "2", "contents": "\xff"}'))


def test_files_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="no such file"):
        load_corpus(tmp_path / "missing.jsonl")
    with pytest.raises(CorpusError, match="not a file"):
        load_corpus(tmp_path)
    with pytest.raises(CorpusError, match="the file is empty"):
        load_corpus(write(tmp_path, ""))
    with pytest.raises(CorpusError, match="only blank lines"):
        load_corpus(write(tmp_path, "\n \n"))


def test_progress_can_stop_a_load(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(share: float) -> None:
        assert 0 < share <= 1
        raise Stop

    lines = [json.dumps({"id": str(i), "contents": "x"}) for i in range(5000)]
    with pytest.raises(Stop):
        load_corpus(write(tmp_path, "\n".join(lines)), stop)

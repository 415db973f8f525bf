"""Texts: held out is the end, in one piece; the vocabulary is that of the training part."""

from __future__ import annotations

import doctest
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from lab import texts
from lab.images import DataError
from lab.texts import UNKNOWN, TextSettings, digest_of, load_text, name_of

WORDS = "the cat sat. the dog sat. the cat ran! "


def settings_of(file: Path, **more: object) -> TextSettings:
    return TextSettings(name_of(file), file=str(file), **more)  # type: ignore[arg-type]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some.txt"
    path.write_text(WORDS * 10 + "a zebra naps.", encoding="utf-8")
    return path


def text_of(data: texts.TextData, part: str, between: str = "") -> str:
    return between.join(data.vocabulary[number] for number in getattr(data, part).tolist())


def test_characters_and_the_held_out_end(file: Path) -> None:
    data = load_text(settings_of(file))
    whole = file.read_text(encoding="utf-8")
    assert text_of(data, "train") == whole[: len(data.train)]
    assert len(data.train) == int(0.9 * len(whole))
    assert len(data.train) + len(data.test) == len(whole)
    # "z", "b" and "p" are in the held-out part alone.
    assert text_of(data, "test").endswith(f"a {UNKNOWN}e{UNKNOWN}ra na{UNKNOWN}s.")
    assert data.classes == 1 + len(set(whole[: len(data.train)]))


def test_words_beyond_the_vocabulary_are_one_token(file: Path) -> None:
    data = load_text(settings_of(file, tokens="word", vocabulary=5))
    assert data.vocabulary == (UNKNOWN, "the", "cat", "sat", ".")  # cat and sat are tied
    assert text_of(data, "train", " ").startswith(f"the cat sat . the {UNKNOWN} sat . the cat")
    assert text_of(data, "test", " ").endswith(f"{UNKNOWN} {UNKNOWN} {UNKNOWN} .")
    everything = load_text(settings_of(file, tokens="word", vocabulary=100))
    assert set(everything.vocabulary) == {UNKNOWN, "the", "cat", "sat", "dog", "ran", ".", "!"}


def test_sizes_are_counted_in_tokens_from_the_start_of_each_part(file: Path) -> None:
    whole, some = load_text(settings_of(file)), load_text(settings_of(file, train_size=50))
    assert text_of(some, "train") == text_of(whole, "train")[:50]
    fewer = load_text(settings_of(file, test_size=4))
    assert text_of(fewer, "test") == text_of(whole, "test")[:4]


def test_the_text_every_python_has() -> None:
    data = load_text(TextSettings())
    assert text_of(data, "train").startswith(topics[min(topics)])
    assert len(data.train) > 400_000
    assert digest_of("python-docs") == digest_of("python-docs")


def test_a_text_is_named_by_its_content(file: Path, tmp_path: Path) -> None:
    name = name_of(file)
    assert name.startswith("some.txt:")
    assert digest_of(name) == name.split(":")[1]
    other = tmp_path / "folder" / "some.txt"
    other.parent.mkdir()
    other.write_text("another text", encoding="utf-8")
    assert name_of(other) != name
    with pytest.raises(DataError, match="does not have the expected content; start again"):
        load_text(TextSettings(name, file=str(other)))


def test_the_bible_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="kjv needs --data-dir DIR; apt-get install bible-kjv"):
        load_text(TextSettings("kjv"))
    with pytest.raises(DataError, match="does not exist; apt-get install bible-kjv"):
        load_text(TextSettings("kjv", str(tmp_path)))
    (tmp_path / "kjv.txt").write_text("In the beginning", encoding="utf-8")
    with pytest.raises(DataError, match="kjv does not have the expected content; recreate it: apt"):
        load_text(TextSettings("kjv", str(tmp_path)))


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    with pytest.raises(DataError, match="cannot be read: No such file"):
        name_of(path)
    path.write_bytes(b"\xff\xfe\x00caf\xe9")
    with pytest.raises(DataError, match="is not plain text in UTF-8"):
        name_of(path)
    path.write_text(" \n", encoding="utf-8")
    with pytest.raises(DataError, match="is empty; pass a longer text"):
        name_of(path)
    with pytest.raises(DataError, match="is unknown; pass it with --text FILE"):
        load_text(TextSettings("gone.txt:0123"))


def test_the_example_in_the_docstring() -> None:
    assert doctest.testmod(texts) == doctest.TestResults(failed=0, attempted=2)

"""Plain text for language models, tokenized by character or word, with a held-out part.

The last part of the text is held out: it is never trained on, and the vocabulary comes from the
training part. Anything not in the vocabulary is token 0.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lab.errors import check_least
from lab.images.sources import DataError

Tokens = Literal["char", "word"]
HELD_OUT = 0.1  # share of the text
UNKNOWN = "�"  # the token for everything else
DIGITS = 12  # of a digest
WORD = re.compile(r"\w+|[^\w\s]")
BUILT_IN = "python-docs"


class Text(NamedTuple):
    """A named text: for a file, the digest of its content and how to get it."""

    digest: str = ""
    how: str = ""


TEXTS: dict[str, Text] = {
    # Python's language reference, which every Python has (pydoc_data.topics).
    BUILT_IN: Text(),
    # The King James Bible, 4.4 million characters, as DIR/kjv.txt with --data-dir DIR.
    "kjv": Text(
        "cd45f0c9ceda", "apt-get install bible-kjv; bible -f 'Gen1:1-Rev22:21' > DIR/kjv.txt"
    ),
}


@dataclass(frozen=True)
class TextSettings:
    """What to load, as plain values.

    Args:
        name: A key of `TEXTS`, or `name_of(file)`.
        data_dir: Folder of `kjv.txt`.
        file: File of a text that is not in `TEXTS`.
        tokens: Characters, or words and punctuation marks.
        vocabulary: Number of words to keep, by frequency; all others are one token. All characters
            are kept.
        train_size: Use only the first tokens of the training part.
        test_size: The same for the held-out part.
    """

    name: str = BUILT_IN
    data_dir: str | None = None
    file: str | None = None
    tokens: Tokens = "char"
    vocabulary: int = 2000
    train_size: int | None = None
    test_size: int | None = None

    def __post_init__(self) -> None:
        if self.name not in TEXTS and ":" not in self.name:
            raise DataError(
                f"unknown text {self.name!r}; choose from {', '.join(TEXTS)}, or pass a file with "
                "--text FILE"
            )
        check_least(self, {"vocabulary": 2, "train_size": 1, "test_size": 1}, DataError)


@dataclass(frozen=True)
class TextData:
    """Both parts as token ids [N], and the tokens by id."""

    settings: TextSettings
    train: Tensor
    test: Tensor
    vocabulary: tuple[str, ...]

    @property
    def classes(self) -> int:
        """Size of the vocabulary."""
        return len(self.vocabulary)


def name_of(file: str | Path) -> str:
    """Name of a text file: its file name and a digest of its content."""
    return f"{Path(file).name}:{_digest(_read(Path(file)))}"


def digest_of(name: str) -> str:
    """Digest of a text's content, by name; for the built-in text, that of this Python version."""
    if name == BUILT_IN:
        return _digest(_python_docs())
    return TEXTS[name].digest if name in TEXTS else name.rpartition(":")[2]


@lru_cache(maxsize=2)  # these tensors are never written to
def load_text(settings: TextSettings) -> TextData:
    """Read, check, split and tokenize a text.

    Raises:
        DataError: The text cannot be used; the message says why and what to do.

    Example:
        >>> data = load_text(TextSettings("python-docs", train_size=1000))
        >>> len(data.train), data.vocabulary[0]
        (1000, '�')
    """
    text = _content(settings)
    if _digest(text) != digest_of(settings.name):
        known = TEXTS.get(settings.name)
        what = f"recreate it: {known.how}" if known else "start again with another --out"
        raise DataError(f"{settings.name} does not have the expected content; {what}")
    cut = int(len(text) * (1 - HELD_OUT))
    train, test = (_tokens(part, settings.tokens) for part in (text[:cut], text[cut:]))
    train, test = train[: settings.train_size], test[: settings.test_size]
    size = settings.vocabulary if settings.tokens == "word" else None
    vocabulary = _vocabulary(train, size)
    numbers = {token: number for number, token in enumerate(vocabulary)}
    kept, held_out = (
        torch.tensor([numbers.get(each, 0) for each in part]) for part in (train, test)
    )
    return TextData(settings, kept, held_out, vocabulary)


def _content(settings: TextSettings) -> str:
    if settings.name == BUILT_IN:
        return _python_docs()
    if settings.file is not None:
        return _read(Path(settings.file))
    known = TEXTS.get(settings.name)
    if known is None:
        raise DataError(f"the file of {settings.name} is unknown; pass it with --text FILE")
    if settings.data_dir is None:
        raise DataError(f"{settings.name} needs --data-dir DIR; {known.how}")
    path = Path(settings.data_dir) / f"{settings.name}.txt"
    if not path.exists():
        raise DataError(f"{path} does not exist; {known.how}")
    return _read(path)


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not plain text in UTF-8: {error}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; pass a text file") from error
    if not text.strip():
        raise DataError(f"{path} is empty; pass a longer text")
    return text


@lru_cache(maxsize=1)
def _python_docs() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def _tokens(text: str, tokens: Tokens) -> list[str]:
    return list(text) if tokens == "char" else WORD.findall(text)


def _vocabulary(tokens: list[str], size: int | None) -> tuple[str, ...]:
    """The token for everything else, then tokens by frequency; ties are sorted alphabetically."""
    counts = Counter(tokens)
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    most = len(ranked) if size is None else size - 1
    return (UNKNOWN, *ranked[:most])

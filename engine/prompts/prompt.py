"""A prompt: one text with its name, what sort of text it is, and where it came from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

ORIGINS = ("sample", "file", "pasted", "uploaded")


@dataclass(frozen=True)
class Prompt:
    """A text to be read by a model.

    `name` is what reports call it, `kind` what sort of text it is (prose, code, a file's own name where nothing else
    is known), `origin` one of `ORIGINS`.
    """

    name: str
    kind: str
    text: str
    origin: str

    def __post_init__(self) -> None:
        if self.origin not in ORIGINS:
            raise ValueError(f"a prompt's origin is one of {', '.join(ORIGINS)}, got {self.origin[:40]!r}")

    @property
    def sha256(self) -> str:
        """Hash of the text alone; see `text_sha256`."""
        return text_sha256(self.text)


def text_sha256(text: str) -> str:
    """sha256 of a prompt's text as UTF-8.

    Half a character (a lone surrogate, which UTF-8 cannot hold) counts as the three bytes that UTF-8 would give its
    number, so that every text has a hash and no two texts share their bytes. No model reads such a text: `encode`
    refuses it.
    """
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

"""Where the pieces of a row came from, for logs and for people."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RowOrigin:
    """Where a piece of a row came from: `tokens` tokens from offset `token` of document `document` of a store."""

    store: str
    source: str
    document: int
    token: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.store} ({self.source}) document {self.document} token {self.token}"


@dataclass(frozen=True)
class PairOrigin:
    """Where the two sides of a pair came from. is_next: whether `second` follows `first` in its document.

    chunk: the tokens of the chunk that the pair was made of; those in neither side are dropped in this epoch.
    """

    first: RowOrigin
    second: RowOrigin
    is_next: bool
    chunk: RowOrigin

    @property
    def dropped(self) -> int:
        """Tokens of the chunk that are in neither side."""
        own = self.first.tokens + (self.second.tokens if self.is_next else 0)
        return self.chunk.tokens - own

    def __str__(self) -> str:
        second = f"document {self.second.document} token {self.second.token}"
        return f"{self.first} + {second} ({'next' if self.is_next else 'random'})"

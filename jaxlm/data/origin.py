"""Origins of the tokens of a row, for logs and displays."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RowOrigin:
    """Origin of a span of a row: `tokens` tokens from offset `token` of document `document` of a store."""

    store: str
    source: str
    document: int
    token: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.store} ({self.source}) document {self.document} token {self.token}"


@dataclass(frozen=True)
class PairOrigin:
    """Origin of the two segments of a pair. is_next: True if `second` follows `first` in its document.

    chunk: origin of the pair's chunk; its tokens that are in neither segment are dropped in this epoch.
    """

    first: RowOrigin
    second: RowOrigin
    is_next: bool
    chunk: RowOrigin

    @property
    def dropped(self) -> int:
        """Return the number of tokens of the chunk that are in neither segment."""
        own = self.first.tokens + (self.second.tokens if self.is_next else 0)
        return self.chunk.tokens - own

    def __str__(self) -> str:
        second = f"document {self.second.document} token {self.second.token}"
        return f"{self.first} + {second} ({'next' if self.is_next else 'random'})"

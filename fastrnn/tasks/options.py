"""The architecture common to the models of all tasks."""

from __future__ import annotations

from dataclasses import dataclass

from .._core.named import cell_name

_LARGEST, _DEEPEST = 1 << 16, 1 << 6


@dataclass(frozen=True)
class NetworkOptions:
    """Recurrent layers over vectors of words.

    Attributes:
        cell: a key of :data:`fastrnn.cells.CELLS` whose cell has a module, or "rnn" for "rnn_tanh".
        hidden: H, units of a layer and direction.
        layers: L.
        bidirectional: whether the layers read in both directions.
        embedding: width of a word's trained vector; 0: none.
        characters: units of each direction of the layer that reads a word's characters; 0: none.
        dropout: on the words' vectors, between layers and on the last layer's output.
        word_dropout: p; in training, a word seen n times is replaced by an unknown one with probability p / (p + n).
    """

    cell: str = "lstm"
    hidden: int = 128
    layers: int = 1
    bidirectional: bool = True
    embedding: int = 100
    characters: int = 50
    dropout: float = 0.5
    word_dropout: float = 0.25

    def __post_init__(self) -> None:
        object.__setattr__(self, "cell", cell_name(self.cell))
        bounds = {"hidden": (1, _LARGEST), "layers": (1, _DEEPEST), "embedding": (0, _LARGEST),
                  "characters": (0, _LARGEST)}  # fmt: skip
        for name, (least, most) in bounds.items():
            size = getattr(self, name)
            if type(size) is not int or not least <= size <= most:
                raise ValueError(f"{name} must be an integer between {least} and {most}, got {size!r}")
        if not isinstance(self.bidirectional, bool):
            raise ValueError(f"bidirectional must be true or false, got {self.bidirectional!r}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if not 0 <= self.word_dropout < float("inf"):
            raise ValueError(f"word_dropout must not be negative, got {self.word_dropout}")

    @property
    def width(self) -> int:
        """D*H, the width of a step's output."""
        return self.hidden * (2 if self.bidirectional else 1)

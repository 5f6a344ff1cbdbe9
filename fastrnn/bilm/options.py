"""The architecture of a biLM, as options.json and the metadata of a native file describe it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

OFFICIAL_FILTERS = ((1, 32), (2, 32), (3, 64), (4, 128), (5, 256), (6, 512), (7, 1024))
CHARACTER_ROWS = 262  # 256 bytes, 5 specials, and row 0: "no token"

# How embed.py divides text.
TOKENS_PER_BATCH = 4096
CHUNK_LENGTH = 1024
STATEFUL_BATCH = 64  # as in AllenNLP's elmo command


_LARGEST = 1 << 24  # largest size: a larger one, from a damaged file, would exhaust memory instead of giving an error
_DEEPEST = 1 << 10


def _require_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        most = _DEEPEST if name in ("layers", "highways") else _LARGEST
        if type(size) is not int or size > most:
            raise ValueError(f"{name} must be an integer of at most {most}, got {size!r}")


@dataclass(frozen=True)
class CharacterOptions:
    """The character CNN: embedding, convolutions, highway layers, projection.

    Attributes:
        embedding_dim: width of a character's vector.
        filters: (width, count) of every convolution.
        highways: number of highway layers.
        activation: "relu" or "tanh", after the maximum over positions.
        max_characters: characters of a token, including the two word marks.
        projected: whether a linear layer makes the token vector; without it, its width is the number of all filters.
    """

    embedding_dim: int = 16
    filters: tuple[tuple[int, int], ...] = OFFICIAL_FILTERS
    highways: int = 2
    activation: str = "relu"
    max_characters: int = 50
    projected: bool = True

    def __post_init__(self) -> None:
        _require_sizes(
            embedding_dim=self.embedding_dim, highways=self.highways, max_characters=self.max_characters,
            **{f"filters[{i}][{j}]": n for i, f in enumerate(self.filters) for j, n in enumerate(f)},
        )  # fmt: skip
        if self.activation not in ("relu", "tanh"):
            raise ValueError(f"char_cnn activation must be 'relu' or 'tanh', got {self.activation!r}")
        if not self.filters or any(len(f) != 2 or min(f) < 1 for f in self.filters):
            raise ValueError(f"char_cnn filters must be pairs of width >= 1 and count >= 1, got {list(self.filters)}")
        if self.max_characters < max(3, *(width for width, _ in self.filters)):
            raise ValueError(
                f"max_characters_per_token must be at least 3 and the widest filter, got {self.max_characters} "
                f"with filters {[list(f) for f in self.filters]}"
            )
        if self.embedding_dim < 1 or self.highways < 0:
            raise ValueError(
                f"char_cnn needs embedding dim >= 1 and n_highway >= 0, got {self.embedding_dim} and {self.highways}"
            )

    @property
    def channels(self) -> int:
        return sum(count for _, count in self.filters)


@dataclass(frozen=True)
class BiLMOptions:
    """A language model's architecture, with both directions or only the forward one (bilm-tf's `bidirectional`).

    Attributes:
        hidden: units of a layer and direction, H.
        projection: width of token vectors and of every layer's output, P; equal to hidden without projection.
        layers: recurrent layers per direction, L.
        cell: "lstm" or "gru".
        projected: whether the LSTM projects its output from H to P (weight_hr).
        cell_clip: bound of the LSTM's cell state; 0 is off.
        proj_clip: bound of the projected output; 0 is off.
        skip_connections: add a layer's input to its output, from the second layer on.
        characters: the character CNN, or None for word input.
        vocabulary_size: word input: number of words V.
        boundary_ids: word input: ids of <S> and </S> (1 + index in the vocabulary).
        bidirectional: whether there is also a backward direction.
    """

    hidden: int = 4096
    projection: int = 512
    layers: int = 2
    cell: str = "lstm"
    projected: bool = True
    cell_clip: float = 3.0
    proj_clip: float = 3.0
    skip_connections: bool = True
    characters: CharacterOptions | None = field(default_factory=CharacterOptions)
    vocabulary_size: int | None = None
    boundary_ids: tuple[int, int] = (1, 2)
    bidirectional: bool = True

    def __post_init__(self) -> None:
        _require_sizes(
            hidden=self.hidden, projection=self.projection, layers=self.layers,
            vocabulary_size=1 if self.vocabulary_size is None else self.vocabulary_size,
        )  # fmt: skip
        if min(self.hidden, self.projection, self.layers) < 1:
            raise ValueError(
                "dim, projection_dim and n_layers must be positive, "
                f"got {self.hidden}, {self.projection}, {self.layers}"
            )
        if self.projection > self.hidden:
            raise ValueError(f"projection_dim {self.projection} is larger than dim {self.hidden}")
        if self.cell not in ("lstm", "gru"):
            raise ValueError(f"cell must be 'lstm' or 'gru', got {self.cell!r}")
        if self.cell == "gru" and self.projected:
            raise ValueError("a GRU has no projection: pass projected=False and projection equal to hidden")
        if not self.projected and self.hidden != self.projection:
            raise ValueError(
                f"without projection token vectors are as wide as the layers: projection must equal hidden, "
                f"got {self.projection} and {self.hidden}"
            )
        if not (0 <= self.cell_clip < math.inf and 0 <= self.proj_clip < math.inf):
            raise ValueError(f"clips must be positive, or 0 for none, got {self.cell_clip} and {self.proj_clip}")
        if not isinstance(self.bidirectional, bool):
            raise ValueError(f"bidirectional must be true or false, got {self.bidirectional!r}")
        if (self.characters is None) == (self.vocabulary_size is None):
            raise ValueError("a model reads characters or words: give exactly one of characters, vocabulary_size")
        if self.characters and not self.characters.projected and self.characters.channels != self.projection:
            raise ValueError(
                "without CNN_proj the filters must add up to projection_dim, "
                f"got {self.characters.channels} and {self.projection}"
            )

    @property
    def directions(self) -> int:
        """D: 2, or 1 for a model that only reads forward."""
        return 2 if self.bidirectional else 1

    @property
    def input(self) -> str:
        """What the model reads: "characters" or "words"."""
        return "words" if self.characters is None else "characters"

    @property
    def recurrent_cell(self) -> str:
        """The key in :data:`fastrnn.cells.CELLS`."""
        return "lstm_projected" if self.projected else self.cell

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> BiLMOptions:
        data = dict(data)
        characters = data.get("characters")
        if characters is not None:
            characters = dict(characters, filters=tuple((int(w), int(n)) for w, n in characters["filters"]))
            data["characters"] = CharacterOptions(**characters)
        data["boundary_ids"] = tuple(data.get("boundary_ids", (1, 2)))
        return cls(**data)

"""Token encoders: turn ids of tokens into context-free vectors [..., P], by the character CNN or a table of words.

Only distinct tokens are encoded, and only up to their length. All windows that lie wholly in a token's padding give the
same value, so a token of n characters (including word marks) needs n + 1 windows of every width instead of 50.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .characters import PADDING
from .module_list import ModuleListOf
from .options import CHARACTER_ROWS, BiLMOptions, CharacterOptions

_TOKENS_AT_ONCE = 2048  # bounds the channels x tokens buffers of the highway layers
_CPU_VALUES, _CUDA_VALUES = 1 << 21, 1 << 26  # values of a convolution's result at a time: 8 MB fit a CPU's cache


def unique_rows(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct rows of ids [N, C] and the index of each row among them [N].

    Rows are compared by a 64-bit hash and then in full, so a collision only costs a slower second try.
    """
    generator = torch.Generator().manual_seed(0x5EED)
    factors = torch.randint(-(1 << 62), 1 << 62, (ids.shape[1],), generator=generator).mul_(2).add_(1)
    hashes = (ids * factors.to(ids.device)).sum(1)
    distinct, inverse = hashes.unique(return_inverse=True)
    first = torch.empty_like(distinct).scatter_(0, inverse, torch.arange(len(ids), device=ids.device))
    rows = ids[first]
    if torch.equal(rows[inverse], ids):
        return rows, inverse
    rows, inverse = ids.unique(dim=0, return_inverse=True)
    return rows, inverse


def _matrix(weight: Tensor) -> Tensor:
    """A convolution's weight [count, d, width] as [width*d, count]."""
    if weight.shape[2] == 1:  # its gradient then has the strides that DistributedDataParallel expects without a warning
        return weight.squeeze(2).t()
    return weight.permute(2, 1, 0).reshape(-1, weight.shape[0])


def bias_of(convolution: nn.Conv1d) -> Tensor:
    """The bias of a convolution that has one, as all of the encoder have."""
    assert convolution.bias is not None
    return convolution.bias


class CharacterEncoder(nn.Module):
    """Character embedding, convolutions with a maximum over positions, highway layers and a projection.

    Parameters follow torch.nn: convolutions [count, embedding_dim, width]. A highway layer is one linear map to
    [transform; gate]; the gate multiplies the transformed part.
    """

    def __init__(self, options: CharacterOptions, width: int) -> None:
        super().__init__()
        self.options = options
        self.width = width
        channels = options.channels
        self.embedding = nn.Parameter(torch.empty(CHARACTER_ROWS, options.embedding_dim))
        self.convolutions = ModuleListOf(nn.Conv1d(options.embedding_dim, n, w) for w, n in options.filters)
        self.highways = ModuleListOf(nn.Linear(channels, 2 * channels) for _ in range(options.highways))
        self.projection = nn.Linear(channels, width) if options.projected else None
        self.init_parameters()

    @torch.no_grad()
    def init_parameters(self) -> None:
        """Initialise the parameters as bilm-tf does."""
        options = self.options
        self.embedding.uniform_(-1, 1)
        self.embedding[0] = 0
        for (width, _), convolution in zip(options.filters, self.convolutions, strict=True):
            if options.activation == "relu":
                convolution.weight.uniform_(-0.05, 0.05)
            else:
                convolution.weight.normal_(0, math.sqrt(1 / (width * options.embedding_dim)))
            bias_of(convolution).zero_()
        deviation = math.sqrt(1 / options.channels)
        for highway in self.highways:
            highway.weight.normal_(0, deviation)
            highway.bias.zero_()
            highway.bias[options.channels :] = -2  # the gate is mostly closed at the start
        if self.projection is not None:
            self.projection.weight.normal_(0, deviation)
            self.projection.bias.zero_()

    def forward(self, ids: Tensor) -> Tensor:
        """Vectors of tokens.

        Args:
            ids: [..., max_characters], integers in 0..261; all zeros mean "no token".

        Returns:
            Vectors [..., P], zero for "no token".
        """
        if ids.shape[-1] != self.options.max_characters:
            raise ValueError(
                f"expected {self.options.max_characters} character ids a token (max_characters_per_token), got "
                f"{ids.shape[-1]}: pass max_characters={self.options.max_characters} to batch_to_ids"
            )
        if not ids.numel():
            return self.embedding.new_zeros(*ids.shape[:-1], self.width)
        rows, inverse = unique_rows(ids.reshape(-1, ids.shape[-1]).long())
        low, high = (int(value) for value in rows.aminmax())
        if low < 0 or high >= CHARACTER_ROWS:
            raise ValueError(f"character ids must lie in 0..{CHARACTER_ROWS - 1}, got {low}..{high}")
        lengths = ((rows != PADDING) * torch.arange(1, rows.shape[1] + 1, device=rows.device)).amax(1)
        lengths, order = lengths.sort()
        rows = rows[order]
        vectors = torch.cat(
            [
                self._vectors(part, part_lengths.tolist())
                for part, part_lengths in zip(rows.split(_TOKENS_AT_ONCE), lengths.split(_TOKENS_AT_ONCE), strict=True)
            ]
        )
        vectors = vectors * (rows > 0).any(1, keepdim=True)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return vectors[places[inverse]].view(*ids.shape[:-1], self.width)

    def _vectors(self, rows: Tensor, lengths: list[int]) -> Tensor:
        """Vectors [N, P] of rows [N, C], sorted by ascending ``lengths`` (without padding)."""
        filters = [_matrix(c.weight) for c in self.convolutions]
        x = torch.cat([self._maxima(rows[i:j], lengths[j - 1], filters) for i, j in self._groups(rows, lengths)])
        x = x + torch.cat(
            [bias_of(c) for c in self.convolutions]
        )  # exact after the maximum, since rounding is monotone
        x = x.relu() if self.options.activation == "relu" else x.tanh()
        for highway in self.highways:
            transformed, gate = highway(x).chunk(2, dim=1)
            # Under autocast the layer returns a 16-bit type while x is float32.
            x = torch.lerp(x, transformed.relu().type_as(x), gate.sigmoid().type_as(x))
        return x if self.projection is None else self.projection(x)

    def _groups(self, rows: Tensor, lengths: list[int]) -> Iterator[tuple[int, int]]:
        """Ranges of rows whose windows fit the buffer."""
        values = _CUDA_VALUES if rows.is_cuda else _CPU_VALUES
        windows = max(1, values // max(count for _, count in self.options.filters))
        start = 0
        for stop in range(1, len(lengths) + 1):
            if stop == len(lengths) or (stop + 1 - start) * (lengths[stop] + 1) > windows:
                yield start, stop
                start = stop

    def _maxima(self, rows: Tensor, longest: int, filters: list[Tensor]) -> Tensor:
        """Maximum over positions of every filter, without bias: [N, channels]."""
        count, characters = rows.shape
        widest = max(width for width, _ in self.options.filters)
        windows = min(longest, characters - 1) + 1
        kept = min(characters, windows + widest - 1)
        x = F.pad(F.embedding(rows[:, :kept], self.embedding, padding_idx=0), (0, 0, 0, windows + widest - 1 - kept))
        # All windows of the widest filter; narrower filters use their first columns.
        x = x.unfold(1, widest, 1).transpose(2, 3).reshape(count * windows, -1)
        maxima = []
        for (width, _), weight in zip(self.options.filters, filters, strict=True):
            y = (x[:, : len(weight)] @ weight).view(count, windows, -1)
            y = y[:, : characters - width + 1]  # windows that reach past the row's last character
            maxima.append(y.max(1).values if y.requires_grad else y.amax(1))
        return torch.cat(maxima, dim=1)


class WordEncoder(nn.Module):
    """A table of word vectors; row 0 is "no token", row k + 1 the vocabulary's word k."""

    def __init__(self, vocabulary_size: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Parameter(torch.empty(vocabulary_size + 1, width))
        self.init_parameters()

    @torch.no_grad()
    def init_parameters(self) -> None:
        """Initialise the table as bilm-tf does: TensorFlow's default, Glorot's uniform distribution."""
        rows, width = self.embedding.shape
        bound = math.sqrt(6 / (rows - 1 + width))
        self.embedding.uniform_(-bound, bound)
        self.embedding[0] = 0

    def forward(self, ids: Tensor) -> Tensor:
        """Vectors [..., P] of word ids [...], zero for id 0."""
        if ids.numel():
            low, high = (int(value) for value in ids.aminmax())
            if low < 0 or high >= len(self.embedding):
                raise ValueError(f"word ids must lie in 0..{len(self.embedding) - 1}, got {low}..{high}")
        return F.embedding(ids.long(), self.embedding, padding_idx=0)


TokenEncoder = CharacterEncoder | WordEncoder


def make_encoder(options: BiLMOptions) -> TokenEncoder:
    if options.characters is not None:
        return CharacterEncoder(options.characters, options.projection)
    assert options.vocabulary_size is not None
    return WordEncoder(options.vocabulary_size, options.projection)

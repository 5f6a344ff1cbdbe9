"""A linear-chain conditional random field over the tags of sentences (Lafferty, McCallum and Pereira 2001)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LinearChainCRF(nn.Module):
    """p(tags | sentence), proportional to exp(score). The score of tags y of a sentence of n words is
    start[y_1] + sum_t emission[t, y_t] + sum_t transition[y_t, y_(t+1)] + end[y_n].

    Args:
        tags: K.
    """

    def __init__(self, tags: int) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(tags))
        self.end = nn.Parameter(torch.zeros(tags))
        self.transition = nn.Parameter(torch.zeros(tags, tags))

    def log_likelihood(self, emissions: Tensor, tags: Tensor, lengths: Tensor) -> Tensor:
        """Log probability of the given tags.

        Args:
            emissions: [T, B, K].
            tags: int64 [T, B], with arbitrary valid tags beyond a sentence's end.
            lengths: [B], at least 1.

        Returns:
            [B].
        """
        return self._score(emissions, tags, lengths) - self._log_normalizer(emissions, lengths)

    def decode(self, emissions: Tensor, lengths: Tensor) -> list[list[int]]:
        """The most probable tags of each sentence (Viterbi algorithm); arguments as above."""
        best = self.start + emissions[0]
        origins = []
        for step in range(1, len(emissions)):
            scores, origin = (best[:, :, None] + self.transition).max(1)
            inside = (step < lengths)[:, None]
            best = torch.where(inside, scores + emissions[step], best)
            origins.append(torch.where(inside, origin, torch.arange(origin.shape[1], device=origin.device)))
        last = (best + self.end).argmax(1)
        path = [last]
        for origin in reversed(origins):
            path.append(origin.gather(1, path[-1][:, None])[:, 0])
        rows = torch.stack(path[::-1], 1).tolist()
        return [row[:length] for row, length in zip(rows, lengths.tolist(), strict=True)]

    def _score(self, emissions: Tensor, tags: Tensor, lengths: Tensor) -> Tensor:
        inside = torch.arange(len(emissions), device=lengths.device)[:, None] < lengths
        own = emissions.gather(2, tags[:, :, None])[:, :, 0]
        steps = self.transition[tags[:-1], tags[1:]]
        last = tags.gather(0, lengths[None] - 1)[0]
        total = own.masked_fill(~inside, 0).sum(0) + steps.masked_fill(~inside[1:], 0).sum(0)
        return total + self.start[tags[0]] + self.end[last]

    def _log_normalizer(self, emissions: Tensor, lengths: Tensor) -> Tensor:
        total = self.start + emissions[0]
        for step in range(1, len(emissions)):
            longer = torch.logsumexp(total[:, :, None] + self.transition, 1) + emissions[step]
            total = torch.where((step < lengths)[:, None], longer, total)
        return torch.logsumexp(total + self.end, 1)

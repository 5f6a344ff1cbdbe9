"""A small English grammar in which verbs agree with their subject across intervening phrases, and models of it."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from ..lm.model import LanguageModel, LanguageModelOptions
from ..text_models.units import Units
from .agreement import NUMBERS, Item
from .training import Curve, fit

_NOUNS = (
    "author", "baker", "captain", "doctor", "engineer", "farmer", "guard", "hunter", "judge", "king", "lawyer",
    "mother", "neighbour", "officer", "painter", "sailor", "teacher", "uncle", "visitor", "writer",
)  # fmt: skip
_VERBS = ("admire", "avoid", "call", "follow", "greet", "help", "know", "like", "meet", "remember", "see", "visit")
_PREPOSITIONS = ("above", "behind", "beside", "near", "under")
_ADVERBS = ("often", "probably", "rarely")
_PHRASES = (0.45, 0.3, 0.15, 0.1)  # probabilities that a subject has 0, 1, 2, 3 phrases
_KEPT_BACK = 5  # one in this many pairs of subject and next noun occurs only in the test


class Grammar:
    """Draws sentences such as "the author near the guards often greets the king", in which verb and subject agree.

    Args:
        seed: seed of the draws.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def beginning(self, kept_back: bool) -> Item:
        """A sentence up to its verb.

        Args:
            kept_back: draw subject and next noun from the pairs that training does not see together.
        """
        draw = self._random
        (phrases,) = draw.choices(range(len(_PHRASES)), _PHRASES)
        while True:
            nouns = [(draw.randrange(len(_NOUNS)), draw.randrange(2)) for _ in range(phrases + 1)]
            if not phrases or (sum(noun for noun, _ in nouns[:2]) % _KEPT_BACK == 0) == kept_back:
                break
        words = []
        for place, (noun, plural) in enumerate(nouns):
            words += [draw.choice(_PREPOSITIONS)] if place else []
            words += ["the", _NOUNS[noun] + "s" * plural]
        if draw.random() < 0.2:
            words.append(draw.choice(_ADVERBS))
        verb = draw.choice(_VERBS)
        plural = nouns[0][1]
        attractors = sum(other != plural for _, other in nouns)
        condition = (
            f"{phrases} phrase{'' if phrases == 1 else 's'}, {attractors} attractor{'' if attractors == 1 else 's'}"
        )
        forms = (verb, verb + "s") if plural else (verb + "s", verb)
        return Item(tuple(words), *forms, NUMBERS[plural], attractors, condition)

    def sentence(self) -> list[str]:
        """A whole sentence for training."""
        item = self.beginning(kept_back=False)
        draw = self._random
        rest = ["the", draw.choice(_NOUNS) + draw.choice(("", "s"))] if draw.random() < 0.5 else []
        return [*item.words, item.right, *rest]

    def text(self, words: int) -> list[str]:
        """Concatenated sentences with at least this number of words."""
        found: list[str] = []
        while len(found) < words:
            found += [*self.sentence(), "\n"]
        return found


def held_out_items(count: int, seed: int) -> list[Item]:
    """Beginnings with pairs of nouns that training does not see together, sorted by condition."""
    grammar = Grammar(seed + 1)
    return sorted((grammar.beginning(kept_back=True) for _ in range(count)), key=lambda item: item.condition)


def train_model(
    cell: str,
    *,
    hidden: int = 50,
    steps: int = 1000,
    batch: int = 32,
    rate: float = 1e-2,
    clip: float = 1.0,
    seed: int = 0,
    device: str = "cpu",
    time: int = 40,
    started: Callable[[int], None] = lambda step: None,
) -> tuple[LanguageModel, Curve]:
    """Trains a language model on the grammar's sentences, new ones at each step.

    Args:
        cell: one of :func:`fastrnn.probe.cell_names`.
        hidden: H, and the width of words.
        steps: training steps; the learning rate falls linearly to nearly 0.
        batch: B, rows of a step.
        rate: learning rate of Adam.
        clip: bound of the gradient norm; 0: none.
        seed: seed of weights and sentences.
        device: device of the computation.
        time: T, words of a row.
        started: called with the number of each training step.
    """
    torch.manual_seed(seed)
    grammar = Grammar(seed)
    text = " ".join(grammar.text(20_000)) + " " + " ".join(noun + end for noun in _NOUNS for end in ("", "s"))
    model = LanguageModel(LanguageModelOptions(cell, hidden), Units.of_text("words", text, 1)).to(device)
    numbers = {**model.units.index, "\n": model.units.boundary}

    def loss_of(step: int) -> torch.Tensor:
        rows = [[numbers[word] for word in ["\n", *grammar.text(time)][: time + 1]] for _ in range(batch)]
        ids = torch.tensor(rows, device=device).T.contiguous()
        return model.loss(ids[:-1], ids[1:])[0]

    curve = fit(model.parameters(), loss_of, steps=steps, rate=rate, last_rate=0.01, clip=clip, started=started)
    return model.eval(), curve

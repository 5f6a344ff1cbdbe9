"""The sampler and the softmax losses of a biLM."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tolerances
import torch
from torch import Tensor

from fastrnn.bilm.optimizer import clip_by_global_norm, make_optimizer
from fastrnn.bilm.softmax import LogUniformSampler, Negatives, SoftmaxHead, log_expected_count

WIDTH, WORDS, TOKENS = 16, 60, 24


def example() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    return torch.randn(TOKENS, WIDTH, generator=random), torch.randint(WORDS, (TOKENS,), generator=random)


@pytest.mark.parametrize(("words", "samples"), [(50, 10), (50, 49), (1000, 300)])
def test_draws_until_enough_distinct_words(words: int, samples: int) -> None:
    """The vectorised sampler gives the same words and number of tries as TensorFlow's loop over single draws."""
    sampler = LogUniformSampler(words, samples, seed=5)
    uniform = np.random.default_rng(5)
    found = sampler.draw()
    wanted: list[int] = []
    tries = 0
    while len(wanted) < samples:
        tries += 1
        word = int(math.exp(uniform.random() * math.log(words + 1))) - 1
        if word not in wanted:
            wanted.append(word)
    assert found.words.tolist() == wanted
    assert found.tries == tries


def test_frequencies_are_the_expected_counts() -> None:
    """Over many draws, the frequency of each word agrees with its expected count for the number of tries."""
    sampler = LogUniformSampler(WORDS, 8, seed=0)
    words = torch.arange(WORDS)
    draws = 4000
    count, expected = torch.zeros(WORDS), torch.zeros(WORDS)
    for _ in range(draws):
        negatives = sampler.draw()
        count[negatives.words] += 1
        expected += log_expected_count(words, negatives.tries, WORDS).exp()
    deviation = (expected * (1 - expected / draws)).sqrt()
    assert ((count - expected).abs() < tolerances.SIGMAS * deviation).all()


def test_probabilities_of_the_sampler_add_up() -> None:
    """One try finds exactly one word, so the expected counts of one try are the probabilities."""
    total = log_expected_count(torch.arange(WORDS), 1, WORDS).double().exp().sum().item()
    assert abs(total - 1) < tolerances.softmax(WORDS, 1)


def test_sampler_resumes() -> None:
    straight, resumed = (LogUniformSampler(WORDS, 8, seed=0) for _ in range(2))
    straight.draw()
    resumed.restore(straight.state())
    assert torch.equal(straight.draw().words, resumed.draw().words)


def test_more_samples_than_words() -> None:
    with pytest.raises(ValueError, match="cannot draw 61 distinct words from a vocabulary of 60"):
        LogUniformSampler(WORDS, 61, seed=0)


def tensorflow_loss(head: SoftmaxHead, hidden: Tensor, targets: Tensor, negatives: Negatives) -> Tensor:
    """tf.nn.sampled_softmax_loss(remove_accidental_hits=True), token by token in float64."""

    def logit(vector: Tensor, word: int) -> Tensor:
        probability = (math.log(word + 2) - math.log(word + 1)) / math.log(WORDS + 1)
        expected = -math.expm1(negatives.tries * math.log1p(-probability))
        return vector @ head.weight[word].double() + head.bias[word, 0].double() - math.log(expected)

    losses = []
    for vector, target in zip(hidden.double(), targets.tolist(), strict=True):
        others = [word for word in negatives.words.tolist() if word != target]
        logits = torch.stack([logit(vector, target), *(logit(vector, word) for word in others)])
        losses.append(-logits.log_softmax(0)[0])
    return torch.stack(losses).mean()


@pytest.mark.parametrize("sparse", [False, True])
def test_sampled_loss_is_tensorflows(sparse: bool) -> None:
    head = SoftmaxHead("sampled", WIDTH, WORDS, sparse=sparse)
    torch.nn.init.normal_(head.bias)
    hidden, targets = example()
    hidden.requires_grad_()
    negatives = LogUniformSampler(WORDS, 20, seed=2).draw()
    targets[:2] = negatives.words[[0, -1]]  # accidental hits, including both ends of the sample
    loss = head.loss(hidden, targets, negatives)
    found = torch.autograd.grad(loss, [hidden, head.weight, head.bias])
    truth = tensorflow_loss(head, hidden, targets, negatives)
    wanted = torch.autograd.grad(truth, [hidden, head.weight, head.bias])
    bound = tolerances.softmax(WORDS, WIDTH)
    tolerances.assert_close(loss, truth, bound, "loss", relative=True)
    for name, gradient, expected in zip(("hidden", "weight", "bias"), found, wanted, strict=True):
        assert gradient.is_sparse == (sparse and name != "hidden")
        tolerances.assert_close(gradient.to_dense(), expected, bound, name, relative=True)


def test_all_words_sampled_is_the_full_softmax() -> None:
    head = SoftmaxHead("sampled", WIDTH, WORDS)
    hidden, targets = example()
    found = head.loss(hidden, targets, LogUniformSampler(WORDS, WORDS, seed=0).draw())
    full = head.loss(hidden, targets)
    tolerances.assert_close(found, full, tolerances.softmax(WORDS, WIDTH), relative=True)
    by_table = -head.log_probabilities(hidden).gather(1, targets[:, None]).mean()
    tolerances.assert_close(by_table, full, tolerances.softmax(WORDS, WIDTH), relative=True)


@pytest.mark.parametrize(("words", "width"), [(5, 4), (60, 16), (3000, 64)])
def test_adaptive_softmax(words: int, width: int) -> None:
    head = SoftmaxHead("adaptive", width, words)
    hidden, targets = torch.randn(TOKENS, width), torch.randint(words, (TOKENS,))
    log_probabilities = head.log_probabilities(hidden)
    bound = tolerances.softmax(words, width)
    tolerances.assert_close(log_probabilities.exp().sum(1), torch.ones(TOKENS), bound)
    tolerances.assert_close(
        head.loss(hidden, targets), -log_probabilities.gather(1, targets[:, None]).mean(), bound, relative=True
    )


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match="one of sampled, full, adaptive, got 'soft'"):
        SoftmaxHead("soft", WIDTH, WORDS)


def test_sparse_steps_are_the_dense_ones() -> None:
    """Clip and Adagrad give the same parameters from sparse gradients with repeated rows as from dense ones."""
    heads = []
    for sparse in (False, True):
        torch.manual_seed(3)
        head = SoftmaxHead("sampled", WIDTH, WORDS, sparse=sparse)
        parameters = list(head.parameters())
        optimizer = make_optimizer("adagrad", [] if sparse else parameters, None, parameters if sparse else [])
        sampler = LogUniformSampler(WORDS, 20, seed=2)
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(2):
                head.loss(*example(), sampler.draw()).backward()
            norm = clip_by_global_norm(head.parameters(), 0.5)
            assert norm > 0.5, "the case needs a clip that acts"
            optimizer.step()
        heads.append(head)
    for dense, sparse in zip(heads[0].parameters(), heads[1].parameters(), strict=True):
        tolerances.assert_close(sparse, dense, tolerances.softmax(WORDS, WIDTH))


def test_clip_is_tensorflows() -> None:
    """Gradients within the bound stay unchanged, others are scaled to it; without a bound nothing happens."""
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (3, 2, 1)]

    def clipped(bound: float) -> tuple[float, list[list[float]]]:
        parameters[0].grad, parameters[1].grad = torch.tensor([2.0, 0.0, 1.0]), torch.tensor([0.0, 2.0])
        norm = clip_by_global_norm(parameters, bound).item()
        return norm, [parameter.grad.tolist() for parameter in parameters[:2]]

    assert clipped(4.0) == clipped(math.inf) == (3.0, [[2.0, 0.0, 1.0], [0.0, 2.0]])
    assert clipped(1.5) == (3.0, [[1.0, 0.0, 0.5], [0.0, 1.0]])


def test_adagrad_is_the_originals() -> None:
    """accumulator = 1 + g^2, step = 0.2 g / sqrt(accumulator)."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = make_optimizer("adagrad", [parameter], None)
    parameter.grad = torch.tensor([math.sqrt(3.0)])
    optimizer.step()
    tolerances.assert_close(parameter, torch.tensor([-0.2 * math.sqrt(3.0) / 2]), tolerances.softmax(1, 1))

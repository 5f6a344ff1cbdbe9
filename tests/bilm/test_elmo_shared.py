"""Shared use: an Elmo among threads, a cache under changing weights and modes, input that can be read only once."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tolerances
import torch
from elmo_models import make_model

from fastrnn.bilm import Elmo, batch_to_ids
from fastrnn.bilm.cache import TokenVectors
from fastrnn.bilm.embed import Embedder
from fastrnn.text_models.vocabulary import count_words

TEXT = [[f"w{number}.{place}" for place in range(3 + number % 7)] + ["the"] for number in range(48)]


@pytest.fixture(autouse=True)
def eager_threads():
    """Makes threads switch as often as possible."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def assert_vectors(found: torch.Tensor, encoder: torch.nn.Module, tokens: list[str]) -> None:
    with torch.no_grad():
        truth = encoder(batch_to_ids([tokens], encoder.options.max_characters)[0])
    tolerances.assert_close(found, truth, tolerances.ELMO_SAME)


def new_elmo(**changes) -> Elmo:
    return Elmo(make_model(), **{"stateful": False, "dropout": 0, **changes})


# Threads.


def test_threads_share_an_embedder():
    shared, own = Embedder(make_model(), "top"), Embedder(make_model(), "top")
    truth = [next(own.iterate([sentence])) for sentence in TEXT]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda sentence: next(shared.iterate([sentence])), TEXT))
    found += [next(shared.iterate([sentence])) for sentence in TEXT]  # nothing wrong stays in the cache
    for array, expected in zip(found, truth * 2, strict=True):
        tolerances.assert_close(torch.from_numpy(array), torch.from_numpy(expected), tolerances.ELMO_SAME)


@pytest.mark.parametrize("remember", [0, 5, 1000])
def test_threads_share_an_elmo(remember):
    elmo, own = new_elmo(), new_elmo()
    elmo.cache_vocabulary([token for sentence in TEXT[:24] for token in sentence], remember)
    with torch.no_grad():
        truth = [own([sentence]).representations[0] for sentence in TEXT]
    start = threading.Barrier(4)

    def read(first: int) -> list[torch.Tensor]:
        start.wait()
        with torch.no_grad():
            return [elmo([sentence]).representations[0] for sentence in TEXT[first:] + TEXT[:first]]

    with ThreadPoolExecutor(4) as pool:
        for first, found in zip(range(4), pool.map(read, range(4)), strict=True):
            for value, expected in zip(found, truth[first:] + truth[:first], strict=True):
                tolerances.assert_close(value, expected, tolerances.ELMO_SAME)
    assert len(elmo.token_vectors) <= elmo.token_vectors.capacity


def test_threads_grow_one_cache():
    """Many small tables: each addition makes a larger one while other threads read."""
    encoder = make_model().encoder.requires_grad_(False)
    cache = TokenVectors(encoder, remember=300)
    random = np.random.default_rng(0)
    questions = [[f"t{n}" for n in random.choice(400, 12)] for _ in range(240)]
    with ThreadPoolExecutor(4) as pool:
        for tokens, found in zip(questions, pool.map(cache.lookup, questions), strict=True):
            assert_vectors(found, encoder, tokens)
    for tokens in questions[::10]:
        assert_vectors(cache.lookup(tokens), encoder, tokens)
    assert len(cache) == 302 == cache.capacity and cache.full


def test_a_thread_that_waits_for_weights_keeps_nothing_old(monkeypatch):
    """Late vectors of old weights are not kept among those of new weights."""
    encoder = make_model().encoder.requires_grad_(False)
    cache = TokenVectors(encoder, remember=10)
    cache.lookup(["a"])
    encode, encoded, changed = cache._encode, threading.Event(), threading.Event()

    def slowly(tokens):
        vectors = encode(tokens)
        if "late" in tokens and not encoded.is_set():
            encoded.set()
            assert changed.wait(10)
        return vectors

    monkeypatch.setattr(cache, "_encode", slowly)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(cache.lookup, ["late"])
        assert encoded.wait(10)
        encoder.load_state_dict(make_model(2).encoder.state_dict())
        cache.lookup(["a"])
        changed.set()
        late.result()
    assert_vectors(cache.lookup(["late"]), encoder, ["late"])


@pytest.mark.parametrize("kind", ["elmo", "embedder"])
def test_a_stateful_one_refuses_a_second_thread(kind, monkeypatch):
    shared = new_elmo(stateful=True) if kind == "elmo" else Embedder(make_model(), stateful=True)
    call = shared if kind == "elmo" else lambda sentences: list(shared.iterate(sentences))
    contextualize, inside, leave = shared.bilm.contextualize, threading.Event(), threading.Event()

    def slowly(*arguments, **options):
        inside.set()
        assert leave.wait(10)
        return contextualize(*arguments, **options)

    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(shared.bilm, "contextualize", slowly)
        first = pool.submit(call, [["The", "cat"]])
        assert inside.wait(10)
        with pytest.raises(RuntimeError, match="its calls are one sequence"):
            call([["The", "cat"]])
        with pytest.raises(RuntimeError, match="its calls are one sequence"):
            shared.carried.reset()
        leave.set()
        first.result()
    call([["The", "cat"]])  # calls in sequence are allowed
    shared.carried.reset()


def test_warming_up_disturbs_nobody_until_it_is_done():
    elmo = new_elmo()
    elmo.warm_up([[["The", "cat"]]])
    before = elmo([["sat"]]).representations[0]
    during = []

    def batches():
        for _ in range(2):
            yield [["a", "dog"]]
            during.append(elmo([["sat"]]).representations[0])

    elmo.warm_up(batches())
    assert all(torch.equal(value, before) for value in during)
    assert not torch.equal(elmo([["sat"]]).representations[0], before)
    with pytest.raises(TypeError, match="list of tokens"):
        elmo.warm_up([[["a"]], ["b c"]])


# Modes and weights.


def add_in_place(encoder):
    with torch.no_grad():
        encoder.projection.weight.add_(0.1)


def write_data(encoder):
    for parameter, other in zip(encoder.parameters(), make_model(2).encoder.parameters(), strict=True):
        parameter.data.copy_(other)


def write_through_numpy(encoder):
    encoder.highways[0].bias.detach().numpy()[:] = 0.3


def exchange_data(encoder):
    for parameter in encoder.parameters():
        parameter.data = parameter.data * 2


def assign(encoder):
    encoder.load_state_dict(make_model(2).encoder.state_dict(), assign=True)
    encoder.requires_grad_(False)


CHANGES = {
    "in place": add_in_place,
    "load_state_dict": lambda encoder: encoder.load_state_dict(make_model(2).encoder.state_dict()),
    "load_state_dict(assign=True)": assign,
    ".data.copy_": write_data,
    ".data =": exchange_data,
    "numpy": write_through_numpy,
    "init": lambda encoder: encoder.init_parameters(),
    "double": lambda encoder: encoder.double(),
    "a layer replaced": lambda encoder: setattr(encoder, "projection", make_model(3).encoder.projection),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_seen(change):
    encoder = make_model().encoder.requires_grad_(False)
    cache = TokenVectors(encoder, ["cat"], remember=5)
    before = cache.lookup(["cat", "dog"])
    assert torch.equal(cache.lookup(["cat", "dog"]), before) and len(cache) == 4
    CHANGES[change](encoder)
    encoder.requires_grad_(False)
    found = cache.lookup(["cat", "dog"])
    assert found.dtype == encoder.embedding.dtype and not torch.equal(found.float(), before)
    assert_vectors(found, encoder, ["cat", "dog"])


def test_changed_weights_without_version_counters_are_seen():
    with torch.inference_mode():
        encoder = make_model().encoder.requires_grad_(False)
    cache = TokenVectors(encoder, ["cat"], remember=5)
    cache.lookup(["cat", "dog"])
    with torch.inference_mode():
        encoder.projection.weight.mul_(2)
    assert_vectors(cache.lookup(["cat", "dog"]), encoder, ["cat", "dog"])


def test_a_write_behind_torchs_back_that_the_samples_miss_needs_clear():
    encoder = make_model().encoder.requires_grad_(False)
    cache = TokenVectors(encoder, ["cat"])
    cache.lookup(["cat"])
    encoder.embedding.data[98:101] += 1  # b"abc" with the offset of 1, which contains no sample
    cache.clear()
    assert_vectors(cache.lookup(["cat"]), encoder, ["cat"])


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("second", [torch.inference_mode, torch.enable_grad])
def test_modes_mix(first, second):
    elmo, plain = new_elmo(), new_elmo()
    elmo.cache_vocabulary(["The"], remember=10)
    with first():
        elmo([["The", "cat"]])
    with second():
        found = elmo([["The", "cat", "sat", "there"]]).representations[0]
    tolerances.assert_close(found, plain([["The", "cat", "sat", "there"]]).representations[0], tolerances.ELMO_SAME)
    elmo([["The", "dog"]]).representations[0].sum().backward()
    assert elmo.mixes[0].gamma.grad.isfinite()


def test_autocast_leaves_no_rounded_vectors_behind():
    encoder = make_model().encoder.requires_grad_(False)
    cache = TokenVectors(encoder, ["cat"], remember=5)
    with torch.autocast("cpu", torch.bfloat16):
        assert cache.lookup(["cat", "dog"]).dtype == TokenVectors(encoder).lookup(["cat"]).dtype == torch.bfloat16
    assert_vectors(cache.lookup(["cat", "dog"]), encoder, ["cat", "dog"])


def test_a_state_made_in_inference_mode_can_be_trained_from():
    elmo = new_elmo(fine_tune=True)
    with torch.inference_mode():
        elmo.warm_up([[["a", "dog"]]])
    elmo([["sat"]]).representations[0].sum().backward()
    stateful = new_elmo(fine_tune=True, stateful=True)
    with torch.inference_mode():
        stateful([["a", "dog"]])
    stateful([["sat"]]).representations[0].sum().backward()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda elmo: pickle.loads(pickle.dumps(elmo))])
def test_copies_share_no_vectors(copied):
    elmo = new_elmo()
    elmo.cache_vocabulary(["The", "cat"], remember=3)
    truth = elmo([["The", "cat", "sat"]]).representations[0]
    twin = copied(elmo)
    with torch.no_grad():
        elmo.bilm.encoder.projection.weight.zero_()
    assert torch.equal(twin([["The", "cat", "sat"]]).representations[0], truth)
    assert not torch.equal(elmo([["The", "cat", "sat"]]).representations[0], truth)


# Input that can be read only once, and strings.

LINES = ["The cat sat .", "", "a dog"]
READERS = {
    "Elmo": lambda sentences: new_elmo()(sentences).representations[0],
    "batch_to_ids": batch_to_ids,
    "Embedder": lambda sentences: torch.from_numpy(np.concatenate([*Embedder(make_model()).iterate(sentences)], 1)),
    "warm_up": lambda sentences: warmed_up(sentences),
}


def warmed_up(sentences) -> torch.Tensor:
    elmo = new_elmo()
    elmo.warm_up([sentences])
    return elmo([["cat"]]).representations[0]


@pytest.mark.parametrize("reader", READERS)
def test_sentences_may_come_from_any_iterable(reader):
    truth = READERS[reader]([line.split() for line in LINES])
    assert truth.numel()
    for sentences in (map(str.split, LINES), (iter(line.split()) for line in LINES), tuple(map(str.split, LINES))):
        assert torch.equal(READERS[reader](sentences), truth)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("sentences", "said"),
    [
        ("The cat", "sentences must be lists of tokens, got the string 'The cat'"),
        (["The cat"], "a sentence must be a list of tokens, got the string 'The cat'"),
        ([["a"], b"bc"], "a sentence must be a list of tokens, got the string b'bc'"),
        ([["a", 3]], "which are strings; got one of int"),
        ([[["a"]]], "which are strings; got one of list"),
        ([None], "a list of tokens, got NoneType"),
    ],
)
def test_what_is_no_sentence_is_refused(reader, sentences, said):
    with pytest.raises(TypeError) as raised:
        READERS[reader](sentences)
    assert said in str(raised.value)


def test_a_string_is_no_vocabulary_and_no_text():
    elmo = new_elmo()
    for use in (
        elmo.cache_vocabulary,
        lambda text: Embedder(make_model(), vocabulary=text),
        lambda text: TokenVectors(make_model().encoder, text),
        lambda text: count_words([text]),
    ):
        with pytest.raises(TypeError, match="must be a list of tokens, got the string 'the cat'"):
            use("the cat")

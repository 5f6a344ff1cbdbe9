"""Elmo as a layer: state, sentence marks, mixes, freezing, the vocabulary cache, long sequences in chunks."""

from __future__ import annotations

import copy

import pytest
import tolerances
import torch
from elmo_models import SENTENCES, make_model

from fastrnn import functional
from fastrnn.bilm import BiLMOptions, Elmo, ScalarMix, batch_to_ids, chunks
from fastrnn.bilm.cache import TokenVectors

GRU = {"cell": "gru", "hidden": 8, "projected": False}
TOP = {"mix_weights": [0, 0, 1], "mix_softmax": False, "dropout": 0}


@pytest.fixture(autouse=True)
def _exact_float32(device):
    """TF32 is off, since the bounds are for float32."""
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


def top(elmo: Elmo, sentences) -> torch.Tensor:
    return elmo(sentences).representations[0].detach()


def close(found: torch.Tensor, truth: torch.Tensor) -> None:
    tolerances.assert_close(found, truth, tolerances.ELMO_SAME)


def states(elmo: Elmo) -> list[torch.Tensor]:
    (rows,) = elmo.carried.rows.values()
    return [value for values in rows for value in values]


# State.


def test_state_is_carried_and_can_be_reset(device):
    elmo = Elmo(make_model(), **TOP).to(device)
    first, second = top(elmo, SENTENCES), top(elmo, SENTENCES)
    assert (first - second).abs().max() > 1e-2
    elmo.reset_states()
    assert torch.equal(top(elmo, SENTENCES), first)
    stateless = Elmo(make_model(), stateful=False, **TOP).to(device)
    assert torch.equal(top(stateless, SENTENCES), first) and torch.equal(top(stateless, SENTENCES), first)
    assert not stateless.carried.rows


def test_text_and_ids_give_the_same(device):
    elmo = Elmo(make_model(), stateful=False, **TOP).to(device)
    close(top(elmo, batch_to_ids(SENTENCES, 20).to(device)), top(elmo, SENTENCES))


def test_smaller_batches_leave_the_other_rows_and_larger_ones_add_zero_rows(device):
    elmo = Elmo(make_model(), **TOP).to(device)
    elmo(SENTENCES[:3])
    before = [value.clone() for value in states(elmo)]
    elmo(SENTENCES[3:])
    for old, new in zip(before, states(elmo), strict=True):
        assert torch.equal(old[:, 1:], new[:, 1:]) and not torch.equal(old[:, :1], new[:, :1])
    fourth = top(elmo, [*SENTENCES[:3], SENTENCES[3]])[3]
    close(fourth, top(Elmo(elmo.bilm, stateful=False, **TOP), SENTENCES[3:])[0])
    assert states(elmo)[0].shape[1] == 4


def test_state_stays_out_of_the_state_dict(device):
    elmo = Elmo(make_model(), **TOP).to(device)
    names = list(elmo.state_dict())
    elmo(SENTENCES)
    assert list(elmo.state_dict()) == names
    assert not [name for name in names if "carried" in name or "bias_hh" in name]
    twin = copy.deepcopy(elmo)
    close(top(twin, SENTENCES), top(elmo, SENTENCES))


def test_warm_up_fixes_a_start_state(device):
    elmo = Elmo(make_model(), stateful=False, **TOP).to(device)
    cold = top(elmo, SENTENCES)
    elmo.warm_up([SENTENCES, SENTENCES[2:]])
    warm = top(elmo, SENTENCES)
    assert (warm - cold).abs().max() > 1e-2
    assert torch.equal(top(elmo, SENTENCES), warm)
    close(top(elmo, SENTENCES[3:])[0], warm[3])  # independent of the rest of the batch
    carrying = Elmo(make_model(), **TOP).to(device)
    for batch in (SENTENCES, SENTENCES[2:]):
        carrying(batch)
    close(top(carrying, [SENTENCES[0]])[0], warm[0, : len(SENTENCES[0])])
    elmo.stateful = True
    close(top(elmo, SENTENCES), warm)
    assert (top(elmo, SENTENCES) - warm).abs().max() > 1e-2
    with pytest.raises(ValueError, match="at least one batch"):
        elmo.warm_up([])


def test_state_follows_a_change_of_type(device):
    elmo = Elmo(make_model(), **TOP).to(device)
    elmo(SENTENCES)
    elmo.double()
    assert top(elmo, SENTENCES).dtype == torch.float64


# Shapes, marks, mixes.


@pytest.mark.parametrize("sentences", [[[]], [[], []], [["a"]], [[], ["b"] * 7]])
@pytest.mark.parametrize("keep", [False, True])
def test_empty_sentences(device, sentences, keep):
    elmo = Elmo(make_model(), keep_boundaries=keep, **TOP).to(device)
    for inputs in (sentences, batch_to_ids(sentences, 20).to(device)):
        (found,), mask = elmo(inputs)
        longest = max(map(len, sentences)) + (2 if keep else 0)
        assert found.shape == (len(sentences), longest, 16) and mask.shape == found.shape[:2]
        assert mask.sum(1).tolist() == [len(s) + (2 if keep else 0) for s in sentences]
        assert not found[~mask].any() and found[mask].any() == bool(mask.any())


def test_boundaries_can_be_kept(device):
    bilm = make_model()
    kept = top(Elmo(bilm, stateful=False, keep_boundaries=True, **TOP).to(device), SENTENCES)
    cut = top(Elmo(bilm, stateful=False, **TOP).to(device), SENTENCES)
    for row, sentence in enumerate(SENTENCES):
        assert torch.equal(kept[row, 1 : len(sentence) + 1], cut[row, : len(sentence)])


def test_further_dimensions(device):
    elmo = Elmo(make_model(), stateful=False, **TOP).to(device)
    ids = batch_to_ids(SENTENCES, 20).to(device)
    nested = ids.view(2, 2, *ids.shape[1:])
    (found,), mask = elmo(nested)
    close(found.flatten(0, 1), elmo(ids)[0][0])
    assert mask.shape == nested.shape[:3]


def test_several_mixes_share_one_pass(device, monkeypatch):
    elmo = Elmo(make_model(), 2, stateful=False, dropout=0).to(device)
    elmo.mixes[1].weights.data = torch.tensor([0.0, 5.0, 1.0], device=device)
    passes = []
    monkeypatch.setattr(elmo.bilm, "contextualize", lambda *a, **k: passes.append(1) or type(elmo.bilm).contextualize(
        elmo.bilm, *a, **k))  # fmt: skip
    first, second = elmo(SENTENCES).representations
    assert len(passes) == 1 and not torch.equal(first, second)


def test_dropout_is_for_training_only(device):
    elmo = Elmo(make_model(), stateful=False).to(device)
    (dropped,), mask = elmo(SENTENCES)
    assert 0.3 < (dropped[mask] == 0).float().mean() < 0.7
    elmo.eval()
    assert torch.equal(top(elmo, SENTENCES), top(elmo, SENTENCES))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(2, 3, 50, dtype=torch.int64), "max_characters=20"),
        (torch.full((1, 1, 20), 262), r"0\.\.261, got .*262"),
        (torch.full((1, 1, 20), -1), "pad on the right|0..261"),
        (torch.zeros(20, dtype=torch.int64), "at least 3 dimensions"),
        (torch.tensor([[0, 1]])[..., None].expand(1, 2, 20), "pad on the right"),
    ],
)
def test_wrong_ids_are_refused(ids, message):
    with pytest.raises(ValueError, match=message):
        Elmo(make_model())(ids)


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="list of tokens"):
        Elmo(make_model())(["a sentence"])
    with pytest.raises(ValueError, match="chunk_length"):
        Elmo(make_model(), chunk_length=0)
    words = make_model(characters=None, vocabulary_size=3)
    with pytest.raises(ValueError, match="pass the vocabulary"):
        Elmo(words)([["a"]])
    with pytest.raises(ValueError, match="no <UNK>"):
        Elmo(words, vocabulary=["<S>", "</S>", "a"])([["b"]])
    with pytest.raises(ValueError, match="0..3, got"):
        Elmo(words)(torch.tensor([[9]]))
    with pytest.raises(ValueError, match="table already"):
        Elmo(words).cache_vocabulary(["a"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 4, "projection": 8}, "larger than dim"),
        ({"cell": "gru"}, "no projection"),
        ({"cell": "rnn"}, "'lstm' or 'gru'"),
        ({"projected": False}, "must equal hidden"),
        ({"characters": None}, "characters or words"),
        ({"cell_clip": -1.0}, "clips"),
        ({"layers": 0}, "n_layers"),
    ],
)
def test_wrong_architectures_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        BiLMOptions(**{"hidden": 16, "projection": 8, **changes})


# Freezing and fine-tuning.


def test_frozen_by_default_with_trainable_mixes(device):
    elmo = Elmo(make_model(), dropout=0).to(device)
    (found,), _ = elmo(SENTENCES)
    found.square().sum().backward()
    assert all(p.grad is None and not p.requires_grad for p in elmo.bilm.parameters())
    assert elmo.mixes[0].weights.grad.abs().min() > 0 and elmo.mixes[0].gamma.grad.abs() > 0


@pytest.mark.parametrize("changes", [{}, {"skip_connections": False}, GRU])
def test_fine_tuning_reaches_every_parameter(device, changes):
    elmo = Elmo(make_model(**changes), fine_tune=True, dropout=0).to(device)
    for _ in range(2):  # the carried state must not connect the graphs of two calls
        (found,), _ = elmo(SENTENCES)
        found.square().sum().backward()
    for name, parameter in elmo.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name
    if "cell" not in changes:
        assert not elmo.bilm.encoder.embedding.grad[0].any()
    with torch.no_grad():
        assert not elmo(SENTENCES)[0][0].requires_grad


def test_fine_tuning_gradient_by_differences():
    torch.manual_seed(0)
    elmo = Elmo(make_model(cell_clip=0.0, proj_clip=0.0), fine_tune=True, stateful=False, dropout=0).double()
    parameters = [elmo.bilm.forward_layers[1].weight_hr, elmo.bilm.encoder.projection.bias, elmo.mixes[0].weights]
    ids = batch_to_ids([["ab", "c"], ["d"]], 20)

    def loss(*_):
        return elmo(ids)[0][0].square().sum()

    assert torch.autograd.gradcheck(loss, [p.requires_grad_() for p in parameters], **tolerances.GRADCHECK)


# The cache of token vectors.


@torch.no_grad()
def test_vocabulary_cache_changes_nothing(device):
    elmo = Elmo(make_model(), stateful=False, **TOP).to(device)
    plain = top(elmo, SENTENCES)
    for tokens, remember in ((["cat", "The", "cat"], 0), (["cat"], 3), ([], 2), ([], 100)):
        elmo.cache_vocabulary(tokens, remember)
        for _ in range(3):
            close(top(elmo, SENTENCES), plain)
        assert len(elmo.token_vectors) <= len({*tokens, "<S>", "</S>"}) + remember


@torch.no_grad()
def test_vocabulary_cache_follows_the_weights(device):
    elmo = Elmo(make_model(), stateful=False, **TOP).to(device)
    elmo.cache_vocabulary(["cat", "sat"], 5)
    elmo(SENTENCES)
    elmo.bilm.encoder.projection.weight.mul_(2)
    changed = top(elmo, SENTENCES)
    close(changed, top(Elmo(elmo.bilm, stateful=False, **TOP), SENTENCES))
    elmo.load_state_dict(Elmo(make_model(seed=3), **TOP).state_dict())
    close(top(elmo, SENTENCES), top(Elmo(make_model(seed=3), stateful=False, **TOP).to(device), SENTENCES))
    assert top(elmo.double(), SENTENCES).dtype == torch.float64


def test_vocabulary_cache_refuses_fine_tuning(device):
    elmo = Elmo(make_model(), fine_tune=True).to(device)
    elmo.cache_vocabulary(["cat"])
    with pytest.raises(RuntimeError, match="cannot be trained through it"):
        elmo(SENTENCES)
    with torch.no_grad():
        elmo(SENTENCES)
    elmo.cache_vocabulary([])  # keeps nothing
    elmo(SENTENCES)


@torch.no_grad()
def test_only_unknown_tokens_are_encoded(device, monkeypatch):
    vectors = TokenVectors(make_model().to(device).encoder, ["a", "b"])
    vectors.lookup(["a"])
    encoded = []
    encode = vectors._encode
    monkeypatch.setattr(vectors, "_encode", lambda tokens: encoded.extend(tokens) or encode(tokens))
    vectors.lookup(["a", "b", "c", "a", "c", "d"])
    assert encoded == ["c", "d"]


# Long sequences in chunks.


@pytest.mark.parametrize("length", [1, 2, 5, 8, 12])
@pytest.mark.parametrize("changes", [{}, {"skip_connections": False, "layers": 3}, GRU])
def test_chunks_are_exact(device, length, changes):
    weights = [0.5, 1.0, -2.0, 0.3][: changes.get("layers", 2) + 1]
    settings = {"mix_weights": weights, "mix_softmax": False, "dropout": 0}
    whole = Elmo(make_model(**changes), **settings).to(device)
    summed = Elmo(make_model(**changes), chunk_length=length, mix_trainable=False, **settings).to(device)
    trained = Elmo(make_model(**changes), chunk_length=length, **settings).to(device)
    for batch in (SENTENCES, SENTENCES[1:], SENTENCES[2:3]):
        truth = top(whole, batch)
        close(top(summed, batch), truth)
        close(top(trained, batch), truth)
        for found in (summed, trained):
            for value, expected in zip(states(found), states(whole), strict=True):
                close(value, expected)
    normal = {**settings, "layer_norm": "bilm_tf", "stateful": False}
    close(
        top(Elmo(summed.bilm, chunk_length=length, **normal), SENTENCES),
        top(Elmo(summed.bilm, **normal), SENTENCES),
    )


def test_chunks_bound_every_call(device, monkeypatch):
    longest = []

    def watched(cell, inputs, *arguments, **options):
        longest.append(max(len(x) for x in inputs))
        return functional.layer(cell, inputs, *arguments, **options)

    monkeypatch.setattr(chunks, "layer", watched)
    elmo = Elmo(make_model(), chunk_length=7, **TOP).to(device)
    elmo([["a"] * 30, ["b"] * 2])
    assert longest and max(longest) == 7


def test_chunks_are_for_inference_only(device, monkeypatch):
    monkeypatch.setattr("fastrnn.bilm.elmo.contextualize_in_chunks", None)
    elmo = Elmo(make_model(), fine_tune=True, chunk_length=3, dropout=0).to(device)
    elmo(SENTENCES)[0][0].sum().backward()


@torch.no_grad()
def test_a_sentence_of_44177_tokens(device):
    sentence = [f"w{number % 991}" for number in range(44_177)]
    bilm = make_model().to(device)
    whole = top(Elmo(bilm, **TOP), [sentence])
    chunks = top(Elmo(bilm, chunk_length=2000, **TOP), [sentence])
    assert whole.shape == (1, 44_177, 16)
    close(chunks, whole)


def test_one_mix_for_data_parallel():
    assert [tuple(p.shape) for p in ScalarMix(3).parameters()] == [(3,), ()]

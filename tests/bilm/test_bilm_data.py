"""Text files, vocabularies and training batches of a biLM."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fastrnn.bilm.data import TokenTable, TrainingData, first_occurrences
from fastrnn.text_models.text import Shard, TextError, find_files, read_sentences, read_shard, scan
from fastrnn.text_models.vocabulary import Vocabulary, VocabularyError, build_vocabulary, count_words

WORDS = ["<S>", "</S>", "<UNK>", "a", "b", "c"]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def shards_of(tmp_path: Path, *texts: str) -> list[Shard]:
    return scan([write(tmp_path / f"shard{number}.txt", text) for number, text in enumerate(texts)])


def test_batches_are_the_originals(test_data: Path, tmp_path: Path) -> None:
    expected = json.loads((test_data / "elmo_fixtures/bilm_tf/lm_dataset_expected.json").read_text())
    data = TrainingData(
        shards_of(tmp_path, "\n".join(expected["sentences"])),
        Vocabulary(expected["vocab"]),
        batch=expected["batch_size"],
        steps=expected["num_steps"],
        max_characters=expected["max_word_length"],
        seed=0,
        shuffle=False,
    )
    for number in range(2):
        inputs, targets = next(data)
        batch = data.spell(inputs, targets)
        for direction, name in enumerate(("forward", "reverse")):
            wanted = expected[name][number]
            spelled = batch.ids[batch.inputs[direction]].transpose(1, 0, 2)
            np.testing.assert_array_equal(spelled - 1, wanted["tokens_characters"])
            np.testing.assert_array_equal(batch.targets[direction].T, wanted["next_token_id"])
            np.testing.assert_array_equal(data.table.targets(inputs[direction]), wanted["token_ids"])


def test_every_round_reads_every_sentence_once(tmp_path: Path) -> None:
    texts = ["a\na b\nc c\n", "b\nb a x\n", "y\n"]
    shards = shards_of(tmp_path, *texts)
    expected = Counter(tuple(line.split()) for text in texts for line in text.splitlines())
    data = TrainingData(shards, Vocabulary(WORDS), batch=3, steps=2, seed=3)
    for direction, stream in enumerate(data._sentences):
        for _ in range(3):
            found = Counter()
            for _ in range(expected.total()):
                first, *words, last = data.table.words(next(stream))
                assert (first, last) == (("</S>", "<S>") if direction else ("<S>", "</S>"))
                found[tuple(words[::-1] if direction else words)] += 1
            assert found == expected


def test_directions_read_different_text(tmp_path: Path) -> None:
    text = "".join(f"w{number} a b\n" for number in range(50))
    data = TrainingData(shards_of(tmp_path, text), Vocabulary(WORDS), batch=2, steps=20, seed=0)
    inputs, _ = next(data)
    forward, backward = (set(data.table.words(half.ravel())) for half in inputs)
    assert forward != backward


def test_same_rows_whatever_the_division(tmp_path: Path) -> None:
    """The rows of a batch for two processes are those of one process's batch."""
    text = "".join(f"a w{number} b\n" for number in range(30))
    shards = shards_of(tmp_path, text)
    whole, divided = (TrainingData(shards, Vocabulary(WORDS), batch=4, steps=3, seed=1) for _ in range(2))
    for _ in range(20):
        window = next(whole)
        batch = whole.spell(*window)
        inputs, targets = next(divided)
        for rows in (slice(0, 2), slice(2, 4)):
            part = divided.spell(inputs[:, rows], targets[:, rows])
            np.testing.assert_array_equal(part.ids[part.inputs], batch.ids[batch.inputs[:, :, rows]])
            np.testing.assert_array_equal(part.targets, batch.targets[:, :, rows])


@pytest.mark.parametrize("stop", [0, 1, 5, 10, 17, 24])
def test_position_is_restored(tmp_path: Path, stop: int) -> None:
    # Shards of unequal length, so that the two directions change shards at different times.
    texts = ["".join(f"a x{shard}_{number} b c\n" for number in range(4 + 3 * shard)) for shard in range(3)]
    shards = shards_of(tmp_path, *texts)
    straight, resumed = (TrainingData(shards, Vocabulary(WORDS), batch=2, steps=5, seed=7) for _ in range(2))
    for _ in range(stop):
        next(straight)
    resumed.restore(json.loads(json.dumps(straight.state())))
    for _ in range(25):
        wanted, found = straight.spell(*next(straight)), resumed.spell(*next(resumed))
        np.testing.assert_array_equal(found.ids, wanted.ids)
        np.testing.assert_array_equal(found.inputs, wanted.inputs)
        np.testing.assert_array_equal(found.targets, wanted.targets)


def test_words_outside_the_vocabulary_are_forgotten(tmp_path: Path) -> None:
    texts = ["".join(f"x{shard}_{number}\n" for number in range(100)) for shard in range(4)]
    data = TrainingData(shards_of(tmp_path, *texts), Vocabulary(WORDS), batch=1, steps=10, seed=0)
    for _ in range(200):
        next(data)
    # A shard for each of the two directions, and at most one more each until the next window drops the old one.
    assert len(data.table) <= len(WORDS) + 400 + 2


def test_table_renumbers() -> None:
    table = TokenTable(Vocabulary(WORDS), 8)
    rows = table.rows(["a", "x", "y", "z", "<S>"])
    assert table.targets(rows).tolist() == [3, 2, 2, 2, 0]
    spelled = table.ids[rows[[0, 2, 3]]]
    new = table.keep_only([rows[[0, 2, 3]]])
    kept = new[rows[[0, 2, 3]]]
    assert table.words(kept) == ["a", "y", "z"]
    np.testing.assert_array_equal(table.ids[kept], spelled)
    assert "x" not in table
    assert table.words(table.rows(["x", "z"])) == ["x", "z"]


def test_first_occurrences() -> None:
    values = np.array([3, 1, 3, 0, 1, 2])
    assert first_occurrences(values, np.zeros(4, np.int64)).tolist() == [True, True, False, True, False, True]


def test_counts(tmp_path: Path) -> None:
    (shard,) = shards_of(tmp_path, "a b c\n\nd \u00a0 e\r\nform\x0cfeed\u2028sep\n")
    assert (shard.sentences, shard.words) == (4, sum(map(len, read_shard(shard))))
    assert shard.predictions == shard.words + 4
    assert list(read_shard(shard))[1] == []


def test_bad_text(tmp_path: Path) -> None:
    with pytest.raises(TextError, match="no text file matches"):
        find_files([str(tmp_path / "none*")])
    write(tmp_path / "empty.txt", "\n\n")
    with pytest.raises(TextError, match="empty.txt is empty"):
        scan([tmp_path / "empty.txt"])
    (tmp_path / "binary.txt").write_bytes(b"word\0word\n")
    with pytest.raises(TextError, match="binary.txt, line 1: a NUL byte"):
        read_sentences(tmp_path / "binary.txt")
    (tmp_path / "latin.txt").write_bytes("caf\u00e9\n".encode("latin-1"))
    with pytest.raises(TextError, match="latin.txt, line 1: byte 0xe9 is not UTF-8"):
        read_sentences(tmp_path / "latin.txt")


def test_shard_that_changes_or_vanishes(tmp_path: Path) -> None:
    (shard,) = shards_of(tmp_path, "a b\n")
    write(Path(shard.path), "b a\n")
    with pytest.raises(TextError, match="changed during the run.*same size"):
        read_shard(shard)
    write(Path(shard.path), "a b c\n")
    with pytest.raises(TextError, match="had 4 bytes and has 6 now"):
        read_shard(shard)
    Path(shard.path).unlink()
    with pytest.raises(TextError, match="cannot read"):
        read_shard(shard)


def test_folder_and_pattern_name_the_same_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", ".hidden"):
        write(tmp_path / name, "a\n")
    wanted = [tmp_path / "a.txt", tmp_path / "b.txt"]
    assert find_files([str(tmp_path)]) == find_files([str(tmp_path / "*.txt"), str(tmp_path / "a.txt")]) == wanted


def test_vocabulary_is_sorted_by_frequency(tmp_path: Path) -> None:
    path = write(tmp_path / "text.txt", "b b b a a c <UNK> c c c\nd\n")
    vocabulary = build_vocabulary(count_words(read_sentences(path)), min_count=2)
    assert vocabulary.words == ["<S>", "</S>", "<UNK>", "c", "b", "a"]
    vocabulary.save(tmp_path / "vocab.txt")
    assert Vocabulary.load(tmp_path / "vocab.txt").words == vocabulary.words
    assert build_vocabulary(count_words(read_sentences(path)), 1, max_size=4).words == vocabulary.words[:4]
    with pytest.raises(TextError, match="no word occurs 9 times"):
        build_vocabulary(count_words(read_sentences(path)), 9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<S>\n</S>\na\n", "has no <UNK>"),
        ("<S>\n</S>\n<UNK>\na\na\n", "line 5: 'a' is on line 4 already"),
        ("<S>\n\n</S>\n<UNK>\n", "line 2: '' is not one word"),
        ("<S>\n</S>\n<UNK>\na b\n", "line 4: 'a b' is not one word"),
    ],
)
def test_bad_vocabulary(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(VocabularyError, match=message):
        Vocabulary.load(write(tmp_path / "vocab.txt", text))
    with pytest.raises(TextError, match="cannot read .*missing.txt: No such file"):
        Vocabulary.load(tmp_path / "missing.txt")

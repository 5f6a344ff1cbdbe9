"""Bad numbers and files of other programs end in a one-line error; the cases come from practice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_text_files import place, run, trained  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode

from fastrnn.explanation import explain_layer

h5py = pytest.importorskip("h5py")
safetensors_torch = pytest.importorskip("safetensors.torch")

OFFICIAL = ["--options", "model/options.json", "--weights", "model/weights.hdf5"]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden": 10**12, "batch": 1}, "plan: hidden is 1000000000000, at most 16777216"),
        ({"hidden": 8, "batch": 10**12}, "plan: batch is 1000000000000"),
        ({"hidden": 8, "batch": 1, "steps": 2**62}, "plan: steps is 4611686018427387904"),
        ({"hidden": 10**40, "batch": 1}, "hidden must be a size of at most 64 bits"),
    ],
)
def test_sizes_that_cannot_be_planned(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explain_layer("lstm", **sizes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "--hidden", "1000000000000", "--batch", "1"], "1000000000000 is too large"),
        (["generate", "--model", "model", "--seed", "-1"], "-1 is not in the range"),
        (["generate", "--model", "model", "--seed", str(2**64)], "is too large"),
        (["generate", "--model", "model", "--temperature", "nan"], "nan is not a finite number"),
        (["bench", "char-lm", "--learning-rate", "inf"], "inf is not a finite number"),
        (["bench", "--budget", "nan"], "nan is not a finite number"),
    ],
)
def test_numbers_out_of_range(place: Path, arguments: list[str], message: str) -> None:  # noqa: F811
    code, said = run(arguments)
    assert code == 2 and message in said


@pytest.mark.parametrize("temperature", ["1e-45", "5e-324", "1e300"])
def test_temperatures_that_underflow(place: Path, temperature: str) -> None:  # noqa: F811
    code, said = run(["generate", "--model", "model", "--temperature", temperature, "--max-tokens", "5"])
    assert code == 0, said
    if float(temperature) < 1:
        assert said == run(["generate", "--model", "model", "--temperature", "0", "--max-tokens", "5"])[1]


def test_a_model_in_bfloat16_just_works(place: Path) -> None:  # noqa: F811
    path = Path("model/model.safetensors")
    with __import__("safetensors").safe_open(path, "pt") as file:
        head = dict(file.metadata())
    tensors = safetensors_torch.load_file(path)
    safetensors_torch.save_file({name: value.bfloat16() for name, value in tensors.items()}, path, head)
    Path("words").write_text("w1\nw2\n")
    for output in ("out.txt", "out.hdf5"):
        assert run(["cache-tokens", "words", output, "--model", "model"])[0] == 0
    for arguments in (["eval-bilm", "shard0.txt"], ["score", "shard0.txt"], ["generate"]):
        code, said = run([*arguments, "--model", "model"])
        assert code == 0 and "nan" not in said


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "found list"),
        (torch.zeros(3), "found Tensor"),
        ({1: torch.zeros(3)}, "found dict"),
        ({"_token_embedder._char_embedding_weights": [1.0]}, "found dict"),
        ({"model": {"a": torch.zeros(3)}}, "found dict"),
        ({"_token_embedder._char_embedding_weights": torch.zeros(2)}, "missing or not of 3 dimensions|dimensions"),
    ],
)
def test_checkpoints_of_other_programs(place: Path, content: object, message: str) -> None:  # noqa: F811
    import re

    torch.save(content, "other.th")
    code, said = run(["embed", "shard0.txt", "out", "--weights", "other.th"])
    assert code == 1 and re.search(message, said) and said.count("\n") == 1, said
    Path("out").mkdir()
    torch.save(content, "out/checkpoint-000000001.pt")
    train = ["train-bilm", "--train", "shard0.txt", "--vocab", "vocab.txt", "--out", "out", "--dim", "12"]
    code, said = run([*train, "--projection", "6", "--filters", "1:4", "--batch", "2", "--unroll", "4", "--steps", "2"])
    assert code == 1 and "checkpoint-000000001.pt has format None" in said, said


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("lstm", "dim"), 10**12, "hidden must be an integer of at most"),
        (("lstm", "n_layers"), 10**6, "layers must be an integer of at most"),
        (("lstm", "cell_clip"), float("nan"), "clips must be positive"),
        (("lstm", "cell_clip"), 10**400, "too large"),
        (("char_cnn", "n_highway"), 10**6, "highways must be an integer of at most"),
        (("char_cnn", "filters"), [[1, 10**12]], "must be an integer of at most"),
    ],
)
def test_options_with_impossible_values(place: Path, path: tuple[str, str], value, message: str) -> None:  # noqa: F811
    options = json.loads(Path("model/options.json").read_text())
    options[path[0]][path[1]] = value
    Path("model/options.json").write_text(json.dumps(options))
    code, said = run(["embed", "shard0.txt", "out", *OFFICIAL])
    assert code == 1 and "options.json" in said and message in said and said.count("\n") == 1, said


def test_options_of_endless_depth(place: Path) -> None:  # noqa: F811
    Path("model/options.json").write_text("[" * 200_000)
    code, said = run(["embed", "shard0.txt", "out", *OFFICIAL])
    assert code == 1 and "options.json: not a JSON file" in said


@pytest.mark.parametrize("kind", ["nan", "large", "soft link", "external link", "group", "null", "text"])
def test_hdf5_with_values_or_links_that_cannot_be(place: Path, kind: str) -> None:  # noqa: F811
    name = "CNN_proj/b_proj"
    with h5py.File("model/weights.hdf5", "r+") as file:
        values = file[name][...].astype("float64")
        del file[name]
        if kind in ("nan", "large"):
            values[1] = float("nan") if kind == "nan" else 1e300
            file[name] = values
        elif kind == "group":
            file.create_group(name)
        elif kind == "null":
            file[name] = h5py.Empty("f")
        elif kind == "text":
            file[name] = ["a"] * len(values)
        else:
            file[name] = h5py.SoftLink("/nowhere") if kind == "soft link" else h5py.ExternalLink("none.hdf5", "/x")
    code, said = run(["embed", "shard0.txt", "out", *OFFICIAL])
    assert code == 1 and "weights.hdf5: " in said and name in said and said.count("\n") == 1, said


def test_a_learning_rate_that_ends_in_nan_leaves_the_last_good_checkpoint(place: Path) -> None:  # noqa: F811
    """The first steps have a good rate; then a step has a finite loss but leaves parameters that are not finite."""
    train = ["train-bilm", "--train", "shard0.txt", "--vocab", "vocab.txt", "--out", "out", "--dim", "12"]
    train += ["--projection", "6", "--filters", "1:4", "--batch", "2", "--unroll", "4", "--checkpoint-every", "1"]
    code, said = run([*train, "--keep", "1", "--steps", "2", "--learning-rate", "1e30"])
    assert code == 1 and "step 1 has left parameters under which the loss is not finite" in said, said
    assert not list(Path("out").glob("*.pt")) and not Path("out/weights.hdf5").exists()


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest new tensor with memory."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(t, torch.Tensor) and not t.is_meta:
                self.elements = max(self.elements, t.numel())
        return result


# Refused because of the shapes in the file, before memory of those sizes is allocated.
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lstm": {"projection_dim": 10**9}}, "projection must be an integer of at most"),
        ({"lstm": {"dim": 10**6, "projection_dim": 10**6}}, "should have shape (1000000, 1000000), found (12, 6)"),
        ({"lstm": {"dim": 10**7}}, "should have shape (12, 40000000), found (12, 48)"),
        ({"lstm": {"n_layers": 1000}}, "Cell2/LSTMCell/W_0 is missing"),
        ({"char_cnn": {"embedding": {"dim": 10**7}}}, "should have shape (261, 10000000), found (261, 4)"),
        ({"char_cnn": {"n_highway": 1000}}, "CNN_high_1/W_transform is missing"),
        ({"char_cnn": {"filters": [[1, 4], [2, 10**7]]}}, "should have shape (1, 2, 4, 10000000), found (1, 2, 4, 8)"),
    ],
    ids=str,
)
def test_sizes_that_are_not_the_files(place: Path, changes: dict, message: str) -> None:  # noqa: F811
    options = json.loads(Path("model/options.json").read_text())
    for section, values in changes.items():
        options[section] |= values
    Path("model/options.json").write_text(json.dumps(options))
    with Largest() as largest:
        code, said = run(["embed", "shard0.txt", "out", *OFFICIAL])
    assert code == 1 and said.count("Error: ") == 1 and message in said, said
    assert largest.elements < 10**5


def test_sizes_in_a_head_that_are_not_the_files(place: Path) -> None:  # noqa: F811
    path = Path("model/model.safetensors")
    with __import__("safetensors").safe_open(path, "pt") as file:
        head = dict(file.metadata())
    architecture = json.loads(head["fastrnn.bilm"])
    architecture |= {"hidden": 10**6, "projection": 10**6}
    head["fastrnn.bilm"] = json.dumps(architecture)
    safetensors_torch.save_file(safetensors_torch.load_file(path), path, head)
    settings = json.loads(Path("lm/settings.json").read_text())
    settings["model"]["hidden"] = 10**6
    Path("lm/settings.json").write_text(json.dumps(settings))
    for arguments in (["embed", "shard0.txt", "out", "--model", "model"], "lm score shard0.txt --model lm".split()):
        with Largest() as largest:
            code, said = run(arguments)
        assert code == 1 and said.count("Error: ") == 1 and "should have shape" in said, said
        assert largest.elements < 10**5


def test_a_head_with_more_mixes_than_the_file(place: Path) -> None:  # noqa: F811
    assert run(["convert-bilm", "model", "elmo.safetensors"])[0] == 0
    with __import__("safetensors").safe_open("elmo.safetensors", "pt") as file:
        head = dict(file.metadata())
    head["fastrnn.elmo"] = json.dumps(json.loads(head["fastrnn.elmo"]) | {"num_output_representations": 10**9})
    safetensors_torch.save_file(safetensors_torch.load_file("elmo.safetensors"), "elmo.safetensors", head)
    code, said = run(["embed", "shard0.txt", "out", "--model", "elmo.safetensors"])
    assert code == 1 and said.count("Error: ") == 1 and "is 1000000000, found 1 mixes" in said, said

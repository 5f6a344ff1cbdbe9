"""Finds a model's files by one rule for all commands: in a folder, in a zip archive of one, or at a file of weights.

A folder may be one that `train-bilm` wrote, one of the original's releases, or one of the NLPL repository's
(model.hdf5, options.json, vocab.txt; vectors.nlpl.eu), whose archives need no unpacking.
"""

from __future__ import annotations

import errno
import gzip
import os
import re
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from ..text_models.files import WeightsError
from ..text_models.vocabulary import VocabularyError, read_words
from .words import boundary_ids

if TYPE_CHECKING:
    from .elmo import Elmo

# Order of preference in a folder: train-bilm's file with the softmax, the official format's usual names, any other.
_BY_NAME = (("model.safetensors",), ("weights.hdf5", "model.hdf5"))
_BY_ENDING = (".hdf5", ".safetensors", ".th", ".index")  # .index: a checkpoint of bilm-tf
_ALLENNLP = (".th", ".pt", ".bin")
_VOCABULARY = "vocab.txt"
_PACKED_VOCABULARY = ("model.hdf5", "vocab.txt.gz")  # in the NLPL's folders, beside weights of this name


@dataclass(frozen=True)
class ModelFiles:
    """The files of one model.

    Attributes:
        place: the given path: a folder, an archive or a file.
        weights: .hdf5, .safetensors, .th, .pt or .bin.
        options: the options.json that belongs to ``weights``, or None.
        vocabulary: the words, one per line, or None; models that read characters need none.
        packed_vocabulary: the file from which ``vocabulary`` was unpacked, or None.
    """

    place: Path
    weights: Path
    options: Path | None = None
    vocabulary: Path | None = None
    packed_vocabulary: Path | None = None

    def beside(self) -> list[tuple[str, Path]]:
        """The files that are read along with the weights, for fastrnn.paths.guard_outputs."""
        files = (self.options, self.vocabulary, self.packed_vocabulary)
        return [(f"part of {self.place}", path) for path in files if path is not None]

    def elmo(self) -> Elmo:
        """The model with the mixes in the file, or untrained ones; its biLM is ``.bilm``.

        Raises:
            WeightsError: a file is missing, damaged or does not fit.
            VocabularyError, TextError: likewise the vocabulary of a model that reads words.
        """
        from . import allennlp, native, official
        from .elmo import Elmo, words_of

        if self.weights.suffix in _ALLENNLP:
            return allennlp.load(self.weights, self.options)
        if self.weights.suffix == ".safetensors":
            elmo = native.load_elmo(self.weights)
            if elmo.bilm.options.characters is None and self.vocabulary is not None:
                known = words_of(elmo.bilm, read_words(self.vocabulary), str(self.vocabulary))
                if elmo.word_ids not in (None, known):
                    raise VocabularyError(f"{self.vocabulary} has other words than the vocabulary in {self.weights}")
                elmo.word_ids = known
            return elmo
        if self.options is None:
            names = " or ".join(_names_of_options(self.weights.name))
            raise WeightsError(f"{self.weights} needs --options, for no {names} lies beside it")
        if official.read_options(self.options).characters is not None:
            return Elmo(official.load(self.options, self.weights))
        if self.vocabulary is None:
            raise WeightsError(
                f"{self.weights} holds a biLM that reads words: it needs its vocabulary, --vocab or {_VOCABULARY} "
                "beside it, which says what row is <S> and what </S>"
            )
        source = str(self.vocabulary)
        words = read_words(self.vocabulary)
        elmo = Elmo(official.load(self.options, self.weights, boundary_ids=boundary_ids(words, source)))
        elmo.word_ids = words_of(elmo.bilm, words, source)
        return elmo


@contextmanager
def find_model(
    place: str | os.PathLike[str],
    options: str | os.PathLike[str] | None = None,
    vocabulary: str | os.PathLike[str] | None = None,
) -> Iterator[ModelFiles]:
    """The files of the model at ``place``. Files of an archive exist only within the context.

    Args:
        place: a folder, a .zip archive with such a folder's files, or a file of weights with its options.json (for
            NAME_weights.hdf5 also NAME_options.json) and vocab.txt beside it.
        options: used instead of the options.json found there; not for .safetensors, which hold their own.
        vocabulary: used instead of the vocab.txt found there.

    Raises:
        FileNotFoundError: nothing is there, or no weights.
        WeightsError: a file of another kind, several files of weights, or a damaged archive.
    """
    place = Path(place)

    def completed(found: ModelFiles) -> ModelFiles:
        if options is not None and found.weights.suffix == ".safetensors":
            raise WeightsError(f"{found.weights} holds its options itself: leave out the options.json {options}")
        given = {"options": options, "vocabulary": vocabulary}
        return replace(found, **{name: Path(path) for name, path in given.items() if path is not None})

    if place.is_dir():
        names = [entry.name for entry in place.iterdir() if entry.is_file()]
        with _unpacked(_in_folder(place, place, names)) as found:
            yield completed(found)
    elif not place.exists():
        raise _no_model(place, "there is no such file or folder")
    elif place.suffix.lower() == ".zip":
        with tempfile.TemporaryDirectory(prefix="fastrnn-") as folder:
            names = _unpack(place, Path(folder))
            try:
                with _unpacked(_in_folder(place, Path(folder), names)) as found:
                    yield completed(found)
            except ValueError as error:  # name the archive, not the temporary folder
                if folder in str(error):
                    error.args = (str(error).replace(folder, str(place)),)
                raise
    elif place.suffix in (".hdf5", ".safetensors", ".index", *_ALLENNLP):
        usual = (*_names_of_options(place.name), _VOCABULARY, _PACKED_VOCABULARY[1])
        with _unpacked(_files(place, place, [n for n in usual if (place.parent / n).is_file()])) as found:
            yield completed(found)
    else:
        raise WeightsError(
            f"{place} is no model: expected a folder, a .zip archive, or weights in a .hdf5, .safetensors, .th, .pt "
            "or .bin file"
        )


@contextmanager
def _unpacked(found: ModelFiles) -> Iterator[ModelFiles]:
    """The same files, with a packed vocabulary unpacked."""
    packed = found.vocabulary
    if packed is None or packed.name != _PACKED_VOCABULARY[1]:
        yield found
        return
    with tempfile.TemporaryDirectory(prefix="fastrnn-") as folder:
        text = Path(folder) / _VOCABULARY
        try:
            with gzip.open(packed) as source, open(text, "wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise WeightsError(f"{packed}: not a gzip file that can be read (cut short?): {error}") from error
        try:
            yield replace(found, vocabulary=text, packed_vocabulary=packed)
        except ValueError as error:
            if folder in str(error):
                error.args = (str(error).replace(str(text), str(packed)),)
            raise


def _no_model(place: Path, why: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, f"holds no trained model: {why}", str(place))


def _names_of_options(weights: str) -> list[str]:
    """Possible names of the options.json that belongs to a file of weights."""
    release = weights.removesuffix("weights.hdf5")  # elmo_2x4096_512_2048cnn_2xhighway_weights.hdf5
    return [f"{release}options.json", "options.json"] if release not in (weights, "") else ["options.json"]


def _weights_among(names: Iterable[str]) -> list[str]:
    """Those of ``names`` that are files of weights and share the highest preference."""
    names = sorted(names)
    for wanted in _BY_NAME:
        if found := [name for name in names if name in wanted]:
            return found
    for ending in _BY_ENDING:
        if found := [name for name in names if name.endswith(ending)]:
            return _newest(found) if ending == ".index" else found
    return []


def _newest(names: list[str]) -> list[str]:
    """The checkpoint of the last step, if all names are checkpoints model.ckpt-STEP.index; else all names."""
    steps = {name: int(step[1]) for name in names if (step := re.search(r"-(\d+)\.index$", name))}
    return [max(names, key=steps.__getitem__)] if len(steps) == len(names) else names


def _in_folder(place: Path, folder: Path, names: list[str]) -> ModelFiles:
    found = _weights_among(names)
    if not found:
        expected = ", ".join(name for names in _BY_NAME for name in names)
        raise _no_model(place, f"it has none of {expected} (train-bilm writes its model at the end of an epoch)")
    if len(found) > 1:
        raise WeightsError(f"{place} holds several files of weights, {', '.join(found)}: name the file that is meant")
    return _files(place, folder / found[0], names)


def _files(place: Path, weights: Path, names: Iterable[str]) -> ModelFiles:
    """The model of the file ``weights``, with the files beside it that belong to it."""
    options = next((name for name in _names_of_options(weights.name) if name in names), None)
    usual = [_VOCABULARY, *([_PACKED_VOCABULARY[1]] if weights.name == _PACKED_VOCABULARY[0] else [])]
    vocabulary = next((name for name in usual if name in names), None)
    return ModelFiles(
        place,
        weights,
        None if options is None or weights.suffix == ".safetensors" else weights.parent / options,
        None if vocabulary is None else weights.parent / vocabulary,
    )


def _unpack(archive: Path, folder: Path) -> list[str]:
    """Unpack the model's files from an archive into a folder and return their names."""
    try:
        with zipfile.ZipFile(archive) as file:
            by_folder: dict[PurePosixPath, dict[str, zipfile.ZipInfo]] = {}
            for member in file.infolist():
                path = PurePosixPath(member.filename)
                if not member.is_dir() and "__MACOSX" not in path.parts:  # metadata that Apple's archiver adds
                    by_folder.setdefault(path.parent, {})[path.name] = member
            models = [members for members in by_folder.values() if _weights_among(members)]
            if len(models) > 1:
                raise WeightsError(f"{archive} holds several models: unpack it and name the folder that is meant")
            names = list(models[0]) if models else []
            wanted = {*_weights_among(names), _VOCABULARY, _PACKED_VOCABULARY[1]}
            wanted |= {option for name in wanted for option in _names_of_options(name)}
            for name in wanted.intersection(names):
                with file.open(models[0][name]) as source, open(folder / name, "wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
    except OSError as error:
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), str(archive)) from error
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise WeightsError(f"{archive}: not an archive that can be read (cut short, or encrypted?): {error}") from error
    return names

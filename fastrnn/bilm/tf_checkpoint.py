"""Reads checkpoints of bilm-tf, including the softmax, with TensorFlow's own reader (the extra `tf`).

bilm-tf writes `model.ckpt-STEP` (three files) and options.json to its folder. Variables have the names of the hdf5 file
that its dump_weights writes, except for the scope `lm` and the names of TensorFlow's cells: github.com/allenai/bilm-tf,
bilm/training.py, `dump_weights` and `_build_loss`. A model of one direction has no scope RNN_0 around its cells.
"""

from __future__ import annotations

import re
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from ..text_models.files import WeightsError
from .official import Weights

ENDING = ".index"  # of the file that names the others
_SCOPE = "lm/"
# Turns a name in the hdf5 file into that of the variable, the inverse of dump_weights.
_NAMES = (
    (r"/RNN/", "/rnn/"),
    (r"/MultiRNNCell/", "/multi_rnn_cell/"),
    (r"/Cell(\d+)/", r"/cell_\1/"),
    (r"/LSTMCell/", "/lstm_cell/"),
    (r"/W_P_0$", "/projection/kernel"),
    (r"/W_0$", "/kernel"),
    (r"/B$", "/bias"),
)


class Checkpoint(Weights):
    """A checkpoint that is read under the names of the hdf5 format."""

    def __init__(self, path: str | PathLike[str]) -> None:
        try:
            import tensorflow
        except ImportError as error:
            raise ImportError(
                f"reading {path} needs TensorFlow (pip install tensorflow-cpu), whose checkpoint it is"
            ) from error
        self.path = path
        if not Path(path).is_file():
            raise FileNotFoundError(f"no such file: {path}")
        try:
            self._reader = tensorflow.train.load_checkpoint(str(path).removesuffix(ENDING))
            self._shapes = self._reader.get_variable_to_shape_map()
        except Exception as error:  # TensorFlow has its own exception types
            raise WeightsError(f"{path}: not a checkpoint that can be read: {error}") from error

    def __exit__(self, *_: object) -> None:
        pass

    def __contains__(self, name: str) -> bool:
        return _variable(name) in self._shapes

    def _dataset(self, name: str, shape: tuple[int, ...]) -> Tensor:
        variable = _variable(name)
        found = tuple(self._shapes[variable])
        self.check_shape(variable, shape, found)
        if self.shapes_alone:
            return torch.empty(found, device="meta")
        try:
            values = self._reader.get_tensor(variable)
        except Exception as error:
            raise WeightsError(f"{self.path}: {variable} cannot be read, the file is damaged: {error}") from error
        self.check_type(variable, values.dtype)
        return torch.from_numpy(values.astype("float32"))


def _variable(name: str) -> str:
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return _SCOPE + name


def read_softmax(path: str | PathLike[str], width: int) -> dict[str, Tensor]:
    """The softmax's parameters under our names; a shared softmax only has a bias."""
    with Checkpoint(path) as file:
        weights = {"bias": file.read("softmax/b", -1)[:, None]}
        if "softmax/W" in file:
            weights["weight"] = file.read("softmax/W", -1, width)
    return weights

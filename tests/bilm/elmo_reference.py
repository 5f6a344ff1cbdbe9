"""An independent biLM in NumPy float64, read directly from the original's two files: the reference for tests.

Follows the published formulas position by position, and shares only the files with the package.
"""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


class ReferenceBiLM:
    """The model of options.json and an hdf5 file; `layers` computes everything for a batch."""

    def __init__(self, options: Path, weights: Path) -> None:
        self.options = json.loads(Path(options).read_text())
        self.weights: dict[str, np.ndarray] = {}
        with h5py.File(weights, "r") as file:
            file.visititems(self._take)
        self.lstm = self.options["lstm"]
        self.state: dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray]] = {}

    def _take(self, name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset):
            self.weights[name] = item[...].astype(np.float64)

    def characters(self, token: str) -> list[int]:
        """Ids without the offset of 1."""
        longest = self.options["char_cnn"]["max_characters_per_token"]
        marks = {"<S>": [256], "</S>": [257]}
        inner = marks.get(token) or list(token.encode("utf-8", "ignore")[: longest - 2])
        return ([258, *inner, 259] + [260] * longest)[:longest]

    def token(self, token: str) -> np.ndarray:
        """The context-free vector [P]."""
        cnn, w = self.options["char_cnn"], self.weights
        x = w["char_embed"][self.characters(token)]
        parts = []
        for index, (width, _) in enumerate(cnn["filters"]):
            kernel, bias = w[f"CNN/W_cnn_{index}"][0], w[f"CNN/b_cnn_{index}"]
            values = [np.einsum("wd,wdn->n", x[at : at + width], kernel) + bias for at in range(len(x) - width + 1)]
            highest = np.max(values, axis=0)
            parts.append(np.maximum(highest, 0) if cnn["activation"] == "relu" else np.tanh(highest))
        v = np.concatenate(parts)
        for index in range(cnn.get("n_highway") or 0):
            prefix = f"CNN_high_{index}/"
            gate = _sigmoid(v @ w[prefix + "W_carry"] + w[prefix + "b_carry"])
            transformed = np.maximum(v @ w[prefix + "W_transform"] + w[prefix + "b_transform"], 0)
            v = gate * transformed + (1 - gate) * v
        return v @ w["CNN_proj/W_proj"] + w["CNN_proj/b_proj"]

    def _step(self, name: str, x: np.ndarray, c: np.ndarray, h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        i, j, f, o = np.split(np.concatenate([x, h]) @ self.weights[name + "W_0"] + self.weights[name + "B"], 4)
        c = _sigmoid(f + 1) * c + _sigmoid(i) * np.tanh(j)
        if clip := self.lstm.get("cell_clip"):
            c = np.clip(c, -clip, clip)
        h = _sigmoid(o) * np.tanh(c)
        if self.lstm["projection_dim"] < self.lstm["dim"]:
            h = h @ self.weights[name + "W_P_0"]
            if clip := self.lstm.get("proj_clip"):
                h = np.clip(h, -clip, clip)
        return c, h

    def layers(self, sentences: list[list[str]]) -> list[np.ndarray]:
        """[L + 1, N + 2, 2P] for each sentence, including the marks; rows carry their state from call to call."""
        results = []
        for row, sentence in enumerate(sentences):
            x = np.stack([self.token(token) for token in ("<S>", *sentence, "</S>")])
            directions = []
            for direction in (0, 1):
                outputs, current = [x], x if direction == 0 else x[::-1]
                for index in range(self.lstm["n_layers"]):
                    name = f"RNN_{direction}/RNN/MultiRNNCell/Cell{index}/LSTMCell/"
                    zero = np.zeros(self.lstm["dim"]), np.zeros(self.lstm["projection_dim"])
                    c, h = self.state.get((row, direction, index), zero)
                    result = []
                    for value in current:
                        c, h = self._step(name, value, c, h)
                        result.append(h + value if index and self.lstm["use_skip_connections"] else h)
                    self.state[row, direction, index] = c, h
                    current = np.stack(result)
                    outputs.append(current if direction == 0 else current[::-1])
                directions.append(outputs)
            results.append(np.stack([np.concatenate(pair, axis=1) for pair in zip(*directions, strict=True)]))
        return results

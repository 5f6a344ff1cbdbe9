"""A language model: unit vectors, recurrent layers, and a softmax over all units."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from .._core.named import cell_name, make_layer
from .._core.recurrent import Recurrent
from ..frozen import freeze
from ..functional import linear_cross_entropy
from ..text_models.files import WeightsError, read_tensors
from ..text_models.model_folder import (
    MODEL_FILE,
    SETTINGS_FILE,
    build_model,
    find_model_folder,
    read_settings,
    save_model,
)
from ..text_models.sampling import Drawer, Sampling
from ..text_models.units import Ids, Units

State = Tensor | tuple[Tensor, ...] | None  # as the layer returns it: h, or (h, c); None means zero
_FORMAT, _KIND = "fastrnn.lm", "language model"
_LARGEST, _DEEPEST = 1 << 20, 1 << 8
# Evaluation reads long texts as parallel rows; each row begins with units that only warm up the state.
_ROWS, _ROW_LENGTH, _LEAD_IN, _STEPS = 32, 4096, 256, 128
_LOGITS = 1 << 24  # values computed at once, 64 MB


@dataclass(frozen=True)
class LanguageModelOptions:
    """The architecture, apart from the units.

    Attributes:
        cell: a key of :data:`fastrnn.cells.CELLS` whose cell has a module, or "rnn" for "rnn_tanh".
        hidden: H, hidden units of a layer.
        layers: L.
        embedding: E, width of a unit's vector; None: the width of the softmax's input.
        projection: P > 0: the LSTM projects its state to P values; 0: none.
        tied: the softmax's weight is the table of the units' vectors (Press and Wolf 2017).
        dropout: on the units' vectors, between layers and on the softmax's input.
    """

    cell: str = "lstm"
    hidden: int = 256
    layers: int = 1
    embedding: int | None = None
    projection: int = 0
    tied: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "cell", cell_name(self.cell))
        sizes = {"hidden": self.hidden, "layers": self.layers, "embedding": self.embedding or 1}
        for name, size in {**sizes, "projection": self.projection or 1}.items():
            most = _DEEPEST if name == "layers" else _LARGEST
            if type(size) is not int or not 1 <= size <= most:
                raise ValueError(f"{name} must be an integer between 1 and {most}, got {getattr(self, name)!r}")
        if self.projection and self.cell != "lstm":
            raise ValueError(f"only the LSTM projects: leave out projection, or take lstm in place of {self.cell}")
        if self.projection >= self.hidden:
            raise ValueError(f"projection must be less than hidden, got {self.projection} and {self.hidden}")
        if self.tied and self.embedding not in (None, self.width):
            raise ValueError(
                f"a tied softmax needs vectors as wide as what it reads, got embedding {self.embedding} and "
                f"{self.width}"
            )
        if not isinstance(self.tied, bool):
            raise ValueError(f"tied must be true or false, got {self.tied!r}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")

    @property
    def width(self) -> int:
        """R, the width of a step's output: P or H."""
        return self.projection or self.hidden


@dataclass
class Evaluation:
    """Sums over a text.

    Attributes:
        units: number of predicted units.
        unknown: of these, `<UNK>`.
        nats: their negative log probability.
        kind: "characters" or "words".
    """

    kind: str
    units: int
    unknown: int
    nats: float

    @property
    def loss(self) -> float:
        """Nats per unit."""
        return self.nats / self.units

    @property
    def bits(self) -> float:
        """Bits per unit; for characters, bits per character."""
        return self.loss / math.log(2)

    @property
    def perplexity(self) -> float:
        return float(np.exp(np.float64(self.loss)))

    @property
    def unknown_share(self) -> float:
        return self.unknown / self.units

    @property
    def figures(self) -> dict[str, float]:
        """The figures reported for this kind of units, by name."""
        if self.kind == "characters":
            return {"nats per character": self.loss, "bits per character": self.bits}
        return {"nats per word": self.loss, "perplexity": self.perplexity}

    def __str__(self) -> str:
        found = ", ".join(f"{value:,.4f} {name}" for name, value in self.figures.items())
        return f"{found} ({self.units:,} {self.kind}, <UNK> {self.unknown_share:.2%})"

    @classmethod
    def of(cls, units: Units, ids: Ids, log_probabilities: NDArray[np.floating]) -> Evaluation:
        nats = -float(log_probabilities.sum(dtype=np.float64))
        return cls(units.kind, len(ids), int((ids == units.unknown).sum()), nats)


class LanguageModel(nn.Module):
    """A recurrent language model over characters or words.

    Example::

        model = LanguageModel.load("folder")
        print(model.evaluate("To be, or not to be"))
        print(model.generate("KING", maximum=200, temperature=0.8)[0])

    Args:
        options: the architecture.
        units: what it reads and predicts.
    """

    def __init__(self, options: LanguageModelOptions, units: Units) -> None:
        super().__init__()
        self.options, self.units = options, units
        width = options.embedding or options.width
        self.embedding = nn.Embedding(len(units), width)
        more = {"proj_size": options.projection} if options.projection else {}
        between = options.dropout if options.layers > 1 else 0.0
        self.recurrent = make_layer(
            options.cell, width, options.hidden, num_layers=options.layers, dropout=between, **more
        )
        self.softmax = nn.Linear(options.width, len(units))
        self.dropout = nn.Dropout(options.dropout)
        # A tied row is both a vector and a softmax weight. Its scale suits the softmax: initial logits are near zero.
        nn.init.normal_(self.embedding.weight, std=width**-0.5 if options.tied else 1.0)
        nn.init.zeros_(self.softmax.bias)
        if options.tied:
            self.softmax.weight = self.embedding.weight

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    def forward(self, ids: Tensor, state: State = None, resets: Tensor | None = None) -> tuple[Tensor, State]:
        """The last layer's output [T, B, R], without dropout, for units [T, B], and the state after them.

        Args:
            state: from an earlier call; None means zero.
            resets: bool [T, B], true where the state is reset to zero before a unit, see :class:`fastrnn.LSTM`.
        """
        layer, table = self.recurrent, self.embedding.weight
        if len(table) < table.shape[1] and len(table) <= ids.numel() and self._reads_table():
            assert isinstance(layer, Recurrent)
            states = (state,) if isinstance(state, Tensor) else state
            output, final = layer.run_units(ids, table, states, resets)
            return output, final if len(final) > 1 else final[0]
        result: tuple[Tensor, State] = layer(self.dropout(self.embedding(ids)), state, resets=resets)
        return result

    def _reads_table(self) -> bool:
        """Whether the table's product with W_ih may replace those of the units' vectors."""
        layer = self.recurrent
        if not isinstance(layer, Recurrent) or (self.training and (self.dropout.p or layer.input_dropout)):
            return False  # another layer, or each vector has zeros of its own
        modules = (layer, self.embedding)
        return not any(module._forward_hooks or module._forward_pre_hooks for module in modules)  # they expect a call

    def loss(self, ids: Tensor, targets: Tensor, state: State = None) -> tuple[Tensor, State]:
        """Mean nats per unit of ``targets`` [T, B] after ``ids`` [T, B], and the state, attached to the graph."""
        hidden, state = self(ids, state)
        weight, bias = self.softmax.weight, self.softmax.bias
        return linear_cross_entropy(self.dropout(hidden), weight, targets, linear_bias=bias), state

    @torch.inference_mode()
    def log_probabilities(self, ids: Ids) -> NDArray[np.float32]:
        """Log probability of every unit [N] of a text given those before it, in nats. A boundary precedes the text.

        A text of 8,192 units or more is read as parallel rows, each of which begins with 256 units that are not scored.
        """
        rows = max(1, min(_ROWS, len(ids) // _ROW_LENGTH))
        length = -(-len(ids) // rows)
        lead = _LEAD_IN if rows > 1 else 0
        places = np.arange(-lead, length)[:, None] + length * np.arange(rows)  # of targets, [lead + length, rows]
        text = np.concatenate([[self.units.boundary], ids])  # text[k] precedes unit k of the text
        inside = places.clip(0, len(ids) - 1)
        inputs = torch.from_numpy(text[inside].astype(np.int64)).to(self.device)
        targets = torch.from_numpy(ids[inside].astype(np.int64)).to(self.device)
        found = torch.zeros(targets.shape)
        resets = torch.from_numpy(places == 0).to(self.device)
        training, state = self.training, None
        self.eval()
        for start in range(0, len(inputs), _STEPS):
            part = slice(start, start + _STEPS)
            hidden, state = self(inputs[part], state, resets[part])
            found[part] = self._log_probabilities_of(hidden.flatten(0, 1), targets[part].flatten()).view(-1, rows)
        self.train(training)
        return found[lead:].T.flatten()[: len(ids)].numpy()

    def _log_probabilities_of(self, hidden: Tensor, targets: Tensor) -> Tensor:
        count = max(1, _LOGITS // len(self.units))
        parts = zip(hidden.split(count), targets.split(count), strict=True)
        return torch.cat([-F.cross_entropy(self.softmax(some), own, reduction="none") for some, own in parts]).cpu()

    def evaluate(self, text: str | Ids) -> Evaluation:
        """Loss over a text; every unit counts once, including `<UNK>`.

        Raises:
            ValueError: the text has no unit.
        """
        ids = self.units.encode(text) if isinstance(text, str) else text
        if not len(ids):
            raise ValueError(f"the text has no {self.units.unit} to evaluate")
        return Evaluation.of(self.units, ids, self.log_probabilities(ids))

    def generate(
        self,
        prefix: str = "",
        *,
        count: int = 1,
        maximum: int = 500,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: bool | None = None,
        seed: int = 0,
        allow_unknown: bool = False,
    ) -> list[str]:
        """Generates texts unit by unit.

        Args:
            prefix: the beginning of each text, read after a boundary; may be empty.
            count: B, number of texts, drawn in parallel.
            maximum: maximum number of units to draw.
            temperature: divides the logits; 0 takes the most probable unit.
            top_k: sample only from the k most probable units.
            top_p: sample from the smallest set of units whose total probability is at least this (Holtzman et al.
                2020).
            stop: end a text at the first drawn boundary; None: only for words, whose texts are then sentences.
            seed: the same seed gives the same texts.
            allow_unknown: `<UNK>` may be drawn.

        Returns:
            ``count`` texts, including the prefix.
        """
        if count < 1 or maximum < 0:
            raise ValueError(f"count must be at least 1 and maximum not below 0, got {count} and {maximum}")
        given = self.units.encode(prefix)
        stop = self.units.kind == "words" if stop is None else stop
        rows = self.draw(
            given, count=count, maximum=maximum, sampling=Sampling(temperature, top_k, top_p), stop=stop, seed=seed,
            never=() if allow_unknown else (self.units.unknown,),
        )  # fmt: skip
        joint = " " if self.units.kind == "words" and prefix and not prefix[-1].isspace() else ""
        texts = []
        for row in rows:
            own = self.units.decode(row)
            texts.append(prefix + (joint if own and not own.startswith("\n") else "") + own)
        return texts

    def _stepper(self, state: State, expected: int) -> Callable[[Tensor], Tensor]:
        """A function that makes one step from ``state`` on: units [B] -> the last layer's output [B, R].

        Each call may overwrite the output of the last one.

        Args:
            expected: about how many units it will read in all.
        """
        table = self.embedding.weight
        try:
            # Its weights are prepared once, not at each step.
            frozen = freeze(self.recurrent)  # type: ignore[arg-type] # it may be another layer, which is refused
        except (TypeError, ValueError):  # another cell, type or device

            def step(units: Tensor) -> Tensor:
                nonlocal state
                output: Tensor
                output, state = self.recurrent(F.embedding(units[None], table), state)
                return output[0]

            return step
        frozen.reset_state(state)
        # A vector's product with W_ih is computed once for each unit, unless that is more than the steps would need.
        gates = len(table) <= expected
        if gates:
            table = frozen.input_gates(table)
        hidden: Tensor | None = None

        def frozen_step(units: Tensor) -> Tensor:
            nonlocal hidden
            hidden = frozen.step(table.index_select(0, units), hidden, gates=gates)
            return hidden

        return frozen_step

    @torch.inference_mode()
    def draw(
        self, given: Ids, *, count: int, maximum: int, sampling: Sampling, stop: bool, seed: int,
        never: Sequence[int] = (),
    ) -> list[list[int]]:  # fmt: skip
        """Numbers of the units that :meth:`generate` draws after a boundary and ``given``."""
        training = self.training
        self.eval()
        pick = Drawer(sampling, torch.Generator().manual_seed(seed))
        units = torch.from_numpy(np.concatenate([[self.units.boundary], given]).astype(np.int64))
        units = units[:, None].expand(-1, count).to(self.device)
        drawn: list[Tensor] = []
        open_rows, device = torch.ones(count, dtype=torch.bool), self.device
        weight, bias = self.softmax.weight.detach(), self.softmax.bias.detach()  # a parameter costs a step 1 us
        if never:  # once here, not at every step
            bias = bias.index_fill(0, torch.tensor(never, device=device), float("-inf"))
        step = None
        while len(drawn) < maximum:
            if step is None:  # all of what is given
                output, state = self.recurrent(F.embedding(units, self.embedding.weight))
                hidden, step = output[-1], self._stepper(state, maximum * count)
            else:
                hidden = step(units)
            drawn.append(pick(F.linear(hidden, weight, bias).float().cpu()))
            if stop:
                open_rows &= drawn[-1] != self.units.boundary
                if not open_rows.any():
                    break
            units = drawn[-1].to(device)
        self.train(training)
        rows = torch.stack(drawn, 1).tolist() if drawn else [[] for _ in range(count)]
        if not stop:
            return rows
        end = self.units.boundary
        return [row[: row.index(end)] if end in row else row for row in rows]

    def save(self, folder: Path | str) -> None:
        """Writes ``model.safetensors`` and ``settings.json`` into a folder, each atomically."""
        tensors = self.state_dict()
        if self.options.tied:
            del tensors["softmax.weight"]
        settings = {_FORMAT: 1, "model": asdict(self.options), "units": self.units.to_json()}
        save_model(folder, settings, tensors, {"format": _FORMAT, "units": self.units.digest})

    @classmethod
    def load(cls, place: Path | str, device: torch.device | str = "cpu") -> LanguageModel:
        """Reads a model, for evaluation.

        Args:
            place: the folder that :meth:`save` (and `fastrnn lm train`) wrote, or its model.safetensors.

        Raises:
            FileNotFoundError: a file is missing.
            WeightsError: a file is damaged, or the two do not belong together.
        """
        folder = find_model_folder(place, _KIND)
        tensors, head = read_tensors(folder / MODEL_FILE)

        def read(data: dict[str, Any]) -> tuple[LanguageModelOptions, Units]:
            return LanguageModelOptions(**data["model"]), Units.from_json(data["units"], str(folder / SETTINGS_FILE))

        options, units = read_settings(folder, _KIND, _FORMAT, read)
        if head.get("units", units.digest) != units.digest:
            raise WeightsError(f"{folder / SETTINGS_FILE} is of another model than {folder / MODEL_FILE}")
        if options.tied and "embedding.weight" in tensors:
            tensors["softmax.weight"] = tensors["embedding.weight"]
        return build_model(lambda: cls(options, units), tensors, folder / MODEL_FILE).to(device).eval()


def detach(state: State) -> State:
    """The same state, detached from its graph."""
    if state is None or isinstance(state, Tensor):
        return state if state is None else state.detach()
    return tuple(value.detach() for value in state)

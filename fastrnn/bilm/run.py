"""A training run in a folder: start or resume, steps, held-out perplexity after each epoch, checkpoints, export."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from ..paths import Argument
from ..text_models.checkpoint import CheckpointError, require_same_run, save_checkpoint, taking_up
from ..text_models.errors import Interrupted, TrainingError
from ..text_models.files import say_bytes
from ..text_models.loop import deterministic, stop_requests
from ..text_models.precision import precision_warning
from ..text_models.progress import StepTimer, TrainingProgress, summary_writer
from ..text_models.run_folder import require_own_folder, run_folder
from ..text_models.text import Shard, find_files, read_sentences, read_shard, scan
from ..text_models.vocabulary import Vocabulary
from .evaluate import Evaluation, evaluate, merge
from .language_model import (
    MODEL_FILE,
    OPTIONS_FILE,
    VOCABULARY_FILE,
    WEIGHTS_FILE,
    LanguageModel,
    new_language_model,
)
from .model import DIRECTIONS
from .options import BiLMOptions
from .settings import run_differences
from .start import Beginning, begin, take_over
from .training import StepResult, Trainer, TrainingOptions, World, sparse_gradients


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Run:
    """What to train on, for how long, and where to save it.

    Attributes:
        train: paths, folders or glob patterns of training text.
        held_out: likewise, text that is evaluated after each epoch; may be empty.
        vocabulary: file of words; None: the words of the run in ``folder``, or of ``start_from``.
        folder: folder for checkpoints, log and model.
        epochs: passes over the text.
        steps: number of steps; if given, replaces ``epochs``.
        checkpoint_every: steps between checkpoints.
        keep: number of checkpoints to keep.
        log_every: steps between lines of the log.
        start_from: a model to continue, as :func:`~fastrnn.bilm.location.find_model` finds it; see start.py.
        device: None: a GPU if there is one.
    """

    train: Sequence[str]
    vocabulary: str | None
    folder: str
    held_out: Sequence[str] = ()
    epochs: int = 10
    steps: int | None = None
    checkpoint_every: int = 1250
    keep: int = 2
    log_every: int = 100
    start_from: str | None = None
    device: str | None = None
    tensorboard: bool = False


def train(
    run: Run,
    model_options: BiLMOptions | None = None,
    options: TrainingOptions | None = None,
    console: Console | None = None,
    *,
    given: Mapping[str, Any] | None = None,
) -> LanguageModel:
    """Trains until all steps are done; continues an earlier run in the same folder if there is one.

    Under torchrun every process makes this call. Seeds torch's default generator.

    Args:
        model_options, options: None: determined by :func:`~fastrnn.bilm.start.begin`.
        given: alternatively, single settings by the names of the command's options.

    Raises:
        TrainingError: a value is not finite, settings do not fit the checkpoint, or there is too little text.
        CheckpointError: a checkpoint could not be written.
        TextError, VocabularyError: bad input, found before training starts.
        Interrupted: SIGINT or SIGTERM arrived; the checkpoint of the last step has been written.
    """
    # Setting torch's default, "no checks", explicitly silences its warning about it.
    unchecked = torch.sparse.check_sparse_tensor_invariants(enable=False)
    with _processes(run.device) as (world, device), deterministic(device), unchecked:
        settings = given or {}, model_options, options
        return _train(run, settings, console or Console(quiet=world.rank > 0), world, device)


def _train(
    run: Run, settings: tuple[Mapping[str, Any], BiLMOptions | None, TrainingOptions | None], console: Console,
    world: World, device: torch.device,
) -> LanguageModel:  # fmt: skip
    folder = run_folder(run.folder, ("h5py", "safetensors"))
    if run.tensorboard:
        summary_writer()
    beginning = begin(folder, run.start_from, run.vocabulary, *settings)
    options, vocabulary = beginning.training, beginning.vocabulary
    if warning := precision_warning(options.precision, device):
        console.print(f"Warning: {warning}", soft_wrap=True, highlight=False)
    shards, held_out = _texts(run, folder, vocabulary)
    trainer = _new_trainer(beginning, shards, world, device)
    predictions = sum(shard.predictions for shard in shards)
    per_step = trainer.rows * options.unroll
    epoch = predictions // per_step
    if not epoch:
        raise TrainingError(
            f"the text gives {predictions:,} predictions, less than a step of {trainer.rows} x {options.unroll}: "
            "lower --batch or --unroll"
        )
    folder.mkdir(parents=True, exist_ok=True)
    total = run.epochs * epoch if run.steps is None else run.steps
    identity = _identity(trainer, shards, vocabulary)
    if beginning.checkpoint is not None:
        _resume(trainer, *beginning.checkpoint, identity)
    elif beginning.source is not None:
        console.print(take_over(trainer, beginning.source), soft_wrap=True, highlight=False)
    del beginning  # frees the tensors of a checkpoint or a whole model
    console.print(
        f"{len(shards)} {'file' if len(shards) == 1 else 'files'}, {predictions:,} predictions a direction, "
        f"{epoch:,} steps an epoch, {total:,} steps; "
        f"{'resuming at step ' + format(trainer.done, ',') if trainer.done else 'starting'}\n{_sizes(trainer)}",
        soft_wrap=True, highlight=False,
    )  # fmt: skip

    def save() -> None:
        _require_sound(trainer, opening)
        state = trainer.state()  # in every process, since each holds a part
        if world.rank == 0:
            save_checkpoint(folder, trainer.done, {"identity": identity, "trainer": state}, run.keep)

    # Sentences that the model reads before it is evaluated or used, enough to forget the zero state.
    opening = list(islice(read_shard(shards[0]), _OPENING))
    if trainer.done >= total and world.rank == 0:
        trainer.model.warm_up(opening)
        _export(trainer, folder)  # the run may have been killed after its last checkpoint
    progress = TrainingProgress(
        folder if world.rank == 0 else None, total=total, done=trainer.done, units_per_step=per_step,
        describe=partial(_describe, options.softmax), log_every=run.log_every, tensorboard=run.tensorboard,
        console=console,
    )  # fmt: skip
    # Processes of a group would stop at different steps, so they end at once and resume from their last checkpoint.
    stopping = contextlib.nullcontext(_never) if world.size > 1 else stop_requests()
    with progress, stopping as stop_requested:
        timer = StepTimer()
        while trainer.done < total:
            result = trainer.step()
            seconds = timer.lap()
            progress.step(trainer.done, seconds, _values(result, seconds))
            ended = trainer.done % epoch == 0 or trainer.done == total
            if ended:
                trainer.model.warm_up(opening)
            if ended and held_out:
                found = _evaluate(trainer.model, held_out, world)
                progress.note(f"epoch {trainer.done / epoch:.4g}, held-out text, full softmax: {found}")
                figures = {f"perplexity_{name}": value for name, value in found.perplexities.items()}
                progress.record(trainer.done, **figures)
            if ended or trainer.done % run.checkpoint_every == 0 or stop_requested():
                save()
            if ended and world.rank == 0:
                _export(trainer, folder)
            if stop_requested() and trainer.done < total:
                raise Interrupted(f"stopped after step {trainer.done:,}; the same command goes on from there")
            if ended:
                timer.restart()
    console.print(f"all {total:,} steps are made; the model is in {folder}", soft_wrap=True, highlight=False)
    return trainer.model


def _texts(run: Run, folder: Path, vocabulary: Vocabulary) -> tuple[list[Shard], list[Path]]:
    """The text to train on and the held-out files; refuses a folder in which the run would overwrite what it reads."""
    shards = scan(find_files(run.train))
    held_out = find_files(run.held_out) if run.held_out else []
    scan(held_out)  # finds errors now that would stop the run at the end of an epoch
    reads: list[Argument] = [("--vocab", run.vocabulary), ("--start-from", run.start_from)]
    reads += [("--train", shard.path) for shard in shards] + [("--held-out", path) for path in held_out]
    written = [MODEL_FILE, OPTIONS_FILE, WEIGHTS_FILE]
    if not vocabulary.is_in(folder / VOCABULARY_FILE):  # a file with these words is not rewritten, so anyone may own it
        written.append(VOCABULARY_FILE)
    require_own_folder(folder, written, reads)
    return shards, held_out


def _values(result: StepResult, seconds: float) -> dict[str, float]:
    """The values of a step for the log."""
    losses = {f"loss_{name}": loss for name, loss in zip(DIRECTIONS, result.losses, strict=False)}
    return {**losses, "softmax_share": result.softmax_seconds / seconds, "gradient_norm": result.gradient_norm}


def _describe(softmax: str, mean: Mapping[str, float]) -> str:
    # The sampled softmax's loss ranks only a few words, so its exponential is not a perplexity and not shown as one.
    name = "sampled-softmax loss" if softmax == "sampled" else "loss"
    losses = " ".join(f"{name} {mean[f'loss_{name}']:.3f}" for name in DIRECTIONS if f"loss_{name}" in mean)
    share = mean["softmax_share"]
    return f"{name} {losses}  softmax {share * mean['seconds'] * 1e3:.0f} ms a step, {share:.0%}"


def _new_trainer(beginning: Beginning, shards: list[Shard], world: World, device: torch.device) -> Trainer:
    options = beginning.training
    torch.manual_seed(options.seed)
    sparse = sparse_gradients(options, world)
    model = new_language_model(
        beginning.model, options.softmax, beginning.vocabulary, sparse=sparse, shared=options.share_softmax
    )
    torch.manual_seed(options.seed + 1 + world.rank)  # each process draws its own dropout
    return Trainer(model.to(device), shards, options, world)


def _identity(trainer: Trainer, shards: list[Shard], vocabulary: Vocabulary) -> dict[str, Any]:
    words = hashlib.blake2b("\n".join(vocabulary.words).encode(), digest_size=16).hexdigest()
    return {**trainer.settings(), "training text": [shard.digest for shard in shards], "vocabulary": words}


def _resume(trainer: Trainer, path: Path, content: Mapping[str, Any], identity: dict[str, Any]) -> None:
    require_same_run(path, content, identity, run_differences)
    with taking_up(path):
        trainer.restore(content["trainer"])


def _evaluate(model: LanguageModel, files: list[Path], world: World) -> Evaluation:
    sentences = (sentence for path in files for sentence in read_sentences(path))
    own = [sentence for number, sentence in enumerate(sentences) if number % world.size == world.rank]
    model.eval()
    part = evaluate(model, own) if own else Evaluation()
    model.train()
    parts: list[Any] = [part]
    if world.size > 1:
        parts = [None] * world.size
        dist.all_gather_object(parts, part)
    return merge(parts)


def _require_sound(trainer: Trainer, sentences: list[list[str]]) -> None:
    """Refuses parameters from which training cannot continue, before they replace the checkpoint or the model.

    A step with a finite loss may leave such parameters. The next loss would show it, but only after the good checkpoint
    is gone.
    """
    trainer.model.eval()
    found = evaluate(trainer.model, sentences)
    trainer.model.train()
    if not found.finite:
        raise TrainingError(
            f"step {trainer.done} has left parameters under which the loss is not finite. They were not kept, and the "
            "checkpoint before them stays. A lower learning rate or a tighter clip may help"
        )


def _export(trainer: Trainer, folder: Path) -> None:
    try:
        trainer.model.export(folder)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"cannot write the model to {folder}: {error}. The checkpoint of step {trainer.done} is good: "
            "the same command goes on from it"
        ) from error


def _sizes(trainer: Trainer) -> str:
    def count(module: torch.nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    bilm, head = count(trainer.model.bilm), count(trainer.model.head)
    values = 3 if trainer.options.optimizer == "adagrad" else 4  # parameter, gradient, one or two optimiser states
    return (
        f"{bilm:,} parameters in the biLM, {head:,} in the {trainer.options.softmax} softmax: "
        f"up to {say_bytes(4 * values * (bilm + head))} with gradients and optimiser, without activations"
    )


@contextlib.contextmanager
def _processes(device: str | None) -> Iterator[tuple[World, torch.device]]:
    """The process group that torchrun set up, or only this process."""
    cuda = torch.cuda.is_available() if device is None else device.startswith("cuda")
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield World(), torch.device(device or ("cuda" if cuda else "cpu"))
        return
    own = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(own)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield World(dist.get_rank(), dist.get_world_size()), own
    finally:
        dist.destroy_process_group()


_OPENING = 20

"""``fastrnn convert-bilm`` and ``fastrnn cache-tokens``: convert weights to another format, compute token vectors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..cli import refuse_idle
from ..paths import Argument, guard_outputs, overwrite_option
from ..text_models.errors import plain_errors

MODEL = click.Path(exists=True, path_type=Path)
OPTIONS_HELP = "The options.json of hdf5 weights, if not beside them; also for .th, which lack a few settings."
HDF5_ENDINGS = (".hdf5", ".h5", ".hdf", "")
VOCABULARY_HELP = "Word models: the words of the table's rows, one per line, if not vocab.txt beside the weights."
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_TEXT = click.Path(exists=True, dir_okay=False, allow_dash=True)  # a str: Path("./-") would be Path("-")
_OUTPUT = click.Path(dir_okay=False, path_type=Path)


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that select the model: ``model`` and ``options``."""
    help_model = "A folder, a .zip archive of one, or a file of weights (.hdf5, .safetensors, .th)."
    command = click.option("--options", type=_FILE, help=OPTIONS_HELP)(command)
    return click.option("--model", "--weights", "model", type=MODEL, required=True, help=help_model)(command)


@click.command("convert-bilm")
@click.argument("model", type=MODEL)
@click.argument("output", type=_OUTPUT)
@click.option("--options", type=_FILE, help=OPTIONS_HELP)
@click.option("--vocab", "vocabulary", type=_FILE, help=VOCABULARY_HELP)
@click.option("--output-options", type=_OUTPUT, help="Where to write options.json; needed for hdf5 output.")
@overwrite_option
def convert_bilm(
    model: Path,
    output: Path,
    options: Path | None,
    vocabulary: Path | None,
    output_options: Path | None,
    overwrite: bool,
) -> None:
    """Convert biLM weights between formats, which the endings of MODEL and OUTPUT select.

    MODEL may also be a folder, or a .zip archive of one, that holds such a file.

    \b
    .hdf5          the original's, with options.json (bilm-tf, AllenNLP, simple_elmo)
    .th .pt .bin   an AllenNLP state dict with an Elmo in it
    .safetensors   fastrnn's own, which keeps the softmax
    .index         a checkpoint of bilm-tf, to be read only (needs tensorflow)
    """
    from . import allennlp, native, official
    from .language_model import head_metadata, head_tensors
    from .location import find_model

    if output.suffix == ".hdf5" and output_options is None:
        raise click.UsageError("hdf5 output needs --output-options, the place of its options.json")
    if output.suffix != ".hdf5":
        refuse_idle("unless the output is .hdf5", "output_options")
    if output.suffix not in (".hdf5", ".safetensors", ".th", ".pt", ".bin"):
        raise click.UsageError(f"{output} must end in .hdf5, .safetensors, .th, .pt or .bin")
    with plain_errors():
        outputs = [("OUTPUT", output), ("--output-options", output_options)]
        inputs = [("MODEL", model), ("--options", options), ("--vocab", vocabulary)]
        guard_outputs(outputs, inputs, overwrite=overwrite)
        with find_model(model, options, vocabulary) as files:
            guard_outputs(outputs, files.beside(), overwrite=True)
            elmo = files.elmo()
            head, about_head = head_tensors(files, elmo.bilm), head_metadata(files)
        if elmo.bilm.options.characters is not None:
            refuse_idle(f"for {model}, which reads characters", "vocabulary")
        if output.suffix == ".safetensors":
            native.save_elmo(output, elmo, head, about_head)
        elif output.suffix in (".th", ".pt", ".bin"):
            allennlp.save(elmo, output)
        else:
            assert output_options is not None
            official.save(elmo.bilm, output_options, output)
    click.echo(f"{output}: {sum(p.numel() for p in elmo.bilm.parameters()):,} parameters")


@click.command("cache-tokens")
@click.argument("vocabulary", type=_TEXT, metavar="VOCAB")
@click.argument("output", type=_OUTPUT)
@model_options
@overwrite_option
def cache_tokens(vocabulary: str, output: Path, model: Path, options: Path | None, overwrite: bool) -> None:
    """Write the context-free vectors of VOCAB's tokens (one per line; - is standard input) to OUTPUT.

    OUTPUT is an hdf5 file with one dataset, "embedding" (tokens, P), as bilm-tf writes and reads it; with the ending
    .txt it is a text file of lines "token v1 v2 ...". Each line of VOCAB is one token without blanks; no token repeats.
    """
    if output.suffix.lower() not in (*HDF5_ENDINGS, ".txt"):
        raise click.UsageError(f"{output} must end in .hdf5 or .h5, or in .txt for text")
    import torch

    from ..text_models.files import replacing, save_hdf5
    from ..text_models.vocabulary import read_words
    from .cache import TokenVectors
    from .location import find_model

    with plain_errors():
        reads: list[Argument] = [("VOCAB", vocabulary), ("--model", model), ("--options", options)]
        guard_outputs([("OUTPUT", output)], reads, overwrite=overwrite)
        tokens = read_words(vocabulary)
        with find_model(model, options) as files:
            guard_outputs([("OUTPUT", output)], files.beside(), overwrite=True)
            bilm = files.elmo().bilm
        if bilm.options.characters is None:
            raise ValueError("this biLM reads words: its token vectors are a table already")
        with torch.no_grad():
            vectors = TokenVectors(bilm.character_encoder).lookup(tokens).float().numpy()
        with replacing(output) as temporary:
            if output.suffix == ".txt":
                with open(temporary, "w", encoding="utf-8") as file:
                    for token, vector in zip(tokens, vectors, strict=True):
                        file.write(" ".join([token, *(f"{value:.9g}" for value in vector)]) + "\n")
            else:
                save_hdf5(temporary, {"embedding": vectors})
    click.echo(f"{output}: {len(tokens):,} vectors of {bilm.width}")

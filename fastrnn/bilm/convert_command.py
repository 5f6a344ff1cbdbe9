"""``fastrnn convert-bilm`` and ``fastrnn cache-tokens``: weights into another format, token vectors made once."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import click

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_OUTPUT = click.Path(dir_okay=False, path_type=Path)


def read_elmo(weights: Path, options: Path | None):
    """An Elmo from any of the formats, told by the file's ending; mixes only if the format holds them."""
    from . import Elmo, allennlp, native, official

    if weights.suffix == ".safetensors":
        return native.load_elmo(weights)
    if weights.suffix in (".th", ".pt", ".bin"):
        return allennlp.load(weights, options)
    if options is None:
        raise click.UsageError(
            f"{weights} needs --options, the options.json that belongs to it "
            "(only .safetensors, .th, .pt and .bin can do without)"
        )
    return Elmo(official.load(options, weights))


@click.command("convert-bilm")
@click.argument("weights", type=_FILE)
@click.argument("output", type=_OUTPUT)
@click.option("--options", type=_FILE, help="options.json of hdf5 weights; also for .th, which lack a few settings.")
@click.option("--output-options", type=_OUTPUT, help="Where to write options.json; needed for hdf5 output.")
def convert_bilm(weights: Path, output: Path, options: Path | None, output_options: Path | None) -> None:
    """Convert biLM weights between formats, told by the endings of WEIGHTS and OUTPUT.

    \b
    .hdf5          the original's, with options.json (bilm-tf, AllenNLP, simple_elmo)
    .th .pt .bin   an AllenNLP state dict with an Elmo in it
    .safetensors   fastrnn's own
    """
    from . import allennlp, native, official
    from .files import WeightsError

    if output.suffix == ".hdf5" and output_options is None:
        raise click.UsageError("hdf5 output needs --output-options, the place of its options.json")
    try:
        elmo = read_elmo(weights, options)
        if output.suffix == ".safetensors":
            native.save_elmo(output, elmo)
        elif output.suffix in (".th", ".pt", ".bin"):
            allennlp.save(elmo, output)
        elif output.suffix == ".hdf5":
            official.save(elmo.bilm, output_options, output)
        else:
            raise click.UsageError(f"{output} must end in .hdf5, .safetensors, .th, .pt or .bin")
    except WeightsError as error:
        raise click.ClickException(str(error)) from None
    except ValueError as error:  # a model that the other format cannot hold
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"{error.filename or output}: {error.strerror or error}") from None
    click.echo(f"{output}: {sum(p.numel() for p in elmo.bilm.parameters()):,} parameters")


@click.command("cache-tokens")
@click.argument("vocabulary", type=click.File("rb"), metavar="VOCAB")
@click.argument("output", type=_OUTPUT)
@click.option("--options", type=_FILE, help="options.json of hdf5 weights.")
@click.option("--weights", type=_FILE, required=True, help="Weights in any format.")
def cache_tokens(vocabulary: BinaryIO, output: Path, options: Path | None, weights: Path) -> None:
    """Write the context-free vectors of VOCAB's tokens (one a line; - is standard input) to OUTPUT.

    OUTPUT is an hdf5 file with one dataset, "embedding" (tokens, P), as bilm-tf writes and reads, or with the ending
    .txt a text file of lines "token v1 v2 ...".
    """
    import torch

    from .cache import TokenVectors
    from .embed_command import split_lines
    from .files import WeightsError, replacing

    tokens = [line for line in split_lines(vocabulary.read()) if line]
    try:
        bilm = read_elmo(weights, options).bilm
        if bilm.options.characters is None:
            raise click.ClickException("this biLM reads words: its token vectors are a table already")
        with torch.no_grad():
            vectors = TokenVectors(bilm.encoder).lookup(tokens).numpy()
        with replacing(output) as temporary:
            if output.suffix == ".txt":
                with open(temporary, "w", encoding="utf-8", errors="surrogateescape") as file:
                    for token, vector in zip(tokens, vectors, strict=True):
                        file.write(" ".join([token, *(f"{value:.9g}" for value in vector)]) + "\n")
            else:
                import h5py

                with h5py.File(temporary, "w") as file:
                    file["embedding"] = vectors
    except WeightsError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"{error.filename or output}: {error.strerror or error}") from None
    click.echo(f"{output}: {len(tokens):,} vectors of {bilm.width}")

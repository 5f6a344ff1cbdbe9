"""``fastrnn explain``: the options of the command; explanation.py does the work."""

from __future__ import annotations

import click

from .cli import CellName

_DTYPES = ("float32", "float64", "bfloat16", "float16", "tf32")


@click.command("explain")
@click.option("--cell", type=CellName(), default="lstm", show_default=True, help="gru, ...; any other lists them.")
@click.option("--hidden", type=click.IntRange(1), required=True, help="H.")
@click.option("--batch", type=click.IntRange(1), required=True, help="B.")
@click.option("--time", "steps", type=click.IntRange(1), default=256, show_default=True, help="T.")
@click.option("--projection", type=click.IntRange(0), default=0, help="P, with the LSTM, with and without peepholes.")
@click.option("--dtype", type=click.Choice(_DTYPES), default="bfloat16", show_default=True)
@click.option("--bidirectional", is_flag=True, help="Both directions in one launch.")
@click.option("--heads", type=click.IntRange(1), default=1, help="Blocks of the recurrence, a divisor of H.")
@click.option("--training", is_flag=True, help="Count backward too.")
@click.option("--card", default="H100", show_default=True, help="A100, H100, H200, L40S, RTX4090, B200 or cuda:N.")
@click.option("--plan", default="", help="Ask for a strategy: step, block, cluster, grid or streaming.")
def explain(
    cell: str,
    hidden: int,
    batch: int,
    steps: int,
    projection: int,
    dtype: str,
    bidirectional: bool,
    heads: int,
    training: bool,
    card: str,
    plan: str,
) -> None:
    """Show how a layer runs on a GPU, and what a time step should cost there (predicted, not measured)."""
    from .cells import CELLS

    projected = cell.removesuffix("_projected") + "_projected"
    if projection and projected in CELLS:
        cell = projected
    if cell == projected and not projection:
        raise click.UsageError(f"--cell {cell} needs --projection, the size P")
    if cell != projected and projection:
        raise click.UsageError(f"--projection goes with --cell lstm or lstm_peephole, not with {cell}")
    if projection > hidden:
        raise click.UsageError(f"--projection {projection} is larger than --hidden {hidden}")
    import torch

    from .explanation import explain_layer

    try:
        explanation = explain_layer(
            cell,
            hidden=hidden,
            batch=batch,
            steps=steps,
            projection=projection,
            dtype=torch.float32 if dtype == "tf32" else getattr(torch, dtype),
            tf32=dtype == "tf32",
            directions=2 if bidirectional else 1,
            heads=heads,
            training=training,
            card=card,
            strategy=plan,
        )
    except (ValueError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(explanation)

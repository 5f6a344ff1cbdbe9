"""Calls with few rows and steps, which use weights in place or pack them block by block, give the same bits as calls
with many rows, which pack the weights once; and so do steps without a state, which read no recurrent weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import DTYPES

from fastrnn import _C, functional
from fastrnn.cells import CELLS, Parameters

SETS = _C.build_info()["cpu_instruction_sets"].split()


@pytest.fixture(params=SETS)
def instruction_set(request):
    try:
        _C.cpu_choose_instruction_set(request.param)
    except ValueError:
        pytest.skip("not on this machine")
    yield
    _C.cpu_choose_instruction_set("")


def make(cell, dtype, batch, steps, inputs, hidden):
    """Input, initial states and weights; the state has width H, or I if it is projected."""
    spec, g = CELLS[cell], torch.Generator().manual_seed(hidden + batch)
    width = inputs if spec.projects else hidden

    def draw(*shape):
        return ((torch.rand(shape, generator=g, dtype=torch.float64) * 2 - 1) * hidden**-0.5).to(dtype)

    own = Parameters(**{name: draw(*shape) for name, shape in spec.shapes(True, inputs, hidden, width).items()})
    states = tuple(draw(1, batch, each) for each in spec.state_widths(width, hidden))
    return draw(steps, batch, inputs), states, own


# Depths that are not a multiple of 4, of 8 or of a block; a last panel with fewer units; a row stride of 4 KiB.
@pytest.mark.parametrize("inputs, hidden", [(67, 150), (512, 80), (1024, 64), (3, 5)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cell", ["lstm_projected", "gru", "gru_reset_before"])
@torch.no_grad()
def test_few_rows_equal_many(cell, dtype, inputs, hidden, instruction_set):
    x, initial, own = make(cell, dtype, 50, 9, inputs, hidden)
    for steps, counts in ((1, range(1, 10)), (9, (1, 4))):
        expected, expected_final = functional.layer(cell, x[:steps], initial, (own,))
        for rows in counts:
            output, final = functional.layer(cell, x[:steps, :rows], tuple(s[:, :rows] for s in initial), (own,))
            assert torch.equal(output, expected[:, :rows]), f"{rows} rows, {steps} steps"
            assert all(torch.equal(a, b[:, :rows]) for a, b in zip(final, expected_final, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cell", ["lstm", "lstm_projected", "gru", "gru_reset_before", "rnn_tanh"])
@torch.no_grad()
def test_no_state_equals_zeros(cell, dtype, instruction_set):
    x, initial, own = make(cell, dtype, 5, 3, 19, 70)
    zeros = tuple(map(torch.zeros_like, initial))
    for steps, rows in ((1, 1), (1, 5), (3, 1), (3, 5)):
        call, given = x[:steps, :rows], tuple(s[:, :rows] for s in zeros)
        expected, expected_final = functional.layer(cell, call, given, (own,))
        output, final = functional.layer(cell, call, None, (own,))
        assert torch.equal(output, expected)
        assert all(map(torch.equal, final, expected_final))
        if rows > 1:  # a step that only some rows begin multiplies the states of the others
            resets = torch.zeros(steps, rows, dtype=torch.bool)
            resets[-1, ::2] = True
            masked, _ = functional.layer(cell, call, None, (own,), resets=resets)
            assert torch.equal(masked[:, 1:2], functional.layer(cell, call[:, 1:2], None, (own,))[0])
    if cell in ("lstm", "rnn_tanh"):  # the others multiply something else, too
        unread = replace(own, weight_hh=torch.full_like(own.weight_hh, torch.nan))
        output, expected = (functional.layer(cell, x[:1], None, (given,))[0] for given in (unread, own))
        assert torch.equal(output, expected)

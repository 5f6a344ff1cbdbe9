"""Experiments that show what a recurrent cell can and cannot keep: gradients through time, memory, counting.

Each experiment is a function that returns plain numbers; ``fastrnn probe`` runs it, prints a table and draws a picture.
"""

from .counting import LANGUAGES, CountingResult, count_with_cell, trace_cells
from .distance import TASKS, DistanceResult, train_at_distance
from .gradients import GradientResult, gradient_norms, probe_gradients
from .layers import cell_names, make_layer

__all__ = [
    "LANGUAGES",
    "TASKS",
    "CountingResult",
    "DistanceResult",
    "GradientResult",
    "cell_names",
    "count_with_cell",
    "gradient_norms",
    "make_layer",
    "probe_gradients",
    "trace_cells",
    "train_at_distance",
]

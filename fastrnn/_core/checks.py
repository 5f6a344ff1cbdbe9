"""Argument checks: operands, lengths and resets that do not fit together are refused before any address is read."""

from __future__ import annotations

from functools import lru_cache
from typing import NoReturn

import torch
from torch import Tensor

from ..cells import STORAGE_CODES, state_dtype
from .config import Config


def check_masks(lengths: Tensor | None, resets: Tensor | None, batch: int, rows: torch.Size) -> None:
    """Refuse lengths and resets of the wrong type or shape; ``rows`` is the shape of the input without features."""
    if lengths is not None:
        if not isinstance(lengths, Tensor):
            raise TypeError(f"lengths must be a tensor, got {type(lengths).__name__}")
        if lengths.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"lengths must be int64 or int32, got {lengths.dtype}")
        if lengths.dim() != 1 or lengths.shape[0] != batch:
            raise ValueError(f"lengths must have shape ({batch},), got {tuple(lengths.shape)}")
    if resets is not None:
        if not isinstance(resets, Tensor):
            raise TypeError(f"resets must be a tensor, got {type(resets).__name__}")
        if resets.dtype != torch.bool:
            raise ValueError(f"resets must be bool, got {resets.dtype}")
        if resets.shape != rows:
            raise ValueError(f"resets must have shape {tuple(rows)}, got {tuple(resets.shape)}")


def check_clips(config: Config, dtype: torch.dtype) -> None:
    """Refuse clips that are negative or NaN, or that round to zero in the type they bound (zero means no clip)."""
    if config.cell_clip == 0 and config.proj_clip == 0:
        return
    for name, clip, bounded in (
        ("cell_clip", config.cell_clip, state_dtype(dtype)),
        ("proj_clip", config.proj_clip, dtype),
    ):
        if not clip >= 0:
            raise ValueError(f"{name} must be a positive number, or 0 for none; got {clip}")
        if dtype not in STORAGE_CODES:  # check_shapes refuses it
            continue
        least = torch.finfo(bounded).tiny * torch.finfo(bounded).eps
        if 0 < clip < least:
            raise ValueError(
                f"{name} must be at least {least:.2g}, the least positive {bounded}, or 0 for none; got {clip}"
            )


def check_gradient_clip(config: Config) -> None:
    """Refuse a bound that is negative or NaN."""
    if not config.gradient_clip >= 0:
        raise ValueError(f"gradient_clip must be a number that is not negative, or None; got {config.gradient_clip}")


def check_noise(config: Config, seed: Tensor | None, device: torch.device) -> None:
    """Refuse probabilities outside [0, 1), noise that the cell does not support, and a seed of the wrong kind."""
    spec = config.spec
    for name, p, place in (
        ("zoneout_h", config.zoneout_h, ""),
        ("zoneout_c", config.zoneout_c, "" if spec.zones_cells else "cell state that it could keep"),
        ("state_dropout", config.state_dropout, ""),
        ("candidate_dropout", config.candidate_dropout, "" if spec.drops_candidate else "candidate that it could drop"),
    ):
        if not 0 <= p < 1:
            raise ValueError(f"{name} must be a probability in [0, 1), got {p}")
        if p and place:
            raise ValueError(f"{name} must be 0 for {spec.name}, which has no {place}; got {p}")
    if seed is not None and (seed.dtype != torch.int64 or seed.shape != (1,) or seed.device != device):
        found = f"{seed.dtype} of shape {tuple(seed.shape)} on {seed.device}"
        raise ValueError(f"seed must be int64 of shape (1,) on {device}, got {found}")


def check_batch_sizes(batch_sizes: Tensor) -> None:
    """Refuse batch_sizes of the wrong type or shape; structs.py checks their values when it reads them."""
    if not isinstance(batch_sizes, Tensor):
        raise TypeError(f"batch_sizes must be a tensor, got {type(batch_sizes).__name__}")
    if batch_sizes.dtype != torch.int64 or batch_sizes.dim() != 1 or batch_sizes.device.type not in ("cpu", "meta"):
        raise ValueError(
            f"batch_sizes must be int64 of shape (T,) on the CPU, got {batch_sizes.dtype} of shape "
            f"{tuple(batch_sizes.shape)} on {batch_sizes.device}"
        )


def check_shapes(config: Config, operands: list[Tensor], batch_sizes: Tensor | None) -> int:
    """Refuse operands whose shapes, dtypes or devices do not fit together. Returns B."""
    x = operands[0]
    dtype, device = x.dtype, x.device
    if dtype not in STORAGE_CODES:
        raise TypeError(f"expected float32, float64, bfloat16 or float16, got {dtype}")
    dims = 3 if batch_sizes is None else 2
    if x.dim() != dims:
        raise RuntimeError(f"input must have {dims} dimensions, got {x.dim()}")
    spec = config.spec
    name, heads = "weight_hh" if spec.multiplies else "weight_ih", config.heads
    weight = operands[config.place(name, 0)]
    if weight.dim() != (2 if heads == 1 else 3):
        more = "(or 3, the first counting 2 or more heads)" if spec.multiplies else ""
        raise RuntimeError(f"{name} must have 2 dimensions, got shape {tuple(weight.shape)} {more}".rstrip())
    if heads > 1 and spec.projects:
        raise ValueError(f"cell {spec.name} has no heads: a projection mixes them, got {heads}")
    rows = weight.shape[-2]
    hidden, width = config.units(operands)
    if not spec.projects and width != hidden:
        lead = "(" if heads == 1 else f"({heads}, "
        raise RuntimeError(f"weight_hh must have shape {lead}{rows}, {hidden}), got {lead}{rows}, {width})")
    if heads > 1:
        hidden, width = heads * hidden, heads * width
    if batch_sizes is None:
        batch = x.shape[1]
    elif config.has_initial:
        batch = operands[config.first_state].shape[1]
    else:
        batch = int(batch_sizes[0]) if len(batch_sizes) else 0
    features = x.shape[-1]
    # No cache if sizes are symbolic (they have no hash), nor under torch.compile, which traces through it and warns.
    cached = type(features) is type(batch) is type(hidden) is type(width) is int and not torch.compiler.is_compiling()
    expected: list[tuple[int, ...]] = [x.shape] * config.inputs
    expected += (_known_shapes if cached else _shapes)(config, features, hidden, width, batch)
    for t, shape in zip(operands, expected, strict=True):
        if t.shape != shape or t.dtype != dtype or t.device != device:
            _refuse(config, operands, expected)
    return batch


def _shapes(config: Config, features: int, hidden: int, width: int, batch: int) -> list[tuple[int, ...]]:
    """Shapes of the operands after the inputs, for I, H, R and B."""
    spec, directions = config.spec, len(config.reverse)
    states = [(directions, batch, each) for each in spec.state_widths(width, hidden)] if config.has_initial else []
    return states + [*spec.shapes(config.has_bias, features, hidden, width, config.heads).values()] * directions


_known_shapes = lru_cache(maxsize=1024)(_shapes)


def _refuse(config: Config, operands: list[Tensor], shapes: list[tuple[int, ...]]) -> NoReturn:
    """Raise the error for the first operand with a wrong shape, or with another dtype or device than the input."""
    x = operands[0]
    place, t, shape = next(
        (place, t, shape)
        for place, (t, shape) in enumerate(zip(operands, shapes, strict=True))
        if t.shape != shape or t.dtype != x.dtype or t.device != x.device
    )
    name = _name(config, place)
    if t.shape != shape:
        where = f"cell {config.spec.name}, input {tuple(x.shape)}"
        raise RuntimeError(f"{name} must have shape {tuple(shape)}, got {tuple(t.shape)} ({where})")
    if t.dtype != x.dtype:
        raise RuntimeError(f"{name} must have the dtype of the input, {x.dtype}, got {t.dtype}")
    kind = "parameter" if place >= config.first_weight else "hidden"
    raise RuntimeError(
        f"Input and {kind} tensors are not at the same device, found input tensor at {x.device} and "
        f"{kind} tensor at {t.device}"
    )


def _name(config: Config, place: int) -> str:
    """The name of the operand at this place, for error messages."""
    if place < config.inputs:
        return "input"
    if place < config.first_weight:
        return ("h0", "c0")[place - config.first_state]
    return list(config.places)[(place - config.first_weight) % config.weights]

"""The one table of error bounds. Each entry says what it bounds, relative to what, and where the number comes from.

Letters: u is the unit roundoff of a type (half its eps); K the number of terms in a pre-activation (I + R + 2 biases);
T steps. All comparisons are with the step loop in float64 on the same (16-bit) values, so rounding of inputs does not
count.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def roundoff(dtype: torch.dtype) -> float:
    """u of a type."""
    return torch.finfo(dtype).eps / 2


def _accumulation(dtype: torch.dtype) -> float:
    """u of the type of sums: float for all storage types except float64."""
    return roundoff(torch.float64 if dtype == torch.float64 else torch.float32)


def forward(dtype: torch.dtype, steps: int, terms: int) -> float:
    """Largest absolute error of outputs and states, whose size is at most about 1.

    A step adds K*u_acc for its sums of terms of size <= 1 and a few u_acc for the activations, and rounds its state
    once to storage (u). With torch's initial weights, a step amplifies errors by at most a small factor, so errors
    add over T steps: linearly for the (systematic) sums, and like a random walk for the independent roundings, with 4
    sigma.
    """
    rounding = 0.0 if dtype in (torch.float32, torch.float64) else 4 * roundoff(dtype) * math.sqrt(steps)
    return 4 * steps * (terms + 8) * _accumulation(dtype) + rounding


def gradient(dtype: torch.dtype, steps: int, terms: int) -> float:
    """Largest error of a gradient, relative to the largest magnitude in that gradient.

    Backward runs the same recurrence again on values with forward's error (2x), multiplies by up to three saved factors
    that were rounded to storage (the gates; 3u), and sums over rows, which preserves the relative error of the terms
    except for cancellation (covered by the remaining factor 2).
    """
    return 4 * forward(dtype, steps, terms) + (0.0 if dtype in (torch.float32, torch.float64) else 6 * roundoff(dtype))


# The same float64 operations in two orders (torch.nn's loop and ours, a whole sequence and its segments): T*K*u with
# T*K up to a few hundred; gradients sum as many terms again.
SAME_FLOAT64 = 1e-12

# The same for float32: torch.nn's and our results each carry `forward`'s error; T*K up to 400 in those tests.
SAME_FLOAT32 = 2 * 4 * 400 * roundoff(torch.float32)

# Losses of a few training steps with Adam in float64. Adam divides gradients by the root of their second moments, which
# are small if the gradients are, so errors in the weights grow by up to 1/sqrt(v) ~ 1e3.
TRAINED_FLOAT64 = 1e3 * SAME_FLOAT64


def inner_product(terms: int) -> float:
    """Difference of two inner products that should be equal, of ``terms`` float64 values of size about 1."""
    return terms * SAME_FLOAT64


def both(dtype: torch.dtype, steps: int, terms: int, layers: int) -> float:
    """Difference of two results that each have the error `forward` in each of ``layers`` layers (torch's and ours)."""
    return 2 * layers * forward(dtype, steps, terms)


def prepared(form: str, layers: int, steps: int, terms: int) -> float:
    """Error of a frozen layer relative to float64 with the weights and operands as it rounds them: `forward` in each
    layer.

    int8 also rounds operands to 1/100 of their row's largest (below 4 for the normal inputs here). One that is close to
    the middle may be rounded the other way; its weight is of size 1/sqrt(terms).
    """
    rounding = 4 / 100 * (2 / terms) ** 0.5 if form == "int8" else 0.0
    return layers * (forward(torch.float32, steps, terms) + rounding)


# gradcheck in float64: central differences with step 1e-6 have errors of about u/1e-6 = 1e-10 plus third derivatives *
# 1e-12; its default bound leaves room for sums over elements.
GRADCHECK = dict(eps=1e-6, atol=1e-5, rtol=1e-3)


def largest_error(found: Tensor, truth: Tensor) -> float:
    """max |found - truth| in float64; NaN counts as infinite."""
    if found.shape != truth.shape:
        raise AssertionError(f"shape {tuple(found.shape)}, expected {tuple(truth.shape)}")
    if not truth.numel():
        return 0.0
    error = (found.detach().double() - truth.detach().double()).abs().max().item()
    return math.inf if math.isnan(error) else error


def assert_close(found: Tensor, truth: Tensor, bound: float, what: str = "value", relative: bool = False) -> None:
    """Fail if the largest error exceeds the bound, relative to the truth's largest magnitude if ``relative``."""
    error = largest_error(found, truth)
    if relative and truth.numel():
        bound = bound * max(truth.detach().abs().max().item(), torch.finfo(torch.float32).tiny)
    assert error <= bound, f"{what}: error {error:.3g} over the bound {bound:.3g}"


# Allowed deviation of a count of independent events in a test with a fixed seed: one in 1.7 million at 5 sigma.
SIGMAS = 5


def softmax(words: int, width: int, dtype: torch.dtype = torch.float32) -> float:
    """Relative error of a softmax loss, its gradients and its probabilities.

    A logit is a sum of ``width`` products (width*u) and the normaliser a sum of ``words`` exponentials (words*u), each
    accurate to a few u; gradients multiply two such values. With all sizes from 1 to 10: 4 (words + width + 8) u.
    Gradients of 16-bit operands are rounded twice more, before they are multiplied by the loss's own gradient.
    """
    rounding = 0.0 if dtype in (torch.float32, torch.float64) else 2 * roundoff(dtype)
    return 4 * (words + width + 8) * _accumulation(dtype) + rounding


# Relative difference of a training run's losses if the same rows are divided into parts (processes, accumulation,
# windows). Sums of 100 to 1000 float32 gradients in another order change a gradient by at most 1000 u = 6e-5. Over 12
# steps at Adagrad's rate of 0.2 this adds up to 12 * 0.2 * 6e-5 of a parameter of size 1, and losses change about as
# much as parameters.
DIVIDED_BATCH = 12 * 0.2 * 1000 * roundoff(torch.float32)

# ELMo against the original programs' float32 results, and against NumPy in float64: the bound of their own tests.
# Recalculations in float64 and in float32 both differ from their results by 1.4e-6 (values up to 7).
ELMO = 1e-5

# ELMo in float32 in two orders (chunks, batches, with or without cache): each has an error of about 1e-6, as above.
ELMO_SAME = 4e-6

# ELMo with 16-bit weights and activations against float32 on the original programs' test data (values up to 4.6).
# Rounding only the products' operands gives errors of 1.8e-3 (float16) and 1.4e-2 (bfloat16); layers and states are
# rounded too, which doubles them.
ELMO_16BIT = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


def elmo_16bit(dtype: torch.dtype) -> float:
    """The same for a model made in a test, relative to the largest value.

    About eight independent roundings, each u, of a token vector and of two layers' weights, states and outputs; clips
    and squashing functions keep them from growing.
    """
    return 8 * roundoff(dtype)


# float16 storage of ELMo vectors: half a unit in the last place of values under 8.
ELMO_FLOAT16_FILE = 8 * roundoff(torch.float16)

# The forget bias, up to 2 in size, written to the original's files and read back: minus 1, plus 1, in float32.
ELMO_FORGET_BIAS = 2 * 2 * roundoff(torch.float32)


# Strict float32 against TF32: operands of size up to 1 are rounded to 10 bits (2^-11) in every term of a sum of up to
# 32 products with weights below 1/sqrt(32), over 3 steps: 3 * sqrt(32) * 2^-11 = 2^-6.9. Random signs leave half of it.
TF32_BESIDE_FLOAT32 = 2.0**-8

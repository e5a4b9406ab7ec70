"""Margins of greedy choices in units in the last place (ULP) of the best logit's dtype."""

import math

MANTISSA_BITS = {"bf16": 7, "fp16": 10, "fp32": 23, "fp64": 52}


def ulp(value: float, dtype: str) -> float:
    """Returns the spacing of `dtype` at `value`: 2^(exponent - mantissa bits), also for subnormals; 0.0 at zero."""
    if value == 0:
        return 0.0
    return math.ldexp(1.0, math.frexp(abs(value))[1] - 1 - MANTISSA_BITS[dtype])


def margin_ulps(margin: float | None, top: float | None, dtype: str) -> float | None:
    """Returns `margin` in ULP of the best logit `top`; None where the token was forced or the best logit is zero."""
    spacing = None if top is None else ulp(top, dtype)
    return None if margin is None or not spacing else margin / spacing

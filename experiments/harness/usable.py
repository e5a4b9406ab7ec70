"""Which of several numeric contracts this machine can run: the rest is left out by name, with its reason."""

from collections.abc import Mapping

from experiments.harness.exits import one_line, start_again_reproducibly
from minimodel.config import ModelConfig
from minimodel.errors import CopiesDiffer, InputError
from minimodel.numerics import NumericContract
from minimodel.selfcheck import require_usable


def left_out(numeric: Mapping[str, NumericContract], config: ModelConfig, module: str) -> dict[str, str]:
    """Returns a reason for each contract that cannot be run here, by its name. InputError when none can.

    The command `module` starts again in MKL's reproducible mode where equal copies differ without it.
    """
    reasons = {}
    for name, one in numeric.items():
        try:
            require_usable(one, config)
        except InputError as error:
            if isinstance(error, CopiesDiffer):
                start_again_reproducibly(module, error)
            reasons[name] = one_line(error)
    if len(reasons) == len(numeric):
        raise InputError(next(iter(reasons.values())))
    return reasons

"""The experiments, one command each: `python -m experiments` lists them.

As this package is imported before any command's module, three things are settled here, before the seconds that
importing torch takes: Ctrl-C ends in one line, a file or folder of the user's that hides one of our packages is named,
and threads that wait for work give the core away, unless OMP_WAIT_POLICY or GOMP_SPINCOUNT says otherwise.
"""

import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NEIGHBOURS = ("minimodel", "decode", "cache", "stats")


def end_quietly(signum: int, frame: Any) -> None:
    """Ends the process with the code of an interruption; nothing has been opened or written yet."""
    os.write(2, b"interrupted\n")
    os._exit(130)


def hidden_neighbour() -> str:
    """Returns one line that names the first of our packages that a module of the same name hides; empty if none is."""
    root = Path(__file__).resolve().parent.parent
    for name in NEIGHBOURS:
        spec = find_spec(name)
        places = [] if spec is None else [*(spec.submodule_search_locations or ()), spec.origin]
        found = str(places[0]) if places else "nothing"
        if Path(found).resolve() != root / name:
            return f"error: package {name}: expected {root / name}, found {found}; start Python with -P, or elsewhere"
    return ""


if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ):  # OpenMP reads them when torch loads
    os.environ["OMP_WAIT_POLICY"] = "passive"

if sys.argv[:1] == ["-m"]:  # a command is starting, and its own module is not imported yet
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_quietly)
    if hidden := hidden_neighbour():
        print(hidden, file=sys.stderr)
        sys.exit(2)

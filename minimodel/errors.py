"""The one exception for bad input: a file, a value or an option that the project does not accept."""


class InputError(ValueError):
    """Bad input, described in one line: what, where, expected and found. Commands turn it into exit code 2."""


class CopiesDiffer(InputError):
    """Two equal copies of one request get different bits here, which MKL's reproducible mode may put right."""


def refuse(where: str, expected: str, found: object) -> InputError:
    """The usual one-line message. `found` is shown as its repr, cut to 120 characters."""
    try:
        text = repr(found)
    except RecursionError:  # JSON just shallow enough to be parsed can be too deep to be shown
        text = f"a deeply nested {type(found).__name__}"
    return InputError(f"{where}: expected {expected}, found {text if len(text) <= 120 else text[:117] + '...'}")

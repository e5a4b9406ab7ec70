"""Lists every command with one line each: `python -m experiments`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import click

HERE = Path(__file__).resolve().parent
LONG = 110


def commands() -> Iterator[tuple[str, str]]:
    """Yields (module, one line of its docstring) of every module here and below that is a command, by name.

    The files are read, not imported: the listing needs no torch and costs no time.
    """
    for path in sorted(HERE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if path != Path(__file__).resolve() and _is_command(tree):
            parts = path.relative_to(HERE).with_suffix("").parts
            name = ".".join(["experiments", *(parts[:-1] if parts[-1] == "__main__" else parts)])
            yield name, one_line(ast.get_docstring(tree) or "")


def _is_command(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)


def one_line(docstring: str) -> str:
    """Returns the docstring's first sentence; where that is long, what stands before its first colon."""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    ends = [place for mark in (". ", "? ") if (place := paragraph.find(mark)) >= 0]
    sentence = paragraph[: min(ends) + 1] if ends else paragraph
    if len(sentence) > LONG and ": " in sentence:
        sentence = sentence.split(": ")[0] + "."
    return sentence


@click.command(help=__doc__)
def main() -> None:
    found = list(commands())
    width = max(len(name) for name, _ in found)
    click.echo("python -m NAME --help lists the options of each command.\n")
    for name, line in found:
        click.echo(f"{name:<{width}}  {line}")


if __name__ == "__main__":
    main(prog_name="python -m experiments")

"""Lengths that a checkpoint's context allows: what was asked for is refused beyond it, a default is cut to it."""

from dataclasses import dataclass, field

from minimodel.errors import InputError, refuse


@dataclass
class Lengths:
    """`limit`: max_position_embeddings. `omitted` collects a sentence for every default that did not fit."""

    limit: int
    least: int
    omitted: list[str] = field(default_factory=list)

    def several(self, option: str, given: str | None, default: tuple[int, ...]) -> tuple[int, ...]:
        """The lengths of a comma-separated option; without it the defaults that fit."""
        if given is not None:
            return tuple(self._checked(option, length) for length in _numbers(option, given))
        for length in default:
            if length > self.limit:
                self.omitted.append(f"{option} {length}: beyond max_position_embeddings {self.limit}")
        return tuple(length for length in default if self.least < length <= self.limit)

    def one(self, option: str, given: int | None, default: int) -> int:
        """One length; without the option the default, or the limit where that is less."""
        if given is not None:
            return self._checked(option, given)
        if default > self.limit:
            self.omitted.append(f"{option} {default}: cut to max_position_embeddings {self.limit}")
        return min(default, self.limit)

    def _checked(self, option: str, length: int) -> int:
        if not self.least < length <= self.limit:
            raise refuse(option, f"{self.least + 1} to max_position_embeddings {self.limit}", length)
        return length


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{option}: expected whole numbers with commas between, found {text!r}") from None


def chosen(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The names of a comma-separated option in the order of `known`. InputError for one that is not known."""
    names = text.split(",")
    for name in names:
        if name not in known:
            raise refuse(option, f"names of {', '.join(known)}", name)
    return tuple(name for name in known if name in names)

"""Lengths against the context: defaults are cut to it, what was asked for is refused."""

from experiments.benchmark.limits import Lengths
from tests.helpers import refused


def test_defaults_are_cut_to_the_context() -> None:
    lengths = Lengths(limit=2048, least=25)
    assert lengths.several("--context", None, (128, 512, 2048, 4096)) == (128, 512, 2048)
    assert lengths.one("--length", None, 8192) == 2048 and lengths.one("--prefix", None, 2000) == 2000
    assert lengths.omitted == [
        "--context 4096: beyond max_position_embeddings 2048",
        "--length 8192: cut to max_position_embeddings 2048",
    ]
    with refused("--length", "8192"):
        lengths.one("--length", 8192, 8192)

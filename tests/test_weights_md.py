"""weights.md against what is loaded: the tensor table is the demo checkpoint's, and the role rows are the code's."""

import re
from pathlib import Path

import pytest

from minimodel.checkpoint import expected_shapes, open_checkpoint
from minimodel.roles import ROLE_NAMES, ROLE_OFFSET

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "experiments/demo/primary"
TEXT = (ROOT / "weights.md").read_text()


def table():
    """{name pattern: shape} of the tensor table."""
    return dict(re.findall(r"^\| `([a-z_.{}0-9]+)` \| (\[[^\]]+\]) \|", TEXT, flags=re.MULTILINE))


def shape_of(expression, config, rows):
    """`[H*D, E]` in numbers."""
    letters = {
        "V": config.vocab_size,
        "E": config.hidden_size,
        "I": config.intermediate_size,
        "D": config.head_dim,
        "H": config.num_attention_heads,
        "H_kv": config.num_key_value_heads,
        "rows": rows,
    }
    sizes = []
    for part in expression.strip("[]").split(","):
        size = 1
        for letter in part.strip().split("*"):
            size *= letters[letter]
        sizes.append(size)
    return tuple(sizes)


@pytest.mark.skipif(not DEMO.exists(), reason="the bundled demo checkpoint is not there")
def test_the_tensor_table_is_what_the_demo_holds():
    checkpoint = open_checkpoint(DEMO)
    rows = checkpoint.tensors["role_embedding.weight"].shape[0]
    listed = {}
    for name, shape in table().items():
        layers = range(checkpoint.config.num_hidden_layers) if "{i}" in name else [0]
        for i in layers:
            listed[name.replace("{i}", str(i))] = shape_of(shape, checkpoint.config, rows)
    assert listed.pop("lm_head.weight") == expected_shapes(checkpoint.config)["lm_head.weight"]
    assert checkpoint.config.tie_word_embeddings, "the demo's head is tied: no lm_head.weight"
    assert listed == {name: entry.shape for name, entry in checkpoint.tensors.items()}


def test_the_role_rows_are_the_codes():
    rows = re.findall(r"^\| (\d) \| ([a-z]+ ?\d?) \| (\d+) \|", TEXT, flags=re.MULTILINE)
    assert rows == [(str(r), name.replace("_", " "), str(ROLE_OFFSET + r)) for r, name in enumerate(ROLE_NAMES)]

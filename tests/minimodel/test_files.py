"""Small files: names that stay inside, strict JSON, and one line for everything else."""

import hashlib
import os

import pytest

from minimodel.files import inside, parse_json, read_bytes, read_json_object, sha256_of
from tests.helpers import refused


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", "a\0b", "n" * 256, "\ud800.safetensors", 7, None]
)
def test_names_that_are_no_plain_file_names_are_refused(tmp_path, name):
    with refused("plain file name"):
        inside(tmp_path, name)


def test_a_link_may_lead_to_a_neighbour_and_not_outside_or_in_a_circle(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "secret").write_text("x")
    (home / "real").write_text("x")
    for name, target in (("link", "real"), ("out", "../secret"), ("circle", "circle")):
        (home / name).symlink_to(target)
    assert inside(home, "real") == home / "real" and read_bytes(inside(home, "link")) == b"x"
    with refused("out", "link", "secret"):
        inside(home, "out")
    with refused("circle"):
        read_bytes(inside(home, "circle"))


def test_a_snapshot_of_the_hub_cache_may_link_to_its_own_blobs_alone(tmp_path):
    """huggingface_hub keeps every file under blobs/ and fills snapshots/REVISION/ with relative links."""
    for model in ("models--a--b", "models--c--d"):
        (tmp_path / model / "blobs").mkdir(parents=True)
        (tmp_path / model / "blobs" / "0f0f").write_text(model)
    home = tmp_path / "models--a--b" / "snapshots" / "0a1b"
    plain = tmp_path / "models--a--b" / "plain" / "0a1b"  # the same links where no cache puts them
    for folder in (home, plain):
        folder.mkdir(parents=True)
        (folder / "config.json").symlink_to("../../blobs/0f0f")
    assert read_bytes(inside(home, "config.json")) == b"models--a--b"
    (home / "other").symlink_to("../../../models--c--d/blobs/0f0f")
    (home.parent / "elsewhere").write_text("x")
    (home / "beside").symlink_to("../elsewhere")
    for folder, name in ((home, "other"), (home, "beside"), (plain, "config.json")):
        with refused(name, "a link to", "hf download REPOSITORY --local-dir DIR"):
            inside(folder, name)


def test_a_file_that_changes_while_it_is_digested_is_refused(tmp_path, monkeypatch):
    path, real = tmp_path / "weights", hashlib.file_digest
    path.write_bytes(b"one")
    assert sha256_of(path) == hashlib.sha256(b"one").hexdigest()
    monkeypatch.setattr(hashlib, "file_digest", lambda *given: (real(*given), path.write_bytes(b"other"))[0])
    with refused("weights", "changed since"):
        sha256_of(path)
    monkeypatch.undo()
    assert sha256_of(path) == hashlib.sha256(b"other").hexdigest()


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b'{"a": 1, "a": 2}', "'a' appears twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": "\xff"}', "JSON"),
        (b"[" * 200_000, "JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "JSON"),
    ],
)
def test_what_is_not_strict_json_is_refused_with_its_place(text, part):
    with refused("here.json", part):
        parse_json(text, "here.json")


def test_a_json_file_must_be_a_readable_file_of_bounded_size_that_holds_an_object(tmp_path):
    path = tmp_path / "x.json"
    with refused("x.json", "nothing"):
        read_json_object(path)
    path.write_text("[1]")
    with refused("x.json", "object", "list"):
        read_json_object(path)
    path.write_text('{"a": 1}')
    assert read_json_object(path) == {"a": 1}
    with refused("x.json", "at most 4 bytes", "8"):
        read_json_object(path, limit=4)
    with refused(str(tmp_path), "a directory"):
        read_bytes(tmp_path)
    path.chmod(0)
    if os.geteuid() != 0:  # root reads everything
        with refused("x.json", "cannot be read"):
            read_json_object(path)

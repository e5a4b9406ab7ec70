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


def test_a_name_is_taken_and_a_link_may_lead_to_a_neighbour(tmp_path):
    (tmp_path / "real").write_text("x")
    (tmp_path / "link").symlink_to("real")
    assert inside(tmp_path, "real") == tmp_path / "real"
    assert read_bytes(inside(tmp_path, "link")) == b"x"


def test_links_that_lead_outside_or_in_a_circle_are_refused(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "secret").write_text("x")
    (home / "out").symlink_to("../secret")
    (home / "circle").symlink_to("circle")
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
    home.mkdir(parents=True)
    (home / "config.json").symlink_to("../../blobs/0f0f")
    assert read_bytes(inside(home, "config.json")) == b"models--a--b"
    (home / "other").symlink_to("../../../models--c--d/blobs/0f0f")
    (home.parent / "elsewhere").write_text("x")
    (home / "beside").symlink_to("../elsewhere")
    for name in ("other", "beside"):
        with refused(name, "a link to", "hf download REPOSITORY --local-dir DIR"):
            inside(home, name)
    plain = tmp_path / "models--a--b" / "plain" / "0a1b"  # the same links where no cache puts them
    plain.mkdir(parents=True)
    (plain / "config.json").symlink_to("../../blobs/0f0f")
    with refused("config.json", "--local-dir"):
        inside(plain, "config.json")


def test_a_file_that_changes_while_it_is_digested_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    assert sha256_of(path) == hashlib.sha256(b"one").hexdigest()
    real = hashlib.file_digest

    def slow(file, name):
        digest = real(file, name)
        path.write_bytes(b"other")
        return digest

    monkeypatch.setattr(hashlib, "file_digest", slow)
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


def test_a_json_file_must_be_a_file_of_bounded_size_that_holds_an_object(tmp_path):
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


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{}")
    path.chmod(0)
    with refused("x.json", "cannot be read"):
        read_json_object(path)

"""Checkpoints on disk: complete or absent, every changed byte detected, readable without Paceline."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors
import safetensors.torch
import torch

from paceline.checkpoint import Contents, files, find, newest_good, read, write
from paceline.checkpoint import manifest as manifests
from paceline.custody import names
from paceline.custody.partial import PREFIX, Partial, sweep
from paceline.errors import CheckpointError, CorruptCheckpoint, DiskFull
from paceline.testing.crew import Crew, say
from tests.checkpoint.samples import assert_same, contents, weights

FILES = [names.MODEL, names.STATE, names.MANIFEST]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, contents(123))
    assert path.name == "step-000000123-op-123"
    assert names_in(path) == sorted(FILES)
    assert names_in(tmp_path) == [path.name]
    found = read(path)
    assert_same(found, contents(123))
    assert found.model["encoder.weight"] is found.model["decoder.weight"]
    assert (found.torch_version, bool(found.written_at)) == (torch.__version__, True)
    assert_same(read(path, verify=False), contents(123))


def test_weights_are_readable_without_paceline(tmp_path: Path) -> None:
    path = write(tmp_path, contents())
    found = safetensors.torch.load_file(path / names.MODEL)
    expected = weights(7)
    tied = expected.pop("decoder.weight")
    pairs = found.pop("complex")
    assert torch.equal(torch.view_as_complex(pairs), expected.pop("complex"))
    assert sorted(found) == sorted(expected)
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in expected.items()
    )
    with safetensors.safe_open(path / names.MODEL, "pt") as file:
        aliases = json.loads(file.metadata()["paceline.aliases"])
    assert aliases == {"decoder.weight": "encoder.weight"}
    assert torch.equal(found[aliases["decoder.weight"]], tied)
    assert safetensors.torch.load_file(path / names.STATE).keys() == {
        "optimizer.state[0].step",
        "optimizer.state[0].avg",
    }


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.complex32, torch.complex64, torch.int8, torch.uint64],
)
def test_every_type_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(0, 32, dtype=torch.uint8).view(dtype)
    found = read(write(tmp_path, contents(model={"a": tensor}))).model["a"]
    assert found.dtype is dtype
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


def test_values_in_a_state_dict_that_are_no_tensors_come_back(tmp_path: Path) -> None:
    model = {"a": torch.ones(2), "a._extra_state": {"scale": torch.ones(1), "seen": 3}, "b": torch.zeros(1)}
    found = read(write(tmp_path, contents(model=model))).model
    assert list(found) == list(model)
    assert found["a._extra_state"] == {"scale": torch.ones(1), "seen": 3}


def test_a_model_is_loaded_from_what_was_written(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    model[2].weight = model[0].weight
    path = write(tmp_path, contents(model=model.state_dict()))
    other = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    other.load_state_dict(read(path).model)
    assert all(torch.equal(mine, other.state_dict()[name]) for name, mine in model.state_dict().items())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"state": {"a": [print]}}, r"a\[0\]: a callable .*cannot be saved"),
        ({"model": {"w": torch.eye(2).to_sparse()}}, r"model\.w: a tensor of the layout"),
        ({"model": {"w._extra_state": print}}, r"model\.w\._extra_state: a callable"),
        ({"plan": {"x": torch.zeros(1)}}, r"plan\.x: a plan holds plain data"),
    ],
)
def test_what_cannot_be_saved_leaves_nothing(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        write(tmp_path, contents(**changed))
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("operation", [-1, 10**9, 1.5, True])
def test_an_operation_that_has_no_name_is_refused(operation: Any) -> None:
    with pytest.raises(ValueError, match=f"operation={operation}"):
        Contents(run="night", step=0, operation=operation, epoch=0, position=0, model={})


# -- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_one_changed_byte_is_detected(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, contents()) / name
    raw = path.read_bytes()
    chance = random.Random(name)
    places = {0, 7, 8, len(raw) - 1, len(raw) - 2} | {chance.randrange(len(raw)) for _ in range(60)}
    for place in places:
        broken = bytearray(raw)
        broken[place] ^= 1 << chance.randrange(8)
        path.write_bytes(broken)
        with pytest.raises(CheckpointError, match=name):
            read(path.parent)
    path.write_bytes(raw)
    read(path.parent)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "change", [lambda raw: raw[:-1], lambda raw: raw[: len(raw) // 2], lambda raw: b"", lambda raw: raw + b" "]
)
def test_a_file_of_another_length_is_detected(tmp_path: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    path = write(tmp_path, contents()) / name
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CorruptCheckpoint, match=name):
        read(path.parent)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_a_link_or_a_pipe_is_detected(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "run", contents()) / name
    path.rename(tmp_path / "elsewhere")
    with pytest.raises(CorruptCheckpoint, match=f"{name} is missing"):
        read(path.parent)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=f"cannot open .*{name}"):
        read(path.parent)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CorruptCheckpoint, match=f"{name} is not a file"):
        read(path.parent)


def test_the_newest_good_one_is_found_and_the_others_are_named(tmp_path: Path) -> None:
    assert newest_good(tmp_path / "no such folder") == (None, [])
    for operation in (1, 2, 3, 4):
        write(tmp_path, contents(operation))
    (tmp_path / "step-000000004-op-4" / names.STATE).unlink()
    model = tmp_path / "step-000000003-op-3" / names.MODEL
    model.write_bytes(model.read_bytes()[:-1] + b"!")
    (tmp_path / "step-000000099-op-99").symlink_to("step-000000001-op-1")
    (tmp_path / "step-12").mkdir()
    (tmp_path / f"{PREFIX}0").mkdir()
    assert [found.operation for found in find(tmp_path)] == [4, 3, 2, 1]
    found, skipped = newest_good(tmp_path)
    assert found is not None
    assert_same(found, contents(2))
    assert [path.name for path, _ in skipped] == ["step-000000004-op-4", "step-000000003-op-3"]
    assert "missing" in skipped[0].reason
    assert "checksum" in skipped[1].reason
    aside = names.set_aside(skipped[0].path)
    assert aside.name == "corrupt-step-000000004-op-4"
    assert [found.operation for found in find(tmp_path)] == [3, 2, 1]


def test_a_checkpoint_under_the_name_of_another_is_detected(tmp_path: Path) -> None:
    write(tmp_path, contents(5)).rename(tmp_path / "step-000000050-op-50")
    with pytest.raises(CorruptCheckpoint, match="operation 5"):
        read(tmp_path / "step-000000050-op-50")
    (tmp_path / "step-000000050-op-50").rename(tmp_path / "my favourite")
    assert_same(read(tmp_path / "my favourite"), contents(5))


def test_an_operation_that_is_written_again_replaces_the_first(tmp_path: Path) -> None:
    write(tmp_path, contents(5, run="first"))
    write(tmp_path, contents(5, run="second"))
    assert names_in(tmp_path) == ["step-000000005-op-5"]
    assert read(tmp_path / "step-000000005-op-5").run == "second"


def test_a_manifest_made_by_somebody_else_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, contents())
    good = manifests.decode((path / names.MANIFEST).read_bytes())
    cases: list[tuple[dict[str, Any], type[CheckpointError]]] = [
        ({"format": 3, "paceline": "9.9"}, CheckpointError),
        ({"files": {}}, CorruptCheckpoint),
        ({"state": {"tensor": "../../etc/passwd"}}, CorruptCheckpoint),
        ({"model": [("w", "missing")]}, CorruptCheckpoint),
        ({"operation": -1}, CorruptCheckpoint),
    ]
    for changed, error in cases:
        (path / names.MANIFEST).write_bytes(manifests.encode(msgspec.structs.replace(good, **changed)))
        with pytest.raises(error, match=names.MANIFEST):
            read(path)
    for raw in (b"", b"[]", b"[" * 100_000, b"null", b'{"format": 2}'):
        (path / names.MANIFEST).write_bytes(raw)
        with pytest.raises(CorruptCheckpoint, match=names.MANIFEST):
            read(path, verify=False)


@pytest.mark.parametrize(
    "entries",
    [
        {"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4 << 40]}},
        {"a": {"dtype": "F32", "shape": [0, 1 << 61, 1 << 61], "data_offsets": [0, 0]}},
        {
            "a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
            "b": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]},
        },
        {"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}},
        {"a": {"dtype": "U8", "shape": [-8], "data_offsets": [8, 0]}},
        {"a": {"dtype": "X8", "shape": [8], "data_offsets": [0, 8]}},
        {"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}, "__metadata__": {"paceline.pairs": '["a"]'}},
        {"a": 1},
        [],
    ],
)
def test_a_header_made_by_somebody_else_is_refused(tmp_path: Path, entries: Any) -> None:
    path = write(tmp_path, contents())
    text = json.dumps(entries).encode()
    (path / names.MODEL).write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    good = manifests.decode((path / names.MANIFEST).read_bytes())
    good.files[names.MODEL] = manifests.FileRecord(num_bytes=16 + len(text), sha256="")
    (path / names.MANIFEST).write_bytes(manifests.encode(good))
    with pytest.raises(CorruptCheckpoint, match=names.MODEL):
        read(path, verify=False)


# -- interrupted -----------------------------------------------------------------------------------------------------


def write_halfway(_: object, folder: Path) -> None:
    """Writes until the second piece, and says so; then it stands still."""
    pieces = iter([None])

    def between() -> None:
        if next(pieces, "second") == "second":
            say("halfway")
            signal.pause()

    files.write_partial(folder, files.prepare(contents(9)), between)


def test_a_killed_writer_leaves_nothing_that_looks_like_a_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, contents(8))
    with Crew(1, form=False) as crew:
        crew.start(write_halfway, tmp_path)
        crew.hear(0)
        (left,) = tmp_path.glob(f"{PREFIX}*")
        assert names_in(left) == [names.MODEL]
        assert sweep(tmp_path) == []  # its writer lives
        crew.kill(0)
        crew.processes[0].join(10)
    assert [found.operation for found in find(tmp_path)] == [8]
    assert sweep(tmp_path) == [left]
    assert names_in(tmp_path) == ["step-000000008-op-8"]
    assert_same(read(tmp_path / "step-000000008-op-8"), contents(8))


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    partial = Partial(tmp_path)
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        assert sweep(tmp_path) == []
        partial._fd.close()  # as if this process had died
        assert sweep(tmp_path) == [partial.path]
    finally:
        os.write(go[1], b"x")
        os.waitpid(child, 0)
        for end in (*ready, *go):
            os.close(end)


def test_what_is_raised_between_two_pieces_leaves_nothing(tmp_path: Path) -> None:
    def between() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.write_partial(tmp_path, files.prepare(contents()), between)
    assert names_in(tmp_path) == []


def test_a_disk_that_is_too_small_is_named_before_anything_is_written(mount_small: Callable[[str], Path]) -> None:
    folder = mount_small("1m")
    write(folder, contents(1))
    with pytest.raises(DiskFull, match=r"it needs 4,\d+,\d+ bytes and [\d,]+ are free; make room") as caught:
        write(folder, contents(2, model={"large": torch.zeros(1_000_000)}))
    assert caught.value.path == folder
    assert caught.value.needed_bytes > 4_000_000 > 1 << 20 > caught.value.free_bytes
    assert names_in(folder) == ["step-000000001-op-1"]
    assert_same(read(folder / "step-000000001-op-1"), contents(1))


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(mount_small: Callable[[str], Path]) -> None:
    folder = mount_small("4m")
    write(folder, contents(1))

    def fill_up() -> None:
        with contextlib.suppress(OSError), (folder / "somebody else").open("ab", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass

    large = contents(2, model={"large": torch.zeros(500_000)})
    with pytest.raises(DiskFull) as caught:
        files.write_partial(folder, files.prepare(large), fill_up)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert names_in(folder) == ["somebody else", "step-000000001-op-1"]
    assert_same(read(folder / "step-000000001-op-1"), contents(1))
    (folder / "somebody else").unlink()
    assert read(write(folder, large)).operation == 2


def test_a_limit_of_the_process_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            write(tmp_path, contents(model={"large": torch.zeros(100_000)}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names_in(tmp_path) == []


def test_checkpoints_are_named_by_step_and_ordered_by_operation(tmp_path: Path) -> None:
    """A run that went back may come to the same operation at another step: there is one of each operation."""
    for step, operation in ((5, 6), (5, 8), (4, 6), (6, 7)):
        write(tmp_path, contents(operation, step=step))
    assert names_in(tmp_path) == ["step-000000004-op-6", "step-000000005-op-8", "step-000000006-op-7"]
    assert [(found.step, found.operation) for found in names.find(tmp_path)] == [(5, 8), (6, 7), (4, 6)]


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    partial = files.write_partial(tmp_path, files.prepare(contents()))
    shutil.rmtree(tmp_path)
    with pytest.raises(CheckpointError, match="step-000000007-op-7"):
        files.publish(partial, tmp_path, 7, 7)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        files.write_partial(tmp_path, files.prepare(contents()))


@pytest.mark.parametrize("can_exchange", [True, False])
def test_one_that_takes_the_place_of_another_leaves_no_moment_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    """But where the file system cannot exchange two names."""
    write(tmp_path, contents(7))
    seen = []
    remove = shutil.rmtree

    def look(path: Path, **options: Any) -> None:
        seen.append(names_in(tmp_path))
        remove(path, **options)

    monkeypatch.setattr("paceline.custody.partial.shutil.rmtree", look)
    if not can_exchange:
        monkeypatch.setattr("paceline.custody.partial._exchange", lambda *_: False)
    other = contents(7, epoch=3)
    write(tmp_path, other)
    assert ["step-000000007-op-7" in names for names in seen] == [can_exchange]
    assert names_in(tmp_path) == ["step-000000007-op-7"]
    assert_same(read(tmp_path / "step-000000007-op-7"), other)

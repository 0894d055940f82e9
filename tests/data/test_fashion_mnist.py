"""FashionMNIST: had once a node, whole or not at all, and normalised as its tutorial says. Served here by a
local server.
"""

from __future__ import annotations

import fcntl
import gzip
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fsdp.base.errors import ConfigError
from fsdp.config import DataSection
from fsdp.data import DataSet, build_dataset, download
from fsdp.data import fashion_mnist as module

ROOT = Path(__file__).parents[2]


def idx(array: np.ndarray) -> bytes:
    return (
        struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    )


def pictures(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (count, 28, 28), np.uint8), np.arange(count, dtype=np.uint8) % 10


def contents() -> dict[str, bytes]:
    files = {}
    for split, count in (("train", 50), ("t10k", 20)):
        images, labels = pictures(count, count)
        files[f"{split}-images-idx3-ubyte"] = idx(images)
        files[f"{split}-labels-idx1-ubyte"] = idx(labels)
    return files


class Mirror(ThreadingHTTPServer):
    """Serves .gz files from memory, and counts."""

    files: dict[str, bytes]
    cut: str = ""
    asked: Counter[str]


class Handler(BaseHTTPRequestHandler):
    server: Mirror

    def do_GET(self) -> None:
        name = self.path.lstrip("/")
        self.server.asked[name] += 1
        if name not in self.server.files:
            self.send_error(404)
            return
        body = self.server.files[name]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if name == self.server.cut else body)

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    server = Mirror(("127.0.0.1", 0), Handler)
    server.files = {f"{name}.gz": gzip.compress(body) for name, body in contents().items()}
    server.asked = Counter()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def address(mirror: Mirror) -> str:
    return f"http://127.0.0.1:{mirror.server_address[1]}/"


def fashion(folder: Path, mirror: str = "") -> DataSet:
    return build_dataset(
        DataSection(name="fashion_mnist", dir=str(folder), args={"mirror": mirror} if mirror else {})
    )


def raw_of(folder: Path) -> Path:
    raw = folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    return raw


def test_downloaded_once_then_read_offline(tmp_path: Path, mirror: Mirror) -> None:
    first = fashion(tmp_path, address(mirror))
    assert mirror.asked == {f"{name}.gz": 1 for name in module.FILES}
    again = fashion(tmp_path, "http://127.0.0.1:1/")  # where nobody answers
    assert again.heldout is not None
    assert (len(again.train), len(again.heldout)) == (50, 20)
    assert np.array_equal(
        again.train.batch(np.arange(50))["inputs"], first.train.batch(np.arange(50))["inputs"]
    )
    left = {path.name for path in (tmp_path / "FashionMNIST" / "raw").iterdir()}
    assert left == {*module.FILES, ".download.lock"}


def test_normalised_to_the_bit_as_the_tutorials_transforms_do(tmp_path: Path, mirror: Mirror) -> None:
    from fsdp.base.torchvision_import import import_torchvision

    import_torchvision()
    from torchvision.datasets import FashionMNIST
    from torchvision.transforms import Compose, Normalize, ToTensor

    ours = fashion(tmp_path, address(mirror))
    theirs = FashionMNIST(
        str(tmp_path), train=True, transform=Compose([ToTensor(), Normalize((0.5,), (0.5,))])
    )
    batch = ours.train.batch(np.arange(50))
    for place, (picture, label) in enumerate(theirs):
        assert np.array_equal(batch["inputs"][place], picture)
        assert batch["targets"][place] == label
    assert list(ours.info.class_names) == theirs.classes


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("place", ["torchvision's folders", "the folder itself"])
def test_files_that_lie_there_are_used(tmp_path: Path, packed: bool, place: str) -> None:
    folder = raw_of(tmp_path) if place == "torchvision's folders" else tmp_path
    for name, body in contents().items():
        (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(body) if packed else body)
    before = {path.name for path in folder.iterdir()}
    assert len(fashion(tmp_path, "http://127.0.0.1:1/").train) == 50
    assert {path.name for path in folder.iterdir()} == before


RANK = """
import sys; from pathlib import Path; from fsdp.config import DataSection; from fsdp.data import build_dataset
print("ready", flush=True); sys.stdin.readline()
try:
    section = DataSection(name="fashion_mnist", dir=sys.argv[1], args={"mirror": sys.argv[2]})
    print(len(build_dataset(section).train))
except Exception as error:
    print(type(error).__name__, error)
"""


def start_ranks(count: int, folder: Path, mirror: Mirror) -> list[str]:
    """What each of several processes that begin together prints."""
    command = [sys.executable, "-c", RANK, str(folder), address(mirror)]
    ranks = [subprocess.Popen(command, cwd=ROOT, stdin=-1, stdout=-1, text=True) for _ in range(count)]
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
    return [rank.communicate()[0].strip() for rank in ranks]


@pytest.mark.slow
@pytest.mark.long
def test_of_several_ranks_one_downloads_and_all_read(tmp_path: Path, mirror: Mirror) -> None:
    assert start_ranks(3, tmp_path, mirror) == ["50"] * 3
    assert set(mirror.asked.values()) == {1}


def test_a_download_cut_short_is_never_taken_as_whole(tmp_path: Path, mirror: Mirror) -> None:
    mirror.cut = "t10k-images-idx3-ubyte.gz"
    with pytest.raises(ConfigError, match=r"t10k-images-idx3-ubyte\.gz: .*bytes received"):
        fashion(tmp_path, address(mirror))
    assert not list(tmp_path.rglob("t10k-images*"))
    mirror.cut = ""
    assert len(fashion(tmp_path, address(mirror)).train) == 50
    assert mirror.asked["train-images-idx3-ubyte.gz"] == 1  # what was whole is not fetched again


@pytest.mark.parametrize("damage", ["flipped", "another file", "not gzip"])
def test_a_mirror_that_gives_something_else_is_refused(tmp_path: Path, mirror: Mirror, damage: str) -> None:
    name = "train-labels-idx1-ubyte.gz"
    body = bytearray(mirror.files[name])
    body[len(body) // 2] ^= 1
    mirror.files[name] = {
        "flipped": bytes(body),
        "another file": gzip.compress(b"<html>"),
        "not gzip": b"<html>",
    }[damage]
    with pytest.raises(ConfigError, match=r"train-labels-idx1-ubyte\.gz is not complete"):
        fashion(tmp_path, address(mirror))
    assert not list(tmp_path.rglob("train-labels*"))


def test_the_published_place_must_give_the_published_files(
    tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MIRROR", address(mirror))
    with pytest.raises(
        ConfigError, match=r"train-images-idx3-ubyte\.gz is not the published file \(md5 differs\)"
    ):
        fashion(tmp_path)


def test_where_neither_goes_the_hint_says_which_files_go_where(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        fashion(tmp_path / "new", "http://127.0.0.1:1/")
    message = str(caught.value)
    assert message.startswith(
        f"FashionMNIST is not in {tmp_path}/new/FashionMNIST/raw and cannot be downloaded: "
        "http://127.0.0.1:1/"
    )
    hint = message.split("HINT: ")[1]
    assert "--data.dir FOLDER" in hint
    assert all(f"{name}.gz" in hint for name in module.FILES)
    assert "\n" not in message


def test_who_waited_for_a_failure_reports_it_and_does_not_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, tries = threading.Event(), []

    def flock(descriptor: int, how: int) -> None:
        if how == fcntl.LOCK_EX:
            waiting.set()
        fcntl.flock(descriptor, how)

    def get(name: str, work: Path) -> Path:
        tries.append(name)
        assert waiting.wait(20)
        raise download.DownloadError("no route")

    def rank() -> str:
        with pytest.raises(download.DownloadError) as caught:
            download.fetch(tmp_path, lambda: ["file"], get)
        return str(caught.value)

    monkeypatch.setattr(
        download, "fcntl", SimpleNamespace(flock=flock, LOCK_EX=fcntl.LOCK_EX, LOCK_NB=fcntl.LOCK_NB)
    )
    with ThreadPoolExecutor(2) as pool:
        answers = [future.result() for future in [pool.submit(rank), pool.submit(rank)]]
    assert answers == ["no route"] * 2
    assert tries == ["file"]
    rank()
    assert tries == ["file"] * 2  # a later start does try again


def test_a_damaged_file_that_lies_there_is_named(tmp_path: Path) -> None:
    raw = raw_of(tmp_path)
    for name, body in contents().items():
        (raw / name).write_bytes(body[: len(body) // 2] if "train-images" in name else body)
    with pytest.raises(
        ConfigError, match=r"raw/train-images-idx3-ubyte is not a complete idx file.*HINT: rm "
    ):
        fashion(tmp_path)


def test_a_mirror_that_is_no_address_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be downloaded: nonsense/train-images"):
        fashion(tmp_path, "nonsense")

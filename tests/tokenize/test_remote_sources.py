"""Sources beyond local row files: data sets of Hugging Face and objects in a store."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp.base.errors import ConfigError
from fsdp.config import DataSection
from fsdp.data import DataSet, build_dataset
from fsdp.tokenize.rows import DatasetRows
from fsdp.tokenize.sources import Source
from tests.checkpoint import s3_server
from tests.data.test_text_tokens import rows_of
from tests.tokenize.rows import texts, write_lines

ROOT = Path(__file__).parents[2]


def data(name: str, **args: Any) -> DataSet:
    return build_dataset(DataSection(name=name, seq_len=8, args=args))


def assert_same(ours: DataSet, theirs: DataSet) -> None:
    assert np.array_equal(rows_of(ours.train), rows_of(theirs.train))


# ---------------------------------------------------------------- hf:


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder of save_to_disk with two splits, the rows of train in an order of their own."""
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_list(texts(300))
    both = DatasetDict({"train": rows.select(range(299, -1, -1)), "test": rows.select(range(5))})
    both.save_to_disk(str(tmp_path / "saved"))
    return tmp_path / "saved"


@pytest.mark.needs("datasets")
def test_splits_and_rows(saved: Path) -> None:
    (test,) = Source(f"hf:{saved}", split="test").open()
    assert [row.values for row in test.read(1, 4)] == texts(5)[1:4]
    assert [row.place for row in test.read(1, 2)] == [f"hf:{saved} test row 2"]
    for name in (f"hf:{saved}", str(saved)):
        (train,) = Source(name).open()
        assert train.count == 300
        assert train.cuts(1 << 30) == [300]
        assert len(train.cuts(1000)) > 3
    assert Source(f"hf:{saved}").identity() != Source(f"hf:{saved}", split="test").identity()
    for source in (Source(f"hf:{saved}", split="dev"), Source(f"hf:{saved}/gone")):
        with pytest.raises(ConfigError, match=r"cannot be read from this machine: .* HINT: python -c "):
            source.open()


@pytest.mark.needs("datasets")
def test_columns_of_pictures_are_left_out(tmp_path: Path) -> None:
    from datasets import Dataset, Features, Image, Sequence, Value

    features = Features({"text": Value("string"), "picture": Image(), "pictures": Sequence(Image())})
    rows = Dataset.from_dict({"text": ["a"], "picture": [None], "pictures": [[]]}, features=features)
    assert [row.values for row in DatasetRows(rows, "rows").read(0, 1)] == [{"text": "a"}]


@pytest.mark.needs("datasets")
def test_a_cached_data_set_by_name(tmp_path: Path) -> None:
    """The cache as load_dataset on a machine with a network leaves it, read by a process without one."""
    folder = tmp_path / "datasets" / "org___corpus" / "small" / "0.0.0" / ("0" * 40)
    make = (
        "import datasets, sys, json; from pathlib import Path\n"
        "from datasets.arrow_writer import ArrowWriter\n"
        "rows = datasets.Dataset.from_list(json.loads(sys.argv[2])); folder = Path(sys.argv[1])\n"
        "folder.mkdir(parents=True)\n"
        "writer = ArrowWriter(path=str(folder / 'corpus-train.arrow'))\n"
        "writer.write_table(rows.data.table); writer.finalize()\n"
        "splits = datasets.SplitDict(dataset_name='corpus')\n"
        "splits.add(datasets.SplitInfo('train', 1, len(rows), dataset_name='corpus'))\n"
        "datasets.DatasetInfo(features=rows.features, builder_name='parquet', dataset_name='corpus',\n"
        "  config_name='small', splits=splits).write_to_directory(str(folder))\n"
    )
    read = (
        "import json, sys; from fsdp.tokenize.sources import Source\n"
        "(rows,) = Source(*sys.argv[1:]).open()\n"
        "print(json.dumps([row.values for row in rows.read(0, rows.count)]))"
    )
    environ = {**os.environ, "HF_HOME": str(tmp_path), "HF_DATASETS_CACHE": str(tmp_path / "datasets")}

    def run(code: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, *words]
        return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)

    done = run(make, str(folder), json.dumps(texts(3)))
    assert done.returncode == 0, done.stderr
    for words in (["hf:org/corpus", "small"], ["hf:org/corpus", "", "train"]):
        done = run(read, *words)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == texts(3)
    done = run(read, "hf:org/absent")
    assert "hf:org/absent cannot be read from this machine: " in done.stderr
    assert (
        """HINT: python -c "import datasets; datasets.load_dataset('org/absent')" on a machine"""
        in done.stderr
    )


def test_a_part_of_a_local_file_cannot_be_selected(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", texts(30))
    with pytest.raises(ConfigError, match=r"config and split have no effect on .*a.jsonl\. HINT: "):
        data(str(path), split="x")


# ---------------------------------------------------------------- s3://


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server.s3_server() as url:
        yield url


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """s3://NAME with two row files, and others."""
    import fsspec

    s3_server.use(server, monkeypatch.setenv)
    store = fsspec.filesystem("s3")
    name = f"rows-{tmp_path.name.replace('_', '-')[-40:]}"
    store.mkdir(name)
    lines = [json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in texts(300)]
    store.pipe_file(f"{name}/deep/a.jsonl", b"".join(lines[:200]))
    store.pipe_file(f"{name}/deep/b.jsonl.gz", gzip.compress(b"".join(lines[200:])))
    store.pipe_file(f"{name}/deep/README.md", b"of the prefix")
    store.pipe_file(f"{name}/wrong.jsonl", b'{"text": "a"}\nnot JSON\n')
    store.pipe_file(f"{name}/empty.jsonl", b"")
    return f"s3://{name}"


@pytest.mark.needs("s3")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["deep", "deep/*"])
def test_a_prefix_of_objects_is_a_folder_of_files(name: str, bucket: str, tmp_path: Path) -> None:
    theirs = data(str(write_lines(tmp_path / "a.jsonl", texts(300))))
    ours = data(f"{bucket}/{name}")
    assert_same(ours, theirs)
    assert ours.info.facts["fingerprint"] != ""


@pytest.mark.needs("s3")
def test_objects_by_prefix_pattern_and_name(bucket: str) -> None:
    def found(name: str) -> list[str]:
        return [url.removeprefix(f"{bucket}/") for url, *_ in Source(f"{bucket}/{name}").identity()]

    assert found("deep") == found("deep/") == found("deep/*") == ["deep/a.jsonl", "deep/b.jsonl.gz"]
    assert found("**/*.gz") == found("deep/b.jsonl.gz") == ["deep/b.jsonl.gz"]


@pytest.mark.needs("s3")
def test_an_object_is_copied_once_and_again_when_it_changes(bucket: str, own_cache: Path) -> None:
    import fsspec

    name = f"{bucket}/deep/a.jsonl"
    key = Source(name).identity()
    (rows,) = Source(name).open()
    assert [row.values for row in rows.read(198, 200)] == texts(200)[198:]
    copies = list(own_cache.rglob("a.jsonl"))
    Source(name).open()
    assert len(copies) == 1
    assert list(own_cache.rglob("a.jsonl")) == copies
    fsspec.filesystem("s3").pipe_file(f"{bucket}/deep/a.jsonl".removeprefix("s3://"), b'{"text": "new"}\n')
    assert Source(name).identity() != key
    (rows,) = Source(name).open()
    assert [row.values for row in rows.read(0, rows.count)] == [{"text": "new"}]


@pytest.mark.needs("s3")
def test_wrong_objects_are_named_by_their_url(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (rows,) = Source(f"{bucket}/wrong.jsonl").open()
    with pytest.raises(ConfigError, match=rf"^{bucket}/wrong.jsonl line 2 is not JSON ") as caught:
        list(rows.read(0, 2))
    command = str(caught.value.hint).removesuffix(" shows it")
    assert subprocess.run(["sh", "-c", command], capture_output=True, text=True).stdout == "not JSON\n"
    for name, message in (
        ("none", r"/none has no \.jsonl, .* object with a byte in it\. HINT: s3://bucket/prefix"),
        ("empty.jsonl", r"/empty.jsonl has no \.jsonl"),
    ):
        with pytest.raises(ConfigError, match=message):
            Source(f"{bucket}/{name}").identity()
    with pytest.raises(ConfigError, match=r"s3://no-such-bucket/a (cannot be read|has no).* HINT: "):
        Source("s3://no-such-bucket/a").identity()


def test_only_stores_are_urls() -> None:
    with pytest.raises(
        ConfigError, match=r"https://host/a.jsonl is not a URL of s3, gs, .* HINT: s3://bucket"
    ):
        Source("https://user:secret@host/a.jsonl").identity()


@pytest.mark.needs("s3")
@pytest.mark.slow
def test_a_busy_server(bucket: str, server: str, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    import fsspec

    with s3_server.busy_proxy(server, 3) as (url, refused):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        opened = Source(f"{bucket}/deep").open()
    assert refused
    assert sum(rows.count for rows in opened) == 300
    shutil.rmtree(own_cache)

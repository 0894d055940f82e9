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
from fsdp.tokenize import hub_dataset
from fsdp.tokenize.hub_dataset import DatasetRows, HubName, _is_media
from fsdp.tokenize.locate import SourceName, notes_on
from fsdp.tokenize.object_files import find_objects
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
@pytest.mark.slow
def test_a_folder_of_save_to_disk(saved: Path, tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", texts(300)[::-1])
    assert_same(data(f"hf:{saved}"), data(str(lines)))


@pytest.mark.needs("datasets")
def test_splits_and_rows(saved: Path) -> None:
    test = DatasetRows(HubName(str(saved), split="test"))
    assert [row.values for row in test.read(1, 4)] == texts(5)[1:4]
    assert [row.place for row in test.read(1, 2)] == [f"hf:{saved} test row 2"]
    whole = DatasetRows(HubName(str(saved)))
    assert whole.count == 300
    assert whole.cuts(1 << 30) == [300]
    assert len(whole.cuts(1000)) > 3
    assert whole.identity() != test.identity()


def test_lists_of_pictures_are_left_out() -> None:
    """The kinds of columns by their names: reading a row would decode each picture."""
    image, lists = type("Image", (), {})(), type("List", (), {})
    nested = lists()
    nested.feature = lists()
    nested.feature.feature = image
    assert all(map(_is_media, (image, [image], nested)))
    text = type("Value", (), {})()
    assert not any(map(_is_media, (text, [text], {"image": image}, [{"image": image}])))


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
        "import json, sys; from fsdp.tokenize.locate import SourceName\n"
        "(rows,) = SourceName(*sys.argv[1:]).open()\n"
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
    assert "hf:org/absent cannot be read from this machine's cache of Hugging Face: " in done.stderr
    assert (
        """HINT: python -c "import datasets; datasets.load_dataset('org/absent')" on a machine"""
        in done.stderr
    )


@pytest.mark.needs("datasets")
def test_wrong_names_are_one_line(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for source, message in (
        (SourceName("hf:"), "--data.name hf: names no data set. HINT: --data.name hf:ORG/NAME, or hf:FOLDER"),
        (SourceName(f"hf:{saved}", split="dev"), "no split dev; it has train, test. HINT: "),
        (SourceName(f"hf:{saved}", config="x"), "--data.args.config x has no effect on a folder"),
        (SourceName(f"hf:{saved}/train", split="x"), "--data.args.split x has no effect: "),
        (SourceName(f"hf:{tmp_path}/empty"), "has none of state.json, dataset_dict.json, "),
        (SourceName("hf:../a b"), "hf:../a b is neither a folder nor the name of a data set. HINT: "),
    ):
        with pytest.raises(ConfigError) as caught:
            source.open()
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.needs("datasets")
def test_a_damaged_folder(saved: Path) -> None:
    (file,) = (saved / "train").glob("*.arrow")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"saved cannot be read: .* HINT: copy it again; ls -l ") as caught:
        SourceName(f"hf:{saved}").open()
    assert "\n" not in str(caught.value)


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ConfigError, match=r"hf:org/corpus needs the package datasets, .*\. HINT: pip install datasets$"
    ):
        hub_dataset.DatasetRows(HubName("org/corpus"))


def test_a_part_of_a_local_file_cannot_be_selected(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", texts(30))
    with pytest.raises(ConfigError, match=r"--data.args.split x has no effect on .*a.jsonl\. HINT: leave it"):
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


def test_patterns_of_other_places_are_not_looked_for_on_this_machine() -> None:
    for name in ("s3://bucket/rows/*.jsonl", "hf:/saved/[1]"):
        assert notes_on(name) == []


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
        return [one.url.removeprefix(f"{bucket}/") for one in find_objects(f"{bucket}/{name}")]

    assert found("deep") == found("deep/") == found("deep/*") == ["deep/a.jsonl", "deep/b.jsonl.gz"]
    assert found("**/*.gz") == found("deep/b.jsonl.gz") == ["deep/b.jsonl.gz"]


@pytest.mark.needs("s3")
def test_an_object_is_copied_once_and_again_when_it_changes(bucket: str, own_cache: Path) -> None:
    import fsspec

    source = SourceName(f"{bucket}/deep/a.jsonl")
    key = source.identity()
    (rows,) = source.open()
    assert [row.values for row in rows.read(198, 200)] == texts(200)[198:]
    copies = list(own_cache.rglob("a.jsonl"))
    source.open()
    assert len(copies) == 1
    assert list(own_cache.rglob("a.jsonl")) == copies
    fsspec.filesystem("s3").pipe_file(f"{bucket}/deep/a.jsonl".removeprefix("s3://"), b'{"text": "new"}\n')
    assert source.identity() != key
    (rows,) = source.open()
    assert [row.values for row in rows.read(0, rows.count)] == [{"text": "new"}]


@pytest.mark.needs("s3")
def test_wrong_objects_are_named_by_their_url(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (rows,) = SourceName(f"{bucket}/wrong.jsonl").open()
    with pytest.raises(ConfigError, match=rf"^{bucket}/wrong.jsonl line 2 is not JSON: ") as caught:
        list(rows.read(0, 2))
    command = str(caught.value.hint).removesuffix(" shows it")
    assert subprocess.run(["sh", "-c", command], capture_output=True, text=True).stdout == "not JSON\n"
    for name, message in (
        ("none", r"/none has no \.jsonl, .* object with a byte in it\. HINT: s3://bucket/prefix"),
        ("empty.jsonl", r"/empty.jsonl has no \.jsonl"),
    ):
        with pytest.raises(ConfigError, match=message):
            SourceName(f"{bucket}/{name}").identity()
    with pytest.raises(ConfigError, match=r"s3://no-such-bucket/a (does not exist|has no .*)\. HINT: "):
        SourceName("s3://no-such-bucket/a").identity()


@pytest.mark.needs("s3")
def test_lists_in_json_objects(bucket: str) -> None:
    import fsspec

    fs, below = fsspec.filesystem("s3"), f"{bucket}/lists".removeprefix("s3://")
    fs.pipe_file(f"{below}/a.json", json.dumps({"data": texts(5)}).encode())
    fs.pipe_file(f"{below}/b.json.gz", gzip.compress(json.dumps(texts(3)).encode()))
    fs.pipe_file(f"{below}/dataset_info.json", b"{}")
    opened = SourceName(f"{bucket}/lists").open()
    assert [row.values for rows in opened for row in rows.read(0, rows.count)] == texts(5) + texts(3)
    fs.pipe_file(f"{below}/c.json", b'[{"text": "a"}, nothing, {"text": "c"}]')
    with pytest.raises(
        ConfigError, match=rf"^{bucket}/lists/c.json line 1 column 17 .*is not JSON: .*HINT: "
    ):
        SourceName(f"{bucket}/lists/c.json").open()


def test_only_stores_are_urls() -> None:
    with pytest.raises(
        ConfigError, match=r"https://host/a.jsonl is not a URL of s3, gs, .* HINT: s3://bucket"
    ):
        SourceName("https://user:secret@host/a.jsonl").identity()


@pytest.mark.needs("s3")
@pytest.mark.slow
def test_a_busy_server(bucket: str, server: str, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    import fsspec

    with s3_server.busy_proxy(server, 3) as (url, refused):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        opened = SourceName(f"{bucket}/deep").open()
    assert refused
    assert sum(rows.count for rows in opened) == 300
    shutil.rmtree(own_cache)

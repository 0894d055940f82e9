"""The pinned values in fp64, old run directories, and that a difference is found."""

from __future__ import annotations

import copy
import json
import tarfile
from pathlib import Path

import pytest

from tests.golden.__main__ import COMMITTED, HERE, STOPS, flags_of, forked
from tests.golden.chain import Chain, Death, Violation
from tests.golden.configurations import CONFIGURATIONS, FP64, MLP, Configuration, write_data
from tests.golden.values import TOLERANCE, Values, difference

SAMPLE = ("mlp", "hsdp-micro-batches", "stream")


def _marks(configuration: Configuration) -> list[pytest.MarkDecorator]:
    if configuration.hugging_face:
        return [pytest.mark.slow, pytest.mark.long, pytest.mark.needs("transformers")]
    return [] if configuration.name in SAMPLE else [pytest.mark.slow, pytest.mark.long]


ANYWHERE = [
    pytest.param(configuration, id=configuration.name, marks=_marks(configuration))
    for configuration in CONFIGURATIONS
    if configuration.anywhere
]
RECORDED = json.loads(COMMITTED.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("golden")
    write_data(place / "data")
    return place


@pytest.mark.parametrize("configuration", ANYWHERE)
def test_a_run_that_is_stopped_twice_has_the_recorded_values(
    configuration: Configuration, folder: Path
) -> None:
    flags = flags_of(configuration, Path(configuration.name), folder / "data")
    values = forked(flags, configuration.ranks, folder, configuration.name, STOPS)
    assert difference(values, RECORDED[configuration.name]) == ""


def _names(file: Path) -> list[str]:
    with tarfile.open(file) as archive:
        return sorted({name.partition("/")[0] for name in archive.getnames() if name.endswith("/run")})


OLD_RUNS = [(file.name, name) for file in sorted((HERE / "stopped").iterdir()) for name in _names(file)]


@pytest.mark.parametrize(("archive", "name"), OLD_RUNS)
def test_a_run_of_an_earlier_commit_resumes_to_the_values_of_the_unbroken_run(
    archive: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one rank too; a stream's order depends on the number of ranks."""
    monkeypatch.chdir(tmp_path)
    write_data(Path("data"))
    for folder in ("same", "one") if name != "stream" else ("same",):
        with tarfile.open(HERE / "stopped" / archive) as files:
            files.extractall(folder, filter="data")
        expected = json.loads(Path(folder, "values.json").read_text())[name]
        ranks = expected["ranks"] if folder == "same" else 1
        words = ["--config", f"{folder}/{name}/run/config.toml"]
        assert difference(forked(words, ranks, tmp_path, f"{folder}/{name}", [0]), expected) == ""
        saved = sorted(Path(folder, name, "run/checkpoints").glob("*/manifest.json"))
        manifests = [json.loads(file.read_text())["manifest"] for file in saved]
        assert [manifest["counters"]["step"] for manifest in manifests] == [5, 8]
        assert manifests[0]["config"] == manifests[1]["config"], "the log says: the configuration differs"


def test_another_number_a_missing_step_and_other_bits_are_found() -> None:
    values: Values = {**RECORDED["mlp"], "digest": "a"}
    for change in (
        lambda other: other["loss"].update({"8": other["loss"]["8"] + 10 * TOLERANCE}),
        lambda other: other["grad_norm"].pop("3"),
        lambda other: other["weights"].popitem(),
    ):
        other = copy.deepcopy(values)
        change(other)
        assert difference(other, values) != ""
    assert difference({**values, "digest": "b"}, values) == ""
    assert difference({**values, "digest": "b"}, values, 0) == "exported weights"


def test_a_lost_save_a_changed_byte_and_another_loss_are_violations(tmp_path: Path) -> None:
    chain = Chain(Configuration("mlp", 1, f"{MLP} {FP64}"), tmp_path / "chain", 20)
    chain.live()
    reference = chain.read()
    chain.check_end(reference)
    death = Death("saving", "forked", "all ranks", reached=20, sealed=20)
    chain.check_death(death, reference)
    with pytest.raises(Violation, match="newest sealed was 5"):
        chain.check_death(Death("saving", "forked", "all ranks", reached=20, sealed=5), reference)
    reference.losses[7] += 1e-15
    with pytest.raises(Violation, match="losses of steps"):
        chain.check_end(reference)
    [file] = sorted((chain.run_dir / "checkpoints").glob("*20/*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(Exception, match="distcp"):
        chain.check_death(death, reference)

"""slurm/fsdp.sbatch and its like, on a real Slurm: the same numbers as torchrun's, whatever happens on the
way.

Some stand for all in `make test`: both modes, a lost node, all launchers on one run. The others are in the
full form, of which .ci/run has a part.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.job import EVERY, FLAGS, STEPS, Run, Undisturbed
from tests.slurm.scenarios import Left, Network, Suspended

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

ALL_STEPS = list(range(1, STEPS + 1))


def check_finished(left: Left, undisturbed: dict[int, float]) -> None:
    """Done, in one curve without a gap or a step twice, equal to the undisturbed run's to the bit."""
    assert left.state == "COMPLETED", left.log
    assert left.run.steps == ALL_STEPS
    assert left.run.losses == undisturbed
    assert (left.run.path / "DONE").exists()


# ---------------------------------------------------------------- both modes


@pytest.mark.long
@pytest.mark.scenario("both_modes")
def test_two_nodes_of_two_ranks_train_as_torchrun_does_on_one(
    outcome: dict[str, Left], undisturbed: Undisturbed
) -> None:
    """Two jobs at a time on the same nodes, which do not meet."""
    for mode in outcome.values():
        check_finished(mode, undisturbed.losses(2, 2))
        assert (mode.run.starts[0]["ranks"], mode.run.starts[0]["nodes"]) == (4, ["n1", "n2"])
        assert "hsdp, replicate 2 × shard 2 = 4 ranks" in mode.log
        assert re.search(r"^0: .*rank 0\(4\)", mode.log, re.MULTILINE)
    met = [re.findall(r"all 2 nodes reach (\S+)", mode.log) for mode in outcome.values()]
    assert len({place for places in met for place in places}) == 2


# ---------------------------------------------------------------- stopped by the scheduler


@pytest.mark.long
@pytest.mark.scenario("told")
@pytest.mark.parametrize(("name", "reason"), [("deadline", "the deadline"), ("batch", "SIGUSR1")])
def test_a_job_is_requeued_by_its_deadline_alone_and_by_a_signal_to_its_batch_shell(
    outcome: dict[str, Left], name: str, reason: str, undisturbed: Undisturbed
) -> None:
    job = outcome[name]
    check_finished(job, undisturbed.losses(1, 2) if name == "batch" else job.run.losses)
    assert (job.restarts, job.run.ends[0]) == (1, reason), job.log
    assert (" reach 10.88.0." in job.log) == (name == "batch"), job.log


@pytest.mark.long
@pytest.mark.scenario("interactive")
def test_in_the_shell_of_salloc_the_command_that_continues_is_named_and_no_requeue(outcome: Left) -> None:
    assert outcome.run.ends == ["the deadline"], outcome.log
    assert f"Not requeued; the same command with --run.dir {outcome.run.path} continues" in outcome.log


@pytest.mark.long
@pytest.mark.scenario("suspended")
def test_a_second_job_on_the_run_directory_of_a_suspended_one_is_refused_and_writes_nothing(
    outcome: Suspended, undisturbed: Undisturbed
) -> None:
    assert (outcome.second.state, outcome.second.code) == ("FAILED", 4), outcome.second.log
    (line,) = outcome.second.log.splitlines()[1:]
    holder = r"/run is being written by process \d+ on \w+, started by .* \(Slurm job 1, start 1\), since"
    assert re.search(holder, line)
    assert outcome.second_s < 60
    assert outcome.before == outcome.after
    check_finished(outcome.first, undisturbed.losses(1, 1))
    assert [event["event"] for event in outcome.first.run.history] == ["start", "end"]


@pytest.mark.long
@pytest.mark.scenario("told")
def test_a_job_that_scontrol_does_not_requeue_goes_on_as_a_new_one(outcome: dict[str, Left]) -> None:
    first, second = outcome["unwilling"], outcome["new"]
    assert (first.state, first.restarts) == ("COMPLETED", 0), first.log
    assert "in its place: 'sbatch' '--dependency=afterany:" in first.log
    assert second.state == "COMPLETED", second.log
    assert second.run.steps[-1] == STEPS
    assert len(second.run.starts) == 2


# ---------------------------------------------------------------- failures


def check_rank_killed(left: Left, undisturbed: Undisturbed) -> None:
    check_finished(left, undisturbed.losses(1, 2))
    assert left.restarts == 0, "in the same allocation"
    assert [event["event"] for event in left.run.history if event["event"] != "end"] == [
        "start",
        "crash",
        "start",
    ]
    assert left.reached - left.run.starts[1]["from_step"] <= EVERY


@pytest.mark.long
@pytest.mark.scenario("rank_stopped")
def test_a_stopped_rank_is_named_across_nodes_and_the_job_goes_on_without_it(
    outcome: Left, undisturbed: Undisturbed
) -> None:
    check_rank_killed(outcome, undisturbed)
    assert re.search(r"^0: watch: rank 1 \(n2\) is stopped \(SIGSTOP\): step \d+", outcome.log, re.MULTILINE)
    assert re.search(r"^0:   ranks? 0 waits in \w+ \(step \d+, \w+\)", outcome.log, re.MULTILINE)
    assert re.search(r"^0:   HINT: kill -CONT \d+ on n2", outcome.log, re.MULTILINE)
    (folder,) = (outcome.run.path / "watch").glob("stopped-*")
    assert {path.name for path in folder.iterdir()} >= {"evidence.json", "rank-0.txt", "rank-1.txt"}


@pytest.mark.long
@pytest.mark.scenario("node_lost")
def test_a_lost_node_is_left_out_of_the_next_start(outcome: Left, undisturbed: Undisturbed) -> None:
    check_finished(outcome, undisturbed.losses(1, 2))
    assert outcome.restarts == 1
    assert outcome.run.starts[1]["nodes"] == ["n1", "n3"]
    assert outcome.reached - outcome.run.starts[1]["from_step"] <= EVERY


# ---------------------------------------------------------------- names and networks


@pytest.mark.long
@pytest.mark.scenario("network")
def test_where_node_names_do_not_resolve_the_nodes_meet_by_address(
    outcome: Network, undisturbed: Undisturbed
) -> None:
    """With a command in front of everything, as a container has it."""
    check_finished(outcome.nameless, undisturbed.losses(1, 2))


@pytest.mark.long
@pytest.mark.scenario("network")
def test_a_dry_run_shows_each_node_and_the_command_and_trains_nothing(outcome: Network) -> None:
    left = outcome.checked
    assert left.state == "COMPLETED"
    for node in ("n1", "n2"):
        assert re.search(rf"^{node}: 1 ranks on cpu; Python 3\S+ at \S+; torch 2\.", left.log, re.MULTILINE)
    assert re.search(r"would run: srun .*train\.py --run\.dir \S+ --model\.name mlp", left.log)
    assert not left.run.path.exists()


@pytest.mark.long
@pytest.mark.scenario("preflight")
def test_a_preflight_looks_at_the_jobs_nodes_and_trains_nothing(outcome: dict[str, Left]) -> None:
    left = outcome["fit"]
    assert left.state == "COMPLETED", left.log
    for rank, node in enumerate(("n1", "n2")):
        assert re.search(rf"^0: {node} +{rank} +[\d.]+", left.log, re.MULTILINE), left.log
    assert re.search(r"^0: verdict: fit to train", left.log, re.MULTILINE)
    assert (left.run.path / "doctor" / "doctor.txt").exists()
    assert not left.run.starts


@pytest.mark.long
@pytest.mark.scenario("preflight")
def test_a_node_that_falls_out_fails_the_job_and_is_written_for_sbatch(outcome: dict[str, Left]) -> None:
    left = outcome["sick"]
    assert left.state == "FAILED", left.log
    assert "verdict: 1 node not fit, n2: sbatch --exclude=n2" in left.log
    assert re.search(r"^OUT +n2: does not see what the first node wrote into ", left.log, re.MULTILINE), (
        left.log
    )
    assert "HINT: mount the shared storage there" in left.log
    assert (left.run.path / "doctor" / "exclude").read_text() == "n2\n"
    assert "Traceback" not in left.log
    assert "slurm: not fit to train: " in left.log.splitlines()[-1]


@pytest.mark.long
def test_a_bare_srun_needs_no_script(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """`srun python train.py`, one task a rank: the meeting place follows from Slurm's own variables. Each
    node's own name is 127.0.1.1 there, as on Debian.
    """
    run = Run(tmp_path / "run")
    command = ["srun", "--nodes=2", "--ntasks=2", "python", "train.py", *FLAGS, "--run.dir", str(run.path)]
    with Cluster(tmp_path / "slurm") as cluster:
        for node in cluster.nodes:
            hosts = re.sub(rf"\S+ {node}\n", f"127.0.1.1 {node}\n", (tmp_path / "slurm/hosts").read_text())
            (tmp_path / f"hosts of {node}").write_text(hosts)
            cluster.on_node(node, "mount", "--bind", str(tmp_path / f"hosts of {node}"), "/etc/hosts")
        cluster.run(*command, timeout_s=240)
    assert run.losses == undisturbed.losses(1, 2)
    assert run.starts[0]["launcher"] == "srun"


# ---------------------------------------------------------------- submitit, and through several launchers


@pytest.mark.long
@pytest.mark.scenario("submitted")
def test_submitit_is_requeued_at_its_limit_and_when_preempted(
    outcome: Left, undisturbed: Undisturbed
) -> None:
    check_finished(outcome, undisturbed.losses(2, 2))
    assert outcome.run.ends[0] in ("SIGUSR2", "the deadline")
    assert "SIGTERM" in outcome.run.ends
    assert len(outcome.run.starts) == outcome.restarts + 1
    assert {start["launcher"] for start in outcome.run.starts} == {"submitit (slurm)"}
    assert len(list(outcome.run.path.glob("code/*/train.py"))) == 1


@pytest.mark.scenario("three_launchers")
def test_begun_under_torchrun_gone_on_under_sbatch_ended_under_submitit(
    outcome: Left, undisturbed: Undisturbed
) -> None:
    check_finished(outcome, undisturbed.losses(2, 1))
    launchers = [start["launcher"] for start in outcome.run.starts]
    assert launchers == ["torchrun", "torchrun under Slurm", "submitit (slurm)"]
    assert [start["from_step"] for start in outcome.run.starts] == [0, 13, 26]

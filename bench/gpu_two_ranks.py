"""Parts of bench.gpu with two ranks, on a GPU both on it where NCCL lets them."""

from __future__ import annotations

import re

from bench.gpu_runs import QUIET, VECTORS, Bench, Figures, NotPossible, Ran, apart, need


def both(bench: Bench, name: str, *flags: str) -> Ran:
    """Two ranks, on a GPU both on it, that end well; the first of them."""
    ran = bench.ranks(name, *flags)
    refused(ran)
    need(not any(one.code for one in ran), f"two ranks do not train: {ran[0].end()} | {ran[1].end()}")
    return ran[0]


def refused(ran: list[Ran]) -> None:
    if any(one.code and re.search(r"Duplicate GPU|invalid usage", one.text) for one in ran):
        raise NotPossible("NCCL refuses two ranks on one GPU")


TWO = (*VECTORS, *QUIET, "--speed.compile", "false", "--train.steps", "8")
"""Flags of two ranks."""


def other_counts(bench: Bench) -> Figures:
    """Rank 1 is killed after a save, which ends rank 0; one rank continues the run."""
    exact = ("--precision.param", "fp32", "--run.matmul_precision", "highest", "--train.steps", "300")
    data = ("--data.name", "bench.gpu_data:raising", "--data.args.at", "-1")
    often = ("--checkpoint.every_steps", "20", "--speed.compile", "false")
    flags = (*VECTORS, *QUIET[2:], *often, *data, *exact)
    alone, found = bench.trained("alone", *flags).losses(), dict[str, float]()
    for replicate, shard in ((2, 1), (1, 2)):
        name = f"{replicate} × {shard}"
        mesh = f"--mesh.strategy hsdp --mesh.replicate {replicate} --mesh.shard {shard}".split()
        killed = bench.ranks(name, *flags, *mesh, killed=True)
        refused(killed)
        need(all(ran.code for ran in killed), f"{name}: exit codes {[ran.code for ran in killed]}")
        again = bench.trained(name, *flags)
        need("resumes from step" in again.text, f"{name}: nothing was resumed: {again.end()}")
        found[f"{name}, largest difference"] = apart(again.losses(), alone)
    need(max(found.values()) < 1e-4, f"losses differ: {found}")
    return found


TIMEOUT_S = 20


def timed_out(bench: Bench) -> Figures:
    """Rank 1 stalls and no watch ends it: rank 0 waits in a group of the mesh, with that time-out."""
    mesh = ("--mesh.strategy", "hsdp", "--mesh.replicate", "2", "--mesh.shard", "1")
    stall = ("--data.name", "bench.gpu_data:stalling", "--watch.enabled", "false")
    limit = ("--run.process_group_timeout_s", str(TIMEOUT_S))
    (ran,) = bench.ranks("time-out", *TWO, *mesh, *stall, *limit, limit_s=150, wait_for=1)
    refused([ran])
    need(ran.code != 0, "rank 0 did not fail")
    need(re.search(r"time-?d? ?out", ran.text, re.I) is not None, f"no line has a time-out: {ran.end()}")
    return {"time-out s": TIMEOUT_S, "seconds to the end of rank 0": round(ran.seconds, 1)}


def lost_ranks(bench: Bench) -> Figures:
    """Two ranks, on a GPU both on it: a run, a rank that raises, a rank that stalls."""
    flags = TWO
    data = ("--data.name", "bench.gpu_data:raising", "--data.args.at", "-1")
    both(bench, "both", *flags, *data)
    raised = bench.ranks("raise", *flags, "--data.name", "bench.gpu_data:raising", limit_s=90)
    need(all(ran.code for ran in raised), f"exit codes {[ran.code for ran in raised]}")
    need("broken on purpose" in raised[1].text, raised[1].end())
    stall = ("--data.name", "bench.gpu_data:stalling", "--watch.hang_s", "10")
    stalled = bench.ranks("stall", *flags, *stall, limit_s=150)
    need(all(ran.code for ran in stalled), f"exit codes {[ran.code for ran in stalled]}")
    need("rank 1" in stalled[0].text + stalled[1].text, f"no line names rank 1: {stalled[0].end()}")
    return {
        "seconds to the end of both, raise": round(max(ran.seconds for ran in raised), 1),
        "stall": round(max(ran.seconds for ran in stalled), 1),
    }

"""NCCL's transport as read from its log. The lines have the formats of logs of NCCL 2.18 to 2.28 in public
issues, with other names; none was recorded here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from fsdp.doctor import measure
from fsdp.doctor.__main__ import main
from fsdp.doctor.findings import judge, text
from fsdp.doctor.nccl_log import Transport
from tests.doctor.test_findings import alike, reports

SOCKET = """\
NCCL version 2.18.5+cuda12.0
n0:571:571 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to en,eth,bond
n0:571:571 [0] NCCL INFO Bootstrap : Using enp10s0:10.10.7.1<0>
n0:571:571 [0] NCCL INFO NET/Plugin : No plugin found, using internal implementation
n0:571:580 [0] NCCL INFO NET/IB : No device found.
n0:571:580 [0] NCCL INFO NET/Socket : Using [0]enp10s0:10.10.7.1<0> [1]bond0:10.10.8.1<0>
n0:571:580 [0] NCCL INFO Using network Socket
n0:571:580 [0] NCCL INFO Channel 00/02 :    0   1   2   3
n0:571:580 [0] NCCL INFO Channel 01/02 :    0   1   2   3
n0:571:580 [0] NCCL INFO Channel 00/0 : 3[1] -> 0[0] [receive] via NET/Socket/0
n0:571:580 [0] NCCL INFO Channel 01/0 : 3[1] -> 0[0] [receive] via NET/Socket/1
n0:571:580 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct
n0:571:580 [0] NCCL INFO Connected all rings
n0:571:580 [0] NCCL INFO 2 coll channels, 0 nvls channels, 2 p2p channels, 2 p2p channels per peer
"""
INFINIBAND = """\
NCCL version 2.21.5+cuda12.4
gpu-a:5664:5734 [1] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:172.24.1.7<0>
gpu-a:5664:5734 [1] NCCL INFO Using network IBext_v8
gpu-a:5664:5734 [1] NCCL INFO               + NVL[264.0] - NVS/0
gpu-a:5664:5734 [1] NCCL INFO Channel 07/0 : 0[0] -> 2[0] [receive] via NET/IBext_v8/3/GDRDMA
gpu-a:5664:5734 [1] NCCL INFO Channel 00/0 : 1[1] -> 3[1] [send] via NET/IBext_v8/2/GDRDMA/Shared
gpu-a:5664:5734 [1] NCCL INFO Channel 00/0 : 3[1] -> 2[0] via P2P/CUMEM
gpu-a:5664:5734 [1] NCCL INFO Channel 01/0 : 8[0] -> 15[7] via P2P/IPC/read
gpu-a:5664:5734 [1] NCCL INFO 16 coll channels, 0 collnet channels, 4 nvls channels, 16 p2p channels
"""


def of(log: str, **how: Sequence[str]) -> list[tuple[str, bool]]:
    return [(what, bool(hint)) for what, hint in Transport(log).verdicts(2, **how)]


def test_sockets_and_shared_memory() -> None:
    assert Transport(SOCKET).summary == "NCCL 2.18.5, network Socket, NET/Socket 2, SHM 1"
    assert of(SOCKET) == [
        ("NET/Socket between nodes (enp10s0, bond0): the node has no InfiniBand device", False),
        ("SHM within the node: its GPUs exchange through host memory", True),
    ]
    assert of(SOCKET, host_devices=["mlx5_0"])[0] == (
        "NET/Socket between nodes (enp10s0, bond0) though InfiniBand devices exist (mlx5_0)",
        True,
    )


def test_infiniband_with_direct_access_and_nvlink() -> None:
    assert Transport(INFINIBAND).summary == "NCCL 2.21.5, network IB, NET/IB/GDRDMA 2, P2P 2"
    assert of(INFINIBAND) == [
        ("NET/IB with GPUDirect RDMA between nodes (mlx5_0, mlx5_1)", False),
        ("NVLink within the node", False),
    ]


@pytest.mark.parametrize(
    ("more", "what", "hint"),
    [
        ("NCCL_IB_DISABLE set by environment to 1.", "NCCL_IB_DISABLE is 1", "unset NCCL_IB_DISABLE"),
        ("NCCL_NET set by environment to Socket", "NCCL_NET is Socket", "unset NCCL_NET"),
        ("NCCL_P2P_DISABLE set by environment to 1.", "because NCCL_P2P_DISABLE", "unset NCCL_P2P_DISABLE"),
    ],
)
def test_a_variable_that_causes_it_is_named(more: str, what: str, hint: str) -> None:
    verdicts = Transport(f"{SOCKET}n0:571:571 [0] NCCL INFO {more}\n").verdicts(2)
    assert [its_hint for statement, its_hint in verdicts if what in statement] == [hint]


def test_the_command_reads_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.log").write_text(SOCKET)
    assert main(["--nccl-log", str(tmp_path / "a.log")]) == 0
    said = capsys.readouterr().out
    assert said.startswith("NCCL 2.18.5, network Socket")
    assert "odd  SHM within the node" in said
    assert "     HINT: nvidia-smi topo -m" in said
    assert main(["--nccl-log", str(tmp_path / "absent.log")]) == 2
    assert "absent.log cannot be read (No such file or directory). HINT: " in capsys.readouterr().err
    (tmp_path / "other.log").write_text("step 1\n")
    assert main(["--nccl-log", str(tmp_path / "other.log")]) == 2
    assert (
        "other.log has no line of NCCL. HINT: start the run with NCCL_DEBUG=INFO" in capsys.readouterr().err
    )


def test_the_doctor_names_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.log").write_text(SOCKET)
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    monkeypatch.setattr(measure, "INFINIBAND", tmp_path / "infiniband")
    transport = json.loads(json.dumps(measure.transport_of([tmp_path / "a.log"], 2)))
    examined = reports(alike(range(8), transport=transport))
    verdict = judge(examined)
    assert [finding.what for finding in verdict.findings] == [
        "NET/Socket between nodes (enp10s0, bond0) though InfiniBand devices exist (mlx5_0)",
        "SHM within the node: its GPUs exchange through host memory",
    ]
    assert verdict.fit
    assert "rank 0: NCCL 2.18.5, network Socket, NET" in text(examined, verdict, 1.0)


def test_nothing_is_recorded_on_a_cpu_or_over_a_persons_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    with measure.recorded_transport(False) as folder:
        assert folder is None
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    with measure.recorded_transport(True) as folder:
        assert folder is None
    monkeypatch.delenv("NCCL_DEBUG")
    with measure.recorded_transport(True) as folder:
        assert os.environ["NCCL_DEBUG"] == "INFO"
        assert folder is not None
        assert os.environ["NCCL_DEBUG_FILE"].startswith(str(folder))
    assert "NCCL_DEBUG" not in os.environ

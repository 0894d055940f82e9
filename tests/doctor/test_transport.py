"""NCCL's transport as read from its log. The lines have the formats of logs of NCCL 2.18 to 2.28 in public
issues, with other names; none was recorded here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp.doctor import checks
from fsdp.doctor.__main__ import main

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


def transport(tmp_path: Path, log: str) -> dict[str, str]:
    (tmp_path / "a.log").write_text(log)
    return dict(checks.transport_of(tmp_path / "a.log")[1])


def test_each_transport_is_named_and_has_a_hint_where_it_is_odd(tmp_path: Path) -> None:
    verdicts = transport(tmp_path, SOCKET)
    assert [text[:9] for text in verdicts] == ["NET/Socke", "SHM withi"]
    assert [bool(hint) for hint in verdicts.values()] == [False, True], "the node has no InfiniBand device"
    disabled = transport(tmp_path, SOCKET.replace("NET/IB : No device found.", ""))
    assert "unset NCCL_IB_DISABLE" in next(iter(disabled.values()))
    direct = transport(tmp_path, INFINIBAND)
    assert list(direct.values()) == ["", ""]
    assert "GPUDirect RDMA" in next(iter(direct))
    through_host = transport(tmp_path, INFINIBAND.replace("/GDRDMA", ""))
    assert "nvidia_peermem" in next(iter(through_host.values()))


def test_the_command_reads_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.log").write_text(SOCKET)
    assert main(["--nccl-log", str(tmp_path / "a.log")]) == 0
    said = capsys.readouterr().out
    assert said.startswith("NCCL version 2.18.5, NET/Socket 2, SHM 1")
    assert "odd  SHM within the node" in said
    assert "     HINT: unset NCCL_P2P_DISABLE; nvidia-smi topo -m" in said
    assert main(["--nccl-log", str(tmp_path / "absent.log")]) == 2
    assert "absent.log cannot be read (No such file or directory). HINT: " in capsys.readouterr().err
    (tmp_path / "other.log").write_text("step 1\n")
    assert main(["--nccl-log", str(tmp_path / "other.log")]) == 2
    assert (
        "other.log has no line of NCCL. HINT: start the run with NCCL_DEBUG=INFO" in capsys.readouterr().err
    )

"""`shardwise calibrate topology`: from the text of nvidia-smi to a file that `plan` reads."""

import io
import json

import pytest

from shardwise.cli.main import main
from shardwise.cluster import Cluster

PAIR = "\tGPU0\tGPU1\tNIC0\tCPU Affinity\nGPU0\t X \tNV12\tPHB\t0-63\nGPU1\tNV12\t X \tPHB\t0-63\nNIC0\tPHB\tPHB\t X \n"


@pytest.fixture
def table(tmp_path):
    file = tmp_path / "topo.txt"
    file.write_text(PAIR)
    return str(file)


def test_the_file_that_it_prints_is_one_that_plan_reads(table, tmp_path, capsys):
    assert main(["calibrate", "topology", table, "--device", "A100-80GB-PCIe"]) == 0
    printed = capsys.readouterr().out
    assert "# NV12: 1 pair of GPUs, over 12 NVLinks" in printed
    out = tmp_path / "node.toml"
    assert main(["calibrate", "topology", table, "--device", "A100-80GB-PCIe", "--out", str(out)]) == 0
    assert out.read_text() == printed and f"--cluster {out}" in (told := capsys.readouterr().out)
    assert "300 GB/s a device" in told
    assert Cluster.parse(str(out)).intra.bandwidth == 300e9
    assert main(["plan", "llama-3.2-1b", "--cluster", str(out), "--seq", "1024", "--batch", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranked"]


def test_standard_input_and_json(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("GPU 0: NVIDIA H100 PCIe (UUID: GPU-1)\n" + PAIR))
    assert main(["calibrate", "topology", "-", "--nodes", "2", "--nic-gbits", "400", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cluster"] == "2x2xH100-PCIe" and found["paths"] == {"NV12": 1}
    assert (found["inter"]["bandwidth"], found["shared_nics"]) == (50e9, 1), "one NIC for two GPUs"

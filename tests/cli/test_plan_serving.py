"""`shardwise plan --serve`: what it prints, and what belongs to training."""

import json
import re
import subprocess

import pytest

from harness.cases import from_table
from shardwise.cli.main import main

SERVE = ["plan", "llama-3-70b", "--cluster", "8xH100", "--serve", "--prompt", "1000", "--output", "200",
         "--concurrency", "32"]  # fmt: skip


def test_the_tables_and_what_was_weighed(capsys):
    assert main([*SERVE, "--all"]) == 0
    out = capsys.readouterr().out
    for words in (
        "deployments", "first token", "per token", "tokens/s against time per token", "quantised on fewer or split",
        "gathering weights, at best", "faster than tensor parallelism from about", "fp8",
    ):  # fmt: skip
        assert words in out


@pytest.mark.parametrize("by", ["throughput", "cost", "pareto"])
def test_json_has_the_same(by, capsys):
    assert main([*SERVE, "--by", by, "--top", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["ranked"]) == 4 and found["by"] == by and found["considered"] >= found["fitting"] > 4
    for one in found["ranked"]:
        assert one["bytes"] <= found["usable_bytes"] and one["first_token_seconds"] > one["token_seconds"] > 0
        assert one["tokens_per_second_per_device"] * one["devices"] == pytest.approx(one["tokens_per_second"])


def test_tensor_parallelism_over_pcie_is_warned_of(capsys):
    arguments = ["plan", "llama-2-70b", "--serve", "--prompt", "512", "--output", "128", "--concurrency", "1"]
    assert main([*arguments, "--cluster", "4xA100-80GB-PCIe"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "warning: tp=4 runs over PCIe, through the host, not NVLink: " in out
    assert "of the time of a token is its communication" in out
    assert main([*arguments, "--cluster", "4xA100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == []


def test_what_is_not_given_is_assumed_and_fits_the_model(capsys):
    for model, prompt in (("llama-3-8b", 1024), ("gpt2", 768)):
        assert main(["plan", model, "--cluster", "1xL40S", "--serve", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["workload"]["prompt"] == prompt and found["workload"]["concurrency"] == 64
        assert [note.split()[0] for note in found["assumed"]] == ["--prompt", "--output", "--concurrency"]
    assert main(["plan", "gpt2", "--cluster", "1xL40S", "--serve", "--prompt", "1000"]) == 0
    assert "assumed: --output 24" in capsys.readouterr().out


@from_table
def test_what_does_not_fit_names_what_would(words, way, capsys):
    asked = ["plan", *words.split(), "--serve"]
    assert main(asked) == 2
    said = capsys.readouterr().err
    assert "does not fit" in said and said.strip().endswith(way)
    if "take " in way:
        asked[asked.index("--cluster") + 1] = way.rpartition("take ")[2]
        assert main(asked) == 0


def test_bounds_of_latency_choose_the_clients_and_the_deployment(capsys):
    asked = SERVE[:5]
    assert main([*asked, "--ttft", "500ms", "--tpot", "0.02s", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranked"] and found["workload"]["concurrency"] > 1
    for one in found["ranked"]:
        assert one["first_token_seconds"] <= 0.5 and one["token_seconds"] <= 0.02
    assert [(one["name"], one["seconds"]) for one in found["bounds"]] == [("ttft", 0.5), ("tpot", 0.02)]
    alone = [one["best"]["tokens_per_second"] for one in found["bounds"]]
    assert min(alone) >= found["ranked"][0]["tokens_per_second"] and max(alone) > min(alone)
    assert main([*asked, "--ttft", "1ms"]) == 2
    assert "no deployment keeps --ttft 1.00 ms: the shortest for --ttft is " in capsys.readouterr().err
    assert main([*SERVE, "--tpot", "10ms"]) == 2
    assert "with 32 clients no deployment keeps" in capsys.readouterr().err
    assert main([*asked, "--rate", "2", "--tpot", "1ms"]) == 2
    said = capsys.readouterr().err
    assert "at 2 requests a second no deployment keeps" in said and "; leave out --rate for" in said
    assert main([*asked, "--ttft", "soon"]) == 2
    assert "--ttft soon: give a time, such as 200ms" in capsys.readouterr().err


@pytest.mark.parametrize(("engine", "role"), [("vllm", "NixlConnector"), ("sglang", "--disaggregation-mode decode")])
@pytest.mark.parametrize("cluster", ["8xH100", "2x8xH100"])
def test_instances_for_prefill_and_decoding_are_written(engine, role, cluster, tmp_path, capsys):
    file = tmp_path / "apart.sh"
    asked = ["plan", "llama-3.1-70b", "--cluster", cluster, "--serve", "--emit", engine, "--disaggregated"]
    assert main([*asked, "--out", str(file), "--json"]) == 0
    pair = json.loads(capsys.readouterr().out)["disaggregated"]
    text = file.read_text()
    assert subprocess.run(["bash", "-n", str(file)], check=False).returncode == 0
    devices = re.findall(r"CUDA_VISIBLE_DEVICES=(\S+)", text)
    assert sum(len(each.split(",")) for each in devices) == pair["devices"] and role in text
    assert len(re.findall(r"meta-llama/Llama-3.1-70B", text)) == len(devices) >= 2
    ports = re.findall(r"# \w+ on node (\d).*?--port (\d+)", text, re.DOTALL)
    assert len(set(ports)) == len(devices)
    if engine == "sglang":  # one port of the handshake for each instance that reads prompts, and it is a number
        reading = text.count("--disaggregation-mode prefill")
        assert len(re.findall(r"--disaggregation-bootstrap-port \d+", text)) == reading == text.count("bootstrap-port")
    assert main([*asked[:4], "--emit", "vllm", "--disaggregated"]) == 2
    assert "--serve" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_instances_that_exceed_a_node_are_started_on_each_of_theirs(engine, tmp_path, capsys):
    file = tmp_path / "apart.sh"
    asked = ["plan", "deepseek-v3", "--cluster", "4x8xH200", "--serve", "--emit", engine, "--disaggregated"]
    assert main([*asked, "--out", str(file), "--json"]) == 0
    pair, text = json.loads(capsys.readouterr().out)["disaggregated"], file.read_text()
    assert subprocess.run(["bash", "-n", str(file)], check=False).returncode == 0
    assert [int(node) for node in re.findall(r"on node (\d): ", text)] == [0, 1, 2, 3] and pair["devices"] == 32
    assert "NODE_RANK" not in text and "HEAD_ADDRESS" not in text and "every node" not in text and "ray" not in text
    if engine == "sglang":
        assert re.findall(r"--node-rank (\d) .*?--dist-init-addr \"(\S+?):", text, re.DOTALL) == [
            ("0", "$HOST0"), ("1", "$HOST0"), ("0", "$HOST2"), ("1", "$HOST2")
        ]  # fmt: skip
    else:
        assert text.count("--headless") == 2 == text.count("--host 0.0.0.0")
        assert "--headless --nnodes 2 --node-rank 1 --master-addr $HOST0" in text
        assert (
            "--headless --data-parallel-size-local 2 --data-parallel-start-rank 2 --data-parallel-address $HOST2"
            in text
        )

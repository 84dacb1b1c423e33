"""Which links a prediction is made for: one line, the same in JSON, and --network in place of the usual ones."""

import json

import pytest

from harness.cases import from_table, table

SERVE = "--serve --prompt 512 --output 128 --concurrency 16"
COMMANDS = table(__file__, "COMMANDS")


@pytest.mark.parametrize("words", COMMANDS)
def test_every_plan_names_its_links(words, command):
    words = words.format("2x8xH100")
    code, out, err = command(*words.split())
    (line,) = [line for line in out.splitlines() if line.startswith("links: ")]
    assert (code, err) == (0, "") and "NVLink4, 450 GB/s per device inside a node" in line and "NDR400" in line
    assert "assumed, usual for H100-80GB-SXM" in out.replace("\n", " ")
    links = json.loads(command(*words.split(), "--json")[1])["cluster_links"]
    assert links["inside_node"]["name"] == "NVLink4" and links["inside_node"]["assumed"]
    between = links["between_nodes"]
    assert (between["name"], between["bandwidth"], between["nics_per_node"]) == ("NDR400", 50e9, 8)
    assert between["assumed"] and between["kind"] == "network" and "InfiniBand" in between["source"]
    links = json.loads(command(*words.split(), "--network", "100Gb", "--json")[1])["cluster_links"]
    between = links["between_nodes"]
    assert (between["name"], between["bandwidth"], between["nics_per_node"]) == ("100Gb", 12.5e9, 1)
    assert not between["assumed"] and links["inside_node"]["assumed"]


def test_explain_names_them_too(command):
    words = ("explain", "vllm serve Llama-3.2-1B -tp 8 -pp 2", "--cluster", "2x8xA100", "--network", "EFA")
    code, out, err = command(*words)
    assert (code, err) == (0, "") and "EFA, 12.5 GB/s per NIC, 4 per node, between nodes" in out
    assert json.loads(command(*words, "--json")[1])["cluster_links"]["between_nodes"]["nics_per_node"] == 4


def test_a_slower_network_is_dearer(command):
    words = "estimate llama-3-8b --layout dp=16 --cluster 2x8xH100 --seq 1024 --batch 16 --json"
    seconds = [
        json.loads(command(*words.split(), *network)[1])["time"]
        for network in ((), ("--network", "8x400Gb"), ("--network", "400Gb"), ("--network", "100Gb"))
    ]
    assert seconds[0] == seconds[1] < seconds[2] < seconds[3]


def test_trays_of_an_nvl72_are_said_to_be_one_node(command):
    words = ("estimate", "llama-3.2-1b", "--layout", "dp=8", "--seq", "1024", "--batch", "64", "--cluster")
    out = command(*words, "2x4xGB200")[1].replace("\n", " ")
    assert "machines on one NVLink switch are one node: --cluster 8xGB200-NVL72" in out
    assert "one node" not in command(*words, "8xGB200")[1] and "one node" not in command(*words, "1x8xH100")[1]
    assert "one node" not in command(*words, "2x4xGB200", "--network", "NDR")[1]


def test_one_device_has_no_links(command):
    words = ["estimate", "llama-3.2-1b", "--layout", "dp=1", "--cluster", "1xH100", "--seq", "1024", "--batch", "4"]
    assert "links: " not in command(*words)[1]
    links = json.loads(command(*words, "--json")[1])["cluster_links"]
    assert links == {"inside_node": None, "between_nodes": None}


@from_table
def test_sequences_beyond_a_models_positions_are_said(words, command):
    said = "sequences of 8,192 tokens are longer than the 4,096 positions of llama-2-7b"
    assert said in command(*words.split())[1].replace("\n", " ")
    assert any(said in note for note in json.loads(command(*words.split(), "--json")[1])["notes"])
    shorter = words.replace("8192", "4096")
    assert "positions of" not in command(*shorter.split())[1]

"""`shardwise explain`: what is printed, the JSON, and what is refused."""

import json

import pytest

from harness.cases import from_table
from shardwise.cli.main import main

DEEPSPEED = {
    "train_batch_size": 512,
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "stage3_param_persistance_threshold": 1e6},
}
MEGATRON = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4 --num-layers 24 --hidden-size 1024 "
    "--num-attention-heads 16 --vocab-size 50257 --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 2 "
    "--global-batch-size 16 --bf16 --use-distributed-optimizer"
)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(DEEPSPEED))
    return str(path)


def test_everything_is_said(config, capsys):
    assert main(["explain", config, "--cluster", "8x8xH100", "--model", "llama-3-8b", "--seq", "4096"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "DeepSpeed on 64 GPUs: dp=64,zero=3,micro=2" in out
    assert "ZeRO-3 over 64 ranks: parameters, gradients and optimizer state are sharded across 8 nodes" in out
    assert "gradient_clipping is not given" in out
    assert "What a step of llama-3-8b takes" in out and "optimizer state" in out and "all_gather over dp" in out
    assert "zero_optimization.overlap_comm" in out
    assert "(did you mean stage3_param_persistence_threshold?)" in out


def test_the_estimate_is_the_project_s(config, capsys):
    from shardwise import Cluster, Layout, Workload, estimate
    from shardwise.model.catalog import get

    asked = ["explain", config, "--cluster", "8x8xH100", "--model", "llama-3-8b", "--seq", "4096", "--json"]
    assert main(asked) == 0
    found = json.loads(capsys.readouterr().out)
    report = estimate(get("llama-3-8b"), Layout.parse(found["layout"]), Workload(4096, 512), Cluster.parse("8x8xH100"))
    assert found["outlook"]["report"]["roles"] == json.loads(json.dumps(report.to_json()["roles"]))
    assert found["batch"] == 512 and found["ranks"] == 64 and found["outlook"]["not_estimated"] is None


def test_without_a_model_it_says_what_it_would_take(config, capsys):
    assert main(["explain", config, "--ranks", "64"]) == 0
    assert "What it will do, --model and --seq would tell." in capsys.readouterr().out


def test_the_model_of_the_arguments(capsys):
    assert main(["explain", MEGATRON]) == 0
    out = capsys.readouterr().out
    assert "Megatron-LM on 8 GPUs: dp=2,tp=4,zero=1,micro=2,grads=fp32" in out and "the model of these arguments" in out


def test_words_after_two_dashes(capsys):
    assert (
        main(["explain", "--cluster", "8xH100", "--", "vllm", "serve", "meta-llama/Llama-3.1-70B-Instruct", "-tp", "8"])
        == 0
    )
    out = capsys.readouterr().out
    assert "vLLM on 8 GPUs: tp=8" in out and "llama-3.1-70b" in out and "of weights" in out


def test_what_fits_a_server(capsys):
    asked = ["explain", "vllm serve meta-llama/Llama-3.1-70B -tp 4 --max-model-len 8192 --kv-cache-dtype fp8"]
    assert main([*asked, "--cluster", "4xH100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["outlook"]
    # 8 key/value heads of 128 in 80 layers, keys and values of a byte each, over 4 GPUs.
    assert found["cache_bytes_per_token_per_gpu"] == 2 * 80 * 8 * 128 / 4
    norms = 2 * 161 * 8192 * 3 / 4  # every rank has them whole
    assert found["weight_bytes_per_gpu"] == 2 * 70_553_706_496 / 4 + norms
    memory = 81089 * 2**20
    assert 3e9 < found["workspace_bytes_per_gpu"] < 1e10
    assert found["cache_tokens"] == int(
        (0.9 * memory - found["weight_bytes_per_gpu"] - found["workspace_bytes_per_gpu"]) / 40960
    )
    assert found["model"] == "llama-3.1-70b" and found["longest_sequences"] == found["cache_tokens"] // 8192


def test_the_batch_of_the_command_line_comes_first(config, capsys):
    step = "--ranks 64 --model llama-3-8b --seq 2048 --batch 128 --micro 1"
    asked = ["explain", config, *step.split()]
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["layout"], found["batch"], found["seq"]) == ("dp=64,zero=3", 128, 2048)


AUTO = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}}


def test_doubts_are_in_the_first_line_and_strict_rejects_them(command, tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(AUTO))
    asked = ("explain", tmp_path / "ds.json", "--ranks", 8)
    code, out, _ = command(*asked)
    assert code == 0 and out.startswith("DeepSpeed on 8 GPUs: dp=8,zero=3; in doubt: bf16 are auto")
    code, _, err = command(*asked, "--strict")
    assert code == 2 and "--strict: bf16" in err and err.count("\n") == 1
    assert command(*asked, "--strict", "--precision", "bf16")[0] == 0
    code, out, _ = command("explain", "vllm serve x -tp 2 --data-paralel-size 4")
    assert code == 0 and "did you mean --data-parallel-size?" in out.split("What it is")[0]


def priced(command, words, *more):
    code, out, err = command("explain", words, "--json", *more)
    assert code == 0, err
    role = json.loads(out)["outlook"]["report"]["roles"][0]
    return role["bytes"] | {"peak": role["peak_bytes"]}


def test_states_in_16_bits_are_priced(command):
    words = "torchtitan --training.dtype bfloat16 --training.seq_len 2048 --training.local_batch_size 1 "
    words += "--parallelism.tensor_parallel_degree 8 --activation_checkpoint.mode full"
    held = priced(command, words, "--cluster", "8xH100", "--model", "qwen3-32b")
    # The case's published measurement is 32.8 GiB.
    assert held["optimizer"] == 2 * held["parameters"] == 2 * held["gradients"]
    assert held["peak"] / 2**30 == pytest.approx(32.8, rel=0.05)


def test_gradients_are_as_wide_as_said(command):
    words = "torchrun --nproc_per_node 8 pretrain_gpt.py --bf16 --micro-batch-size 1 --seq-length 4096"
    model = ("--model", "llama-3-8b", "--cluster", "8xH100")
    wide, narrow = (priced(command, f"{words} {flag}", *model) for flag in ("", "--grad-reduce-in-bf16"))
    assert wide["gradients"] == 2 * narrow["gradients"] == 2 * narrow["parameters"]


def test_states_that_nothing_counts_are_not_priced(command, tmp_path):
    zero = {"stage": 3, "offload_param": {"device": "cpu"}}
    told = {"train_micro_batch_size_per_gpu": 1, "train_batch_size": 8, "bf16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(told | {"zero_optimization": zero}))
    code, out, _ = command("explain", tmp_path / "ds.json", "--cluster", "8xH100", "--model", "gpt2", "--seq", "512")
    assert code == 0 and "is not priced: parameters are offloaded" in " ".join(out.split()) and "peak" not in out


def test_recomputed_modules_are_priced(command):
    def peak(modules):
        words = "torchrun --nproc_per_node 8 pretrain_gpt.py --use-distributed-optimizer --bf16 --seq-length 4096 "
        words += f"--recompute-granularity selective --recompute-modules {modules} --micro-batch-size 1"
        code, out, err = command("explain", words, "--model", "qwen3-30b-a3b", "--json", "--cluster", "8xH100")
        assert code == 0, err
        return json.loads(out)["outlook"]["report"]["roles"][0]["peak_bytes"]

    assert peak("mlp moe") < peak("core_attn") and peak("core_attn mlp moe") < peak("mlp moe") + 1


@pytest.mark.parametrize(("cluster", "said"), [("8xL4", True), ("8xH100", False)])
def test_tensor_parallel_over_pcie_is_warned_of(command, cluster, said):
    training = "pretrain_gpt.py --tensor-model-parallel-size 2 --seq-length 512 --micro-batch-size 1 --bf16"
    for words in (training, "vllm serve x -tp 2 --max-model-len 512"):
        code, out, err = command("explain", words, "--cluster", cluster, "--model", "gpt2")
        assert code == 0 and ("warning: tp=2 runs over PCIe" in " ".join(out.split())) == said, (out, err)


def test_what_binds_offloading_is_said_without_a_profile_of_the_engine(command, tmp_path):
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    told = {"train_micro_batch_size_per_gpu": 1, "train_batch_size": 64, "bf16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(told | {"zero_optimization": zero}))
    code, out, _ = command(
        "explain", tmp_path / "ds.json", "--model", "llama-3-8b", "--cluster", "8xH100", "--seq", 4096
    )
    words = " ".join(out.split())
    assert code == 0 and "as shardwise would run it, offloading: the host's cores bind, busy for" in words
    assert "no time of a step" in words


SERVED = "vllm serve meta-llama/Llama-3.3-70B-Instruct -tp 8 --max-model-len 8192"


@pytest.fixture
def outlook(command):
    def of(words, cluster="8xH100", *more):
        code, out, err = command("explain", words, "--cluster", cluster, "--json", *more)
        assert code == 0, err
        return json.loads(out)["outlook"]

    return of


def test_flags_of_a_server_change_its_numbers(outlook):
    usual = outlook(SERVED)
    offloaded = outlook(f"{SERVED} --cpu-offload-gb 10")
    assert usual["weight_bytes_per_gpu"] - offloaded["weight_bytes_per_gpu"] == 10 * 2**30
    assert offloaded["cache_bytes_per_gpu"] - usual["cache_bytes_per_gpu"] == 10 * 2**30
    assert outlook(f"{SERVED} --kv-cache-memory-bytes 10G")["cache_tokens"] == 10 * 2**30 / (2 * 80 * 128 * 2)
    assert outlook(f"{SERVED} --num-gpu-blocks-override 1000")["cache_tokens"] == 16_000
    assert outlook(f"{SERVED} --num-gpu-blocks-override 1000 --block-size 32")["cache_tokens"] == 32_000
    sglang = "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B"
    assert outlook(f"{sglang} --max-total-tokens 5000")["cache_tokens"] == 5000


def test_contexts_cut_over_ranks_hold_more_tokens(command, outlook):
    latent = "vllm serve deepseek-ai/DeepSeek-R1 -tp 8 --max-model-len 8192"
    whole, cut = (outlook(f"{latent} -dcp {n}", "8xH200") for n in (1, 8))
    assert cut["cache_bytes_per_token_per_gpu"] == whole["cache_bytes_per_token_per_gpu"] / 8
    found = outlook(f"{SERVED} --prefill-context-parallel-size 2", "16xH100")
    assert found["cache_bytes_per_token_per_gpu"] == outlook(SERVED)["cache_bytes_per_token_per_gpu"] / 2
    code, _, err = command("explain", f"{SERVED} -dcp 2", "--cluster", "8xH100")
    assert code == 2 and "its cache has 8 heads" in err


@from_table
def test_a_sequence_that_does_not_fit_is_an_error_with_the_flag(command, words, flag):
    code, _, err = command("explain", words, "--cluster", "1xL4")
    assert code == 2 and f"less than one sequence of 131,072: give {flag}" in err


def test_a_folder_has_its_own_configuration(outlook, tmp_path):
    sizes = {"vocab_size": 1000, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
    sizes |= {"model_type": "llama", "intermediate_size": 1024, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"num_key_value_heads": 8, "hidden_act": "silu"}))
    assert outlook(f"vllm serve {tmp_path}", "1xL4")["cache_bytes_per_token_per_gpu"] == 2 * 4 * 512 * 2


def test_tensorrt_llm_shares_what_weights_leave(outlook, tmp_path):
    pytest.importorskip("yaml")
    table = {"max_num_tokens": 2048, "max_batch_size": 8, "kv_cache_config": {"free_gpu_memory_fraction": 0.5}}
    (tmp_path / "x.yaml").write_text(json.dumps(table))
    found = outlook(str(tmp_path / "x.yaml"), "1xH100", "--model", "llama-3-8b")
    free = 81089 * 2**20 - found["weight_bytes_per_gpu"] - found["workspace_bytes_per_gpu"]
    assert found["cache_bytes_per_gpu"] == pytest.approx(free / 2)


@from_table
def test_a_name_that_states_a_quantizer_is_never_16_bits(outlook, words, weights):
    found = outlook(f"vllm serve {words}", "8xB300")
    assert (found and found["weight_bytes_per_gpu"] / 1e9) == (weights and pytest.approx(weights, rel=0.02))


@pytest.mark.parametrize("method", ["compressed-tensors", "gguf", "torchao", "experts_int8", "quark"])
@pytest.mark.parametrize("engine", ["vllm serve", "python -m sglang.launch_server --model-path"])
def test_a_quantizer_whose_files_say_the_width_needs_them(command, method, engine):
    code, _, err = command("explain", f"{engine} meta-llama/Llama-3.1-8B --quantization {method}")
    assert code == 2 and f"--quantization {method}: the files of the model say" in err
    words = (f"{engine} meta-llama/Llama-3.1-8B-GPTQ", "--model", "llama-3.1-8b")
    assert command("explain", *words)[0] == 0 and command("explain", *words, "--strict")[0] == 2


def test_replicas_of_vllm_split_experts(command, outlook):
    """vLLM: fused_moe/config.py, FusedMoEParallelConfig.make flattens tensor over data parallelism."""
    bare, spread = (outlook(f"vllm serve Qwen/Qwen3-30B-A3B -dp 4 {more}") for more in ("", "--enable-expert-parallel"))
    assert bare["weight_bytes_per_gpu"] == spread["weight_bytes_per_gpu"] < 20e9
    assert outlook("vllm serve mistralai/Mixtral-8x7B-v0.1 -dp 16", "2x8xH100")["weight_bytes_per_gpu"] < 20e9
    assert outlook("vllm serve Qwen/Qwen3-8B -dp 2")["weight_bytes_per_gpu"] > 16e9
    code, _, err = command("emit", "qwen3-30b-a3b", "--layout", "dp=4", "--for", "vllm")
    assert code == 2 and "ep=1: its replicas share experts; nearest that it can: dp=4,ep=4" in err

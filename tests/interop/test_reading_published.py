"""Inputs as people publish them: each gives the layout that its engine would run, or says what is in doubt."""

import json

import pytest

from harness.cases import from_table, table
from shardwise.errors import UserError
from shardwise.interop import read

SIZES = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32"
MOE = (
    f"--tensor-model-parallel-size 2 --expert-model-parallel-size 4 --num-experts 8 {SIZES} --bf16 --sequence-parallel"
)
DS_AUTO = json.dumps(
    {
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3},
    }
)  # fmt: skip
TP8 = table(__file__, "TP8")
V01 = table(__file__, "V01")


@pytest.fixture
def reading(tmp_path):
    def of(name, text, ranks=None, files=(), **more):
        if name.endswith((".yaml", ".yml")):
            pytest.importorskip("yaml")
        for other, content in dict(files).items():
            (tmp_path / other).write_text(content)
        (tmp_path / name).write_text(text)
        return read([str(tmp_path / name)], ranks, **more)

    return of


def run(flags, launcher="torchrun --nproc_per_node 8"):
    return f"{launcher} pretrain_gpt.py --micro-batch-size 1 {SIZES} --bf16 {flags}\n"


def test_values_by_branch_are_no_value(reading):
    script = "case $S in\n 7B) T=2 ;;\n 70B) T=8 ;;\nesac\n" + run("--tensor-model-parallel-size $T")
    with pytest.raises(UserError, match="a variable that nothing here sets"):
        reading("train.sh", script)


@from_table
def test_experts_are_split_as_all_else(flags, keys):
    assert f",{keys},sp" in str(read([f"pretrain_gpt.py --micro-batch-size 1 {MOE} {flags}"], 32).layout)


@from_table
def test_recomputed_modules_are_as_listed(modules, recompute, beside):
    found = read([f"pretrain_gpt.py --recompute-granularity selective --recompute-modules {modules} --bf16"], 8)
    assert (found.layout.recompute, [*found.recomputed]) == (recompute, beside)


RL = (
    "python3 train.py --actor-num-nodes 2 --actor-num-gpus-per-node 8 --tensor-model-parallel-size 4 "
    "--pipeline-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4 "
    "--sglang-mem-fraction-static 0.7"
)


@pytest.mark.parametrize("more", ["", "--expert-tensor-parallel-size 1", "--rollout-num-gpus 8 --vllm-x 1"])
def test_the_training_beside_rollouts(more):
    found = read([f"{RL} {more}"])
    assert found.engine == "Megatron-LM" and found.layout.ranks == 16
    assert (found.layout.tp, found.layout.pp, found.layout.ep) == (4, 2, 4)
    assert any("beside rollouts" in one for one in found.unsettled)


@from_table
def test_torchtitan_follows_its_file(reading, name, script):
    found = reading(name, script, 8 if name == "a.toml" else None, {"tp8.toml": TP8})
    assert (found.engine, str(found.layout)) == ("torchtitan", "tp=8,sp,recompute=full")
    assert (found.seq, found.batch, found.model) == (2048, 1, "qwen3-32b")
    assert found.narrow_state and not found.unpriced


def test_flags_come_before_the_file(reading):
    script = "torchrun --nproc_per_node=8 -m torchtitan.train --job.config_file t.toml "
    script += "--parallelism.tensor_parallel_degree 4"
    assert str(
        reading("a.sh", script, None, {"t.toml": TP8.replace("shard_degree = 1", "shard_degree = 2")}).layout
    ) == ("dp=2,tp=4,zero=3,sp,recompute=full")
    with pytest.raises(UserError, match="cannot read"):
        reading("a.sh", script.replace("t.toml", "none.toml"))


def test_a_program_with_deepspeed_s_own_flags(reading):
    file = {"ds.json": DS_AUTO.replace('"enabled": "auto"', '"enabled": true', 1)}
    for flags in ("--deepspeed --deepspeed_config ds.json --lr 1", "--deepspeed ds.json"):
        found = reading("run.sh", f"N=4\ndeepspeed --num_gpus=$N main.py {flags}\n", None, file)
        assert (found.engine, str(found.layout)) == ("DeepSpeed", "dp=4,zero=3")


def test_torchtitan_of_0_1(reading):
    found = reading("old.toml", V01, 256)
    # Its local batch is cut into as many micro-batches as stages.
    assert str(found.layout) == "dp=8,tp=8,pp=4,zero=2,sp,micro=2,recompute=full,grads=fp32" and found.batch == 64
    more = V01.replace("_degree = 4", "_degree = 4\npipeline_parallel_microbatches = 8")
    assert reading("old.toml", more, 256).layout.micro == 1
    assert (
        reading("old.toml", V01.replace("[experimental]", "[experimental]\ncontext_parallel_degree = 2"), 256).layout.cp
        == 2
    )
    flags = "--training.tensor_parallel_degree 2 --experimental.pipeline_parallel_degree 1 --training.batch_size 4"
    assert (
        str(read([f"torchrun --nproc_per_node 8 train.py {flags}"]).layout) == "dp=4,tp=2,zero=3,sp,micro=4,grads=fp32"
    )


def test_several_servers_are_said(reading):
    serve = "vllm serve x --tensor-parallel-size {} --port {} &\n"
    found = reading("two.sh", serve.format(4, 8100) + serve.format(8, 8200))
    assert found.layout.tp == 4 and any("vLLM on 8 GPUs: tp=8" in one for one in found.unsettled)
    found = reading("mixed.sh", "pip install vllm\nvllm bench serve --model x\n" + serve.format(2, 1))
    assert str(found.layout) == "tp=2" and not found.unsettled
    loop = "for T in 2 4; do\n" + serve.format("$T", 1) + "done\n"
    with pytest.raises(UserError, match="a variable that nothing here sets"):
        reading("loop.sh", loop + serve.format(8, 1))
    assert any("which is not read" in one for one in reading("loop.sh", serve.format(8, 1) + loop).unsettled)


def test_python_that_says_no_number(reading):
    with pytest.raises(UserError, match="a variable that nothing here sets"):
        reading("serve.py", "from vllm import LLM\nLLM(model='x', tensor_parallel_size=args.tp)\n")
    with pytest.raises(UserError, match="without a call that is known"):
        reading("train.py", "import torch\n")


TRTLLM = """
enable_attention_dp: true
tensor_parallel_size: 8
moe_expert_parallel_size: 8
max_batch_size: 512
kv_cache_config: {dtype: fp8, free_gpu_memory_fraction: 0.8}
"""


def test_tensorrt_llm(reading):
    found = reading("api.yml", TRTLLM)
    assert (found.engine, str(found.layout)) == ("TensorRT-LLM", "dp=8,ep=8") and found.served.sequences == 512
    assert found.served.cache == "float8_e4m3fn"
    found = reading("api.yml", TRTLLM.replace("attention_dp: true", "attention_dp: false"))
    assert str(found.layout) == "tp=8,ep=8"
    command = "trtllm-serve x/y --tp_size 4 --extra_llm_api_options more.yml"
    found = reading("serve.sh", command, None, {"more.yml": "moe_expert_parallel_size: 4\n"})
    assert (found.model, str(found.layout)) == ("x/y", "tp=4,ep=4")


AXOLOTL = table(__file__, "AXOLOTL")


def test_axolotl(reading):
    found = reading("axolotl.yaml", AXOLOTL)
    assert (found.engine, str(found.layout)) == ("Axolotl", "dp=2,tp=2,cp=2,zero=3,grads=fp32")
    assert (found.seq, found.batch, found.model) == (8192, 2, "Qwen/Qwen3-8B")
    kept = AXOLOTL.replace("forward: true", "forward: false").replace("bf16: true", "bf16: auto")
    assert str(reading("a.yaml", kept, 8).layout) == "dp=2,tp=2,cp=2,zero=2,grads=fp32"
    found = reading("run.sh", "axolotl train axolotl.yaml\n", None, {"axolotl.yaml": AXOLOTL})
    assert found.layout.ranks == 8 and found.engine == "Axolotl"
    assert "plan --lora" in reading("a.yaml", AXOLOTL + "adapter: qlora\n").unpriced


LLAMA_FACTORY = table(__file__, "LLAMA_FACTORY")


def test_llama_factory(reading):
    found = reading("mca.yaml", LLAMA_FACTORY, 8)
    assert str(found.layout) == "dp=2,pp=4,ep=2,zero=1,recompute=full,grads=fp32" and found.batch == 16
    assert found.model == "Qwen/Qwen3-30B-A3B" and not found.unsettled
    trainer = "stage: sft\nfinetuning_type: full\nper_device_train_batch_size: 2\nbf16: true\ncutoff_len: 2048\n"
    found = reading("sft.yaml", trainer + "deepspeed: ds.json\n", 8, {"ds.json": DS_AUTO})
    assert (str(found.layout), found.seq, found.batch) == ("dp=8,zero=3,micro=2,recompute=full", 2048, 16)
    assert "LLaMA-Factory" in found.engine
    found = reading("run.sh", "FORCE_TORCHRUN=1 llamafactory-cli train mca.yaml\n", 8)
    assert found.layout.pp == 4
    assert "lora" in reading("lora.yaml", trainer.replace("full", "lora"), 8).unpriced


FSDP = table(__file__, "FSDP")


@from_table
def test_a_trainer_s_fsdp(reading, old, new, layout):
    found = reading("trainer.yaml", FSDP.replace(old, new), 8)
    assert (str(found.layout), found.batch, found.unknown) == (layout, 64, ())


def test_a_trainer_s_deepspeed_file(reading, tmp_path):
    text = "output_dir: out\nper_device_train_batch_size: 1\nbf16: true\ndeepspeed: ds.json\n"
    found = reading("trainer.yaml", text, 8, {"ds.json": DS_AUTO})
    assert str(found.layout) == "dp=8,zero=3" and found.batch == 8 and not found.unsettled
    inline = json.dumps({"per_device_train_batch_size": 4, "deepspeed": json.loads(DS_AUTO), "output_dir": "o"})
    assert str(reading("trainer.json", inline, 8).layout) == "dp=8,zero=3,micro=4,precision=fp32"
    with pytest.raises(UserError, match="cannot read"):
        reading("trainer.yaml", text.replace("ds.json", "gone.json"), 8)
    with pytest.raises(UserError, match="both given"):
        reading("trainer.yaml", text + "fsdp: full_shard\n", 8)
    for launcher in ("deepspeed --num_gpus 8", "torchrun --nproc_per_node=8", "accelerate launch --num_processes 8"):
        flags = "--deepspeed ds.json --per_device_train_batch_size 1 --bf16 True --output_dir x"
        if launcher.startswith("accelerate"):
            flags = "--per_device_train_batch_size 1 --output_dir x"
            launcher += " --use_deepspeed --deepspeed_config_file ds.json --mixed_precision bf16"
        found = reading("run.sh", f"{launcher} train.py {flags}\n")
        assert (str(found.layout), found.batch) == ("dp=8,zero=3", 8), launcher


ACCELERATE = "distributed_type: {}\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 8\n"


def test_accelerate_fills_in_auto(reading):
    text = (
        ACCELERATE.format("DEEPSPEED") + "deepspeed_config: {deepspeed_config_file: ds.json, zero3_init_flag: true}\n"
    )
    found = reading("acc.yaml", text, None, {"ds.json": DS_AUTO})
    assert str(found.layout) == "dp=8,zero=3" and not found.unsettled
    found = reading("acc.yaml", text.replace("bf16", "'no'"), None)
    assert str(found.layout) == "dp=8,zero=3,precision=fp32"
    found = reading("run.sh", "accelerate launch --config_file acc.yaml --mixed_precision bf16 sft.py "
                    "--per_device_train_batch_size 2 --gradient_accumulation_steps 4 --max_length 512\n")  # fmt: skip
    assert (str(found.layout), found.seq, found.batch) == ("dp=8,zero=3,micro=2", 512, 64)
    files = {"trl.yaml": "per_device_train_batch_size: 4\nmodel_name_or_path: x/y\n"}
    found = reading("run.sh", "accelerate launch --config_file acc.yaml -m trl sft --config trl.yaml\n", None, files)
    assert found.layout.micro == 4 and found.model == "x/y"


def test_a_file_that_leaves_precision_to_a_trainer(reading):
    found = reading("ds.json", DS_AUTO, 8)
    assert found.layout.precision == "bf16" and any("--precision" in one for one in found.unsettled)
    for precision in ("bf16", "fp16", "fp32"):
        found = reading("ds.json", DS_AUTO, 8, precision=precision)
        assert (found.layout.precision == "fp32") == (precision == "fp32") and not found.unsettled
    with pytest.raises(UserError, match="leave it out"):
        read(["vllm serve x"], precision="bf16")


@from_table
def test_ulysses_beside_deepspeed(reading, sizes, layout):
    lines = "".join(f"  parallelism_config_{key}: {value}\n" for key, value in sizes.items())
    text = ACCELERATE.format("DEEPSPEED") + f"deepspeed_config: {{zero_stage: 3}}\nparallelism_config:\n{lines}"
    assert str(reading("acc.yaml", text).layout) == layout


@pytest.mark.parametrize(
    ("processes", "machines", "layout"),
    [(30, 4, None), (32, 4, "dp=32,zero=3,shard=8,grads=fp32"), (4, 4, "dp=4,grads=fp32"), (9, 2, None)],
)
def test_hybrid_sharding_fills_machines(reading, processes, machines, layout):
    text = ACCELERATE.format("FSDP").replace("processes: 8", f"processes: {processes}")
    text = (
        text.replace("machines: 1", f"machines: {machines}") + "fsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}\n"
    )
    if layout:
        assert str(reading("acc.yaml", text).layout) == layout
        return
    with pytest.raises(UserError, match="no multiple of num_machines"):
        reading("acc.yaml", text)


@pytest.mark.parametrize("home", ["cpu", "nvme"])
def test_parameters_alone_offloaded(reading, home):
    zero = {"stage": 3, "offload_param": {"device": home}}
    found = reading(
        "ds.json", json.dumps({"train_batch_size": 32, "bf16": {"enabled": True}, "zero_optimization": zero}), 8
    )
    assert str(found.layout) == "dp=8,zero=3,micro=4" and "stays on the GPU" in found.unpriced
    zero["offload_optimizer"] = {"device": home}
    found = reading(
        "ds.json", json.dumps({"train_batch_size": 32, "bf16": {"enabled": True}, "zero_optimization": zero}), 8
    )
    assert found.layout.offload == home and not found.unpriced


def test_deepspeed_files_as_hjson(reading):
    text = '{\n  # comment: "x"\n  train_batch_size: 64  // all\n  "bf16": {"enabled": true,},\n'
    text += "  zero_optimization: {stage: 2}\n}"
    assert str(reading("ds.json", text, 8).layout) == "dp=8,zero=2,micro=8"
    text = '{"train_batch_size": 64, /* a\n b */ "zero_optimization": {"stage": 1},\n "url": "http://x#y",}'
    found = reading("ds.json", text, 8)
    assert str(found.layout) == "dp=8,zero=1,micro=8,precision=fp32" and found.unknown == ("url",)

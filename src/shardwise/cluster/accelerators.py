"""The figures of known accelerators and of the links that they usually come with, each with its source.

Link bandwidths are bytes/s of one device in one direction: NVLink and PCIe are often quoted in both directions
together, InfiniBand in bits. Peaks are dense; a multiply-add counts as two. Watts are what a board may draw at most.
What nobody measured or published is None.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cluster.device import Device, Link

_MIB = 1024**2
_GIB = 1024**3


@dataclass(frozen=True)
class Accelerator:
    """A device with the links inside a node and between nodes that it is usually deployed with."""

    device: Device
    intra: Link
    inter: Link


_ML_ENGINEERING = "stas00/ml-engineering, compute/accelerator/README.md and network/README.md"
_AICONFIGURATOR = "ai-dynamo/aiconfigurator 095f58a51c4c"
# Latency of one more step: all-gather of a small message, (8 ranks - 2 ranks) / 6 steps, in nccl_perf.parquet. What a
# collective costs once, however many steps it has, is not in it.
_NCCL = f"{_AICONFIGURATOR}, systems/data/{{}}_sxm/comm/nccl: small all-gathers, (t(8) - t(2)) / 6"
_SMI = "memory: memory.total of nvidia-smi, in MiB"

_HOPPER_ALPHA = (10.4e-6 - 5.2e-6) / 6
_AMPERE_ALPHA = (15.1e-6 - 9.0e-6) / 6


def _peaks(bf16: float, fp8: float | None = None, fp4: float | None = None, int8: float | None = None,
           tf32: float | None = None, fp32: float | None = None) -> dict[str, float]:  # fmt: skip
    """torch's dtypes -> FLOP/s, from TFLOP/s."""
    given = {
        "bfloat16": bf16, "float16": bf16, "float8_e4m3fn": fp8, "float4": fp4,
        "int8": int8, "tfloat32": tf32, "float32": fp32,
    }  # fmt: skip
    return {dtype: tera * 1e12 for dtype, tera in given.items() if tera is not None}


def _infiniband(name: str, bandwidth: float) -> Link:
    return Link(None, bandwidth, f"InfiniBand {name}, one port a GPU, {_ML_ENGINEERING}", kind="network")


_HDR, _NDR, _XDR = (_infiniband(*port) for port in (("HDR200", 25e9), ("NDR400", 50e9), ("XDR800", 100e9)))
_NVLINK3 = Link(_AMPERE_ALPHA, 300e9, f"NVLink3, {_ML_ENGINEERING}; alpha: {_NCCL.format('a100')}", kind="nvlink")
_NVLINK4 = Link(_HOPPER_ALPHA, 450e9, f"NVLink4, {_ML_ENGINEERING}; alpha: {_NCCL.format('h100')}", kind="nvlink")
_NVLINK5 = Link(None, 900e9, f"NVLink5, {_ML_ENGINEERING}; alpha: not known", kind="nvlink")
# Without a topology, the usual server: no switch joins all of its GPUs.
_PCIE4 = Link(None, 31e9, f"PCIe 4.0 x16, {_ML_ENGINEERING}; through the host: assumed", kind="host")
_PCIE5 = Link(None, 63e9, f"PCIe 5.0 x16, {_ML_ENGINEERING}; through the host: assumed", kind="host")
_UNKNOWN = Link(None, None, "not known")


def _ampere() -> list[Accelerator]:
    peaks = _peaks(312, int8=624, tf32=156, fp32=19.5)
    sxm80 = Device(
        "A100-80GB-SXM", "cuda", 81049 * _MIB, 2.039e12, peaks,
        f"{_ML_ENGINEERING}; memory: 79.15 GiB total capacity, as torch's out-of-memory errors report it; "
        f"bandwidth: {_AICONFIGURATOR}, systems/a100_sxm.yaml; power: NVIDIA, A100 80GB datasheet (SXM)", watts=400,
    )  # fmt: skip
    sxm40 = Device(
        "A100-40GB-SXM", "cuda", 40536 * _MIB, 1.555e12, peaks,
        f"peaks: {_ML_ENGINEERING}; NVIDIA, A100 datasheet (bandwidth, power); memory: 39.59 GiB total capacity, as "
        "torch's out-of-memory errors report it", watts=400,
    )  # fmt: skip
    pcie = Device(
        "A100-80GB-PCIe", "cuda", 81049 * _MIB, 1.935e12, peaks,
        f"{_ML_ENGINEERING}; memory as the SXM's; power: NVIDIA, A100 80GB datasheet (PCIe)", watts=300,
    )  # fmt: skip
    a10g = Device(
        "A10G", "cuda", 23028 * _MIB, 0.6e12, _peaks(70, int8=140, tf32=35, fp32=31.5),
        f"AWS, EC2 G5 instances, and NVIDIA, A10G datasheet (70 TFLOPS, 140 TOPS dense, 600 GB/s); {_SMI}; "
        "power: the cap that nvidia-smi shows on EC2 G5", watts=300,
    )  # fmt: skip
    return [
        Accelerator(sxm80, _NVLINK3, _HDR),
        Accelerator(sxm40, _NVLINK3, _HDR),
        Accelerator(pcie, _PCIE4, _HDR),
        Accelerator(
            a10g, _PCIE4, Link(None, 100e9 / 8 / 8, "AWS, g5.48xlarge: 100 Gb/s a node of 8 GPUs", kind="network")
        ),
    ]


def _hopper() -> list[Accelerator]:
    peaks = _peaks(989, fp8=1979, int8=1979, tf32=494.5, fp32=67)
    sxm = Device(
        "H100-80GB-SXM", "cuda", 81089 * _MIB, 3.35e12, peaks,
        f"{_ML_ENGINEERING}; memory: torch 2.7 total_memory=81089MB (network/benchmarks); "
        f"bandwidth: {_AICONFIGURATOR}, systems/h100_sxm.yaml; power: NVIDIA, H100 datasheet (SXM, up to)", watts=700,
    )  # fmt: skip
    pcie = Device(
        "H100-PCIe", "cuda", 81089 * _MIB, 2.0e12, _peaks(756, fp8=1513, int8=1513, tf32=378, fp32=51),
        f"{_ML_ENGINEERING}; {_AICONFIGURATOR}, systems/h100_pcie.yaml; memory as the SXM's; "
        "power: NVIDIA, H100 PCIe product brief PB-11133-001", watts=350,
    )  # fmt: skip
    h200 = Device(
        "H200", "cuda", 143771 * _MIB, 4.8e12, peaks,
        f"{_ML_ENGINEERING}; {_AICONFIGURATOR}, systems/h200_sxm.yaml; {_SMI}; "
        "power: NVIDIA, H200 datasheet (SXM, up to)", watts=700,
    )  # fmt: skip
    return [Accelerator(sxm, _NVLINK4, _NDR), Accelerator(pcie, _PCIE5, _NDR), Accelerator(h200, _NVLINK4, _NDR)]


def _blackwell() -> list[Accelerator]:
    b200 = Device(
        "B200", "cuda", 183359 * _MIB, 7.7e12, _peaks(2250, 4500, 9000, 4500, 1125, 80),
        f"{_ML_ENGINEERING}; {_AICONFIGURATOR}, systems/b200_sxm.yaml (bandwidth); {_SMI}; power: NVIDIA, Blackwell "
        "datasheet (HGX B200, up to)", watts=1000,
    )  # fmt: skip
    b300 = Device(
        "B300", "cuda", 288_000_000_000, 8.0e12, _peaks(2250, 4500, 12600, 4500, 1125, 80),
        f"{_ML_ENGINEERING}; memory: 288 GB as marketed; power: NVIDIA, Blackwell Ultra datasheet (HGX B300, up to)",
        watts=1100,
    )  # fmt: skip
    gb200 = Device(
        "GB200-NVL72", "cuda", 189471 * _MIB, 8.0e12, _peaks(2500, 5000, 10000, 5000, 1250, 80),
        f"one GPU; {_ML_ENGINEERING}; {_AICONFIGURATOR}, systems/gb200.yaml; "
        "power: NVIDIA, Blackwell datasheet (GB200 NVL72, up to)", watts=1200,
    )  # fmt: skip
    gb300 = Device(
        "GB300-NVL72", "cuda", 288_000_000_000, 8.0e12, _peaks(2500, 5000, 15000, 5000, 1250, 80),
        f"one GPU; {_ML_ENGINEERING}; memory: 288 GB as marketed; power: NVIDIA, Blackwell Ultra datasheet (GB300 "
        "NVL72, up to)", watts=1400,
    )  # fmt: skip
    return [
        Accelerator(b200, _NVLINK5, _NDR),
        Accelerator(b300, _NVLINK5, _XDR),
        # 72 GPUs are one node to us: they share one NVLink domain.
        Accelerator(gb200, _NVLINK5, _NDR),
        Accelerator(gb300, _NVLINK5, _XDR),
    ]


def _others() -> list[Accelerator]:
    mi300x = Device(
        "MI300X", "cuda", 192 * _GIB, 5.3e12, _peaks(1307.4, fp8=2614.9, int8=2614.9, tf32=653.7, fp32=163.4),
        "AMD, Instinct MI300X data sheet (power: of the board, at its peak); torch calls ROCm devices cuda", watts=750,
    )  # fmt: skip
    l40s = Device(
        "L40S", "cuda", 46068 * _MIB, 0.864e12, _peaks(362, fp8=733, int8=733, tf32=183, fp32=91.6),
        f"{_ML_ENGINEERING}; {_AICONFIGURATOR}, systems/l40s.yaml; {_SMI}; power: NVIDIA, L40S datasheet", watts=350,
    )  # fmt: skip
    l4 = Device(
        "L4", "cuda", 23034 * _MIB, 0.3e12, _peaks(121, fp8=242, int8=242, tf32=60, fp32=30.3),
        f"NVIDIA, L4 datasheet (its figures with sparsity, halved; power); {_SMI}", watts=72,
    )  # fmt: skip
    ada = Device(
        "RTX-4090", "cuda", 24564 * _MIB, 1.008e12, _peaks(165.2, fp8=330.3, int8=660.6, tf32=82.6, fp32=82.6),
        f"NVIDIA, Ada GPU architecture whitepaper, appendix A (sums in fp32; power); {_SMI}", watts=450,
    )  # fmt: skip
    tpu = Device(
        "TPU-v5p", "tpu", 95 * _GIB, 2.765e12, _peaks(459, int8=918),
        "Google Cloud, TPU v5p (docs.cloud.google.com/tpu/docs/v5p); int8: stas00/ml-engineering; power: not published",
    )  # fmt: skip
    ici = Link(None, 600e9, "Google Cloud, TPU v5p: 1200 GB/s of ICI a chip, both directions together; 3D torus")
    dcn = Link(None, 50e9 / 8, "Google Cloud, TPU v5p: 50 Gb/s of data-centre network a chip", kind="network")
    xgmi = Link(None, 448e9, f"Infinity Fabric, 7 x 64 GB/s, one peer at most 64 GB/s, {_ML_ENGINEERING}")
    return [
        Accelerator(mi300x, xgmi, _NDR),
        Accelerator(l40s, _PCIE4, _NDR),
        Accelerator(l4, _PCIE4, _UNKNOWN),
        Accelerator(
            ada,
            Link(None, 31e9, "PCIe 4.0 x16, without direct access between GPUs: through the host", kind="host"),
            _UNKNOWN,
        ),
        Accelerator(tpu, ici, dcn),
    ]


ACCELERATORS = {entry.device.name: entry for entry in (*_ampere(), *_hopper(), *_blackwell(), *_others())}

ALIASES = {
    "H100": "H100-80GB-SXM",
    "A100": "A100-80GB-SXM",
    "A100-80GB": "A100-80GB-SXM",
    "A100-40GB": "A100-40GB-SXM",
    "H100-80GB": "H100-80GB-SXM",
    "H100-SXM": "H100-80GB-SXM",
    "H200-SXM": "H200",
    "B200-SXM": "B200",
    "GB200": "GB200-NVL72",
    "GB300": "GB300-NVL72",
    "RTX4090": "RTX-4090",
}

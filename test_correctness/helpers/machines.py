"""Machines that are not here: a directory for /dev, /proc and /sys, and what the vendors' tools would print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from perfsuite.platforms import Machine, detect_machine, load_catalog
from perfsuite.platforms.host import Host, ToolAnswer

XEON = """processor\t: {index}
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 106
model name\t: Intel(R) Xeon(R) Gold 6330 CPU @ 2.00GHz
stepping\t: 6
cpu MHz\t\t: {mhz}
physical id\t: {socket}
siblings\t: 56
cpu cores\t: 28
flags\t\t: fpu sse avx avx2 fma avx512f avx512_vnni hypervisor
bogomips\t: {bogomips}
"""
ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd asimdhp asimddp sve i8mm bf16\nCPU implementer\t: 0x41\n"
ARM += "CPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: 0xd4f\nCPU revision\t: 0\n"


def host(
    root: Path, tools: Mapping[str, str | ToolAnswer], *, environ: Mapping[str, str] = {}, cores: int = 112
) -> Host:
    """A host with these files and tools; a tool is named with its arguments, others are not installed."""

    def run(command: Sequence[str]) -> ToolAnswer:
        answer = tools.get(" ".join(command), ToolAnswer(problem="not installed"))
        return ToolAnswer(text=answer) if isinstance(answer, str) else answer

    return Host(root=root, environ=environ, run=run, cores=cores)


def detected(host: Host, platform: str = "") -> Machine:
    """The machine that this host is, or the platform that is asked for there."""
    return detect_machine(load_catalog(), platform or None, host=host)


def write(root: Path, files: Mapping[str, str]) -> Path:
    """Put these files below ``root``."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def xeon(root: Path, *, mhz: float = 2000.0, free_kb: int = 900_000_000) -> Path:
    """Two sockets of Xeon Gold 6330; ``mhz`` and ``free_kb`` are readings."""
    entries = [XEON.format(index=index, mhz=mhz + index, socket=index, bogomips=mhz * 2) for index in range(2)]
    return write(
        root,
        {
            "proc/cpuinfo": "\n".join(entries),
            "proc/meminfo": f"MemTotal:       1056000000 kB\nMemFree: 1 kB\nMemAvailable:   {free_kb} kB\n",
            "proc/sys/kernel/hostname": "node7\n",
            "proc/sys/kernel/osrelease": "5.4.0-42-generic\n",
            "proc/sys/net/ipv4/tcp_congestion_control": "cubic\n",
            "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 20.04 LTS"\n',
            "sys/class/dmi/id/sys_vendor": "Moore Threads\n",
            "sys/class/dmi/id/product_name": "MCCX D800\n",
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
            "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "performance\n",
            "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
            "sys/class/infiniband/mlx5_0/ports/1/rate": "200 Gb/sec (4X HDR)\n",
            "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
            "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
            "sys/class/infiniband/mlx5_1/ports/1/rate": "10 Gb/sec (4X SDR)\n",
        },
    )


def matrix(count: int, kind: str) -> str:
    """What ``topo -m`` prints for devices that are all linked alike."""
    names = [f"GPU{index}" for index in range(count)]
    head = " " * 8 + "".join(f"{name:8}" for name in [*names, "NIC0", "CPU Affinity"])
    rows = [
        f"{name:8}" + "".join(f"{'X' if other == name else kind:8}" for other in names) + "PIX     0-55"
        for name in names
    ]
    return "\n".join([head, *rows, "", "Legend:", "", "  X    = Self", f"  {kind}  = a bonded set of links"]) + "\n"


def gmi_query(names: Sequence[str], driver: str = "2.7.0") -> str:
    """What ``mthreads-gmi -q`` prints for these devices."""
    blocks = [
        f"GPU{index} 00000000:{0x10 + index:02x}:00.0\n"
        f"    Product Name                   : {name}\n"
        f"    GPU UUID                       : 0a1b2c3d-0000-0000-0000-{index:012d}\n"
        f"    MTBios Version                 : 3.4.3\n"
        f"    FB Memory Usage\n"
        f"        Total                      : 49152MiB\n"
        f"        Used                       : 2MiB\n"
        for index, name in enumerate(names)
    ]
    return f"Driver Version : {driver}\nAttached GPUs  : {len(names)}\n\n" + "\n".join(blocks)


GMI_TABLE = """Mon Nov 11 16:07:07 2024
---------------------------------------------------------------
    mthreads-gmi:1.14.0          Driver Version:2.7.0
---------------------------------------------------------------
ID   Name           |PCIe                |%GPU  Mem
     Device Type    |Pcie Lane Width     |Temp  MPC Capable
+-------------------------------------------------------------+
0    MTT S80        |00000000:04:00.0    |0%    2MiB(16384MiB)
     Physical       |4x(16x)             |49C   YES
---------------------------------------------------------------
"""
MUSA_VERSIONS = (
    'musa_toolkits:\n{\n\t"version":\t"3.1.0",\n\t"git branch":\t"x"\n}\nmccl:\n{\n\t"version":\t"2.11.4"\n}\n'
)


def s4000(root: Path, *, count: int = 8, environ: Mapping[str, str] = {}, tools: Mapping[str, str] = {}) -> Host:
    """MCCX D800: eight S4000, all linked by two MTLinks."""
    xeon(root)
    for index in range(count):
        address = f"sys/bus/pci/devices/0000:{0x10 + index:02x}:00.0"
        write(
            root,
            {
                f"dev/mtgpu.{index}": "",
                f"{address}/max_link_speed": "32.0 GT/s PCIe\n",
                f"{address}/max_link_width": "16\n",
                f"{address}/current_link_speed": "2.5 GT/s PCIe\n",
            },
        )
    said = {
        "mthreads-gmi -q": gmi_query(["MTT S4000"] * count),
        "mthreads-gmi topo -m": matrix(count, "MT2"),
        "musa_version_query": MUSA_VERSIONS,
        **tools,
    }
    return host(root, said, environ=environ)


SMI = "--format=csv,noheader,nounits"
SMI_FIELDS = f"nvidia-smi --query-gpu=index,name,uuid,memory.total,driver_version {SMI}"
_DETAILS = "index,power.limit,pcie.link.gen.max,pcie.link.width.max,ecc.mode.current,mig.mode.current"
SMI_DETAILS = f"nvidia-smi --query-gpu={_DETAILS},compute_cap {SMI}"
SMI_OLDER_DETAILS = f"nvidia-smi --query-gpu={_DETAILS} {SMI}"


def nvidia(
    root: Path,
    names: Sequence[str],
    *,
    capability: str = "9.0",
    mig: str = "Disabled",
    ecc: str = "Enabled",
    environ: Mapping[str, str] = {},
    tools: Mapping[str, str | ToolAnswer] = {},
) -> Host:
    """A host with these NVIDIA devices, as nvidia-smi describes them."""
    xeon(root)
    write(root, {f"dev/nvidia{index}": "" for index in range(len(names))})
    write(root, {"dev/nvidiactl": ""})
    said: dict[str, str | ToolAnswer] = {
        SMI_FIELDS: "".join(
            f"{index}, {name}, GPU-{index}aaa, 143771, 580.159.03\n" for index, name in enumerate(names)
        ),
        SMI_DETAILS: "".join(f"{index}, 700.00, 5, 16, {ecc}, {mig}, {capability}\n" for index in range(len(names))),
        "nvidia-smi topo -m": matrix(len(names), "NV18"),
    }
    return host(root, {**said, **tools}, environ=environ)

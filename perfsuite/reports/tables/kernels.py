"""Tables of single kernels and collectives, of report 004 and of FlagPerf."""

from __future__ import annotations

from perfsuite.reports.tables import spec as c
from perfsuite.reports.tables.spec import ColumnSpec, TableSpec, setting

_STREAMS = ("MemoryCopy", "MemoryTriad", "HostDeviceCopy")

KERNELS = (
    TableSpec(
        title="Matrix products",
        select=lambda case: case.workload == "Matmul" or "tflops" in case.values,
        columns=(
            c.LAYOUT,
            setting("size m x k x n", "size"),
            c.DTYPE,
            ColumnSpec(title="TFLOPS (integers: TOPS)", key="tflops"),
            ColumnSpec(title="ms", key="median_s", scale=1000),
        ),
    ),
    TableSpec(
        title="Memory bandwidth",
        select=lambda case: case.workload in _STREAMS or "gb_per_s" in case.values,
        columns=(
            c.LAYOUT,
            setting("kernel", "kernel"),
            setting("buffer", "size"),
            ColumnSpec(title="GB/s", key="gb_per_s"),
            ColumnSpec(title="bandwidth of", key="residence", value=False, optional=True),
            ColumnSpec(title="ms", key="median_s", scale=1000),
        ),
    ),
    TableSpec(
        title="Collectives",
        select=lambda case: (
            case.workload != "Pairs" and ("collective" in case.settings or "busbw_gb_per_s" in case.values)
        ),
        columns=(
            setting("collective", "kernel"),
            c.LAYOUT,
            setting("size", "size"),
            c.DTYPE,
            ColumnSpec(title="us", key="median_us"),
            ColumnSpec(title="algbw GB/s", key="algbw_gb_per_s"),
            ColumnSpec(title="busbw GB/s", key="busbw_gb_per_s"),
        ),
        notes=("sizes, algbw and busbw as nccl-tests counts them; 1 GB/s is 1e9 bytes/s",),
    ),
    TableSpec(
        title="Pairs of ranks",
        select=lambda case: case.workload == "Pairs",
        columns=(
            setting("directions", "directions"),
            c.LAYOUT,
            setting("size", "size"),
            c.DTYPE,
            ColumnSpec(title="median pair us", key="pair_us", optional=True),
            ColumnSpec(title="slowest pair us", key="slowest_pair_us", optional=True),
            ColumnSpec(title="median pair GB/s", key="pair_gb_per_s", optional=True),
            ColumnSpec(title="slowest pair GB/s", key="slowest_pair_gb_per_s", optional=True),
        ),
        notes=("per direction; messages of a pair follow each other",),
    ),
)

"""The table of device models: what ships, files of a user's, their mistakes; the document's file."""

import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from perfsuite.base.errors import ConfigurationError, UnknownPlatform
from perfsuite.metrics import derive
from perfsuite.platforms import detect_machine, load_catalog, why_absent
from perfsuite.record.result import Work
from test_correctness.helpers import machines
from test_correctness.helpers.markdown import blocks

DOCUMENT = Path(__file__).parent.parent / "docs" / "how-to" / "add-a-platform.md"


@pytest.fixture(scope="module")
def shipped():
    return load_catalog()


def test_every_row_that_ships_has_sources_and_dense_peaks():
    catalog = load_catalog()
    for model in catalog.models.values():
        peaks = [*model.tflops.values(), model.memory, model.memory_bandwidth, model.link, model.host_link]
        peaks += [model.network, model.devices_per_node]
        assert all(len(peak.source) > 10 for peak in peaks if peak)
        # A figure with sparsity is twice the dense one: a 16-bit peak above these would be one.
        assert all(model.tflops[dtype].value <= 2500 for dtype in ("bf16", "fp16") if dtype in model.tflops)
    bf16 = {name: catalog.models[name].tflops["bf16"].value for name in ("s4000", "a100", "h100", "h200", "rtx4090")}
    assert {"s4000": 100, "a100": 312, "h100": 989, "h200": 989, "rtx4090": 165.2} == bf16
    assert "98" in catalog.models["s4000"].tflops["bf16"].source
    assert {} == dict(catalog.models["cpu"].tflops)
    assert "bf16" not in catalog.models["rtx6000ada"].tflops  # only scaled figures exist
    assert {"TOPS"} == {model.tflops["int8"].unit for model in catalog.models.values() if "int8" in model.tflops}


@pytest.mark.parametrize(
    ("reported", "family", "name"),
    [
        ("MTT S4000", "musa", "s4000"),
        ("MTT S80", "musa", "s80"),
        ("MTT S5000", "musa", "s5000"),
        ("NVIDIA H200", "cuda", "h200"),
        ("NVIDIA H200 NVL", "cuda", "h200_nvl"),
        ("NVIDIA GH200 480GB", "cuda", "gh200"),
        ("NVIDIA GH200 144G HBM3e", "cuda", None),
        ("NVIDIA H100 80GB HBM3", "cuda", "h100"),
        ("NVIDIA H100 PCIe", "cuda", "h100_pcie"),
        ("NVIDIA H100 NVL", "cuda", "h100_nvl"),
        ("NVIDIA H100 80GB HBM3e", "cuda", None),
        ("NVIDIA H800", "cuda", "h800"),
        ("NVIDIA H800 PCIe", "cuda", None),
        ("NVIDIA H20", "cuda", "h20"),
        ("NVIDIA H20-3e", "cuda", None),
        ("NVIDIA B200", "cuda", "b200"),
        ("NVIDIA GB200", "cuda", "gb200"),
        ("NVIDIA B300 SXM6 AC", "cuda", "b300"),
        ("NVIDIA GB300", "cuda", None),
        ("NVIDIA A100-SXM4-80GB", "cuda", "a100"),
        ("NVIDIA A100-SXM4-40GB", "cuda", "a100_40gb"),
        ("A100-SXM4-40GB", "cuda", "a100_40gb"),
        ("NVIDIA A100-PCIE-40GB", "cuda", "a100_pcie_40gb"),
        ("NVIDIA A100 80GB PCIe", "cuda", "a100_pcie"),
        ("GRID A100D-80C", "cuda", None),
        ("NVIDIA A800-SXM4-80GB", "cuda", "a800"),
        ("NVIDIA A800 80GB PCIe", "cuda", None),
        ("Tesla V100-SXM2-16GB", "cuda", "v100"),
        ("Tesla V100-SXM2-32GB", "cuda", "v100_32gb"),
        ("Tesla V100-SXM3-32GB", "cuda", None),
        ("Tesla V100-PCIE-16GB", "cuda", None),
        ("NVIDIA L40S", "cuda", "l40s"),
        ("NVIDIA L40", "cuda", "l40"),
        ("NVIDIA L4", "cuda", "l4"),
        ("NVIDIA A10", "cuda", "a10"),
        ("NVIDIA A10G", "cuda", None),
        ("NVIDIA A40", "cuda", "a40"),
        ("Tesla T4", "cuda", "t4"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "cuda", "rtxpro6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "cuda", None),
        ("AMD Instinct MI300X", "rocm", "mi300x"),
        ("AMD Instinct MI325X", "rocm", None),
        ("NVIDIA L20", "cuda", "l20"),
        ("NVIDIA L2", "cuda", None),
        ("NVIDIA GeForce RTX 3090", "cuda", "rtx3090"),
        ("NVIDIA GeForce RTX 3090 Ti", "cuda", None),
        ("NVIDIA GeForce RTX 5090", "cuda", "rtx5090"),
        ("NVIDIA GeForce RTX 5090 D", "cuda", None),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", "cuda", None),
        ("NVIDIA GeForce RTX 4090", "cuda", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 D", "cuda", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "cuda", None),
        ("NVIDIA RTX 6000 Ada Generation", "cuda", "rtx6000ada"),
        ("Quadro RTX 6000", "cuda", None),
        ("MTT S4000", "cuda", None),
    ],
)
def test_a_reported_name_is_recognised_and_a_variant_is_not(shipped, reported, family, name):
    row = shipped.recognise(reported, family)
    assert name == (row.name if row else None)


def test_a_node_is_that_of_the_makers_system_or_unknown():
    """GB/s per node and direction: eight adapters of 200 or 400 Gb/s."""
    nodes = {
        name: (model.network.value if model.network else None, model.devices_per_node.value)
        for name, model in load_catalog().models.items()
        if model.devices_per_node
    }
    assert (200, 8) == nodes["a100"] == nodes["a100_40gb"]
    assert (400, 8) == nodes["h100"] == nodes["h200"] == nodes["b200"]
    assert (50, 8) == nodes["s4000"]
    assert (None, 8) == nodes["mi300x"]
    assert {"rtx3090", "l40s", "h100_pcie", "cpu"}.isdisjoint(nodes)


def test_a_name_in_full_comes_before_a_longer_part_of_another_row(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        '[platform.short]\ntitle = "S"\nfamily = "cuda"\nnames = ["Card 2"]\n'
        '[platform.long]\ntitle = "L"\nfamily = "cuda"\nmatch = ["Card 2", "Card 20"]\n'
    )
    found = [load_catalog([path]).recognise(text, "cuda") for text in ("Card 2", "Card 20", "My Card 2")]
    assert ["short", "long", "long"] == [row and row.name for row in found]


@pytest.mark.parametrize("reported", ["NVIDIA H20-3e", "NVIDIA A800 80GB PCIe", "NVIDIA GeForce RTX 5090 D"])
def test_an_unknown_device_is_named_and_has_no_peak_and_no_share(tmp_path, reported):
    machine = detect_machine(load_catalog(), host=machines.nvidia(tmp_path, [reported]))
    assert ("cuda", reported) == (machine.name, machine.model.title)
    peaks = machine.peaks()
    assert {} == dict(peaks.tflops)
    assert (None, None, None) == (peaks.memory_bandwidth, peaks.link, peaks.host_link)
    assert f"unknown device '{reported}'" in peaks.unknown
    measurement = SimpleNamespace(median_s=1.0, ranks=(), records=(), smoke=False)
    work = Work(flops={"exact": 1e12}, dtype="bf16")
    (metric,) = derive(("tflops",), work=work, measurement=measurement, peaks=peaks)  # type: ignore[arg-type]
    assert (1.0, None) == (metric.value, metric.peak)
    assert f"unknown device '{reported}'" in metric.note


def test_one_chip_has_one_rounding():
    """H100, H800, H200 and GH200 are one chip; so are the cards of H100 NVL and H200 NVL."""
    models = load_catalog().models
    for rows in (("h100", "h800", "h200", "gh200"), ("h100_nvl", "h200_nvl")):
        for dtype in ("fp32", "tf32", "bf16", "fp16", "fp8", "int8"):
            assert 1 == len({models[row].tflops[dtype].value for row in rows}), (rows, dtype)


@pytest.mark.parametrize(("node", "family"), [("dev/kfd", "rocm"), ("dev/davinci0", "ascend")])
def test_a_device_that_perfsuite_cannot_drive_is_named_where_the_cpu_is_measured(tmp_path, node, family):
    machines.write(machines.xeon(tmp_path), {node: ""})
    machine = detect_machine(load_catalog(), host=machines.host(tmp_path, {}))
    (remark,) = [remark for remark in machine.remarks() if family in remark]
    assert f"/{node} is here, but perfsuite has no code for family {family}: the CPU is measured" == remark
    assert "cpu" == machine.name
    asked = detect_machine(load_catalog(), "cpu", host=machine.family.host)
    assert not [remark for remark in asked.remarks() if node in remark]


def test_a_row_of_a_family_without_device_code_is_a_skip_that_says_so():
    machine = detect_machine(load_catalog(), "mi300x")
    assert (0, "mi300x") == (machine.device_count, machine.name)
    assert "MI300X is a row of the table only: perfsuite has no code for family rocm" in machine.absent
    here = detect_machine(load_catalog())
    assert "Ascend 910B is a row of the table only" in why_absent("ascend910b", machine=here, catalog=load_catalog())


def test_unknown_platform_lists_names_and_the_nearest():
    with pytest.raises(UnknownPlatform, match=r"did you mean 's4000'.*choose from cpu, s4000, s5000"):
        load_catalog().find("S400")
    with pytest.raises(UnknownPlatform, match=r"'tpu' is unknown.*choose from .*musa, cuda"):
        detect_machine(load_catalog(), "tpu")


def test_a_file_adds_a_row_and_overrides_one_key(tmp_path):
    first = tmp_path / "first.toml"
    first.write_text(
        '[platform.s5000]\ntitle = "MTT S5000"\nfamily = "musa"\nmatch = ["S5000"]\n'
        '[platform.s4000.tflops]\nbf16 = { value = 98, unit = "TFLOPS", source = "FlagPerf" }\n'
    )
    second = tmp_path / "second.toml"
    second.write_text('[platform.s5000]\nnative = ["fp8"]\n[environment]\nmachine = "D800"\nnics = [1, 2]\n')
    catalog = load_catalog([first, second])
    assert ("MTT S5000", ("fp8",)) == (catalog.models["s5000"].title, catalog.models["s5000"].native)
    peaks = catalog.models["s4000"].tflops
    assert (98.0, "FlagPerf", 50.0) == (peaks["bf16"].value, peaks["bf16"].source, peaks["tf32"].value)
    assert {"machine": "D800", "nics": [1, 2]} == dict(catalog.declared)
    assert 100.0 == load_catalog().models["s4000"].tflops["bf16"].value


ROW = '[platform.x]\ntitle = "X"\nfamily = "cuda"\n'
TFLOPS = "[platform.x.tflops]\n"


def peak(unit, value=3, source="s"):
    return f'{{ value = {value}, unit = "{unit}", source = "{source}" }}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[platform.x\n", r"is not TOML: .*line 1.*correct that line"),
        ("[plattform.x]\n", r"line 1: \[plattform\] is unknown; a file has \[platform.NAME\]"),
        ('platform = "x"\n', r"\[platform\] is 'x'; write a table"),
        ("[platform]\nx = 3\n", r"line 2: \[platform\] x is 3; write a table \[platform.x\]"),
        ("[platform.X-1]\n", r"line 1: .*has name 'X-1'; ids contain it: use small letters, digits and _"),
        ("[platform.musa]\n", r"line 1: \[platform.musa\] is the name of a family"),
        (ROW + "speed = 3\n", r"line 4: \[platform.x\] speed is unknown; choose from title, family, names, match"),
        ('[platform.x]\nfamily = "cuda"\n', r"line 1: \[platform.x\] title is missing or not a text; write title ="),
        ('[platform.x]\ntitle = "X"\n', r"line 1: \[platform.x\] family is missing"),
        (ROW.replace("cuda", "tpu"), r"line 3: .*'tpu', which is not installed; choose .*musa, cuda"),
        (ROW + 'match = "S4000"\n', r"line 4: \[platform.x\] match is 'S4000'; write a list of texts"),
        (ROW + 'native = ["int7"]\n', r"line 4: .*names dtype 'int7'; choose from fp64, fp32, tf32"),
        (ROW + "tflops = 3\n", r"line 4: .*tflops is 3; write a table \[platform.x.tflops\]"),
        (ROW + TFLOPS + f"bfloat16 = {peak('TFLOPS')}\n", r"line 5: .*'bfloat16'; choose"),
        (ROW + TFLOPS + "bf16 = 3\n", r"line 5: .*bf16 is 3; write bf16 = \{ value"),
        (ROW + TFLOPS + 'bf16 = { value = 3, unit = "TFLOPS" }\n', r"line 5: .*bf16 has no source; write where"),
        (ROW + TFLOPS + f"bf16 = {peak('TFLOPS', source=' ')}\n", r"line 5: .*has no source"),
        (ROW + TFLOPS + f"bf16 = {peak('GFLOPS')}\n", r"line 5: .*has unit 'GFLOPS'; convert it .* = \"TFLOPS\""),
        (ROW + TFLOPS + f"int8 = {peak('TFLOPS')}\n", r"line 5: .*int8 has unit 'TFLOPS'; convert it .* = \"TOPS\""),
        (ROW + f"memory = {peak('GiB', -1)}\n", r"line 4: .*memory has value -1; write a number above 0, in GiB"),
        (ROW + f"link = {peak('GB/s', 'nan')}\n", r"line 4: .*has value nan"),
        (ROW + f"link = {peak('GB/s', 'true')}\n", r"line 4: .*has value True"),
        (ROW + 'link = { valeu = 1, unit = "GB/s", source = "s" }\n', r"line 4: .*has unknown key 'valeu'"),
        (
            ROW + 'link = { value = 1, unit = "GB/s", source = "s", kind = "guess" }\n',
            r"line 4: .*kind 'guess'; choose from published, measured, nominal",
        ),
        (ROW + f"devices_per_node = {peak('devices', 7.5)}\n", r"line 4: .*has value 7.5; write the whole number"),
        ("[environment]\nbought = 2024-01-02\n", r"line 2: \[environment\] bought is datetime"),
        ("[environment.a.b]\nc = 1\n", r"\[environment.a\] b is \{'c': 1\}; write a text"),
    ],
)
def test_a_mistake_in_a_file_is_one_line_with_file_line_key_and_rule(tmp_path, text, said):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=said) as caught:
        load_catalog([path])
    assert f"platform file {path}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"no.toml cannot be read: No such file"):
        load_catalog([tmp_path / "no.toml"])
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"# caf\xe9\n")
    with pytest.raises(ConfigurationError, match=r"latin.toml is not UTF-8 at byte 5"):
        load_catalog([latin])
    for text in (f"a = {'[' * 100_000}", f"a = {'9' * 5000}"):
        latin.write_text(text)
        with pytest.raises(ConfigurationError, match=r"latin.toml is nested too deep, or a number is too long"):
            load_catalog([latin])
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(ConfigurationError, match=r"pipe.toml cannot be read: it is a pipe"):
        load_catalog([tmp_path / "pipe.toml"])
    latin.write_bytes(b"\xef\xbb\xbf# written by an editor with a byte order mark\r\n[environment]\r\n")
    load_catalog([latin])
    latin.write_text("# nothing\n")
    with pytest.raises(ConfigurationError, match=r"latin.toml has no table; a file has"):
        load_catalog([latin])


WRITTEN = st.integers(-3, 3) | st.floats(-3, 3) | st.booleans() | st.text("abGB/s ", max_size=4)


@given(peak=st.dictionaries(st.sampled_from(["value", "unit", "source", "kind", "x"]), WRITTEN))
@settings(max_examples=50)
@example(peak={"value": 2.5, "unit": "GB/s", "source": "s"})
def test_whatever_is_written_for_a_peak_is_a_peak_or_one_line_of_error(peak):
    entries = ", ".join(f"{key} = {json.dumps(value)}" for key, value in peak.items())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "mine.toml")
        path.write_text(f"{ROW}link = {{ {entries} }}\n")
        said, link = "", None
        try:
            link = load_catalog([path]).models["x"].link
        except ConfigurationError as error:
            said = str(error)
    correct = (
        type(peak.get("value")) in (int, float)
        and peak["value"] > 0
        and peak.get("unit") == "GB/s"
        and str(peak.get("source", "")).strip() != ""
        and type(peak.get("source")) is str
        and peak.keys() <= {"value", "unit", "source"}
    )
    assert correct == (said == "")
    assert "\n" not in said
    if correct:
        assert link is not None
        assert (float(peak["value"]), "GB/s") == (link.value, link.unit)


def test_the_documents_platform_file_loads_and_its_mistake_reads_as_shown(tmp_path, monkeypatch):
    text = next(block for block in blocks(DOCUMENT, "toml") if block.startswith("# my-cluster.toml"))
    monkeypatch.chdir(tmp_path)
    Path("my-cluster.toml").write_text(text)
    catalog = load_catalog(["my-cluster.toml"])
    assert [*load_catalog().models, "a30", "node_cpu"] == list(catalog.models)
    assert 98.0 == catalog.models["s4000"].tflops["bf16"].value
    assert "InfiniBand, 2 x 200 Gb/s" == catalog.declared["network"]["inter_node"]
    machine = detect_machine(catalog, host=machines.host(machines.xeon(tmp_path / "host"), {}))
    assert ("node_cpu", "measured") == (machine.name, machine.peaks().memory_bandwidth.kind)  # type: ignore[union-attr]
    Path("my-cluster.toml").write_text(text.replace('165, unit = "TFLOPS"', '165, unit = "GFLOPS"'))
    with pytest.raises(ConfigurationError) as caught:
        load_catalog(["my-cluster.toml"])
    shown = next(block for block in blocks(DOCUMENT, "") if "error:" in block)
    assert shown.strip() == f"perfsuite: error: {caught.value}"


@pytest.mark.parametrize(
    ("name", "dtype", "measured"),
    [
        ("rtx4090", "tf32", 85.65),  # zzc0721/torch-performance-test-data#78
        ("rtx4090", "fp16", 168.38),
        ("rtx4090", "fp32", 86.676),  # mli/transformers-benchmarks#4
        ("rtx3090", "bf16", 72.0),
        ("rtx5090", "bf16", 254.0),
    ],
)
def test_boost_clocks_of_tables_make_no_measured_rate_impossible(name, dtype, measured):
    peak = load_catalog().models[name].tflops[dtype]
    assert peak.value < measured
    assert "nominal" == peak.kind


def test_fp8_peaks_are_of_the_accumulation_that_is_asked_for():
    """With fast accumulation; GeForce cards have half of it with FP32 accumulate, the others the same."""
    rates = {name: load_catalog().models[name].tflops["fp8"].value for name in ("rtx4090", "l40s", "rtx6000ada")}
    assert {"rtx4090": 660.6, "l40s": 733, "rtx6000ada": 728.5} == rates

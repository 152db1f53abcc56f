"""What vendors' libraries tell, what they do not, and the signs that a machine is not quiet."""

import contextlib
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from perfsuite.metrics.disturbance import disturbance as disturbance_of
from perfsuite.platforms import quiet
from perfsuite.platforms.base import DetectedDevice
from perfsuite.platforms.cpu import CpuTelemetry
from perfsuite.platforms.cuda import NvmlTelemetry
from perfsuite.platforms.host import Host
from perfsuite.platforms.musa import MtmlTelemetry
from perfsuite.platforms.telemetry import Reading, Unread, disturbance, family_of_processes
from perfsuite.plugin import verdict_reports
from perfsuite.record.describe import held_down
from perfsuite.record.step import USUAL_UNDER_LOAD, DeviceLook
from test_correctness.helpers import machines
from test_correctness.helpers.measurements import measurement_of, rank_facts, result_of


class Library:
    """A vendor's library that answers by the name of a call; names without its prefix fail the test."""

    def __init__(self, prefix, answers):
        self.prefix, self.answers = prefix, answers

    def __getattr__(self, name):
        assert name.lower().startswith(self.prefix), name
        answer = self.answers.get(name, "handle")
        return answer if callable(answer) else lambda *_: answer


def refuse(handle):
    raise RuntimeError("not supported")


NVML = {
    "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
    "nvmlDeviceGetClockInfo": 1410,
    "nvmlDeviceGetMaxClockInfo": 1980,
    "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: 0x20 | 0x4 | 0x1 if handle == "GPU-0aaa" else 0x1,
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=31),
    "nvmlDeviceGetPowerUsage": 698_000,
    "nvmlDeviceGetEnforcedPowerLimit": refuse,
    "nvmlDeviceGetTemperature": 88,
    "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=7), SimpleNamespace(pid=8)],
}


def test_nvml_readings_name_the_causes_and_leave_the_unreadable_unknown():
    devices = [DetectedDevice(index=index, reported_name="NVIDIA H200", uuid=f"GPU-{index}aaa") for index in range(2)]
    telemetry = NvmlTelemetry.open(devices, Library("nvml", NVML))
    assert telemetry is not None
    hot, cool = telemetry.read()
    telemetry.close()
    assert ("power cap", "thermal") == hot.throttle
    assert () == cool.throttle
    assert (1410.0, 1980.0, 698.0, None) == (hot.clock_mhz, hot.max_clock_mhz, hot.power_w, hot.power_cap_w)
    assert (88.0, (7, 8), 97.0) == (hot.temperature_c, hot.processes, hot.utilisation_percent)
    assert "power 698 W of unknown" in str(hot)
    assert "device 0 is throttled (thermal) and shared with 1 other process" in disturbance((hot, cool), own=[7])


@pytest.mark.parametrize("reason", sorted(USUAL_UNDER_LOAD))
def test_what_is_usual_under_load_disturbs_neither_after_a_run_nor_while_it_is_timed(reason):
    assert "" == disturbance([Reading(index=0, throttle=(reason,))])
    assert "" == held_down([DeviceLook(device=0, at_s=0.0, throttle=(reason,))])


@pytest.mark.parametrize(
    ("listed", "contexts", "told"),
    [
        ((7,), 1, ""),
        ((7, 99), 1, "device 0 is shared with 1 other process"),
        ((4007,), 1, ""),  # numbers of another namespace: ours by their count
        ((4007, 4008), 2, ""),
        ((4007, 4099), 1, "device 0 is shared with 1 other process"),
        ((4099,), 0, "device 0 is shared with 1 other process"),  # none of our ranks is there
        ((4007,), 2, ""),  # unknown: the list lacks one of ours
        ((), 1, ""),
        (None, 1, ""),
    ],
)
def test_own_ranks_are_no_strangers_and_strangers_are_found_in_every_namespace(listed, contexts, told):
    assert told == disturbance([Reading(index=0, processes=listed)], own=[7, 8], contexts={0: contexts})


MTML = {
    "mtmlGpuContext": contextlib.nullcontext,
    "mtmlGpuGetClock": 1600,
    "mtmlGpuGetMaxClock": 1750,
    "mtmlDeviceGetPowerUsage": 310_000,
    "mtmlGpuGetTemperature": 71,
    "mtmlGpuGetUtilization": 88,
}


def test_mtml_readings_say_unknown_where_the_library_has_no_call():
    """The library's layer with NVML's names invents answers."""
    library = Library("mtml", MTML)
    telemetry = MtmlTelemetry.open([DetectedDevice(index=0, reported_name="MTT S4000", uuid="u")], library)
    assert telemetry is not None
    (reading,) = telemetry.read()
    assert reading == Reading(
        index=0, clock_mhz=1600.0, max_clock_mhz=1750.0, utilisation_percent=88.0, power_w=310.0, temperature_c=71.0
    )
    assert "throttled by unknown" in str(reading)
    assert "processes unknown" in str(reading)
    telemetry.close()


def test_without_a_library_or_a_driver_everything_is_unknown(tmp_path):
    class Broken:
        def nvmlInit(self):
            raise OSError("no driver")

        mtmlLibraryInit = nvmlInit

    device = DetectedDevice(index=0, reported_name="x", uuid="u")
    assert NvmlTelemetry.open([device], Broken()) is None
    assert MtmlTelemetry.open([device], Broken()) is None
    telemetry = machines.detected(machines.s4000(tmp_path)).family.telemetry()
    if telemetry.source == "":
        assert isinstance(telemetry, Unread)
    readings = telemetry.read()
    assert 8 == len(readings)
    assert all(reading.throttle is None and reading.processes is None for reading in readings)
    assert "" == disturbance(readings)


def test_cpu_throttling_is_what_the_kernel_counted_since(tmp_path):
    counter = "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count"
    machines.write(tmp_path, {counter: "3\n"})
    psutil = SimpleNamespace(
        cpu_freq=lambda: SimpleNamespace(current=2400.0, max=0.0),
        sensors_temperatures=lambda: {"coretemp": [SimpleNamespace(current=60.0), SimpleNamespace(current=72.0)]},
    )
    telemetry = CpuTelemetry(machines.host(tmp_path, {}), psutil)
    assert Reading(index=0, clock_mhz=2400.0, throttle=(), temperature_c=72.0) == telemetry.read()[0]
    machines.write(tmp_path, {counter: "4\n"})
    assert ("thermal",) == telemetry.read()[0].throttle
    assert CpuTelemetry(machines.host(tmp_path / "vm", {}), psutil).read()[0].throttle is None


def why(*cpu_shares, switches=0, device="cpu", which="", aligned=True):
    """Why a case of 10 samples is disturbed, ``switches`` of them switched out, on the cores ``which``."""
    ranks = [rank_facts(rank, device=device, cpu_share=share) for rank, share in enumerate(cpu_shares)]
    switched = tuple(int(index < switches) for index in range(10))
    measured = measurement_of([1e-3] * 10, ranks, involuntary_switches=switched, aligned=aligned)
    return disturbance_of(result_of(measured, environment={"cores": {"which": which}}))


def test_a_rank_that_only_computes_and_lost_its_core_is_disturbed():
    assert "" == why(0.985, switches=1)
    assert "rank 0 got 81% of its core" == why(0.81, switches=1)
    assert "" == why(0.81), "it waited: nothing switched it out"
    assert "" == why(0.99, 0.81, switches=1), "ranks that wait for each other use less than their core"
    assert "" == why(0.10, device="musa:0", switches=9)
    assert "" == why(0.5, 0.5, 0.5, switches=9, which="0-1")


def test_a_training_step_on_one_rank_is_disturbed_by_many_switches():
    assert ["", "rank 0 got 17% of its core"] == [why(0.17, switches=n, aligned=False, which="0") for n in (1, 9)]


def test_too_many_switched_samples_disturb():
    assert "" == why(0.99, switches=2)
    assert "" == why(0.5, 0.5, switches=9, which="0-1"), "no core is left for other programs"
    assert "" != why(0.5, 0.5, switches=9, which="0-2,5")
    assert "30% of the samples had an involuntary context switch" == why(0.99, switches=3)


def test_the_warning_names_steal_and_pressure(tmp_path):
    stat, pressure = "proc/stat", "proc/pressure/cpu"
    host = machines.host(tmp_path, {})
    machines.write(tmp_path, {stat: "cpu  100 0 0 890 0 0 0 10 5 0\ncpu0 1 2\n"})
    machines.write(tmp_path, {pressure: "some avg10=12.50 avg60=0.72 avg300=0.29 total=6800466\nfull avg10=0.00\n"})
    before = quiet.read_host_load(host, [os.getpid()])
    assert quiet.HostLoad(ticks=(10, 1000), pressure_percent=12.5) == before
    machines.write(tmp_path, {stat: "cpu  600 0 0 1350 0 0 0 50 9 0\n"})
    after = quiet.read_host_load(host, [os.getpid()])
    assert pytest.approx(0.04) == quiet.steal_share(before, after)
    (line,) = quiet.warnings([("test_a", "")], before=before, after=after)
    assert "tasks waited for a core in 12 % of the 10 s before the first case" in line
    assert "the hypervisor took 4.0% of the core time" in line
    nothing = quiet.read_host_load(machines.host(tmp_path / "none", {}), [])
    assert [] == quiet.warnings([("test_a", "")], before=nothing, after=nothing)


@pytest.mark.parametrize(("own_ticks", "told"), [(700, "30% of the core time"), (960, "")])
def test_the_warning_names_what_others_took_of_the_cores(tmp_path, own_ticks, told):
    """1,000 ticks of each core, all of them busy: what is not the run's own was somebody else's."""
    host, cores = machines.host(tmp_path, {}), sorted(Host().granted())
    a_second = os.sysconf("SC_CLK_TCK")

    def reading(ticks, own):
        stat = "".join(f"cpu{core} {ticks} 0 0 0 0 0 0 0 0 0\n" for core in cores)
        fields = " ".join(["0"] * 10 + [str(own * len(cores)), "0", "0", "0"])
        machines.write(tmp_path, {"proc/stat": stat, f"proc/{os.getpid()}/stat": f"1 (a) b) S {fields}\n"})
        return quiet.read_host_load(host, [os.getpid()])

    before, after = reading(1000, 0), reading(2000, own_ticks)
    assert after.core_time == tuple(ticks * len(cores) / a_second for ticks in (2000, 2000, own_ticks))
    lines = quiet.warnings([("test_a", "")], before=before, after=after)
    assert lines == ([f"the machine is not quiet: other programs took {told}"] if told else [])


def test_what_a_child_took_is_the_runs_own_also_once_it_has_ended():
    before = quiet.read_host_load(Host(), [os.getpid()]).core_time
    busy = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", busy], check=True)
    after = quiet.read_host_load(Host(), [os.getpid()]).core_time
    if before is None or after is None:
        pytest.skip("no /proc/stat here")
    assert after[2] - before[2] >= 0.4


@pytest.mark.parametrize(
    ("listed", "walks", "word"), [((), 0, ""), ((7, 8), 1, ""), ((8, 9), 1, "device 0 is shared with 1 other process")]
)
def test_the_hosts_processes_are_listed_only_where_devices_have_some(monkeypatch, listed, walks, word):
    telemetry, walked = Unread(count=1), []
    monkeypatch.setattr(telemetry, "read", lambda: (Reading(index=0, throttle=(), processes=listed),))
    monkeypatch.setattr(verdict_reports, "family_of_processes", lambda roots: walked.append(roots) or {*roots, 8})
    suite = SimpleNamespace(
        machine=SimpleNamespace(family=SimpleNamespace(name="cuda", telemetry=lambda: telemetry)),
        session=SimpleNamespace(driver=SimpleNamespace(contexts=lambda: {0: 2})),
        own_processes=lambda: {7},
    )
    assert word == verdict_reports.telemetry_of(suite)()
    assert walks == len(walked)


def test_descendants_are_no_strangers():
    code = "import subprocess,sys; c=subprocess.Popen(['sleep','30']); print(c.pid, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as child:
        grandchild = int(child.stdout.readline())
        assert {os.getpid(), child.pid, grandchild} <= family_of_processes([os.getpid()])
        assert os.getppid() not in family_of_processes([os.getpid()])
        os.kill(grandchild, 9)
        child.kill()

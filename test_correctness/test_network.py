"""What a stranger on the network can reach, and what perfsuite does with bytes that came by it."""

import ast
import os
import re
import socket
from pathlib import Path

import pytest

from perfsuite.base.errors import LaunchError
from perfsuite.runtime.ranks import arrival
from perfsuite.runtime.transports import star
from perfsuite.runtime.transports.keys import Meeting
from perfsuite.runtime.transports.star import AgentFacts
from test_correctness.helpers.agents import a_launch, reach
from test_correctness.helpers.processes import listening_on

PACKAGE = Path(__file__).parent.parent / "perfsuite"
PICKLING_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
PICKLING_CALLS = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "rpc_sync", "rpc_async"),
}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.3", "::1"])
def test_a_store_listens_on_its_address_alone(host):
    if host == "::1" and not _has_ipv6():
        pytest.skip("no IPv6 loopback here")
    served = arrival.serve_store(host)
    assert listening_on(os.getpid())[served.port] == host
    served.set("a", "b")
    assert arrival.TCPStore(host, served.port).get("a") == b"b"


def test_a_torch_whose_newer_server_takes_no_socket_gets_the_older_one(monkeypatch):
    real, tried = arrival.TCPStore, []

    def before_2_8(*arguments, **options):
        tried.append(options.get("use_libuv", True))
        if tried[-1]:
            raise NotImplementedError("The libuv TCPStore backend does not support initialization with an listen fd.")
        return real(*arguments, **options)

    monkeypatch.setattr(arrival, "TCPStore", before_2_8)
    served = arrival.serve_store("127.0.0.1")
    assert tried == [True, False]
    assert listening_on(os.getpid())[served.port] == "127.0.0.1"
    assert real("127.0.0.1", served.port).add("n", 2) == 2


def test_the_launch_s_address_is_the_one_by_which_other_hosts_came(monkeypatch):
    """A host's own name may be a loopback address on that host, so that its own agents come by another."""
    monkeypatch.setattr(star, "gethostname", lambda: "a")
    hosts = {1: ("a", "127.0.1.1"), 2: ("b", "10.0.0.1"), 3: ("b", "10.0.0.1")}
    addresses = {rank: at for rank, (_, at) in hosts.items()}
    facts = {
        rank: AgentFacts(slot=rank, host=host, pid=1, local_rank=rank % 2, local_world_size=2, cores=(0,))
        for rank, (host, _) in hosts.items()
    }
    assert star.best_address(addresses, facts) == "10.0.0.1"
    assert star.best_address({1: addresses[1]}, facts) == "127.0.1.1"
    assert star.best_address({}, {}) == "127.0.0.1"


@pytest.mark.parametrize(
    ("name", "why"),
    [("n1", "Name or service not known"), ("host..of.nobody", "label empty or too long")],
    ids=["no host has it", "no name at all"],
)
def test_an_agent_says_that_the_name_of_rank_0_has_no_address(name, why, monkeypatch, capsys):
    """A node name of Slurm need not be a host name; the wait is 300 s, and DNS may know the name later."""

    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, why)

    if name == "n1":
        monkeypatch.setattr(socket, "getaddrinfo", unknown)
    launch = a_launch(1, local_world_size=1, master_addr=name)
    said = rf"cannot resolve {re.escape(name)}, the host of rank 0 \(.*{why}.*\): set MASTER_ADDR to an address"
    with pytest.raises(LaunchError, match=rf"rank 1 found no driver .*{said}"):
        reach(launch, Meeting(key=bytes(16)), deadline_s=0.1)
    star.say_waiting(launch, "rank 0", 300.0, {"RANK": "1"})
    assert re.search(said, capsys.readouterr().err)


def pickling(tree):
    """Places in a module that would unpickle bytes: as \"line: what\"."""
    found = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module).split(".")[0], *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Name):
            names = [node.id]
        found += [f"{node.lineno}: {name}" for name in names if name in PICKLING_MODULES | PICKLING_CALLS]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = ast.unparse(node.func)
            options = {option.arg: ast.unparse(option.value) for option in node.keywords}
            if called == "torch.load" and options.get("weights_only") != "True":
                found.append(f"{node.lineno}: torch.load without weights_only=True")
            if node.func.attr == "recv" and not node.args and not node.keywords:
                found.append(f"{node.lineno}: {called}() of a multiprocessing connection")
    return found


@pytest.mark.parametrize(
    "code",
    [
        *("import pickle", "from pickle import loads", "dist.all_gather_object(found, mine)", "torch.load(file)"),
        *("from torch.distributed import broadcast_object_list", "message = link.recv()"),
        "torch.load(file, weights_only=False)",
    ],
)
def test_the_search_for_pickles_finds(code):
    assert pickling(ast.parse(code))


@pytest.mark.extended
def test_nothing_of_perfsuite_unpickles_what_came_from_elsewhere():
    assert pickling(ast.parse("torch.load(file, weights_only=True); dist.recv(box, 0); link.recv_bytes()")) == []
    found = {str(file.relative_to(PACKAGE)): pickling(ast.parse(file.read_text())) for file in PACKAGE.glob("**/*.py")}
    assert {file: places for file, places in found.items() if places} == {}


def _has_ipv6():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False

"""Error rates of the rule within a fleet, by a seeded simulation; numbers of docs acceptance-evidence.

    python benchmarks/fleet_truth.py [--repetitions 10] [--nodes 1000]

A node has eight devices and eight quantities.  A log time is a node effect plus a device effect plus noise:

- healthy spreads of 0.5 to 3 % by quantity, 30 % of the variance common to the node, Student tails (t10 and t5);
- half of the device variance of the four compute quantities is common to them (silicon);
- a defect makes one device, in one of four cases a whole node, slower in one family of quantities.

The spreads and tails are assumptions: no healthy fleet is public.  Needs numpy.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator

import numpy as np

from perfsuite.fleet.rule import Slow, compare, slow_in_pairs, two_groups
from perfsuite.metrics.pairs import SLOW_LINK, beyond_ends
from perfsuite.workloads.pair_rounds import AGAIN, tournament

SPREADS = (0.005, 0.005, 0.01, 0.01, 0.015, 0.02, 0.02, 0.03)
NOISES = (0.003, 0.003, 0.004, 0.005, 0.005, 0.006, 0.006, 0.010)
FAMILIES = (0, 0, 1, 1, 2, 2, 2, 2)
"""Memory, host link, compute."""
DEVICES, COMMON, SILICON, WHOLE_NODE = 8, 0.3, 0.5, 0.25
PRIORS = (0.01, 0.01, 0.01, 0.01, 0.02, 0.02, 0.02, 0.02)
"""As perfsuite.fleet.nodes gives them by family: not the true spreads."""


class Fleet:
    """True log times by node, device and quantity, and which devices are defective."""

    def __init__(self, draw: np.random.Generator, nodes: int, tails: float, *, share=0.0, size=0.0, second=0.0) -> None:
        def unit(*shape: int) -> np.ndarray:
            return draw.standard_t(tails, shape) / np.sqrt(tails / (tails - 2))

        self.draw, self.tails = draw, tails
        device = unit(nodes, DEVICES, 8) * np.sqrt(1 - COMMON)
        compute = np.array(FAMILIES) == 2
        silicon = unit(nodes, DEVICES, 1) * np.sqrt(1 - COMMON)
        device[:, :, compute] = np.sqrt(1 - SILICON) * device[:, :, compute] + np.sqrt(SILICON) * silicon
        self.true = (unit(nodes, 1, 8) * np.sqrt(COMMON) + device) * np.array(SPREADS)
        self.healthy = self.true.copy()
        self.defective = np.zeros((nodes, DEVICES), bool)
        self.second = np.zeros(nodes, bool)
        self.second[draw.permutation(nodes)[: round(nodes * second)]] = True
        self.true[self.second] += 0.04 * compute
        for _ in range(max(1, draw.binomial(nodes * DEVICES, share)) if share else 0):
            node, family = draw.integers(nodes), draw.integers(3)
            hit = slice(None) if draw.random() < WHOLE_NODE else slice(*[(d := int(draw.integers(DEVICES))), d + 1])
            self.true[node, hit] += size * (np.array(FAMILIES) == family)
            self.defective[node, hit] = True

    def run(self, transients: float = 0.0) -> np.ndarray:
        """Log times of one run each; ``transients``: share of devices 5 to 30 % slower in one family meanwhile."""
        shape = self.true.shape
        noise = self.draw.standard_t(self.tails, shape) / np.sqrt(self.tails / (self.tails - 2)) * np.array(NOISES)
        hit = self.draw.random(shape[:2]) < transients
        family = self.draw.integers(0, 3, shape[:2])[..., None] == np.array(FAMILIES)
        return self.true + noise + (hit * self.draw.uniform(0.05, 0.3, shape[:2]))[..., None] * family


def named(runs: np.ndarray, again: dict[int, list[np.ndarray]] | None = None) -> np.ndarray:
    """Which devices the rule names, a whole node as all of its devices."""
    found = np.zeros(runs.shape[:2], bool)
    for quantity, outliers in _compared(runs, again):
        del quantity
        for slow in outliers:
            node, device = slow.member
            found[int(node), int(device) if device else slice(None)] = True
    return found


def _compared(runs: np.ndarray, again: dict[int, list[np.ndarray]] | None) -> Iterator[tuple[int, tuple[Slow, ...]]]:
    def plain(values: np.ndarray) -> dict[str, float]:
        return dict(zip(map(str, range(DEVICES)), values.tolist(), strict=True))

    for quantity in range(runs.shape[2]):
        values = {str(node): plain(runs[node, :, quantity]) for node in range(len(runs))}
        later = {str(node): [plain(run[:, quantity]) for run in more] for node, more in (again or {}).items()}
        yield quantity, compare(values, prior=PRIORS[quantity], again=later)[0]


def rates(nodes: int, repetitions: int, tails: float, *, seed: int, transients=0.0, look_again=False, **world):
    """(healthy nodes named per 1,000, those among them truly less than 2 % slow, share of defective devices named)."""
    false = slow_false = healthy = hits = defects = 0
    for repetition in range(repetitions):
        fleet = Fleet(np.random.default_rng([seed, repetition, nodes]), nodes, tails, **world)
        runs = fleet.run(transients)
        found = np.zeros(runs.shape[:2], bool)
        for part in (fleet.second, ~fleet.second) if world.get("second") else (np.ones(nodes, bool),):
            found[part] = named(runs[part])
            if look_again:
                fresh = [fleet.run() for _ in range(3)]
                places = np.flatnonzero(part)
                again = {i: [run[places[i]] for run in fresh] for i in np.flatnonzero(found[part].any(1))}
                found[part] = named(runs[part], again)
        good = ~fleet.defective.any(1)
        worst = (fleet.healthy - np.median(fleet.healthy, (0, 1))).max((1, 2))
        healthy += good.sum()
        false += (found.any(1) & good).sum()
        slow_false += (found.any(1) & good & (worst < 0.02)).sum()
        hits += (found & fleet.defective).sum()
        defects += fleet.defective.sum()
    return 1000 * false / max(1, healthy), 1000 * slow_false / max(1, healthy), 100 * hits / max(1, defects)


def pair_rates(nodes: int, repetitions: int, size: float) -> tuple[float, float]:
    """(healthy nodes named per 1,000, per cent of slow nodes found) by four rounds of pairs; 1 % of nodes are slow.

    A pair takes as long as its slower node, times noise (1 %, t5); 2 % of the messages are 5 to 40 % slower.
    """
    false = healthy = hits = slow_nodes = 0
    for repetition in range(repetitions):
        draw = np.random.default_rng([9, nodes, repetition])
        node = draw.standard_normal(nodes) * 0.007
        bad = set(draw.permutation(nodes)[: max(1, draw.binomial(nodes, 0.01))].tolist())
        for one in bad:
            node[one] += size
        times = {}
        for pairs in tournament(nodes)[:4]:
            noise = draw.standard_t(5.0, len(pairs)) / np.sqrt(5 / 3) * 0.01
            noise += (draw.random(len(pairs)) < 0.02) * draw.uniform(0.05, 0.4, len(pairs))
            times |= {(str(a), str(b)): max(node[a], node[b]) + n for (a, b), n in zip(pairs, noise, strict=True)}
        named = {int(slow.member[0]) for slow in slow_in_pairs(times)}
        false += len(named - bad)
        healthy += nodes - len(bad)
        hits += len(named & bad)
        slow_nodes += len(bad)
    return 1000 * false / healthy, 100 * hits / slow_nodes


def link_rates(nodes: int, repetitions: int, size: float) -> tuple[float, float, float]:
    """(suspected links, healthy links named, per cent of slow links found) per fleet, by all rounds of pairs.

    One link of 32 nodes is slow; noise as for pairs.  Suspects are tried again four times.
    """
    suspected = false = hits = slow_links = 0
    least = np.log1p(SLOW_LINK)
    for repetition in range(repetitions):
        draw = np.random.default_rng([10, nodes, repetition])
        pairs = list(itertools.combinations(range(nodes), 2))
        node = draw.standard_normal(nodes) * 0.007
        chosen = draw.permutation(len(pairs))[: max(1, nodes // 32)]
        bad = {pairs[index] for index in chosen}
        true = {pair: max(node[pair[0]], node[pair[1]]) + size * (pair in bad) for pair in pairs}

        def noise(count: int, draw: np.random.Generator = draw) -> np.ndarray:
            congested = (draw.random(count) < 0.02) * draw.uniform(0.05, 0.4, count)
            return draw.standard_t(5.0, count) / np.sqrt(5 / 3) * 0.01 + congested

        times = {pair: true[pair] + n for pair, n in zip(pairs, noise(len(pairs)), strict=True)}
        suspects = [pair for pair, away in beyond_ends(times).items() if away > least]
        again = {pair: true[pair] + float(np.median(noise(AGAIN))) for pair in suspects}
        named = {pair for pair, away in beyond_ends(times, again).items() if away > least} if again else set()
        suspected += len(suspects)
        false += len(named - bad)
        hits += len(named & bad)
        slow_links += len(bad)
    return suspected / repetitions, false / repetitions, 100 * hits / slow_links


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--repetitions", type=int, default=10)
    options = parser.parse_args()
    nodes, count = options.nodes, options.repetitions
    for tails in (10.0, 5.0):
        false, slow, _ = rates(nodes, count, tails, seed=1)
        print(f"t{tails:g}: {false:.2f} healthy nodes named per 1,000, {slow:.2f} of them truly less than 2 % slow")
    for size in (0.05, 0.10, 0.20):
        print(f"{size:.0%} slower: {rates(nodes, count, 10.0, seed=2, share=0.01, size=size)[2]:.0f} % found")
    once = rates(nodes, count, 10.0, seed=3, share=0.01, size=0.10, transients=0.02)
    twice = rates(nodes, count, 10.0, seed=3, share=0.01, size=0.10, transients=0.02, look_again=True)
    print(f"transients: {once[0]:.1f} false per 1,000, {twice[0]:.2f} after the second look ({twice[2]:.0f} % found)")
    shifted = rates(nodes, count, 10.0, seed=4, share=0.01, size=0.10, second=0.3)
    print(f"30 % of nodes 4 % slower by a recorded key: {shifted[0]:.2f} false per 1,000, {shifted[2]:.0f} % found")
    for size in (1, 2, 8, 16, 64):
        false = rates(size, max(20, count * 640 // size // 4), 10.0, seed=5)[0]
        found = rates(size, max(20, count * 160 // size // 4), 10.0, seed=6, share=1e-9, size=0.20)[2]
        print(f"{size} nodes: {false:.2f} false per 1,000, a 20 % defect found in {found:.0f} %")
    apart = [two_groups(np.median(Fleet(np.random.default_rng([7, r]), 256, 10.0).run()[..., 5], 1)) for r in range(50)]
    shift = [
        two_groups(np.median(Fleet(np.random.default_rng([8, r]), 256, 10.0, second=0.3).run()[..., 4], 1))
        for r in range(50)
    ]
    told = [100 * sum(found is not None for found in each) // 50 for each in (apart, shift)]
    for size in (8, 16, 64, 256, 1024):
        times = max(20, 40 * count * 64 // size // 10)
        found = [pair_rates(size, times, slow) for slow in (0.05, 0.10, 0.30)]
        false = sum(one[0] for one in found) / 3
        shares = " / ".join(f"{one[1]:.0f}" for one in found)
        print(f"pairs of {size} nodes: {false:.2f} false per 1,000, 5 / 10 / 30 % slower: {shares} % found")
    for size in (8, 16, 64):
        once, large = (link_rates(size, max(20, 160 * count // size), slow) for slow in (0.10, 0.30))
        found = f"10 / 30 % slower: {once[2]:.0f} / {large[2]:.0f} % found"
        print(f"links of {size} nodes: {once[0]:.1f} suspected, {once[1]:.2f} named falsely, {found}")
    print(f"two groups told among 256 nodes: {told[0]} % of equal fleets, {told[1]} % with 30 % of them 4 % slower")


if __name__ == "__main__":
    main()

"""A training step to project, with its device, its nodes and the code that runs it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from perfsuite.base.units import GIB
from perfsuite.models import Model, find_projected
from perfsuite.platforms import DeviceModel
from perfsuite.projection.architecture import Architecture
from perfsuite.projection.implementation import Implementation, implementation_of, on_family
from perfsuite.projection.layout import Layout
from perfsuite.projection.memory import USABLE
from perfsuite.record.step import Training


@dataclass(frozen=True, kw_only=True)
class Node:
    """The devices and the network of one node."""

    devices: int
    network_gb_per_s: float = 0.0
    """Rate of the whole node per direction; 0: unknown."""
    machine: str = ""
    """Name of the machine; empty for the vendor's own node."""

    @classmethod
    def of(cls, row: DeviceModel) -> Node:
        """Return the vendor's own node; without one, all devices are in one node."""
        devices = int(row.devices_per_node.value) if row.devices_per_node else 0
        return cls(devices=devices, network_gb_per_s=row.network.value if row.network else 0.0)


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """One step to project.

    >>> from perfsuite.platforms import load_catalog
    >>> training = Training(model="llama2-7b", layout="dp8", sharding="parameters", dtype="bf16")
    >>> job = TrainingJob.of(training, load_catalog().find("s4000"))
    >>> job.layout.world_size, job.node.devices, job.architecture.layers
    (8, 8, 32)
    """

    training: Training
    device: DeviceModel
    node: Node
    architecture: Architecture
    """The model in plain numbers; published rows have models that perfsuite does not build."""
    implementation: Implementation
    published_software: bool = False
    """The code is a published software's, the same for every layout; otherwise perfsuite's own, which depends on it."""

    @classmethod
    def of(
        cls,
        training: Training,
        device: DeviceModel,
        *,
        node: Node | None = None,
        implementation: Implementation | None = None,
    ) -> TrainingJob:
        """Return the job of a model of perfsuite.

        Raises InvalidParameter with the legal choices for an illegal layout.
        """
        model = find_projected(training.model, training.overrides)
        layout = Layout.of(training)
        layout.check(model)
        node, published_software = node or Node.of(device), implementation is not None
        if implementation is None:
            implementation = on_family(implementation_of(model, training), model, training, device.family)
        return cls(
            training=training,
            device=device,
            node=node,
            architecture=Architecture.of(model.built_for(layout.shape.size("tp"))),
            implementation=implementation,
            published_software=published_software,
        )

    @functools.cached_property
    def layout(self) -> Layout:
        """Return the layout of the training step."""
        return Layout.of(self.training)

    @functools.cached_property
    def model(self) -> Model:
        """Return the model with the vocabulary padded for its layout."""
        return self.published.built_for(self.layout.shape.size("tp"))

    @functools.cached_property
    def published(self) -> Model:
        """Return the model without padding."""
        return find_projected(self.training.model, self.training.overrides)

    @property
    def capacity(self) -> float:
        """Return the bytes of device memory that the driver leaves; 0: unknown."""
        return USABLE * self.device.memory.value * GIB if self.device.memory else 0.0

    @property
    def devices_per_node(self) -> int:
        """Return the devices of a node; all devices if the size of a node is unknown."""
        return self.node.devices or self.layout.world_size

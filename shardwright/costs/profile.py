"""What each layer of a program takes, as it was measured.

Input: what `profile` measured. Output: a `Profile`, which prints as a table, is a file, and is
what planners take for measured costs. Invariant: layers stand in the order of the graph,
their nodes are all its forward nodes, each once; equal layers share one measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from shardwright.clusters import CPU_CORE, DEVICES, DeviceModel
from shardwright.costs.cost import Analytic, Costs
from shardwright.costs.fit import FitPoint, fit
from shardwright.costs.layer import Layer
from shardwright.costs.measured import Measured
from shardwright.costs.profile_chart import plot_profile
from shardwright.costs.profile_table import format_profile
from shardwright.costs.stored import read_stored, write_stored
from shardwright.costs.timing import Measurement


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What each layer of a graph takes on a device.

    graph
        The graph's name.
    device, kind
        The model of the device, as it calls itself; ``cpu`` or ``cuda``.
    torch_version, threads
        What it was measured with.
    recompute
        Whether backward runs the forward again, instead of keeping what it needs.
    layers
        In the order of the graph.
    measurements
        By key: what was measured, each distinct layer once.
    """

    graph: str
    device: str
    kind: Literal["cpu", "cuda"]
    torch_version: str
    threads: int
    recompute: bool
    layers: tuple[Layer, ...]
    measurements: dict[str, Measurement]

    def __str__(self) -> str:
        """A table with a line for each distinct layer."""
        return format_profile(self)

    @property
    def forward_time(self) -> float:
        """Milliseconds of all layers' forwards, one after another."""
        return sum(layer.forward_time for layer in self.layers)

    @property
    def backward_time(self) -> float:
        """Milliseconds of all layers' backwards, one after another."""
        return sum(layer.backward_time for layer in self.layers)

    def costs(self, fallback: Costs | None = None) -> Measured:
        """What nodes cost, as they were measured here; see `Measured`.

        ``fallback`` says what was not measured, up to a factor for each operator; by default it is
        the roofline of `device_model`.
        """
        return Measured(self.measurements.values(), fallback or Analytic(self.device_model()))

    def device_model(self) -> DeviceModel:
        """A device of this kind, with the rates that explain best what single nodes took.

        Its memory is not measured.
        """
        named = msgspec.structs.replace(_DEVICES[self.kind], name=self.device)
        found = [pair for each in self.measurements.values() for pair in each.observations()]
        return fit(named, [FitPoint(*pair) for pair in found])

    def save(self, path: str | Path) -> None:
        """Write it as JSON. Raises OSError as writing does."""
        write_stored(path, _ProfileFile(1, self))

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read what `save` wrote. Raises ProfileError."""
        writer = "Profile.save or shardwright profile -o"
        return read_stored(path, _ProfileFile, "profile", writer).profile

    def plot(self, path: str | Path) -> None:
        """Draw a bar chart of times and memory, as ``.svg``, ``.png`` or ``.pdf``.

        Raises ProfileError for other names, and where matplotlib is not installed.
        """
        plot_profile(self, Path(path))


class _ProfileFile(msgspec.Struct, forbid_unknown_fields=True):
    """A profile in a file."""

    version: Literal[1]
    profile: Profile


_DEVICES: Mapping[str, DeviceModel] = {"cpu": CPU_CORE, "cuda": DEVICES["A100-80GB"]}
"""Where the search for a device's rates begins."""

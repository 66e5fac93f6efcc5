import msgspec
import pytest

from shardwright.clusters import CPU_CORE, DEVICES, LINKS, SHARED, Cluster, DeviceModel
from shardwright.errors import PlanError


def test_devices_and_links_by_name():
    assert set(DEVICES) == {"cpu-core", "V100-32GB", "A100-40GB", "A100-80GB", "H100", "H200"}
    assert all(device.name == name for name, device in DEVICES.items())
    assert DEVICES["A100-80GB"].half_flops == pytest.approx(250e12, rel=0.01)
    assert LINKS["nvlink4"].send.bandwidth > LINKS["infiniband-ndr"].send.bandwidth
    assert Cluster.of(1).device is CPU_CORE
    assert Cluster.of(1).inside is SHARED


def test_newer_devices_and_links_are_faster():
    for slow, fast in (("V100-32GB", "A100-40GB"), ("A100-80GB", "H100")):
        for rate in ("flops", "half_flops", "bandwidth"):
            assert getattr(DEVICES[slow], rate) < getattr(DEVICES[fast], rate)


def test_a_device_is_a_plain_value():
    for device in DEVICES.values():
        assert msgspec.json.decode(msgspec.json.encode(device), type=DeviceModel) == device


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("memory", 0, "device 'cpu-core': memory must be positive, found 0"),
        ("flops", -1.0, "flops must be positive, found -1.0"),
        ("bandwidth", float("nan"), "bandwidth must be positive, found nan"),
        ("half_flops", 0.0, "half_flops must be positive, found 0.0"),
        ("overhead", -1e-6, "overhead must not be negative, found -1e-06 s"),
        ("overhead", float("nan"), "overhead must not be negative, found nan s"),
    ],
)
def test_what_cannot_be_is_refused(field, value, message):
    with pytest.raises(PlanError, match=message):
        msgspec.structs.replace(CPU_CORE, **{field: value}).__post_init__()

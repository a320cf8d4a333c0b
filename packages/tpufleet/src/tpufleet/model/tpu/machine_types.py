"""CPUs and memory of GKE's TPU machines, how much of it pods get, and which machines exist."""

from __future__ import annotations

# CPUs and GiB of memory, from
# https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus
MACHINE_RESOURCES: dict[str, tuple[int, int]] = {
    "ct4p-hightpu-4t": (240, 407),
    "ct5lp-hightpu-1t": (24, 48),
    "ct5lp-hightpu-4t": (112, 192),
    "ct5lp-hightpu-8t": (224, 384),
    "ct5p-hightpu-4t": (208, 448),
    # That table has 448, but the machine has 176 GiB, a quarter of the next one's, as in
    # https://cloud.google.com/compute/docs/tpus/tpu-machines; its users see 172 in `free`.
    "ct6e-standard-1t": (44, 176),
    "ct6e-standard-4t": (180, 720),
    "ct6e-standard-8t": (180, 1440),
    # Not in that table when it was read: the memory is from lists of machine types, and the CPUs
    # are a quarter of those of the larger one.
    "tpu7x-standard-1t": (56, 240),
    "tpu7x-standard-4t": (224, 960),
}
# What GKE reserves on each node: share of the next so many cores or GiB; None: of all others. From
# https://cloud.google.com/kubernetes-engine/docs/concepts/plan-node-sizes
_CPU_RESERVED: tuple[tuple[int | None, float], ...] = (
    (1, 0.06),
    (1, 0.01),
    (2, 0.005),
    (None, 0.0025),
)
_MEMORY_RESERVED: tuple[tuple[int | None, float], ...] = (
    (4, 0.25),
    (4, 0.20),
    (8, 0.10),
    (112, 0.06),
    (None, 0.02),
)
_EVICTION_THRESHOLD = 100 / 1024  # GiB

# Machines with Hyperdisk only, from
# https://cloud.google.com/tpu/docs/attach-durable-block-storage (tpu7x is as v6e) and
# https://cloud.google.com/compute/docs/disks/hyperdisks#machine-type-support
_HYPERDISK_MACHINES = (
    "ct6e-", "tpu7x-", "c4-", "c4a-", "c4d-", "h4d-", "m4-", "n4-", "n4d-", "x4-",
)  # fmt: skip

# CPUs of the shapes `standard`, `highmem` and `highcpu` (some lack the largest), from
# https://cloud.google.com/compute/docs/general-purpose-machines
_SIZES = {
    "e2": (2, 4, 8, 16, 32),
    "n1": (1, 2, 4, 8, 16, 32, 64, 96),
    "n2": (2, 4, 8, 16, 32, 48, 64, 80, 96, 128),
    "n2d": (2, 4, 8, 16, 32, 48, 64, 80, 96, 128, 224),
    "g2": (4, 8, 12, 16, 24, 32, 48, 96),
    "t2d": (1, 2, 4, 8, 16, 32, 48, 60),
}

# Of Hyperdisk they have no boot disks, in the same tables.
_PERSISTENT_DISK_MACHINES = ("ct4p-", "ct5lp-", "ct5p-", *(f"{family}-" for family in _SIZES))


def may_exist(machine: str) -> bool:
    """False for what the families above lack; others are not known here."""
    family, shape, *size = machine.split("-")
    if family not in _SIZES or shape in ("custom", "micro", "small", "medium"):
        return True
    shapes = ("standard", "highmem", "highcpu")
    return shape in shapes and [int(each) for each in size if each.isdigit()] in [
        [known] for known in _SIZES[family]
    ]


# https://cloud.google.com/compute/docs/gpus: the machines of each GPU type, by their beginning.
_GPU_MACHINES = {
    "nvidia-l4": "g2",
    "nvidia-tesla-p4": "n1",
    "nvidia-tesla-p100": "n1",
    "nvidia-tesla-t4": "n1",
    "nvidia-tesla-v100": "n1",
    "nvidia-tesla-a100": "a2",
    "nvidia-a100-80gb": "a2-ultragpu",
    "nvidia-h100-80gb": "a3",
    "nvidia-h100-mega-80gb": "a3-megagpu",
    "nvidia-h200-141gb": "a3-ultragpu",
    "nvidia-b200": "a4",
}


def gpu_machines(gpu: str) -> str:
    """How their names begin; empty for a GPU that is not known here."""
    return _GPU_MACHINES.get(gpu, "")


def default_disk_type(machine: str) -> str:
    return "hyperdisk-balanced" if machine.startswith(_HYPERDISK_MACHINES) else "pd-balanced"


def can_have_disk(machine: str, disk_type: str) -> bool:
    """False for what these machines lack; others are not known here."""
    hyperdisk = disk_type.startswith("hyperdisk-")
    if machine.startswith(_HYPERDISK_MACHINES):
        return hyperdisk
    return not (hyperdisk and machine.startswith(_PERSISTENT_DISK_MACHINES))


def allocatable(machine: str) -> tuple[float, float]:
    """CPUs and GiB of memory that the pods of a node can request, at most."""
    cpus, gibibytes = MACHINE_RESOURCES[machine]
    return (
        cpus - _reserved(cpus, _CPU_RESERVED),
        gibibytes - _reserved(gibibytes, _MEMORY_RESERVED) - _EVICTION_THRESHOLD,
    )


def _reserved(total: float, parts: tuple[tuple[int | None, float], ...]) -> float:
    left, reserved = total, 0.0
    for size, share in parts:
        part = left if size is None else min(left, size)
        reserved += share * part
        left -= part
    return reserved

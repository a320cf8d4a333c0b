"""cluster.yaml: every error names its path and the nearest valid value."""

from __future__ import annotations

import ipaddress
import re

import jsonschema
import pytest
import yaml
from msgspec.structs import fields

from tests.environment.environments import EXAMPLE, SMALLEST, environment, example, tpu
from tests.environment.provider_checks import resources
from tpufleet.errors import BadInput
from tpufleet.model.tpu import type_lookup
from tpufleet_gke.environment.config import capacity, names, sections
from tpufleet_gke.environment.config.parse import json_schema, parse, parse_text
from tpufleet_gke.environment.config.starter_file import starter_file

GKE_TYPES = [name for name, kind in type_lookup.all_types().items() if kind.gke_accelerator]

ERRORS = {
    "a misspelt field": ({"tpu_pool": {}}, "tpu_pool: unknown field; did you mean tpu_pools?"),
    "a misspelt nested field": (
        {"cpu_pools": {"cpu": {"auto_repiar": True}}},
        "cpu_pools.cpu.auto_repiar: unknown field; did you mean auto_repair?",
    ),
    "a project": ({"project": "My Project"}, "project: 'My Project' is not a project id; "
                  "for example my-project"),
    "a zone for a region": ({"region": "us-central1-a"}, "region: 'us-central1-a' is not a "
                            "region; for example us-central1"),
    "a region for a zone": ({"zones": ["us-central1"]}, "zones[0]: 'us-central1' is not a zone; "
                            "for example us-central1-a"),
    "a zone elsewhere": ({"zones": ["us-east1-b"]}, "zones[0]: us-east1-b is not in region "
                         "us-central1; for example us-central1-b"),
    "a channel": ({"cluster": {"channel": "REGULR"}}, "cluster.channel: unknown value 'REGULR'; "
                  "did you mean REGULAR?"),
    "a size": ({"tpu_pools": {"a": {"type": "v5e-17"}}}, "tpu_pools.a.type: unknown TPU type "
               "'v5e-17'; the nearest size is v5e-16"),
    "a type without GKE": ({"tpu_pools": {"a": {"type": "v2-8"}}}, "tpu_pools.a.type: v2-8 is "
                           "not available on GKE"),
    "a capacity": ({"tpu_pools": {"a": {"type": "v5e-16", "capacity": "flexstart"}}},
                   "tpu_pools.a.capacity: unknown value 'flexstart'; did you mean flex-start?"),
    "v4 with flex-start": ({"tpu_pools": {"a": {"type": "v4-8", "capacity": "flex-start"}}},
                           "tpu_pools.a.capacity: GKE has no flex-start for v4; for example"),
    "flex-start of two kinds, of which Kueue asks GKE for one": (
        {"tpu_pools": {"a": {"type": "v5e-16", "capacity": "flex-start"},
                       "b": {"type": "v5e-16", "capacity": "flex-start", "slices": 0,
                             "managed_by": "terraform"}}},
        "tpu_pools.b.managed_by: tpu_pools.a has the same type and capacity; write the same in"),
    "a reservation missing": ({"tpu_pools": {"a": {"type": "v5e-16", "capacity": "reserved"}}},
                              "tpu_pools.a.reservation: goes with capacity reserved; set"),
    "a disk that the machines cannot have": (
        {"tpu_pools": {"a": {"type": "v6e-16", "disk_type": "pd-balanced"}}},
        "tpu_pools.a.disk_type: v6e-16 cannot have pd-balanced disks; write hyperdisk-balanced"),
    "a billing account": (
        {"budget": {"billing_account": "billing", "monthly_usd": 5}},
        "budget.billing_account: 'billing' is not a billing account; for example 012345-567890-"),
    "a bucket that Cloud Storage refuses": (
        {"buckets": {"google-ads": {}}},
        "buckets.google-ads: Cloud Storage refuses google in my-project-ml-google-ads"),
    "a label that GKE reserves": (
        {"cpu_pools": {"cpu": {"labels": {"kubernetes.io/role": "x"}}}},
        "cpu_pools.cpu.labels.kubernetes.io/role: reserved by tpufleet or the system"),
    "the key of a taint": (
        {"cpu_pools": {"cpu": {"taints": [{"key": "a b"}]}}},
        "cpu_pools.cpu.taints[0].key: 'a b' is not a label; for example a-b"),
    "a GPU on other machines": (
        {"gpu_pools": {"gpu": {"accelerator": "nvidia-tesla-t4"}}},
        "gpu_pools.gpu.machine_type: nvidia-tesla-t4 goes with n1 machines, not g2-standard-12"),
    "a range of a VPC that exists": (
        {"network": {"pods": "10.9.0.0/16", "existing": {
            "network": "n", "subnetwork": "s", "pods_range": "p", "services_range": "v"}}},
        "network.pods: is that of network.existing; remove it"),
    "a range with host bits": ({"network": {"pods": "10.1.2.3/18"}}, "network.pods: '10.1.2.3/18' "
                               "is not a CIDR range; for example 10.1.0.0/18"),
    "ranges that overlap": ({"network": {"services": "10.0.0.0/20"}}, "network.services: "
                            "10.0.0.0/20 overlaps network.nodes (10.0.0.0/18)"),
    "a control plane range": ({"network": {"control_plane": "172.16.0.0/24"}},
                              "network.control_plane: must be a /28; write 172.16.0.0/28"),
    "a taint effect": ({"cpu_pools": {"cpu": {"taints": [{"key": "a", "effect": "NoSchedule"}]}}},
                       "cpu_pools.cpu.taints[0].effect: unknown value 'NoSchedule'; did you mean "
                       "NO_SCHEDULE?"),
    "an image without a tag": ({"server": {"image": "gcr.io/p/tpufleet"}}, "server.image: "
                               "'gcr.io/p/tpufleet' is not a pinned image; for example "
                               "gcr.io/p/tpufleet:0.1.0"),
    "more nodes at least than at most": ({"cpu_pools": {"cpu": {"min_nodes": 9}}},
                                         "cpu_pools.cpu.min_nodes: 9 is above max_nodes; write 5"),
    "no CPU pool": ({"cpu_pools": {}}, "cpu_pools: empty"),
    "a quota without a pool": (
        {"tpu_pools": {"a": {"type": "v5e-16"}}, "teams": {"x": {"quota": {"v5e-32": 1}}}},
        "teams.x.quota.v5e-32: no pool in tpu_pools has this type; did you mean v5e-16?"),
    "quotas beyond the pools": (
        {"tpu_pools": {"a": {"type": "v5e-16", "slices": 3}},
         "teams": {"x": {"quota": {"v5e-16": 2}}, "y": {"quota": {"v5e-16": 2}}}},
        "teams.y.quota.v5e-16: quotas promise 4 slices of v5e-16, tpu_pools has 3; write 1"),
    "two teams in one namespace": (
        {"teams": {"x": {"namespace": "n"}, "y": {"namespace": "n"}}},
        "teams.y.namespace: n is team x's; for example y"),
    "a bucket of an unknown team": ({"buckets": {"data": {"teams": ["trainin"]}}},
                                    "buckets.data.teams[0]: unknown team 'trainin'; did you mean "
                                    "training?"),
    "versions in a hierarchical bucket": (
        {"buckets": {"a": {"hierarchical": True, "versioning": True}}},
        "buckets.a.versioning: not available with hierarchical: true; write false"),
    "a label of Google Cloud": ({"labels": {"Cost Center": "lab"}}, "labels.'Cost Center': "
                                "'Cost Center' is not a label of Google Cloud; for example "
                                "cost-center"),
    "no zone": ({"zones": []}, "zones: empty; for example [us-central1-a]"),
    "a system namespace": ({"teams": {"kube-system": {}}}, "teams.kube-system.namespace: "
                           "kube-system is a system namespace; for example kube-system-jobs"),
    "the namespace of the server": (
        {"teams": {"x": {"namespace": "tpufleet-system"}}},
        "teams.x.namespace: tpufleet-system is a system namespace; for example x-jobs"),
    "a template of Terraform": ({"cluster": {"description": "of ${x}"}}, "cluster.description: "
                                "Terraform would evaluate 'of ${x}'; write it without ${ and %{"),
    "a private endpoint of public nodes": (
        {"network": {"private_endpoint": True, "private_nodes": False}},
        "network.private_endpoint: goes with private_nodes: true; write false"),
    "half a dollar": (
        {"budget": {"billing_account": "012345-567890-ABCDEF", "monthly_usd": 0.5}},
        "budget.monthly_usd: must be"),
    "an unknown machine type": ({"cpu_pools": {"cpu": {"machine_type": "n2-standrad-8"}}},
                                "cpu_pools.cpu.machine_type: Compute Engine has no n2-standrad-8; "
                                "for example n2-standard-8"),
    "an unknown size": ({"cpu_pools": {"cpu": {"machine_type": "n2-standard-9"}}},
                        "cpu_pools.cpu.machine_type: Compute Engine has no n2-standard-9"),
    "an ancient Kueue": ({"addons": {"kueue": "v0.4.0"}}, "addons.kueue: v0.4.0 has no API "
                         "v1beta2; write v0.18.3"),
    "a pool named as a slice of another": (
        {"tpu_pools": {"a": {"type": "v5e-16", "slices": 2, "managed_by": "terraform"},
                       "a-1": {"type": "v5e-8", "managed_by": "terraform"}}},
        "tpu_pools.a-1: tpu_pools.a has a node pool a-1 too; rename one"),
    "two pools of one name": (
        {"gpu_pools": {"cpu": {}}}, "gpu_pools.cpu: cpu_pools.cpu has a node pool cpu too"),
    "a service account of nobody": (
        {"service_accounts": {"trainign": "lab-jobs"}},
        "service_accounts.trainign: neither a part nor a team; did you mean training?"),
    "a service account of two": (
        {"service_accounts": {"server": "lab-jobs", "training": "lab-jobs"}},
        "service_accounts: lab-jobs is of two parts"),
    "a fallback of the provisioner": (
        {"tpu_pools": {"a": {"type": "v5e-16", "fallback": ["spot"]}}},
        "tpu_pools.a.fallback: goes with managed_by: compute-class; write that"),
    "a fallback to a reservation without one": (
        {"tpu_pools": {"a": {"type": "v5e-16", "managed_by": "compute-class",
                             "fallback": ["reserved"]}}},
        "tpu_pools.a.reservation: goes with capacity reserved; set reservation: NAME"),
    "flex-start by a ComputeClass": (
        {"tpu_pools": {"a": {"type": "v5e-16", "managed_by": "compute-class",
                             "capacity": "flex-start"}}},
        "tpu_pools.a.managed_by: not available with flex-start; write provisioner or terraform"),
    "tpu7x by a ComputeClass": (
        {"tpu_pools": {"a": {"type": "tpu7x-2x2x2", "managed_by": "compute-class"}}},
        "tpu_pools.a.managed_by: not available with slices of tpu7x-16; write provisioner"),
    "a type both with and without ComputeClass": (
        {"tpu_pools": {"a": {"type": "v5e-16", "managed_by": "compute-class"},
                       "b": {"type": "v5e-16"}}},
        "tpu_pools.a.managed_by: another of tpu_pools has v5e-16 too"),
    "a name too long for the accounts of parts": (
        {"name": "a-name-of-20-letters", "teams": {"x": {}}},
        "name: too long for the service account a-name-of-20-letters-provisioner; shorten it"),
    "a name too long for the account of a team": (
        {"teams": {"x" * 30: {}}}, f"teams.{'x' * 30}: too long for the service account"),
    "a pool whose slices have names that GKE refuses": (
        {"tpu_pools": {"a" * 39: {"type": "v5e-16", "managed_by": "terraform"}}},
        f"tpu_pools.{'a' * 39}: its node pool {'a' * 39}-0 has a name that is too long"),
    "upgrades that a channel does not leave off": (
        {"tpu_pools": {"a": {"type": "v5e-16", "auto_upgrade": False}}},
        "tpu_pools.a.auto_upgrade: unknown field"),
    "a state bucket that Cloud Storage refuses": (
        {"automation": {"bucket": "my-google-state"}}, "automation.bucket: 'my-google-state' is "
        "not a bucket name"),
    "the value of a label of nodes": (
        {"cpu_pools": {"cpu": {"labels": {"team": "a b"}}}},
        "cpu_pools.cpu.labels.team: 'a b' is not a label value; for example a-b"),
    "the value of a taint": (
        {"cpu_pools": {"cpu": {"taints": [{"key": "a", "value": "a b"}]}}},
        "cpu_pools.cpu.taints[0].value: 'a b' is not a label value; for example a-b"),
    "an image of nodes": (
        {"cpu_pools": {"cpu": {"image_type": "COS"}}}, "cpu_pools.cpu.image_type: unknown value"),
    "a machine without Persistent Disk": (
        {"cpu_pools": {"cpu": {"machine_type": "c4-standard-8"}}},
        "cpu_pools.cpu.disk_type: c4-standard-8 cannot have pd-balanced disks; write hyperdisk-"),
    "a machine without Hyperdisk": (
        {"cpu_pools": {"cpu": {"disk_type": "hyperdisk-balanced"}}},
        "cpu_pools.cpu.disk_type: n2-standard-8 cannot have hyperdisk-balanced disks; write pd-"),
    "logs of jobs without those of the system": (
        {"cluster": {"logging": ["WORKLOADS"]}},
        "cluster.logging: WORKLOADS goes with SYSTEM_COMPONENTS"),
    "a range that no VPC has": (
        {"network": {"nodes": "224.0.0.0/18"}},
        "network.nodes: '224.0.0.0/18' is not a range that a VPC can have"),
    "a public range at a private endpoint": (
        {"network": {"private_endpoint": True, "authorized_networks": {"home": "1.2.3.0/24"}}},
        "network.authorized_networks.home: 1.2.3.0/24 cannot reach a private endpoint"),
    "a network that exists": (
        {"network": {"existing": {
            "network": "Net", "subnetwork": "s", "pods_range": "p", "services_range": "v"}}},
        "network.existing.network: 'Net' is not a name of a resource; for example net"),
    "the name of a reservation": (
        {"tpu_pools": {"a": {"type": "v5e-16", "capacity": "reserved", "reservation": "My R"}}},
        "tpu_pools.a.reservation: 'My R' is not a reservation"),
    "a location of buckets": (
        {"buckets": {"a": {"location": "europe"}}}, "buckets.a.location: 'europe' is not"),
    "a location of images": ({"registry": {"location": "eu"}}, "registry.location: 'eu' is not"),
    "a version of Kubernetes with a letter": (
        {"cluster": {"version": "v1.33"}}, "cluster.version: 'v1.33' is not a version; for example "
        "1.33"),
    "a release without its letter": (
        {"addons": {"kueue": "0.18.3"}}, "addons.kueue: '0.18.3' is not a release; for example "
        "v0.18.3"),
    "a label that Google reserves": (
        {"labels": {"goog-x": "a"}}, "labels.goog-x: 'goog-x' is not a label of Google Cloud"),
    "text for a flag": ({"deletion_protection": "yes"}, "deletion_protection: must be true or "
                        "false, not 'yes'"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "expected"), ERRORS.values(), ids=ERRORS)
def test_an_error_names_the_path_and_the_nearest_valid_value(changes, expected):
    with pytest.raises(BadInput) as caught:
        parse({**SMALLEST, **changes})
    assert f"cluster.yaml: {expected}" in str(caught.value)


ACCEPTED = {
    "a bucket in two regions": {"buckets": {"a": {"location": "nam4"}}},
    "images in Europe": {"registry": {"location": "europe"}},
    "everybody at a public endpoint": {"network": {"authorized_networks": {"all": "0.0.0.0/0"}}},
    "no logs": {"cluster": {"logging": []}},
    "a part of a reservation of another project": {"tpu_pools": {"a": {
        "type": "v5e-16", "capacity": "reserved",
        "reservation": "projects/other-project/reservations/r/reservationBlocks/b-1"}}},
    "machines that may have either disk": {
        "cpu_pools": {"cpu": {"machine_type": "c3-standard-8", "disk_type": "hyperdisk-balanced"}}},
}  # fmt: skip


@pytest.mark.parametrize("changes", ACCEPTED.values(), ids=ACCEPTED)
def test_what_google_cloud_accepts_is_accepted(changes):
    assert parse({**SMALLEST, **changes})


def test_all_errors_are_reported_at_once():
    with pytest.raises(BadInput) as caught:
        parse({"project": "X", "region": 5, "zonez": []})
    assert len(str(caught.value).splitlines()) == 4  # zonez, project, region, zones


def test_the_example_has_thirty_lines_and_is_valid():
    assert len(EXAMPLE.read_text().splitlines()) <= 30
    assert set(example().teams) == {"research", "serving"}


def test_the_example_and_the_smallest_file_match_the_json_schema():
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(yaml.safe_load(EXAMPLE.read_text()), schema)
    jsonschema.validate(SMALLEST, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**SMALLEST, "cluster": {"chanel": "RAPID"}}, schema)


def test_the_starter_file_is_valid_and_shows_every_field():
    text = starter_file("my-project", "us-central1", ("us-central1-a",), "v5e-16")
    assert parse_text(text).tpu_pools["v5e-16"].capacity == "spot"
    shown = set(re.findall(r"^#?\s*([a-z_]+):", text, re.MULTILINE))
    for section in (
        sections.Environment, sections.Automation, sections.Network, sections.ExistingNetwork,
        sections.Cluster, sections.NodeDefaults, sections.CpuPool, sections.GpuPool,
        sections.TpuPool, sections.Registry, sections.Bucket, sections.TensorBoard, sections.Team,
        sections.Server, sections.AddOns, sections.Budget,
    ):  # fmt: skip
        assert {item.name for item in fields(section)} <= shown, section


def test_the_defaults_in_the_starter_file_can_be_uncommented():
    text = starter_file("my-project", "us-central1", ("us-central1-a",), "v5e-16")
    body = text.partition("\n\n")[2]
    uncommented = "\n".join(
        re.sub(r"^# ( *[a-z_0-9]+:)", r"\1", line)
        for line in body.splitlines()
        # Alternatives of what is set already.
        if not re.match(r"# +(reservation|existing|host_project|network|subnetwork|pods_range|"
                        r"services_range|create_grants|autoscaling):", line)
        or line == "# network:"
    )  # fmt: skip
    assert parse_text(uncommented).budget is not None


@pytest.mark.parametrize("kind", GKE_TYPES)
def test_the_pods_of_every_slice_type_fit_the_default_range(kind):
    """C10: the range was a /18 at 110 pods per node, 64 nodes, whatever the slice."""
    built = environment(tpu_pools={"pool": {"type": kind, "slices": 2}})
    nodes = type_lookup.find(kind).hosts * 2
    pods = ipaddress.IPv4Network(capacity.pods_range(built))
    assert pods.num_addresses >= nodes * capacity.addresses_per_node(capacity.PODS_PER_TPU_NODE)
    assert ipaddress.IPv4Network(built.network.nodes).num_addresses > nodes


def test_a_range_that_is_too_small_for_the_slices_is_an_error():
    with pytest.raises(BadInput, match=r"network\.pods: .* write 10\.128\.0\.0/1"):
        environment(
            network={"pods": "10.128.0.0/24"},
            tpu_pools={"pool": {"type": "v5p-1024", "slices": 1}},
        )


def test_addresses_per_node_follow_the_documented_table():
    # https://cloud.google.com/kubernetes-engine/docs/how-to/flexible-pod-cidr
    table = {8: 28, 16: 27, 32: 26, 64: 25, 110: 24, 128: 24, 256: 23}
    assert {pods: 32 - capacity.addresses_per_node(pods).bit_length() + 1 for pods in table} == (
        table
    )


def test_names_are_prefixed_with_the_environment():
    built = example()
    assert names.cluster(built) == "ml-cluster"
    assert names.bucket(built, "datasets") == "my-project-ml-datasets"
    assert names.image_path(built) == "us-central1-docker.pkg.dev/my-project/ml-images"


def test_a_duplicate_key_is_an_error_with_its_line():
    with pytest.raises(BadInput, match=r"cluster\.yaml:3: duplicate key project"):
        parse_text("project: my-project\nregion: us-central1\nproject: other\nzones: [a]\n")


def test_a_slice_is_created_in_a_zone_that_has_its_type():
    built = environment(zones=["us-central1-f", "us-central1-a"], **tpu("v5e-16"))
    assert capacity.zone(built, built.tpu_pools["pool"]) == "us-central1-a"


def test_every_resource_has_an_address_of_its_own():
    """Was: team a with the bucket b-c, and team a-b with the bucket c, shared one."""
    built = environment(teams={"a": {}, "a-b": {}}, buckets={"b-c": {}, "c": {}})
    addresses = [
        block.address
        for block in resources(built)
        if block.labels[1] != "outputs"  # one in each stage
    ]
    assert len(set(addresses)) == len(addresses)

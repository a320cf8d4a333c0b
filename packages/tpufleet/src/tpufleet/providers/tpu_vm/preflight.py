"""Checks a Google Cloud project before the first slice is paid for. Each problem comes with the
command that fixes it; nothing is changed."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any
from urllib.parse import quote

import msgspec

from tpufleet.errors import BadInput, PermissionMissing, ProviderError
from tpufleet.model.fleet import compute_reservations
from tpufleet.model.fleet.preflight import Check, failed, ok, skipped, warning
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.tpu import tpu_zones, transfer_prices, type_lookup
from tpufleet.providers.tpu_vm.google_rest import Answer, GoogleRest
from tpufleet.providers.tpu_vm.preflight_accounts import (
    check_hosts_account,
    default_account_of,
    grant,
    unknown,
)
from tpufleet.providers.tpu_vm.preflight_server import (
    DEPLOY,
    check_firewall,
    check_gangs,
    check_server_url,
)
from tpufleet.providers.tpu_vm.settings import GoogleSettings, TpuVmSettings

API = "tpu.googleapis.com"
# Nodes need a network and a service account, which Compute Engine has
# (cloud.google.com/tpu/docs/setup-gcp-account).
APIS = {"Cloud TPU API": API, "Compute Engine API": "compute.googleapis.com"}
# Of the server, by role (cloud.google.com/iam/docs/roles-permissions).
PERMISSIONS = {
    "roles/tpu.admin": (
        "tpu.nodes.create", "tpu.nodes.delete", "tpu.nodes.get", "tpu.nodes.list",
        "tpu.nodes.update",  # queued resources have no permissions of their own
    ),
}  # fmt: skip
# Without these every reservation counts as one of calendar mode that has begun.
RESERVATION_PERMISSIONS = ("compute.futureReservations.list", "compute.reservations.get")
BUCKET_PERMISSIONS = (
    "storage.objects.create", "storage.objects.delete", "storage.objects.get",
    "storage.objects.list",
)  # fmt: skip


class PreflightInput(msgspec.Struct, frozen=True, kw_only=True):
    settings: GoogleSettings
    emulated: bool = False
    bucket: str = ""  # gs://name/folder
    public_url: str = ""
    server: str = ""  # that this machine is a client of; it has settings of its own
    ca_file: str = ""  # of a private CA; empty: the system's
    # Types and capacity of the slices that the user wants at a time; empty: one per generation.
    slices: Sequence[tuple[str, Capacity]] = ()


class Preflight:
    """Of the provider `tpu-vm`. Another overrides what differs."""

    section = "tpu_vm"
    apis: Mapping[str, str] = APIS
    permissions: Mapping[str, Sequence[str]] = PERMISSIONS

    def __init__(self, wanted: PreflightInput, rest: GoogleRest) -> None:
        self._wanted = wanted
        self._settings = wanted.settings
        self._project = wanted.settings.project
        self._rest = rest

    def run(self) -> list[Check]:
        groups: Sequence[Callable[[], Iterator[Check]]] = (
            self._project_exists, self._api, self._roles, self._account, self._zones,
            self._runtimes, self._quota, self._networks, self._bucket, self._bundle,
        )  # fmt: skip
        try:
            self._rest.connect()
        except PermissionMissing as error:
            login = "gcloud auth application-default login"
            checks = [failed("credentials", str(error), login)]
        else:
            checks = [ok("credentials", self._rest.principal)]
            for group in groups:
                try:
                    checks += group()
                except ProviderError as error:
                    name = group.__name__.strip("_").replace("_", " ")
                    checks.append(warning(name, f"cannot be checked: {error}"))
        wanted = self._wanted
        urls = (wanted.public_url, wanted.server, wanted.ca_file)
        return [*checks, check_server_url(*urls, self._wanted.emulated)]

    def _gcloud(self, words: str) -> str:
        return f"gcloud {words} --project {self._project}"

    def _grant(self, resource: str, role: str) -> str:
        return grant(resource, f'"{self._rest.principal}"', role)

    def _project_exists(self) -> Iterator[Check]:
        answer = self._rest.get("projects", f"v1/projects/{self._project}")
        if answer.status == 200:
            yield ok("project", self._project)
        elif answer.disabled_service:
            yield unknown(self._project, "project", answer)
        else:
            yield failed(
                "project",
                f"{self._project}: {answer.message or 'not found, or no access'}",
                "gcloud projects list",
            )

    def _api(self) -> Iterator[Check]:
        for name, service in self.apis.items():
            answer = self._rest.get("services", f"v1/projects/{self._project}/services/{service}")
            if answer.status != 200:
                yield unknown(self._project, name, answer)
            elif answer.body.get("state") == "ENABLED":
                yield ok(name, "enabled")
            else:
                yield failed(name, "not enabled", self._gcloud(f"services enable {service}"))

    def _roles(self) -> Iterator[Check]:
        for role, permissions in self.permissions.items():
            yield self._role(self._project, role, permissions)
        try:
            owner = compute_reservations.parse(self._settings.reservation).project
        except BadInput:
            return  # none, or one of the Cloud TPU API
        yield self._role(owner or self._project, "roles/compute.viewer", RESERVATION_PERMISSIONS)

    def _role(self, project: str, role: str, permissions: Sequence[str]) -> Check:
        path = f"v1/projects/{project}:testIamPermissions"
        answer = self._rest.post("projects", path, {"permissions": list(permissions)})
        if answer.status != 200:
            return unknown(project, role, answer)
        lacking = sorted(set(permissions) - set(answer.body.get("permissions", ())))
        fix = self._grant(f"projects {project}", role)
        missing = f"missing {', '.join(lacking)}"
        return failed(role, missing, fix) if lacking else ok(role, "granted")

    def _account(self) -> Iterator[Check]:
        """The server attaches the hosts' service account to nodes."""
        account = self._settings.service_account or default_account_of(self._rest, self._project)
        path = f"v1/projects/{self._project}/serviceAccounts/{account}:testIamPermissions"
        answer = self._rest.post("iam", path, {"permissions": ["iam.serviceAccounts.actAs"]})
        if answer.missing:
            create = self._gcloud(f"iam service-accounts create {account.partition('@')[0]}")
            yield failed("service account", f"{account} not found", create)
        elif answer.body.get("permissions"):
            yield ok("service account", f"may attach {account}")
        else:
            yield failed(
                "service account",
                f"may not attach {account} to hosts",
                self._grant(f"iam service-accounts {account}", "roles/iam.serviceAccountUser")
                + f" --project {self._project}",
            )

    def _zones(self) -> Iterator[Check]:
        """Zones that do not exist, and types that no zone of the config file has."""
        zones = self._settings.zones
        for zone in self._unknown_zones():
            close = difflib.get_close_matches(zone, tpu_zones.zones(), n=1)
            meant = f": {close[0]}?" if close else "; `tpu types --zones` lists them"
            yield failed(
                f"zone {zone}",
                f"no zone of Google Cloud{meant}",
                f"correct `zones` of `{self.section}` in the config file",
            )
        for name in dict(self._wanted.slices):
            accelerator, short = type_lookup.find(name).name, type_lookup.short_name(name)
            if not any(tpu_zones.is_offered(accelerator, zone) for zone in zones):
                documented = ", ".join(tpu_zones.zones_of(accelerator)[:4])
                yield failed(
                    f"zones of {short}",
                    f"not documented in {', '.join(zones)}",
                    f"add one of its zones to `zones` of `{self.section}`: {documented}",
                )

    def _known_zones(self) -> list[str]:
        unknown = self._unknown_zones()
        return [zone for zone in self._settings.zones if zone not in unknown]

    def _unknown_zones(self) -> list[str]:
        """The catalogue may be older than a zone, so Compute Engine is asked."""
        return [
            zone
            for zone in self._settings.zones
            if zone not in tpu_zones.zones()
            and self._rest.get(
                "compute", f"compute/v1/projects/{self._project}/zones/{zone}"
            ).status
            == 404
        ]

    def _runtimes(self) -> Iterator[Check]:
        """Of the types that the user wants, and all of the config file."""
        assert isinstance(self._settings, TpuVmSettings)
        versions = dict(self._settings.runtimes)
        for kind in map(type_lookup.find, dict(self._wanted.slices)):
            if kind.runtime:
                versions.setdefault(kind.generation, kind.runtime)
        types = type_lookup.all_types().values()
        for (generation, version), zone in product(versions.items(), self._known_zones()):
            of_generation = [each.name for each in types if each.generation == generation]
            if any(tpu_zones.is_offered(name, zone) for name in of_generation):
                yield self._runtime(generation, version, zone)

    def _runtime(self, generation: str, version: str, zone: str) -> Check:
        """cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.runtimeVersions"""
        name = f"runtime {generation} {zone}"
        path = f"v2/projects/{self._project}/locations/{zone}/runtimeVersions/{quote(version)}"
        answer = self._rest.get("tpu", path)
        if answer.status == 200:
            return ok(name, version)
        if not answer.missing:
            return unknown(self._project, name, answer)
        return failed(
            name,
            f"{version} does not exist; correct `runtimes` of `tpu_vm`",
            self._gcloud(f"compute tpus tpu-vm versions list --zone {zone}"),
        )

    def _quota(self) -> Iterator[Check]:
        for accelerator, zone, capacity in self._pairs():
            kind, slices = type_lookup.find(accelerator), self._slices(accelerator, capacity)
            name = f"quota {type_lookup.short_name(accelerator)} {zone}"
            quota, place = tpu_zones.quota_id(kind, capacity), f"zone={zone}"
            answer = self._quota_info(quota)
            if answer.status != 200:
                yield unknown(self._project, name, answer)
                continue
            limit = _limit_of(answer.body, "zone", zone, 0)
            needed = tpu_zones.quota_units(kind) * slices
            unit = "cores" if kind.generation in tpu_zones.QUOTA_IN_CORES else "chips"
            if limit is None or limit >= needed:
                # Both must suffice, and a project may have one without the other.
                region = zone.rpartition("-")[0]
                of_region = tpu_zones.quota_id(kind, capacity, "Region")
                least = _limit_of(self._quota_info(of_region).body, "region", region, None)
                if least is not None and (limit is None or least < limit):
                    quota, place, limit = of_region, f"region={region}", least
            if limit is None or limit >= needed:
                allowed = "unlimited" if limit is None else f"{limit} {unit}"
                yield ok(name, f"{allowed} ({capacity})")
                continue
            # A type that the user asked for must work; the others only inform.
            asked = bool(self._wanted.slices)
            where = f", in {place}" if place.startswith("region") else ""
            yield (failed if asked else warning)(
                name,
                f"{limit} of {needed} {unit} ({capacity}){where}",
                self._quota_command(API, quota, place, needed),
            )

    def _quota_command(self, api: str, quota: str, dimensions: str, value: int) -> str:
        """Cloud Quotas requires the e-mail address of whoever asks for more
        (cloud.google.com/docs/quotas/reference/rest/v1/projects.locations.quotaPreferences)."""
        return (
            f"gcloud beta quotas preferences create --service={api} --project={self._project} "
            f"--quota-id={quota} --dimensions={dimensions} --preferred-value={value} "
            '--email="$(gcloud config get account)"'
        )

    def _quota_info(self, quota: str) -> Answer:
        """cloud.google.com/docs/quotas/reference/rest/v1/projects.locations.services.quotaInfos"""
        return self._rest.get(
            "quotas",
            f"v1/projects/{self._project}/locations/global/services/{API}/quotaInfos/{quota}",
        )

    def _pairs(self) -> Iterator[tuple[str, str, Capacity]]:
        """Types and zones to check. A type that no configured zone offers is checked in none."""
        types = self._wanted.slices or [
            (kind.name, Capacity.SPOT)
            for kind in type_lookup.all_types().values()
            if self._may_have(kind) and kind.chips == 4
        ]
        zones = self._known_zones()
        for accelerator, capacity in dict.fromkeys(types):
            for zone in zones:
                if tpu_zones.is_offered(type_lookup.find(accelerator).name, zone):
                    yield accelerator, zone, capacity

    def _slices(self, accelerator: str, capacity: Capacity) -> int:
        return max(list(self._wanted.slices).count((accelerator, capacity)), 1)

    def _may_have(self, kind: type_lookup.Accelerator) -> bool:
        return kind.runtime is not None

    def _networks(self) -> Iterator[Check]:
        network = self._settings.network_path or self._network_of_subnetwork()
        host, short = network.split("/")[1], network.rpartition("/")[2]
        answer = self._rest.get("compute", f"compute/v1/{network}")
        if answer.missing:
            create = f"gcloud compute networks create {short} --project {host}"
            yield failed("network", f"{short} not found in {host}", create)
            return
        if answer.status != 200:
            yield unknown(host, "network", answer)
            return
        yield ok("network", short)
        rule = check_firewall(self._rest, host, short, self._wanted.public_url)
        if rule is not None:
            yield rule
        yield check_gangs(self._rest, host, short)
        for region in sorted(set(map(_region_of, self._settings.zones))):
            yield from self._region(region, short, host)

    def _network_of_subnetwork(self) -> str:
        """Where only a subnetwork is named, or none."""
        subnetwork = self._settings.subnetwork_path(self._settings.zones[0])
        answer = self._rest.get("compute", f"compute/v1/{subnetwork}") if subnetwork else None
        link = str(answer.body.get("network", "")) if answer is not None else ""
        default = f"projects/{self._settings.network_project}/global/networks/default"
        return link.partition("/compute/v1/")[2] or default

    def _region(self, region: str, network: str, host: str) -> Iterator[Check]:
        default = f"projects/{host}/regions/{region}/subnetworks/default"
        subnetwork = self._settings.subnetwork_path(f"{region}-a") or default
        short, name = subnetwork.rpartition("/")[2], f"subnetwork {region}"
        answer = self._rest.get("compute", f"compute/v1/{subnetwork}")
        if answer.missing:
            create = f"gcloud compute networks subnets create {short} --region {region} "
            create += f"--network {network} --range 10.128.0.0/20 --project {host}"
            yield failed(name, f"{short} not found", create)
        elif self._settings.external_ips:
            yield ok(name, f"{short}; hosts have external addresses")
        elif not answer.body.get("privateIpGoogleAccess"):
            yield failed(
                name,
                "hosts have no external address, and Private Google Access is off",
                f"gcloud compute networks subnets update {short} --region {region} "
                f"--enable-private-ip-google-access --project {host}",
            )
        else:
            yield ok(name, f"{short}; Private Google Access is on")
            yield self._nat(region, network, host, short)

    def _nat(self, region: str, network: str, host: str, subnetwork: str) -> Check:
        name = f"NAT {region}"
        answer = self._rest.get("compute", f"compute/v1/projects/{host}/regions/{region}/routers")
        if answer.status != 200:
            return unknown(host, name, answer)
        routers = answer.body.get("items", ())
        own = [each for each in routers if str(each.get("network")).endswith(f"/{network}")]
        if any(_serves(nat, subnetwork) for router in own for nat in router.get("nats", ())):
            return ok(name, "Cloud NAT is set up")
        router = f"tpufleet-{region}"
        return failed(
            name,
            "hosts have neither external addresses nor Cloud NAT: they reach no packages",
            f"gcloud compute routers create {router} --network {network} --region {region} "
            f"--project {host} && gcloud compute routers nats create {router} "
            f"--router {router} --region {region} --auto-allocate-nat-external-ips "
            f"--nat-all-subnet-ip-ranges --project {host}",
        )

    def _bucket(self) -> Iterator[Check]:
        named = self._wanted.bucket or f"gs://{self._project}-tpufleet"
        name = named.removeprefix("gs://").partition("/")[0]
        region = _region_of(self._settings.zones[0])
        create = self._gcloud(f"storage buckets create gs://{name} --location {region}")
        if not self._wanted.bucket:
            lost = "none: checkpoints stay on the hosts and are lost with them"
            yield warning(
                "bucket", lost, f"{create}, then set `bucket: {named}` in the config file"
            )
            return
        answer = self._rest.get("storage", f"storage/v1/b/{name}")
        if answer.missing:
            yield failed("bucket", f"gs://{name} not found", create)
            return
        granted = self._rest.get(
            "storage",
            f"storage/v1/b/{name}/iam/testPermissions",
            permissions=list(BUCKET_PERMISSIONS),  # type: ignore[arg-type]  # a repeated parameter
        ).body.get("permissions", ())
        lacking = sorted(set(BUCKET_PERMISSIONS) - set(granted))
        if lacking:
            fix = self._grant(f"storage buckets gs://{name}", "roles/storage.objectUser")
            yield failed("bucket", f"gs://{name}: missing {', '.join(lacking)}", fix)
        else:
            yield ok("bucket", f"gs://{name} can be read and written")
        yield from self._distance(name, str(answer.body.get("location", "")))
        account = self._settings.service_account
        yield check_hosts_account(self._rest, self._project, account, name)

    def _distance(self, bucket: str, location: str) -> Iterator[Check]:
        """Jobs read their checkpoint from the bucket after each preemption."""
        zones = set(map(_region_of, self._settings.zones))
        usd = {region: transfer_prices.usd_per_gb(location, region) for region in zones}
        far = sorted(region for region in zones if usd[region])
        if location and far:
            most = 100 * max(usd.values())
            yield warning(
                "bucket region",
                f"gs://{bucket} is in {location.lower()}, hosts also in {', '.join(far)}: moving a "
                f"checkpoint of 100 GB there costs about ${most:.0f} each time, and takes longer",
            )

    def _bundle(self) -> Iterator[Check]:
        bundle = self._settings.bundle
        if self._wanted.emulated:
            yield skipped("bundle", "an emulator needs none")
        elif not bundle and self._wanted.server:
            yield skipped("bundle", f"that of {self._wanted.server}")
        elif not bundle:
            yield failed(
                "bundle",
                f"hosts have nothing to install: {self.section}.bundle is not set",
                "tpu deploy bundle" if self._wanted.public_url else DEPLOY,
            )
        elif not bundle.startswith("gs://"):
            yield ok("bundle", f"{bundle} (not checked)")
        else:
            bucket, _, name = bundle.removeprefix("gs://").partition("/")
            answer = self._rest.get(
                "storage", f"storage/v1/b/{bucket}/o/{name.replace('/', '%2F')}"
            )
            missing = failed(
                "bundle", f"{bundle}: {answer.message or 'not found'}", "tpu deploy bundle"
            )
            yield ok("bundle", bundle) if answer.status == 200 else missing


def _region_of(zone: str) -> str:
    return zone.rpartition("-")[0]


def _serves(nat: Mapping[str, Any], subnetwork: str) -> bool:
    """Whether hosts of a subnetwork reach the Internet by it
    (cloud.google.com/compute/docs/reference/rest/v1/routers)."""
    if nat.get("type", "PUBLIC") != "PUBLIC":
        return False
    listed = [str(each.get("name", "")) for each in nat.get("subnetworks", ())]
    every = nat.get("sourceSubnetworkIpRangesToNat") != "LIST_OF_SUBNETWORKS"
    return every or any(each.endswith(f"/{subnetwork}") for each in listed)


def _limit_of(info: dict[str, Any], kind: str, place: str, absent: int | None) -> int | None:
    """Of a zone or a region, in Cloud Quotas' QuotaInfo; None: unlimited. `absent` if it is not
    listed."""
    for entry in info.get("dimensionsInfos", ()):
        dimensions = entry.get("dimensions") or {}
        if dimensions.get(kind) == place or place in entry.get("applicableLocations", ()):
            value = int(entry.get("details", {}).get("value", 0))
            return None if value < 0 else value
    return absent

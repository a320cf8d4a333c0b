"""A Terraform provider `hashicorp/google` over the emulated cloud, with the real one's schema.

Terraform and OpenTofu attach to it through TF_REATTACH_PROVIDERS: nothing is downloaded, and plan,
apply and destroy run as they would against Google Cloud.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import grpc

from tpufleet_testbed import servers
from tpufleet_testbed.terraform import plugin_protocol as protocol
from tpufleet_testbed.terraform.emulated_google_cloud import (
    EmulatedGoogleCloud,
    Refused,
    computed_values,
)

SCHEMA_FILE = Path(__file__).parent / "google_provider_schema.json"
REGISTRIES = ("registry.opentofu.org", "registry.terraform.io")
PROVIDER_ARGUMENTS = {
    "project": {"type": "string"},
    "region": {"type": "string"},
    "default_labels": {"type": ["map", "string"]},
    "billing_project": {"type": "string"},
    "user_project_override": {"type": "bool"},
}
# A change of these replaces the resource.
IMMUTABLE = {
    "account_id", "billing_account", "cluster", "location", "max_pods_per_node", "name", "network",
    "placement_policy", "project", "region", "repository_id", "role", "member", "role_id",
    "service", "subnetwork",
}  # fmt: skip
# A change within these blocks does, too.
IMMUTABLE_WITHIN: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "google_container_cluster": {"private_cluster_config": ("master_ipv4_cidr_block",)},
    "google_container_node_pool": {
        "node_config": ("oauth_scopes", "reservation_affinity", "service_account", "spot")
    },
}
MESSAGES = protocol.MESSAGES


@cache
def provider_schema() -> dict[str, Any]:
    """{"provider": version, "resources": {type: {"arguments": …, "computed": […]}}, "data": …}"""
    schema: dict[str, Any] = json.loads(SCHEMA_FILE.read_text())
    return schema


class GoogleProvider:
    """One method for each call of the protocol."""

    def __init__(self, cloud: EmulatedGoogleCloud) -> None:
        self._cloud = cloud

    def GetSchema(self, request: Any) -> Any:
        resources = provider_schema()["resources"]
        return MESSAGES["GetSchema"](
            provider=_schema(PROVIDER_ARGUMENTS, []),
            resource_schemas=[
                MESSAGES["SchemaEntry"](
                    key=kind, value=_schema(declared["arguments"], declared["computed"])
                )
                for kind, declared in resources.items()
            ],
            data_source_schemas=[
                MESSAGES["SchemaEntry"](
                    key=kind, value=_schema(declared["arguments"], declared["computed"])
                )
                for kind, declared in provider_schema()["data"].items()
            ],
        )

    def PrepareProviderConfig(self, request: Any) -> Any:
        return MESSAGES["PrepareResponse"](prepared_config=request.config)

    def ValidateResourceTypeConfig(self, request: Any) -> Any:
        return MESSAGES["Diagnostics"]()

    def ValidateDataSourceConfig(self, request: Any) -> Any:
        return MESSAGES["Diagnostics"]()

    def Configure(self, request: Any) -> Any:
        return MESSAGES["Diagnostics"]()

    def Stop(self, request: Any) -> Any:
        return MESSAGES["Empty"]()

    def UpgradeResourceState(self, request: Any) -> Any:
        state = json.loads(request.raw_state.json)
        return MESSAGES["UpgradeResponse"](upgraded_state=protocol.encode(state))

    def ReadResource(self, request: Any) -> Any:
        state = protocol.decode(request.current_state)
        found = self._cloud.read(request.type_name, state) if state else None
        whole = _complete(request.type_name, found) if found is not None else None
        return MESSAGES["ReadResponse"](new_state=protocol.encode(whole))

    def ReadDataSource(self, request: Any) -> Any:
        config = protocol.decode(request.config)
        known = computed_values(request.type_name, config)
        state = {name: known.get(name) if each is None else each for name, each in config.items()}
        return MESSAGES["ReadDataResponse"](state=protocol.encode(state))

    def PlanResourceChange(self, request: Any) -> Any:
        prior = protocol.decode(request.prior_state)
        planned = protocol.decode(request.proposed_new_state)
        replaced = []
        if planned is not None:
            computed = _computed(request.type_name)
            for name in computed:
                if prior is None and planned.get(name) is None:
                    planned[name] = protocol.UNKNOWN
            if prior is not None:
                replaced = [
                    MESSAGES["AttributePath"](
                        steps=[MESSAGES["AttributeStep"](attribute_name=name)]
                    )
                    for name in _replacing(request.type_name, planned, prior, computed)
                ]
        return MESSAGES["PlanResponse"](
            planned_state=protocol.encode(planned), requires_replace=replaced
        )

    def ApplyResourceChange(self, request: Any) -> Any:
        kind = request.type_name
        prior = protocol.decode(request.prior_state)
        planned = protocol.decode(request.planned_state)
        try:
            if planned is None:
                self._cloud.delete(kind, prior)
            else:
                values = computed_values(kind, planned)
                planned = {
                    name: values.get(name, values["id"]) if protocol.is_unknown(value) else value
                    for name, value in planned.items()
                }
                if prior is None:
                    self._cloud.create(kind, planned)
                else:
                    self._cloud.update(kind, planned)
        except Refused as error:
            failure = protocol.error(f"Error applying {kind}", str(error))
            return MESSAGES["ApplyResponse"](
                new_state=protocol.encode(prior), diagnostics=[failure]
            )
        return MESSAGES["ApplyResponse"](new_state=protocol.encode(planned))

    def ImportResourceState(self, request: Any) -> Any:
        found = self._cloud.find(request.type_name, request.id)
        if found is None:
            failure = protocol.error("Cannot import non-existent remote object", request.id)
            return MESSAGES["ImportResponse"](diagnostics=[failure])
        imported = MESSAGES["ImportedResource"](
            type_name=request.type_name, state=protocol.encode(_complete(request.type_name, found))
        )
        return MESSAGES["ImportResponse"](imported_resources=[imported])


def _replacing(
    kind: str, planned: Mapping[str, Any], prior: Mapping[str, Any], computed: Collection[str]
) -> list[str]:
    """Arguments whose change replaces the resource."""
    plain = [
        name
        for name in sorted(IMMUTABLE & set(planned) - set(computed))
        if planned[name] != prior.get(name)
    ]
    inner = [
        block
        for block, names in IMMUTABLE_WITHIN.get(kind, {}).items()
        for name in names
        if _values(planned.get(block), name) != _values(prior.get(block), name)
    ]
    return [*plain, *dict.fromkeys(inner)]


def _values(blocks: Sequence[Mapping[str, Any]] | None, name: str) -> list[Any]:
    return [block.get(name) for block in blocks or ()]


def _complete(kind: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """With every argument of its type, for a resource that was created outside Terraform."""
    declared = provider_schema()["resources"][kind]
    empty: dict[str, Any] = {
        name: [] if "block" in entry else None for name, entry in declared["arguments"].items()
    }
    return {**empty, **dict.fromkeys(declared["computed"]), **record}


def _computed(kind: str) -> list[str]:
    declared: list[str] = provider_schema()["resources"][kind]["computed"]
    has_id = "id" in provider_schema()["resources"][kind]["arguments"]
    return [*declared, *(["id"] if has_id else [])]


def _schema(arguments: Mapping[str, Any], computed: list[str]) -> Any:
    block = _block(arguments)
    for name in computed:
        block.attributes.add(name=name, type=b'"string"', computed=True)
    return MESSAGES["Schema"](block=block)


def _block(arguments: Mapping[str, Any]) -> Any:
    block = MESSAGES["Block"]()
    for name, entry in arguments.items():
        required = entry.get("required", False)
        if "block" in entry:
            block.block_types.add(
                type_name=name,
                block=_block(entry["block"]),
                nesting=protocol.NESTING_LIST,
                min_items=int(required),
                max_items=0 if entry["many"] else 1,
            )
        else:
            block.attributes.add(
                name=name,
                type=json.dumps(entry["type"]).encode(),
                required=required,
                optional=not required,
                computed=name == "id" and not required,
            )
    return block


@contextmanager
def serve(cloud: EmulatedGoogleCloud) -> Iterator[dict[str, str]]:
    """Yields the environment variables with which Terraform or OpenTofu uses this provider."""
    provider = GoogleProvider(cloud)
    methods = {
        method: (MESSAGES[taken], getattr(provider, method))
        for method, taken in protocol.METHODS.items()
    }
    # The schema is larger than what gRPC sends by default.
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    services = [servers.grpc_service(protocol.SERVICE, methods)]
    server = grpc.server(ThreadPoolExecutor(max_workers=16), services, options=options)
    with tempfile.TemporaryDirectory(prefix="tpufleet-provider-") as folder:
        socket = str(Path(folder) / "provider.sock")
        server.add_insecure_port(f"unix:{socket}")
        server.start()
        attached = {
            "Protocol": "grpc",
            "ProtocolVersion": 5,
            "Pid": os.getpid(),
            "Test": True,
            "Addr": {"Network": "unix", "String": socket},
        }
        try:
            yield {
                "TF_REATTACH_PROVIDERS": json.dumps(
                    {f"{registry}/hashicorp/google": attached for registry in REGISTRIES}
                )
            }
        finally:
            server.stop(grace=None).wait()

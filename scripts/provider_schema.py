"""Write the schema of Google's Terraform provider, for the resources that tpufleet generates.

    pip download --no-deps -d WHEELS cdktf-cdktf-provider-google==16.12.1
    python scripts/provider_schema.py WHEELS/*.whl

The provider itself is not needed: its typed bindings are generated from its schema, and are parsed
here as text. Argument names, their types, which are required, nested blocks, and computed
attributes go to google_provider_schema.json of the testbed.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TARGET = (
    ROOT / "packages/tpufleet-testbed/src/tpufleet_testbed/terraform/google_provider_schema.json"
)
RESOURCES = (
    "artifact_registry_repository", "artifact_registry_repository_iam_member",
    "billing_account_iam_member", "billing_budget", "compute_firewall",
    "compute_network", "compute_resource_policy", "compute_router", "compute_router_nat",
    "compute_subnetwork", "compute_subnetwork_iam_member", "container_cluster",
    "container_node_pool", "project_iam_custom_role", "project_iam_member", "project_service",
    "service_account", "service_account_iam_member", "storage_bucket", "storage_bucket_iam_member",
    "storage_bucket_object", "vertex_ai_tensorboard",
)  # fmt: skip
DATA_SOURCES = ("project",)
# Of every resource, and in the language itself.
META = frozenset(
    {"connection", "count", "depends_on", "for_each", "lifecycle", "provider", "provisioners"}
)
PRIMITIVES = {"str": "string", "Number": "number", "bool": "bool"}


def main() -> None:
    archive = zipfile.ZipFile(sys.argv[1])
    schema = {f"google_{name}": resource(archive, name) for name in RESOURCES}
    data = {f"google_{name}": resource(archive, f"data_google_{name}") for name in DATA_SOURCES}
    provider = re.search(r"hashicorp/google/([0-9.]+)/docs", read(archive, "project_service"))
    assert provider
    TARGET.write_text(
        json.dumps(
            {"provider": provider[1], "resources": schema, "data": data}, separators=(",", ":")
        )
        + "\n"
    )
    print(f"{TARGET}: {len(schema)} resources of hashicorp/google {provider[1]}")


def read(archive: zipfile.ZipFile, name: str) -> str:
    return archive.read(f"cdktf_cdktf_provider_google/{name}/__init__.py").decode()


def resource(archive: zipfile.ZipFile, name: str) -> dict[str, Any]:
    tree = ast.parse(read(archive, name))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    title = "".join(part.capitalize() for part in name.split("_"))
    arguments = block(f"{title}Config", classes, META)
    return {"arguments": arguments, "computed": computed(classes[title], arguments)}


def block(
    name: str, classes: dict[str, ast.ClassDef], without: frozenset[str] = frozenset()
) -> dict[str, Any]:
    init = next(
        item for item in classes[name].body
        if isinstance(item, ast.FunctionDef) and item.name == "__init__"
    ).args  # fmt: skip
    arguments = {}
    for argument, default in zip(init.kwonlyargs, init.kw_defaults, strict=True):
        if argument.arg in without or argument.annotation is None:
            continue
        text = ast.unparse(argument.annotation)
        inner = next((each for each in re.findall(r"\w+", text) if each in classes), None)
        entry: dict[str, Any] = {"required": True} if default is None else {}
        if inner:
            entry["block"] = block(inner, classes)
            entry["many"] = "Sequence" in text
        else:
            entry["type"] = argument_type(text)
        arguments[argument.arg] = entry
    return arguments


def argument_type(text: str) -> Any:
    names = re.findall(r"\w+", text)
    primitive = next((PRIMITIVES[each] for each in names if each in PRIMITIVES), "string")
    if "Mapping" in names:
        values = [PRIMITIVES[each] for each in names if each in PRIMITIVES]
        return ["map", values[-1]]
    return ["list", primitive] if "Sequence" in names else primitive


def computed(node: ast.ClassDef, arguments: dict[str, Any]) -> list[str]:
    """Attributes that are text and not arguments: self_link, email …"""
    found = []
    for item in node.body:
        if not isinstance(item, ast.FunctionDef) or item.returns is None:
            continue
        is_property = any("property" in ast.unparse(each) for each in item.decorator_list)
        text = ast.unparse(item.returns)
        if is_property and text == "builtins.str" and item.name.islower():
            found.append(item.name)
    return sorted({*found, "id"} - set(arguments))


main()

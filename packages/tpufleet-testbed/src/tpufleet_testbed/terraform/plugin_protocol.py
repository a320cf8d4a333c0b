"""Messages of the plugin protocol, version 5, as far as a provider of resources needs them.

Field numbers are those of tfplugin5.proto, which is stable:
https://github.com/opentofu/opentofu/blob/main/docs/plugin-protocol/tfplugin5.9.proto
"""

from __future__ import annotations

from typing import Any

import msgspec
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE = "tfplugin5.Provider"
NESTING_LIST = 2
ERROR = 1
# An unknown value in the encoding of Terraform's type system: extension 0.
UNKNOWN = msgspec.msgpack.Ext(0, b"\x00")

_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _FIELD.TYPE_STRING,
    "bytes": _FIELD.TYPE_BYTES,
    "bool": _FIELD.TYPE_BOOL,
    "int64": _FIELD.TYPE_INT64,
}
# Each message with the number, name and type of its fields; `*` marks a repeated field. A map is a
# repeated entry.
_DECLARATIONS = """
DynamicValue: 1 msgpack bytes, 2 json bytes
Diagnostic: 1 severity int64, 2 summary string, 3 detail string
AttributeStep: 1 attribute_name string
AttributePath: 1 steps *AttributeStep
Empty:
RawState: 1 json bytes
Attribute: 1 name string, 2 type bytes, 4 required bool, 5 optional bool, 6 computed bool
NestedBlock: 1 type_name string, 2 block Block, 3 nesting int64, 4 min_items int64,
    5 max_items int64
Block: 1 version int64, 2 attributes *Attribute, 3 block_types *NestedBlock
Schema: 1 version int64, 2 block Block
SchemaEntry: 1 key string, 2 value Schema
GetSchema: 1 provider Schema, 2 resource_schemas *SchemaEntry, 3 data_source_schemas *SchemaEntry
ConfigRequest: 1 config DynamicValue
PrepareResponse: 1 prepared_config DynamicValue
Diagnostics: 1 diagnostics *Diagnostic
UpgradeRequest: 1 type_name string, 2 version int64, 3 raw_state RawState
UpgradeResponse: 1 upgraded_state DynamicValue
ReadRequest: 1 type_name string, 2 current_state DynamicValue, 3 private bytes
ReadResponse: 1 new_state DynamicValue, 2 diagnostics *Diagnostic, 3 private bytes
PlanRequest: 1 type_name string, 2 prior_state DynamicValue, 3 proposed_new_state DynamicValue,
    4 config DynamicValue
PlanResponse: 1 planned_state DynamicValue, 2 requires_replace *AttributePath,
    4 diagnostics *Diagnostic
ApplyRequest: 1 type_name string, 2 prior_state DynamicValue, 3 planned_state DynamicValue
ApplyResponse: 1 new_state DynamicValue, 3 diagnostics *Diagnostic
ReadDataRequest: 1 type_name string, 2 config DynamicValue
ReadDataResponse: 1 state DynamicValue, 2 diagnostics *Diagnostic
ImportRequest: 1 type_name string, 2 id string
ImportedResource: 1 type_name string, 2 state DynamicValue
ImportResponse: 1 imported_resources *ImportedResource, 2 diagnostics *Diagnostic
"""
# Method → message of its request.
METHODS = {
    "GetSchema": "Empty",
    "PrepareProviderConfig": "ConfigRequest",
    "ValidateResourceTypeConfig": "Empty",
    "ValidateDataSourceConfig": "Empty",
    "Configure": "Empty",
    "UpgradeResourceState": "UpgradeRequest",
    "ReadResource": "ReadRequest",
    "ReadDataSource": "ReadDataRequest",
    "PlanResourceChange": "PlanRequest",
    "ApplyResourceChange": "ApplyRequest",
    "ImportResourceState": "ImportRequest",
    "Stop": "Empty",
}


def _build() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="tpufleet/tfplugin5.proto", package="tpufleet.tfplugin5", syntax="proto3"
    )
    declarations = _DECLARATIONS.replace("\n    ", " ").strip().splitlines()
    for declaration in declarations:
        name, _, declared = declaration.partition(":")
        message = file.message_type.add(name=name)
        for entry in filter(None, declared.split(",")):
            number, field_name, kind = entry.split()
            repeated = kind.startswith("*")
            field = message.field.add(
                name=field_name,
                number=int(number),
                label=_FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL,
            )
            kind = kind.removeprefix("*")
            if kind in _SCALARS:
                field.type = _SCALARS[kind]
            else:
                field.type = _FIELD.TYPE_MESSAGE
                field.type_name = f".tpufleet.tfplugin5.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        message.name: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"tpufleet.tfplugin5.{message.name}")
        )
        for message in file.message_type
    }


MESSAGES = _build()


def encode(value: Any) -> Any:
    return MESSAGES["DynamicValue"](msgpack=msgspec.msgpack.encode(value))


def decode(value: Any) -> Any:
    return msgspec.msgpack.decode(value.msgpack) if value.msgpack else None


def is_unknown(value: Any) -> bool:
    return isinstance(value, msgspec.msgpack.Ext)


def error(summary: str, detail: str = "") -> Any:
    return MESSAGES["Diagnostic"](severity=ERROR, summary=summary, detail=detail)

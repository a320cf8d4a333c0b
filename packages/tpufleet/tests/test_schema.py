"""The schema layer: all errors of a document at once, in our words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import pytest
from msgspec import Meta

from tpufleet import schema
from tpufleet.errors import BadInput, InvalidSettings, quote

Zone = Annotated[
    str,
    schema.text(
        "zone", r"[a-z]+-[a-z]+[0-9]-[a-z]", example="us-east1-d", repair=lambda text: f"{text}-a"
    ),
]


def parse_seconds(value: Any) -> float | None:
    if value == "none":
        return None
    if isinstance(value, str) and value.endswith("s"):
        return float(value[:-1])
    raise BadInput(f"{quote(value)} is not a duration; write 90s")


Seconds = Annotated[
    float,
    schema.custom(
        "duration",
        parse_seconds,
        {"type": "string"},
        write=lambda value: "none" if value is None else f"{value:g}s",
    ),
]


class Capacity(StrEnum):
    SPOT = "spot"
    ON_DEMAND = "on-demand"


class Disk(msgspec.Struct, frozen=True, kw_only=True):
    source: Annotated[str, schema.about("Name of the disk.", example="data")]
    read_only: bool = True

    @classmethod
    def expand(cls, value: Any) -> Any:
        return {"source": value} if isinstance(value, str) else value


class Network(msgspec.Struct, frozen=True, kw_only=True):
    nat: Annotated[bool, schema.about("Create Cloud NAT.")] = True


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    ALIASES: ClassVar[Mapping[str, str]] = {"count": "size"}

    size: Annotated[int, Meta(ge=1, le=64), schema.about("Slices.", example="2", flag="--n")]
    zones: Annotated[
        tuple[Zone, ...], Meta(max_length=3, extra_json_schema={"uniqueItems": True})
    ] = ()
    capacity: tuple[Capacity, ...] = (Capacity.SPOT,)
    channel: Literal["RAPID", "STABLE"] = "STABLE"
    price: Annotated[float, Meta(gt=0)] | None = None
    patience: Seconds | None = 30.0
    grace: Seconds = 5.0
    env: dict[str, schema.Text] = {}
    disks: tuple[Disk, ...] = ()
    networks: dict[str, Network] = {}
    network: Annotated[Network, schema.about("Network.")] = Network()
    secret: bool = False

    def check(self) -> Iterator[tuple[str, str]]:
        if self.secret and self.zones:
            yield "secret", "not with zones; remove one"


def problems(document: Any, **options: Any) -> dict[str, str]:
    with pytest.raises(InvalidSettings) as caught:
        schema.parse(Pool, document, **options)
    return dict(caught.value.errors)


def test_a_valid_document_becomes_the_struct() -> None:
    pool = schema.parse(
        Pool,
        {
            "size": 2,
            "zones": "us-east1-d",
            "capacity": ["Spot", "on_demand"],
            "channel": "rapid",
            "price": 3,
            "patience": "none",
            "env": {"LR": 0.1},
            "disks": ["data", {"source": "more", "read_only": False}],
            "networks": {"lab": {"nat": False}},
            "secret": None,
        },
    )
    assert pool == Pool(
        size=2,
        zones=("us-east1-d",),
        capacity=(Capacity.SPOT, Capacity.ON_DEMAND),
        channel="RAPID",
        price=3.0,
        patience=None,
        env={"LR": "0.1"},
        disks=(Disk(source="data"), Disk(source="more", read_only=False)),
        networks={"lab": Network(nat=False)},
    )


def test_all_errors_are_reported_at_once_with_their_paths() -> None:
    found = problems(
        {
            "size": 65,
            "zones": ["us-east1-d", "us-east1", "us-east1-d\n", 5],
            "capacity": "spott",
            "price": float("nan"),
            "patience": 5,
            "grace": "none",
            "disks": [{"sourse": "data", "read_only": "yes"}],
            "networks": {"lab": {"nat": 1}},
            "env": {"A": [1]},
        }
    )
    assert list(found) == [
        "size", "zones", "capacity", "price", "patience", "grace", "disks[0].sourse",
        "disks[0].read_only", "disks[0].source", "networks.lab.nat", "env.A",
    ]  # fmt: skip
    assert found["size"] == "must be an integer from 1 to 64, not 65; for example 2"
    assert "did you mean spot?" in found["capacity"]
    assert "above 0" in found["price"]
    assert "did you mean source?" in found["disks[0].sourse"]


def test_an_invalid_text_comes_with_the_nearest_valid_one() -> None:
    found = problems({"size": 1, "zones": ["us-east1", "us-east1-d\n", 5]})
    assert found["zones[0]"] == "'us-east1' is not a zone; for example us-east1-a"
    assert found["zones[1]"].endswith("for example us-east1-d")
    assert found["zones[2]"].startswith("5 is not a zone")


@pytest.mark.parametrize(
    ("document", "path", "part"),
    [
        ({}, "size", "required; for example 2"),
        ({"size": None}, "size", "required"),
        ({"size": True}, "size", "not true"),
        ({"size": "2"}, "size", "not '2'"),
        ({"size": 2**70}, "size", "a number of more than 64 bits"),
        ({"size": 1, "count": 1}, "count", "did you mean size?"),
        ({"size": 1, "zone": "x"}, "zone", "did you mean zones?"),
        ({"size": 1, 5: 1}, "5", "unknown field"),
        ({"size": 1, "a\nb": 1}, "'a\\nb'", "unknown field"),
        ({"size": 1, "zones": ["us-east1-d"] * 2}, "zones[1]", "duplicate"),
        ({"size": 1, "zones": ["us-east1-d"] * 4}, "zones", "4 items; at most 3"),
        ({f"f{n}": 1 for n in range(1001)}, "", "1001 fields; at most 1000"),
        ({"size": 1, "env": "A"}, "env", "must be a mapping"),
        ({"size": 1, "env": {"A": "\0"}}, "env.A", "NUL"),
        ({"size": 1, "networks": {"a": 5}}, "networks.a", "must be a mapping"),
        ({"size": 1, "secret": True, "zones": "us-east1-d"}, "secret", "not with zones"),
        ([], "", "must be a mapping"),
    ],
)
def test_an_error_names_its_field_and_a_remedy(document: Any, path: str, part: str) -> None:
    found = problems(document)
    assert list(found) == [path]
    assert part in found[path]


def test_environment_variables_hold_text() -> None:
    written = {"size": "2", "secret": "True", "env": "A=1, B=2", "zones": "", "price": "0.5"}
    pool = schema.parse(Pool, written, lax=True)
    assert (pool.size, pool.secret, pool.zones, pool.price) == (2, True, (), 0.5)
    assert pool.env == {"A": "1", "B": "2"}
    assert "NAME=VALUE" in problems({"size": "2", "env": "A"}, lax=True)["env"]


def test_the_path_of_the_document_precedes_those_of_its_fields() -> None:
    assert list(problems({"size": 0}, path="pools[1]")) == ["pools[1].size"]


def test_valid_fields_are_kept_beside_the_errors() -> None:
    values, errors = schema.parse_fields(Pool, {"size": 0, "price": 2, "zons": 1})
    assert values == {"price": 2.0}
    assert [path for path, _ in errors] == ["size", "zons"]


@pytest.mark.parametrize(
    "pool",
    [
        Pool(size=1),
        Pool(size=2, patience=None, capacity=(Capacity.ON_DEMAND,), disks=(Disk(source="a"),)),
        Pool(size=3, network=Network(nat=False), env={"A": "1"}, grace=1.0),
    ],
)
def test_what_is_written_is_read_again(pool: Pool) -> None:
    assert schema.parse(Pool, schema.to_document(pool)) == pool


def test_defaults_are_not_written() -> None:
    assert schema.to_document(Pool(size=1)) == {"size": 1}
    assert schema.to_document(Pool(size=1), keep=["capacity"]) == {"size": 1, "capacity": ["spot"]}


def test_the_json_schema_has_types_bounds_and_descriptions() -> None:
    made = schema.json_schema(Pool, "pools")
    assert made["required"] == ["size"]
    assert made["properties"]["size"] == {
        "type": "integer", "minimum": 1, "maximum": 64, "description": "Slices.",
    }  # fmt: skip
    assert made["properties"]["zones"]["anyOf"][1]["uniqueItems"] is True
    assert made["properties"]["capacity"]["anyOf"][0] == {"enum": ["spot", "on-demand"]}
    assert made["properties"]["network"]["properties"]["nat"]["type"] == "boolean"


def test_rows_describe_each_field_for_a_reference_table() -> None:
    rows = {row.name: row for row in schema.rows(Pool, nested=True)}
    assert (rows["size"].label, rows["size"].default) == ("integer", "required")
    assert rows["size"].extra == {"flag": "--n"}
    assert rows["patience"].default == "30s"
    assert rows["capacity"].default == "spot"
    assert rows["network.nat"].description == "Create Cloud NAT."
    assert rows["networks.NAME.nat"].default == "true"

"""The schema layer: files and settings that people write are msgspec structs, read by `parse`.

    Zone = Annotated[str, schema.text("zone", r"[a-z]+-[a-z]+[0-9]-[a-z]", example="us-east1-d")]

    class Pool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        zones: Annotated[tuple[Zone, ...], schema.about("Zones in order of preference.")] = ()
        size: Annotated[int, msgspec.Meta(ge=1, le=64), schema.about("Slices.", example="2")]

    pool = schema.parse(Pool, yaml_document)

`parse` raises one `InvalidSettings` (a BadInput) with every error: path, what is wrong, what to
write. `json_schema`, `rows` (for reference tables) and `to_document` read the same declaration.

Types: str, int, float, bool, enums, Literal, `X | None`, `tuple[X, ...]`, `dict[K, V]` (Mapping
too), structs, and any type whose annotation has `text(…)` or `custom(…)`. Bounds are msgspec's:
`Meta(ge=1, le=64)`, `Meta(max_length=100)`. Rules of all documents:
  - null is the same as leaving a field out;
  - one item may be written without the brackets of its list;
  - choices ignore case, and `_` means `-`;
  - with `lax`, as for environment variables, values may be text: `true`, `12`, `a,b`, `A=1,B=2`, or
    JSON of a mapping.

A struct may have
  - `check(self)`, a generator of (field, problem) for fields that contradict each other, which is
    called when each of them is valid. `msgspec` does not call it when it reads stored data;
  - `expand(cls, value)`, a class method that turns a short form into a mapping;
  - `ALIASES`, a ClassVar with names from other tools and the field that each means.
"""

from __future__ import annotations

import re
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from tpufleet.errors import BadInput, InvalidSettings, invalid, must_be, quote, suggest

T = TypeVar("T")
Problem = tuple[str, str]  # path, what is wrong there

MAX_FIELDS = 1000  # known or not: each that is unknown is compared with those that are known
MAX_TEXT = 100_000  # Linux rejects a single argument of more than 128 KiB
_INVALID: Any = object()
_PLAIN_KEY = re.compile(r"[\w./-]{1,60}")
_UNENCODABLE = re.compile("[\0\ud800-\udfff]")  # neither a program argument nor UTF-8
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


# Declarations


@dataclass(frozen=True, slots=True)
class _Custom:
    label: str
    parse: Callable[[Any], Any]
    schema: dict[str, Any]
    write: Callable[[Any], Any]


def about(description: str, *, example: str = "", default: str = "", **extra: Any) -> msgspec.Meta:
    """Documentation of a field. `default`: in words, where the value does not say it. `extra` is
    for the caller, in `Row.extra`."""
    return msgspec.Meta(
        description=description,
        examples=[example] if example else None,
        extra={"default": default, "about": extra},
    )


def custom(
    label: str,
    parse: Callable[[Any], Any],
    json: Mapping[str, Any] | None = None,
    *,
    write: Callable[[Any], Any] = lambda value: value,
) -> msgspec.Meta:
    """A type with a form of its own. `parse` returns the value or raises BadInput, whose paths, if
    it has any, are relative to the field; None means `none`. `write` is the inverse."""
    return msgspec.Meta(extra={"custom": _Custom(label, parse, dict(json or {}), write)})


def text(
    label: str,
    pattern: str,
    *,
    example: str,
    repair: Callable[[str], str] = str,
    rule: str = "",
    reserved: str = "",
    numbers: bool = False,
) -> msgspec.Meta:
    """Text that matches from its start to its end. `repair` returns the nearest valid text; `rule`
    is the pattern in words; `reserved` matches what nobody may use. `numbers`: also as YAML reads
    them."""
    compiled, kept = re.compile(pattern), re.compile(reserved or r"(?!)")
    expected = f"{_article(label)} ({rule})" if rule else _article(label)

    def parse(value: Any) -> str:
        if numbers and type(value) in (int, float):
            value = str(value)
        if isinstance(value, str) and compiled.fullmatch(value):
            if kept.fullmatch(value):
                raise BadInput(f"reserved by tpufleet or the system; use another {label}")
            return value
        nearest = repair(value) if isinstance(value, str) else example
        if not compiled.fullmatch(nearest):
            nearest = example
        raise invalid(value, expected, nearest)

    written = re.sub(r"\(\?P<\w+>", "(?:", pattern)  # JavaScript has no such groups
    kind = ["string", "number"] if numbers else "string"
    return custom(label, parse, {"type": kind, "pattern": f"^(?:{written})$"})


def parse_text(value: Any) -> str:
    """Text of a program: YAML's numbers are taken as they are written."""
    if type(value) is float or (type(value) is int and value.bit_length() <= 64):
        return str(value)
    if not isinstance(value, str):
        raise BadInput(f"must be text, not {quote(value)}; put it in quotes")
    if _UNENCODABLE.search(value):
        raise BadInput("contains a NUL or an unpaired surrogate; remove it")
    if len(value) > MAX_TEXT:
        raise BadInput(f"longer than {MAX_TEXT} characters; put it in a file")
    return value


Text = Annotated[str, custom("text", parse_text, {"type": ["string", "number"]})]


# Reading and writing


def parse(kind: type[T], document: Any, *, path: str = "", lax: bool = False) -> T:
    """The struct, or InvalidSettings with all errors. `path` is that of the document itself."""
    run = _Run(lax)
    value: T = _node(kind).convert(run, path, document)
    if run.problems:
        raise InvalidSettings(run.problems)
    return value


def parse_fields(
    kind: type, document: Any, *, lax: bool = False
) -> tuple[dict[str, Any], list[Problem]]:
    """The valid fields by attribute, and all errors. Without `check`."""
    run = _Run(lax)
    node = _node(kind)
    assert isinstance(node, _StructNode)
    return node.values(run, "", document), run.problems


def check(meta: msgspec.Meta, value: Any) -> Any:
    """A value of `text` or `custom` that is no field of a document. Raises BadInput."""
    return (meta.extra or {})["custom"].parse(value)


def error_of(meta: msgspec.Meta, value: Any) -> str | None:
    """What is wrong with it; None when it is valid."""
    try:
        check(meta, value)
    except BadInput as error:
        return str(error)
    return None


def to_document(value: Any, keep: Iterable[str] = ()) -> dict[str, Any]:
    """The document that `parse` turns into this struct. Defaults are left out, except of `keep`."""
    node = _node(type(value))
    assert isinstance(node, _StructNode)
    return node.write_fields(value, frozenset(keep))


def json_schema(kind: type, title: str) -> dict[str, Any]:
    """For editors; `parse` checks more."""
    return {"$schema": _DIALECT, "title": title, **_node(kind).schema}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A field, for reference tables and command-line options."""

    name: str  # with the path of its section: `network.nat`, `node_pools.NAME.size`
    attribute: str
    label: str  # its type in words
    default: str  # in words; `required` where it has none
    description: str
    example: str
    required: bool
    schema: Mapping[str, Any]
    extra: Mapping[str, Any] = field(default_factory=dict)


def rows(kind: type, prefix: str = "", *, nested: bool = False) -> list[Row]:
    """`nested`: those of a section follow it."""
    found: list[Row] = []
    for each in _struct_node(kind).fields.values():
        found.append(each.row(prefix))
        inner = each.node
        placeholder = ""
        while isinstance(inner, _ListNode | _MappingNode):
            placeholder = "NAME." if isinstance(inner, _MappingNode) else "0."
            inner = inner.item
        if nested and isinstance(inner, _StructNode):
            found += rows(inner.kind, f"{prefix}{each.key}.{placeholder}", nested=True)
    return found


# One node for each type of a declaration


class _Run:
    """One call of `parse`."""

    __slots__ = ("lax", "problems")

    def __init__(self, lax: bool) -> None:
        self.lax = lax
        self.problems: list[Problem] = []

    def add(self, path: str, problem: str) -> Any:
        self.problems.append((path, problem))
        return _INVALID

    def refuse(self, path: str, expected: str, value: Any, hint: str = "") -> Any:
        return self.add(path, f"{must_be(expected, value)}{hint}")

    def add_error(self, path: str, error: BadInput) -> Any:
        if isinstance(error, InvalidSettings):
            self.problems += [(_join(path, name), problem) for name, problem in error.errors]
        else:
            self.add(path, str(error))
        return _INVALID


class _Node:
    label: str
    schema: dict[str, Any]

    def convert(self, run: _Run, path: str, value: Any) -> Any:
        """The value, or `_INVALID` after errors were added."""
        raise NotImplementedError

    def write(self, value: Any) -> Any:
        return value


class _Scalar(_Node):
    """Checked by msgspec; its error is told in our words."""

    def __init__(self, kind: Any, metas: Sequence[msgspec.Meta], example: str) -> None:
        self._kind = kind
        # msgspec keeps what it knows about a struct, but not about an annotated type.
        annotated = Annotated[(kind, *metas)] if metas else kind
        self._holder = msgspec.defstruct("Value", [("value", annotated)])
        self.label = {str: "text", int: "integer", float: "number", bool: "true or false"}[kind]
        self.schema = {
            name: item
            for name, item in msgspec.json.schema(annotated).items()
            if name not in ("description", "examples")
        }
        self._expected = _expected(kind, self.label, metas)
        self._hint = f"; for example {example}" if example else ""

    def convert(self, run: _Run, path: str, value: Any) -> Any:
        if type(value) is bool and self._kind is not bool:
            return self._refuse(run, path, value)
        try:
            document = {"value": value}
            return msgspec.convert(document, self._holder, strict=not run.lax).value  # type: ignore[attr-defined]
        except (msgspec.ValidationError, UnicodeError):  # a surrogate cannot be encoded
            return self._refuse(run, path, value)

    def _refuse(self, run: _Run, path: str, value: Any) -> Any:
        if self._kind is str and not isinstance(value, str):
            return run.refuse(path, "text", value, "; put it in quotes")
        return run.refuse(path, self._expected, value, self._hint)


class _Choice(_Node):
    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = {_fold(name): value for name, value in values.items()}
        self._names = list(values)
        self.label = " or ".join(values) if len(values) < 4 else "name"
        self.schema = {"enum": list(values)}

    def convert(self, run: _Run, path: str, value: Any) -> Any:
        found = self._values.get(_fold(value), _INVALID) if isinstance(value, str) else _INVALID
        if found is not _INVALID:
            return found
        hint = suggest(value if isinstance(value, str) else "", self._names, cutoff=0.5)
        return run.add(path, f"unknown value {quote(value)}{hint}")

    def write(self, value: Any) -> Any:
        return value.value if isinstance(value, Enum) else value


class _CustomNode(_Node):
    def __init__(self, declared: _Custom, optional: bool) -> None:
        self._declared, self._optional = declared, optional
        self.label, self.schema = declared.label, declared.schema

    def convert(self, run: _Run, path: str, value: Any) -> Any:
        try:
            parsed = self._declared.parse(value)
        except BadInput as error:
            return run.add_error(path, error)
        if parsed is None and not self._optional:
            return run.add(path, "cannot be none; leave it out for the default")
        return parsed

    def write(self, value: Any) -> Any:
        return self._declared.write(value)


class _ListNode(_Node):
    def __init__(self, item: _Node, metas: Sequence[msgspec.Meta]) -> None:
        self.item = item
        self.label = f"{item.label}, or a list"
        self._least = max((meta.min_length or 0 for meta in metas), default=0)
        self._most = min((meta.max_length for meta in metas if meta.max_length), default=None)
        more = [meta.extra_json_schema for meta in metas if meta.extra_json_schema]
        self._unique = any(each.get("uniqueItems") for each in more)
        bounds = {"minItems": self._least, "maxItems": self._most, "uniqueItems": self._unique}
        array: dict[str, Any] = {"type": "array", "items": item.schema}
        array |= {name: bound for name, bound in bounds.items() if bound}
        self.schema = {"anyOf": [item.schema, array]}

    def convert(self, run: _Run, path: str, value: Any) -> Any:
        if run.lax and isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        several = isinstance(value, list | tuple)
        items = value if several else [value]
        before = len(run.problems)
        if len(items) < self._least:
            return run.add(path, f"empty; write at least {self._least} {self.item.label}")
        if self._most is not None and len(items) > self._most:
            return run.add(path, f"{len(items)} items; at most {self._most}")
        parsed: list[Any] = []
        for index, each in enumerate(items):
            where = f"{path}[{index}]" if several else path
            valid = self.item.convert(run, where, each)
            if self._unique and valid is not _INVALID and valid in parsed:
                run.add(where, f"duplicate {quote(each)}; remove one")
            parsed.append(valid)
        return tuple(parsed) if len(run.problems) == before else _INVALID

    def write(self, value: Any) -> Any:
        return [self.item.write(each) for each in value]


class _MappingNode(_Node):
    label = "mapping"

    def __init__(
        self, key: _Node, item: _Node, metas: Sequence[msgspec.Meta], example: str
    ) -> None:
        self.key, self.item = key, item
        self._most = min((meta.max_length for meta in metas if meta.max_length), default=None)
        self._hint = f"; write {example}" if example else ""
        self.schema = {"type": "object", "additionalProperties": item.schema}
        if "pattern" in key.schema:
            self.schema["propertyNames"] = {"pattern": key.schema["pattern"]}

    def convert(self, run: _Run, path: str, value: Any) -> Any:
        if run.lax and isinstance(value, str):
            value = _pairs(run, path, value)
        if not isinstance(value, Mapping):
            if value is _INVALID:
                return value
            return run.refuse(path, "a mapping", value, self._hint)
        if self._most is not None and len(value) > self._most:
            return run.add(path, f"{len(value)} items; at most {self._most}")
        before = len(run.problems)
        parsed = {
            self.key.convert(run, where := _join(path, name), name): self.item.convert(
                run, where, each
            )
            for name, each in value.items()
        }
        return parsed if len(run.problems) == before else _INVALID

    def write(self, value: Any) -> Any:
        return {name: self.item.write(each) for name, each in value.items()}


class _Field:
    def __init__(self, info: msgspec.structs.FieldInfo) -> None:
        metas = _metas(info.type)
        self.attribute, self.key, self.required = info.name, info.encode_name, info.required
        self.description = next((m.description for m in metas if m.description), "")
        self.documented = {"description": self.description} if self.description else {}
        self.example = str(next((m.examples[0] for m in metas if m.examples), ""))
        self.node = _compile(info.type, self.example)
        self._default_text, self._extra = "", {}
        for meta in metas:
            if meta.extra and "about" in meta.extra:
                self._default_text, self._extra = meta.extra["default"], meta.extra["about"]
        self.default: Any = info.default
        if info.default_factory is not msgspec.NODEFAULT:
            self.default = info.default_factory()

    def row(self, prefix: str) -> Row:
        default = self._default_text or ("required" if self.required else self._shown())
        return Row(
            name=f"{prefix}{self.key}",
            attribute=self.attribute,
            label=self.node.label,
            default=default,
            description=self.description,
            example=self.example,
            required=self.required,
            schema=self.node.schema,
            extra=self._extra,
        )

    def _shown(self) -> str:
        if self.default is None or self.default in ("", (), []):
            return "none"
        if isinstance(self.node, _StructNode):
            return ""
        written = self.node.write(self.default)
        if isinstance(written, bool):
            return str(written).lower()
        if isinstance(written, dict):
            return ", ".join(f"{name}: {each}" for name, each in written.items()) or "empty"
        return ", ".join(map(str, written)) if isinstance(written, list) else str(written)


class _StructNode(_Node):
    label = "section"

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.fields = {
            each.key: each for each in map(_Field, msgspec.structs.fields(kind)) if each.key
        }
        self._required = [each for each in self.fields.values() if each.required]
        self._aliases: Mapping[str, str] = getattr(kind, "ALIASES", {})
        self._expand = getattr(kind, "expand", None)
        self._check = getattr(kind, "check", None)
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {
                each.key: {**each.node.schema, **each.documented} for each in self.fields.values()
            },
            "additionalProperties": False,
        }
        if self._required:
            schema["required"] = [each.key for each in self._required]
        short = {"type": ["string", "number"]}
        self.schema = {"anyOf": [short, schema]} if self._expand else schema

    def values(self, run: _Run, path: str, value: Any) -> dict[str, Any]:
        """The valid fields."""
        if self._expand is not None:
            try:
                value = self._expand(value)
            except BadInput as error:
                run.add_error(path, error)
                return {}
        if not isinstance(value, Mapping):
            names = ", ".join(list(self.fields)[:3])
            run.refuse(path, f"a mapping with fields such as {names}", value)
            return {}
        if len(value) > MAX_FIELDS:
            run.add(path, f"{len(value)} fields; at most {MAX_FIELDS}")
            return {}
        parsed: dict[str, Any] = {}
        for name, item in value.items():
            known = self.fields.get(name) if isinstance(name, str) else None
            if known is None:
                hint = suggest(str(name), self.fields, self._aliases)
                run.add(_join(path, name), f"unknown field{hint}")
            elif item is not None:
                valid = known.node.convert(run, _join(path, name), item)
                if valid is not _INVALID:
                    parsed[known.attribute] = valid
        for each in self._required:
            if value.get(each.key) is None:
                hint = f"; for example {each.example}" if each.example else ""
                run.add(_join(path, each.key), f"required{hint}")
        return parsed

    def convert(self, run: _Run, path: str, value: Any) -> Any:
        before = len(run.problems)
        parsed = self.values(run, path, value)
        if len(run.problems) != before:
            return _INVALID
        try:
            made = self.kind(**parsed)
        except BadInput as error:  # of __post_init__
            return run.add_error(path, error)
        if self._check is not None:
            run.problems += [(_join(path, name), problem) for name, problem in self._check(made)]
        return made if len(run.problems) == before else _INVALID

    def write_fields(self, value: Any, keep: frozenset[str]) -> dict[str, Any]:
        written = {}
        for each in self.fields.values():
            item = getattr(value, each.attribute)
            if each.key in keep or each.required or item != each.default:
                written[each.key] = each.node.write(item)
        return written

    def write(self, value: Any) -> Any:
        return None if value is None else self.write_fields(value, frozenset())


_nodes: dict[Any, _Node] = {}
_lock = threading.RLock()  # msgspec crashes when two threads first use one type at the same time


def _node(kind: Any) -> _Node:
    node = _nodes.get(kind)
    if node is None:
        with _lock:
            node = _nodes[kind] = _compile(kind)
    return node


def _struct_node(kind: type) -> _StructNode:
    node = _node(kind)
    assert isinstance(node, _StructNode), kind
    return node


def _metas(kind: Any) -> list[msgspec.Meta]:
    return [each for each in getattr(kind, "__metadata__", ()) if isinstance(each, msgspec.Meta)]


def _compile(kind: Any, example: str = "", optional: bool = False) -> _Node:
    metas = _metas(kind)
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    for meta in metas:
        if meta.extra and "custom" in meta.extra:
            return _CustomNode(meta.extra["custom"], optional or type(None) in get_args(kind))
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        (inner,) = [each for each in arguments if each is not type(None)]
        annotated = Annotated[(inner, *metas)] if metas else inner
        return _compile(annotated, example, optional=True)
    if origin is Literal:
        return _Choice({str(each): each for each in arguments})
    if origin in (tuple, list):
        return _ListNode(_compile(arguments[0]), metas)
    if origin is not None and issubclass(origin, Mapping):
        return _MappingNode(_compile(arguments[0]), _compile(arguments[1]), metas, example)
    if issubclass(kind, msgspec.Struct):
        return _nodes.get(kind) or _StructNode(kind)
    if issubclass(kind, Enum):
        return _Choice({str(each.value): each for each in kind})
    return _Scalar(kind, metas, example)


def _expected(kind: Any, label: str, metas: Sequence[msgspec.Meta]) -> str:
    def bound(name: str) -> Any:
        return next((b for meta in metas if (b := getattr(meta, name)) is not None), None)

    if kind is bool:
        return label
    least, most = bound("ge"), bound("le")
    expected, unit = _article(label), ""
    if kind is str:
        least, most = bound("min_length"), bound("max_length")
        expected, unit = "text", " characters"
    if (above := bound("gt")) is not None:
        expected += f" above {above}"
    if least is not None and most is not None:
        return f"{expected} from {least} to {most}{unit}"
    if least is not None:
        return f"{expected} of at least {least}{unit}"
    return f"{expected} of at most {most}{unit}" if most is not None else expected


def _article(label: str) -> str:
    return f"{'an' if label[0] in 'aeiouAEIO' else 'a'} {label}"


def _fold(name: str) -> str:
    return name.strip().lower().replace("_", "-")


def _join(path: str, name: Any) -> str:
    name = name if isinstance(name, str) and _PLAIN_KEY.fullmatch(name) else _shown_key(name)
    return f"{path}.{name}" if path and name and not name.startswith("[") else path + name


def _shown_key(name: Any) -> str:
    if isinstance(name, str) and re.fullmatch(r"(\[[0-9]+\]|[\w./-]){0,200}", name):
        return name
    return quote(name)


def _pairs(run: _Run, path: str, written: str) -> Any:
    """`A=1,B=2`, or JSON where values are sections."""
    if written.startswith("{"):
        try:
            return msgspec.json.decode(written)
        except msgspec.DecodeError as error:
            return run.add(path, f"not JSON: {error}")
    pairs = {}
    for item in filter(None, (part.strip() for part in written.split(","))):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not (name and equals and value):
            return run.add_error(path, invalid(item, "NAME=VALUE", "A=1,B=2"))
        pairs[name] = value
    return pairs

"""A YAML file as checked nodes: each knows its file, line and key path, so that every error can name them.

No objects are built from the file. Size and depth are bounded; anchors, aliases and tags are refused.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import yaml

from topology.errors import TopologyError, shown
from topology.units import Quantity

FILE_BYTES_MAX = 1 << 20
DEPTH_MAX = 16
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252}[A-Za-z0-9])?", re.ASCII)
_WHOLE = re.compile(r"0|[1-9][0-9]{0,14}", re.ASCII)
_PORT = re.compile(r"[1-9][0-9]{0,4}", re.ASCII)
_STANDARD = "tag:yaml.org,2002:"


@dataclass(frozen=True, slots=True)
class Item:
    """One node of the file. All readers raise TopologyError with file, line, key path, what was found and allowed."""

    node: yaml.Node
    path: str
    source: str

    def error(self, problem: str) -> TopologyError:
        """The error to raise about this node."""
        where = f"{self.path}: " if self.path else ""
        return TopologyError(f"{self.source}:{self.line}: {where}{problem}")

    def wrong(self, allowed: str) -> TopologyError:
        """The error for a node that is not what is allowed here."""
        return self.error(f"found {self.found}, allowed: {allowed}")

    @property
    def line(self) -> int:
        """Line number, from 1."""
        return int(self.node.start_mark.line) + 1

    @property
    def found(self) -> str:
        """What stands here, in few words."""
        if isinstance(self.node, yaml.MappingNode):
            return "a mapping" if self.node.value else "an empty mapping"
        if isinstance(self.node, yaml.SequenceNode):
            return "a list" if self.node.value else "an empty list"
        return shown(self.node.value) if self.node.value else "nothing"

    @property
    def is_list(self) -> bool:
        """Whether this is a list."""
        return isinstance(self.node, yaml.SequenceNode)

    @property
    def is_mapping(self) -> bool:
        """Whether this is a mapping."""
        return isinstance(self.node, yaml.MappingNode)

    def items(self, allowed: str) -> list[Item]:
        """The items of a list that is not empty."""
        if not isinstance(self.node, yaml.SequenceNode) or not self.node.value:
            raise self.wrong(allowed)
        return [Item(node, f"{self.path}[{index}]", self.source) for index, node in enumerate(self.node.value)]

    def entries(self, allowed: str) -> list[tuple[Item, Item]]:
        """(key, value) items of a mapping that is not empty, with the value's path. No key may occur twice."""
        if not isinstance(self.node, yaml.MappingNode) or not self.node.value:
            raise self.wrong(allowed)
        lines: dict[str, int] = {}
        result = []
        for key_node, value_node in self.node.value:
            key = Item(key_node, self.path, self.source)
            name = key.text("a word as key")
            if name in lines:
                raise key.error(f"key {shown(name)} occurs twice (first in line {lines[name]})")
            lines[name] = key.line
            path = f"{self.path}.{name}" if self.path else name
            result.append((key, Item(value_node, path, self.source)))
        return result

    def fields(self, known: Collection[str], required: Collection[str] = ()) -> dict[str, Item]:
        """The values of a mapping by key; `known` are the keys allowed."""
        fields = {}
        for key, value in self.entries(f"a mapping with the keys {', '.join(known)}"):
            name = str(key.node.value)
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise key.error(f"unknown key {shown(name)}{hint}, allowed: {', '.join(known)}")
            fields[name] = value
        for name in required:
            if name not in fields:
                raise self.error(f"the key {name!r} is missing")
        return fields

    def text(self, allowed: str) -> str:
        """A single value, as written."""
        if not isinstance(self.node, yaml.ScalarNode) or not self.node.value:
            raise self.wrong(allowed)
        return str(self.node.value)

    def name(self) -> str:
        """A name of letters, digits, "-" and "_"."""
        allowed = "a name of up to 63 letters, digits, '-' and '_', starting with a letter or digit"
        text = self.text(allowed)
        if not _NAME.fullmatch(text):
            raise self.wrong(allowed)
        return text

    def whole(self, least: int, most: int) -> int:
        """A whole number in that range."""
        allowed = f"a whole number from {least} to {most}"
        text = self.text(allowed)
        plain = self.node.tag == f"{_STANDARD}int"
        if not plain or not _WHOLE.fullmatch(text) or not least <= int(text) <= most:
            raise self.wrong(allowed)
        return int(text)

    def flag(self) -> bool:
        """true or false."""
        text = self.text("true or false").lower()
        if self.node.tag != f"{_STANDARD}bool":
            raise self.wrong("true or false")
        return text in ("true", "yes", "on")

    def quantity(self, kind: Quantity, least: float, most: float) -> float:
        """A number with a unit, from `least` to `most`, in SI."""
        text = self.text(f"a number with a unit, as in {kind.example!r}")
        try:
            value = kind.parse(text)
        except TopologyError as error:
            raise self.error(str(error)) from None
        if not least <= value <= most:
            raise self.error(f"found {shown(text)}, allowed: {least:g} to {most:g} in SI units")
        return value

    def host(self) -> str:
        """A host's name or IP address."""
        text = self.text("a host name or IP address")
        if not _HOST.fullmatch(text) and not _is_ipv6(text):
            raise self.wrong("a host name or IP address")
        return text

    def address(self) -> tuple[str, int]:
        """host:port, where an IPv6 host stands in brackets."""
        allowed = "host:port with a port from 1 to 65535, as in 'dc1.example.org:7000' or '[2001:db8::1]:7000'"
        host, colon, port = self.text(allowed).rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]") and _is_ipv6(host[1:-1])
        if not colon or not (bracketed or _HOST.fullmatch(host)):
            raise self.wrong(allowed)
        if not _PORT.fullmatch(port) or int(port) > 65535:
            raise self.wrong(allowed)
        return host.strip("[]"), int(port)


def read(text: str, source: str) -> Item:
    """Compose one YAML document. Raises TopologyError for anything that is not plain, bounded YAML."""
    if len(text.encode("utf-8", "surrogatepass")) > FILE_BYTES_MAX:
        raise TopologyError(f"{source}: the file is larger than {FILE_BYTES_MAX >> 20} MiB")
    loader: Any = None
    try:
        loader = _PlainLoader(text)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        parts = [part for part in (error.context, error.problem) if part]
        raise TopologyError(f"{where}: not valid YAML: {_one_line(', '.join(parts))}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise TopologyError(f"{source}: not valid YAML: {_one_line(str(error))}") from None
    finally:
        if loader is not None:
            loader.dispose()
    if node is None:
        raise TopologyError(f"{source}: the file is empty, allowed: a mapping that starts with 'cluster: NAME'")
    return Item(node, "", source)


class _PlainLoader(yaml.SafeLoader):
    """Composes nodes, but refuses what a topology never needs and what makes small files big."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise yaml.MarkedYAMLError(problem="anchors and aliases are not allowed", problem_mark=event.start_mark)
        if getattr(event, "tag", None) is not None:
            raise yaml.MarkedYAMLError(problem="tags are not allowed", problem_mark=event.start_mark)
        if self._depth >= DEPTH_MAX:
            problem = f"nested deeper than {DEPTH_MAX} levels"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _one_line(text: str) -> str:
    return " ".join(text.split())
